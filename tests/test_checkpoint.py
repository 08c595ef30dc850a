"""Checkpoints and exports: whole or not at all, and never believed when they are damaged."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from drafters import FULL, small_drafter, small_spec
from safetensors.torch import load_file, save_file
from worlds import in_worlds

from dflash_offline.checkpoint import (
    TrainState,
    best_score,
    export_drafter,
    forget_best,
    list_checkpoints,
    load_drafter,
    load_warm_start,
    resume_newest,
    save_best,
    save_checkpoint,
)
from dflash_offline.config import TrainConfig
from dflash_offline.optim import make_optimizers
from dflash_offline.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
KNOBS = {"lr": 0.5}
FILES = WEIGHTS, OPTIMIZER, FACTS = "drafter.safetensors", "optimizer.safetensors", "state.json"


def state_of(seed=0, step=0, world=ALONE, **knobs):
    drafter = small_drafter(small_spec(), seed)
    paths = {"shards": (), "eval_shards": (), "target": Path(), "output": Path()}
    config = TrainConfig(**paths, **{"lr": 0.1, "muon_lr": 0.2, **knobs})
    return TrainState(drafter, make_optimizers(drafter, config, world), step, step * 4)


def take_steps(state, count):
    """Steps with gradients that depend on the step alone."""
    for _ in range(count):
        g = torch.Generator().manual_seed(state.step)
        for parameter in state.drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=g)
        state.optimizers.step()
        state.step, state.rows = state.step + 1, state.rows + 4


def saved(tmp_path, steps=(1,), keep=9):
    for step in steps:
        save_checkpoint(tmp_path, state_of(step=step), KNOBS, keep=keep)
    return list_checkpoints(tmp_path)


def assert_same_weights(got, expected):
    for name, value in expected.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name


def test_only_the_newest_checkpoints_stay(tmp_path):
    assert [p.name for p in saved(tmp_path, (1, 2, 30), keep=2)] == [
        "step-00000002",
        "step-00000030",
    ]


def test_an_unfinished_checkpoint_is_not_one(tmp_path):
    (tmp_path / "checkpoints" / ".step-00000005.tmp").mkdir(parents=True)
    assert list_checkpoints(tmp_path) == []
    assert len(saved(tmp_path, (5,))) == 1  # and does not stand in the way


def test_stray_entries_are_no_checkpoints(tmp_path):
    (folder,) = saved(tmp_path, (4,))
    shutil.copytree(folder, folder.with_name("step-00000004.bak"))
    (folder.with_name("step-00000009")).mkdir()
    (folder.with_name("step-00000010")).write_text("")
    assert list_checkpoints(tmp_path) == [folder]


def test_a_drafter_with_nan_is_neither_exported_nor_loaded(tmp_path):
    drafter = small_drafter(small_spec())
    export_drafter(drafter, tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(ValueError, match=r"not loaded: norm\.weight holds inf or NaN"):
        load_drafter(tmp_path / "drafter", device=CPU, dtype=torch.float32)
    drafter.norm.weight.data[0] = float("inf")
    with pytest.raises(ValueError, match="not exported"):
        export_drafter(drafter, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_restores_step_rows_and_weights(tmp_path):
    (folder,) = saved(tmp_path, (3,))
    state = state_of(seed=8)
    assert resume_newest(tmp_path, state, KNOBS) == folder
    assert (state.step, state.rows) == (3, 12)
    assert_same_weights(state.drafter, small_drafter(small_spec(), 0))
    assert state.optimizers.entries() == []  # it was saved before the first step


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    state = state_of(seed=8, step=2)
    assert resume_newest(tmp_path / "nothing", state, KNOBS) is None
    assert state.step == 2


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_optimizer_goes_on_bit_for_bit(tmp_path, kind):
    whole = state_of(optimizer=kind)
    take_steps(whole, 4)
    first = state_of(optimizer=kind)
    take_steps(first, 2)
    save_checkpoint(tmp_path, first, KNOBS, keep=1)
    second = state_of(seed=8, optimizer=kind)
    resume_newest(tmp_path, second, KNOBS)
    shutil.rmtree(tmp_path / "checkpoints")  # what was read must not be tied to the file
    take_steps(second, 2)
    assert_same_weights(second.drafter, whole.drafter)


def test_a_checkpoint_is_plain_safetensors(tmp_path):
    state = state_of()
    take_steps(state, 1)
    folder = save_checkpoint(tmp_path, state, KNOBS, keep=1)
    weights, states = load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER)
    for name, parameter in state.drafter.named_parameters():
        assert torch.equal(weights[name], parameter)
        # AdamW's first mean: (1 - 0.9) of the first gradient.
        torch.testing.assert_close(states[f"{name}/exp_avg"], 0.1 * parameter.grad)
        assert states[f"{name}/step"] == 1
    assert len(states) == 3 * len(weights)


def go_on(world, folder):
    """Resume if there is something to resume, take two steps, save."""
    for kind in ("adamw", "muon"):
        state = state_of(seed=8, world=world, optimizer=kind, shard_optimizer=True)
        if not resume_newest(folder / kind, state, KNOBS):
            state.drafter.load_state_dict(small_drafter(small_spec(), 0).state_dict())
        take_steps(state, 2)
        save_checkpoint(folder / kind, state, KNOBS, keep=9)


def test_a_run_goes_on_with_more_and_fewer_ranks_bit_for_bit(tmp_path):
    """2 ranks, then 3, then 2, then 1; against one process all along."""
    in_worlds(go_on, (2, 3, 2), tmp_path)
    for kind in ("adamw", "muon"):
        last = state_of(seed=8, optimizer=kind)
        assert resume_newest(tmp_path / kind, last, KNOBS).name == "step-00000006"
        take_steps(last, 1)
        whole = state_of(optimizer=kind)
        take_steps(whole, 7)
        assert_same_weights(last.drafter, whole.drafter)
        assert (last.step, last.rows) == (7, 28)


def test_another_number_of_ranks_is_told_of(tmp_path, capsys):
    (folder,) = saved(tmp_path)
    resume_newest(tmp_path, state_of(), KNOBS)
    assert "ranks" not in capsys.readouterr().err
    rewrite_facts(folder, ranks=4)
    resume_newest(tmp_path, state_of(), KNOBS)
    assert "4 wrote it, 1 go on; rows and their order stay the same" in capsys.readouterr().err


def rewrite_facts(folder, **changes):
    """state.json as it would have been written with other facts."""
    facts = {**json.loads((folder / FACTS).read_text()), **changes}
    hashes = facts["sha256"]
    hashes.pop("state", None)
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    hashes["state"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / FACTS).write_text(json.dumps(facts))


def test_a_changed_knob_is_refused_by_name_and_no_reason_to_look_for_an_older_one(tmp_path):
    saved(tmp_path, (1, 2))
    with pytest.raises(ValueError, match=r"step-00000002 was made with lr = 0\.5, .* has 0\.25"):
        resume_newest(tmp_path, state_of(), {"lr": 0.25})


def test_a_knob_that_did_not_exist_yet_was_at_its_default(tmp_path):
    saved(tmp_path)
    resume_newest(tmp_path, state_of(), {**KNOBS, "schedule": "cosine", "feature_noise": 0.0})
    with pytest.raises(ValueError, match="made with schedule = 'cosine', this run has 'wsd'"):
        resume_newest(tmp_path, state_of(), {**KNOBS, "schedule": "wsd"})
    with pytest.raises(ValueError, match="made with content = None"):
        resume_newest(tmp_path, state_of(), {**KNOBS, "content": "other"})


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_checkpoints_of_before_the_crc32c_are_read(tmp_path, kind):
    """drafter.safetensors, a torch.save of torch's own state dicts, sha256 of both."""
    whole = state_of(optimizer=kind)
    drafter = small_drafter(small_spec(), 0)
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    vectors = [p for p in drafter.parameters() if p.ndim != 2]
    adamw = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}
    if kind == "muon":
        muon = torch.optim.Muon(matrices, lr=0.2, weight_decay=0.0)
        optimizers = [muon, torch.optim.AdamW(vectors, **adamw)]
    else:
        optimizers = [torch.optim.AdamW([*matrices, *vectors], **adamw)]
    g = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=g)
    for optimizer in optimizers:
        optimizer.step()

    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    save_file(drafter.state_dict(), folder / WEIGHTS)
    torch.save([o.state_dict() for o in optimizers], folder / "optimizer.pt")
    hashes = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in (WEIGHTS, "optimizer.pt")
    }
    facts = {"step": 1, "rows": 4, "config": KNOBS, "sha256": hashes}
    (folder / FACTS).write_text(json.dumps(facts))
    rewrite_facts(folder)

    state = state_of(seed=8, optimizer=kind)
    resume_newest(tmp_path, state, KNOBS)
    take_steps(state, 2)
    take_steps(whole, 3)
    for got, expected in zip(state.drafter.parameters(), whole.drafter.parameters(), strict=True):
        torch.testing.assert_close(got, expected)

    content = (folder / "optimizer.pt").read_bytes()
    (folder / "optimizer.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"optimizer\.pt is damaged"):
        resume_newest(tmp_path, state, KNOBS)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def swap_with_the_older(path):
    path.write_bytes((path.parent.parent / "step-00000001" / path.name).read_bytes())


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        *((damage, f) for damage in (cut, flip_a_bit, Path.unlink) for f in FILES),
        *((swap_with_the_older, f) for f in (WEIGHTS, OPTIMIZER)),
    ],
)
def test_the_newest_checkpoint_is_set_aside_if_damaged_and_the_one_before_is_used(
    tmp_path, capsys, damage, file
):
    for seed in (1, 2):
        state = state_of(seed)
        take_steps(state, seed)
        save_checkpoint(tmp_path, state, KNOBS, keep=9)
    older, newer = list_checkpoints(tmp_path)
    damage(newer / file)
    state = state_of(seed=8)
    assert resume_newest(tmp_path, state, KNOBS) == older
    assert state.step == 1
    told = capsys.readouterr().err
    assert f"warning: {newer / file}" in told
    assert "going on from step-00000001" in told
    aside = newer.with_name("step-00000002.damaged-1")
    assert str(aside) in told
    assert aside.is_dir() and not newer.exists()


def test_damaged_checkpoints_do_not_count_and_are_not_overwritten(tmp_path):
    folders = saved(tmp_path, (1, 2, 3))
    flip_a_bit(folders[1] / WEIGHTS)
    flip_a_bit(folders[2] / WEIGHTS)
    assert resume_newest(tmp_path, state_of(), KNOBS) == folders[0]
    saved(tmp_path, (3,), keep=2)
    saved(tmp_path, (4,), keep=2)
    names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert names == {
        "step-00000003", "step-00000004", "step-00000002.damaged-1", "step-00000003.damaged-1",
    }  # fmt: skip
    flip_a_bit(tmp_path / "checkpoints" / "step-00000004" / WEIGHTS)
    resume_newest(tmp_path, state_of(), KNOBS)
    saved(tmp_path, (4,), keep=2)
    flip_a_bit(tmp_path / "checkpoints" / "step-00000004" / WEIGHTS)
    assert resume_newest(tmp_path, state_of(), KNOBS).name == "step-00000003"
    assert (tmp_path / "checkpoints" / "step-00000004.damaged-2").is_dir()


def test_only_damaged_checkpoints_are_an_error_that_names_them_and_moves_nothing(tmp_path):
    first, second = saved(tmp_path, (1, 2))
    cut(first / WEIGHTS)
    (second / FACTS).write_text("{")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"is whole \(.*state\.json is not JSON.*; .*damaged"):
            resume_newest(tmp_path, state_of(), KNOBS)
    assert list_checkpoints(tmp_path) == [first, second]


@pytest.mark.parametrize("text", ["{}", '{"sha256": 3}', '{"sha256": {"state": "00"}}', "[]"])
def test_facts_that_are_none_are_damage(tmp_path, text):
    (folder,) = saved(tmp_path)
    (folder / FACTS).write_text(text)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole \(.*state\.json"):
        resume_newest(tmp_path, state_of(), KNOBS)


def test_optimizer_state_of_another_drafter_is_refused(tmp_path):
    state = state_of()
    take_steps(state, 1)
    folder = save_checkpoint(tmp_path, state, KNOBS, keep=1)
    states = load_file(folder / OPTIMIZER)
    states["layers.7.mlp.up_proj.weight/exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"does not fit the drafter at layers\.7"):
        state_of().optimizers.load(states, states.__getitem__)


def test_the_best_drafter_is_kept_and_a_resumed_run_knows_its_score(tmp_path):
    for step, score, is_better in [
        (1, 2.5, True),
        (2, 2.0, False),
        (3, 2.5, False),
        (4, 2.75, True),
    ]:
        assert save_best(tmp_path, state_of(step, step), score, measure="length") is is_better
    for step, score in [(5, float("nan")), (6, float("inf"))]:
        assert not save_best(tmp_path, state_of(step, step), score, measure="length")
    facts = json.loads((tmp_path / "best" / "best.json").read_text())
    assert facts == {"step": 4, "score": 2.75, "measure": "length"}
    kept = load_drafter(tmp_path / "best", device=CPU, dtype=torch.bfloat16)
    assert_same_weights(kept, small_drafter(small_spec(), 4).bfloat16())
    assert best_score(tmp_path, "length") == 2.75
    assert best_score(tmp_path, "accuracy") is None
    assert save_best(tmp_path, state_of(), 0.5, measure="accuracy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best"]
    forget_best(tmp_path)
    assert best_score(tmp_path, "accuracy") is None


def test_a_best_drafter_that_was_being_replaced_is_not_lost(tmp_path):
    save_best(tmp_path, state_of(), 2.0, measure="length")
    (tmp_path / "best").rename(tmp_path / ".best.old")  # and there the process was killed
    assert not save_best(tmp_path, state_of(), 1.0, measure="length")
    assert best_score(tmp_path, "length") == 2.0


def test_a_damaged_score_gives_way(tmp_path):
    save_best(tmp_path, state_of(), 2.0, measure="length")
    (tmp_path / "best" / "best.json").write_text("{")
    assert save_best(tmp_path, state_of(), 1.0, measure="length")


def test_a_warm_start_has_the_weights_of_the_export_as_fp32_masters(tmp_path):
    export_drafter(small_drafter(small_spec(), 3), tmp_path / "drafter")
    drafter = small_drafter(small_spec(block_size=8), 0)  # another block size will do
    load_warm_start(tmp_path / "drafter", drafter)
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert_same_weights(drafter, small_drafter(small_spec(), 3).bfloat16().float())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": (1, 2, 4)}, r"target_layer_ids = \(1, 3, 4\), .* \(1, 2, 4\)"),
        ({"mask_token_id": 51}, "mask_token_id = 50, .* 51"),
        ({"vocab_size": 65}, "vocab_size = 64, .* 65"),
        ({"hidden_size": 64}, "hidden_size = 32, .* 64"),
        ({"mlp_width": 40}, "mlp_width = 48, .* 40"),
        ({"kv_heads": 4}, "kv_heads = 2, .* 4"),
        ({"layer_types": (FULL, FULL)}, "layer_types = .*sliding.*, .*full"),
        ({"sliding_window": 7}, "sliding_window = 6, .* 7"),
        ({"rope_theta": 1e6}, r"rope_theta = 10000\.0, .* 1000000\.0"),
    ],
)
def test_a_warm_start_of_another_shape_or_meaning_is_refused_by_name(tmp_path, changes, words):
    export_drafter(small_drafter(small_spec(), 3), tmp_path / "drafter")
    drafter = small_drafter(small_spec(**changes))
    with pytest.raises(ValueError, match=f"--warm-start .*{words}"):
        load_warm_start(tmp_path / "drafter", drafter)


def test_the_window_of_a_drafter_without_sliding_layers_means_nothing(tmp_path):
    export_drafter(small_drafter(small_spec((FULL, FULL)), 3), tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config["sliding_window"] = 4096  # as some published drafters have it
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    load_warm_start(tmp_path / "drafter", small_drafter(small_spec((FULL, FULL))))


def test_a_warm_start_that_is_not_there_or_not_whole_is_refused(tmp_path):
    folder = tmp_path / "drafter"
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        load_warm_start(folder, small_drafter(small_spec()))
    export_drafter(small_drafter(small_spec()), folder)
    tensors = load_file(folder / "model.safetensors")
    fewer = {name: t for name, t in tensors.items() if name != "norm.weight"}
    more = {**tensors, "embed_tokens.weight": torch.zeros(2, 2)}
    other = {**tensors, "norm.weight": torch.zeros(5)}
    inf = {**tensors, "norm.weight": torch.full((32,), float("inf"))}
    for wrong, words in [
        (fewer, "lacks tensor norm.weight"),
        (more, "holds an unknown tensor embed_tokens.weight"),
        (other, r"norm\.weight has shape \[5\] instead of \[32\]"),
        (inf, r"not loaded: norm\.weight holds inf"),
    ]:
        save_file(wrong, folder / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load_warm_start(folder, small_drafter(small_spec()))
    cut(folder / "model.safetensors")
    with pytest.raises(ValueError, match="no safetensors file or cut short"):
        load_warm_start(folder, small_drafter(small_spec()))
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist"):
        load_warm_start(folder, small_drafter(small_spec()))


def test_an_export_is_reloaded_as_it_was_trained(tmp_path):
    drafter = small_drafter(small_spec())
    export_drafter(drafter, tmp_path / "drafter")
    again = load_drafter(tmp_path / "drafter", device=CPU, dtype=torch.float32)
    assert again.spec == drafter.spec
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().float()), name


def test_an_export_with_a_missing_or_a_strange_tensor_is_refused(tmp_path):
    folder = tmp_path / "drafter"
    export_drafter(small_drafter(small_spec()), folder)
    tensors = load_file(folder / "model.safetensors")
    fewer = {name: t for name, t in tensors.items() if name != "norm.weight"}
    more = {**tensors, "embed_tokens.weight": torch.zeros(2, 2)}
    for wrong, words in ((fewer, "norm.weight"), (more, "embed_tokens.weight")):
        save_file(wrong, folder / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load_drafter(folder, device=CPU, dtype=torch.float32)


def test_an_export_whose_config_tells_another_shape_is_refused(tmp_path):
    folder = tmp_path / "drafter"
    export_drafter(small_drafter(small_spec()), folder)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 40
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not hold the drafter it describes"):
        load_drafter(folder, device=CPU, dtype=torch.float32)
