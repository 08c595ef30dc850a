"""Stage two on small stores: gradients over ranks, exact resume, overfitting, refusals."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stores import make_store, random_documents

from dflash_offline.config import EvaluateConfig, ExtractConfig, TrainConfig
from dflash_offline.stages import train as train_stage
from dflash_offline.stages.evaluate import evaluate
from dflash_offline.stages.extract import extract
from dflash_offline.stages.train import train

PROGRAM = Path(sys.executable).parent / "dflash-offline"
SHAPE = {
    "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp_width": 48, "block_size": 4,
    "sliding_window": 8, "row_tokens": 64, "anchors": 12, "rows_per_step": 2, "mask_token_id": 3,
    "precision": "fp32", "device": "cpu", "log_every": 1, "warmup": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("stores")
    return {
        "shards": (make_store(folder / "train", tiny_llama, random_documents(24)),),
        "eval_shards": (make_store(folder / "held", tiny_llama, random_documents(6, seed=1)),),
        "target": tiny_llama,
    }


RUNS = ("first", "second")


def config(stores, output, **knobs):
    return TrainConfig(**{**SHAPE, **stores, "output": output, **knobs})


def weights(run):
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    return load_file(newest / "drafter.safetensors")


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def losses(run):
    return {entry["step"]: entry["loss"] for entry in log_of(run) if "loss" in entry}


def as_flags(settings):
    flags = []
    for name, value in settings.items():
        values = value if isinstance(value, tuple) else (value,)
        flags += ["--" + name.replace("_", "-"), *map(str, values)]
    return flags


def run_ranks(settings, ranks):
    """The command under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["--nproc-per-node", str(ranks), "--no-python", PROGRAM, "train"]
    done = subprocess.run(
        [*torchrun, *command, *as_flags(settings)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_half_the_steps_and_a_resume_equal_all_steps_bit_for_bit(stores, tmp_path, optimizer):
    knobs = {"steps": 6, "save_every": 3, "optimizer": optimizer}
    train(config(stores, tmp_path / "whole", **knobs))
    train(config(stores, tmp_path / "halves", **knobs))
    # Take the second half away, as if the run had been killed after step 3.
    halves = tmp_path / "halves"
    (last,) = (halves / "checkpoints").glob("step-00000006")
    last.rename(tmp_path / "gone")
    before = weights(halves)
    train(config(stores, halves, resume=True, **knobs))

    expected, got = weights(tmp_path / "whole"), weights(halves)
    assert not torch.equal(before["fc.weight"], got["fc.weight"])
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
    assert losses(halves) == losses(tmp_path / "whole")


def test_resume_refuses_a_changed_knob_by_name(stores, tmp_path):
    train(config(stores, tmp_path, steps=2))
    with pytest.raises(ValueError, match="lr"):
        train(config(stores, tmp_path, steps=2, resume=True, lr=0.5))


def test_resume_refuses_other_shards_of_the_same_size(stores, tiny_llama, tmp_path):
    run = tmp_path / "run"
    train(config(stores, run, steps=2))
    same_lengths = random_documents(24)
    other = (make_store(tmp_path / "other", tiny_llama, same_lengths, seed=9),)
    with pytest.raises(ValueError, match="content of --shards"):
        train(config(stores, run, steps=2, resume=True, shards=other))
    moved = tmp_path / "moved"
    shutil.copytree(stores["shards"][0], moved)
    train(config(stores, run, steps=2, resume=True, shards=(moved,)))


def test_a_resumed_run_tells_the_time_left_from_its_own_steps(stores, tmp_path, capsys):
    train(config(stores, tmp_path, steps=40, save_every=20, log_every=10))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000040")
    capsys.readouterr()
    train(config(stores, tmp_path, steps=40, resume=True, save_every=20, log_every=10))
    lines = [line for line in capsys.readouterr().err.splitlines() if "eta" in line]
    # The first step of this process has a line of its own: it may have compiled.
    assert [line.split("step ")[1].split("/")[0] for line in lines] == ["21", "30", "40"]


def test_a_finished_run_is_not_overwritten_without_resume(stores, tmp_path):
    train(config(stores, tmp_path, steps=1))
    with pytest.raises(ValueError, match="--resume"):
        train(config(stores, tmp_path, steps=1))


def test_two_ranks_learn_what_one_process_learns(stores, tmp_path):
    knobs = {**SHAPE, **stores, "steps": 4, "rows_per_step": 4}
    train(TrainConfig(**knobs, output=tmp_path / "one"))
    run_ranks({**knobs, "output": tmp_path / "two"}, 2)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=2e-5, rtol=1e-4, msg=name)
    for step, loss in losses(tmp_path / "one").items():
        assert losses(tmp_path / "two")[step] == pytest.approx(loss, rel=1e-4)


def test_ranks_with_few_many_and_no_supervised_tokens_give_the_single_gradient(
    stores, tiny_llama, tmp_path
):
    g = torch.Generator().manual_seed(4)
    documents = []
    for supervised in (10, 1000, 1000, 0, 10, 1000, 0, 0):  # a row each
        ids = torch.randint(5, 200, (1024,), generator=g)
        documents.append((ids, torch.arange(1024) >= 1024 - supervised))
    data = (make_store(tmp_path / "uneven", tiny_llama, documents),)
    sizes = {"row_tokens": 1024, "anchors": 40, "eval_rows": 1}
    knobs = {**SHAPE, **stores, "shards": data, "steps": 3, **sizes}
    train(TrainConfig(**knobs, output=tmp_path / "one"))
    run_ranks({**knobs, "output": tmp_path / "two"}, 2)
    first_one, first_two = (log_of(tmp_path / run)[0] for run in ("one", "two"))
    assert first_two["gradient_norm"] == pytest.approx(first_one["gradient_norm"], rel=1e-4)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=5e-5, rtol=1e-3, msg=name)


def test_one_conversation_is_learnt_to_full_acceptance(tiny_llama, tmp_path):
    documents = random_documents(1, seed=7, shortest=38, longest=40)
    store = (make_store(tmp_path / "one", tiny_llama, documents),)
    run = tmp_path / "run"
    knobs = {"steps": 200, "lr": 5e-3, "log_every": 100, "rows_per_step": 1, "anchors": 40}
    data = {"shards": store, "eval_shards": store, "target": tiny_llama}
    train(TrainConfig(**{**SHAPE, **data, **knobs, "output": run}))

    result = tmp_path / "evaluation.json"
    evaluate(
        EvaluateConfig(
            drafter=run / "drafter", target=tiny_llama, shards=store, output=result, device="cpu"
        )
    )
    report = json.loads(result.read_text())
    _, mask = documents[0]
    to_gain = int(mask.sum()) - 1
    assert report["documents"] == [
        {
            "id": 0,
            "shards": str(store[0]),
            "acceptance_length": to_gain / -(-to_gain // 4),
            "cycles": -(-to_gain // 4),
            "tokens": to_gain,
        }
    ]


def test_evaluating_on_what_is_trained_on_is_warned_of(stores, tmp_path, capsys):
    train(config(stores, tmp_path, steps=1, eval_shards=stores["shards"]))
    assert "held-out figures mean nothing" in capsys.readouterr().err
    train(config(stores, tmp_path / "other", steps=1))
    assert "held-out figures mean nothing" not in capsys.readouterr().err


@pytest.mark.parametrize("owner", ["target", "shards", "somebody"])
def test_an_output_that_holds_anything_but_a_run_is_refused_untouched(stores, tmp_path, owner):
    output = tmp_path / "precious"
    if owner == "somebody":
        (output / "drafter").mkdir(parents=True)
        (output / "drafter" / "thesis.txt").write_text("years of work")
    else:
        original = stores["target"] if owner == "target" else stores["shards"][0]
        shutil.copytree(original, output)
    before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="is no run and not empty"):
        train(config(stores, output, steps=1))
    assert {p: p.read_bytes() for p in output.rglob("*") if p.is_file()} == before


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(stores, tmp_path, monkeypatch):
    step = torch.optim.AdamW.step

    def ruin(self, *given):
        step(self, *given)
        self.param_groups[0]["params"][0].data.fill_(float("nan"))

    monkeypatch.setattr(torch.optim.AdamW, "step", ruin)
    with pytest.raises(ValueError, match=r"not saved: .* holds inf or NaN"):
        train(config(stores, tmp_path, steps=1))
    assert list((tmp_path / "checkpoints").glob("step-*")) == []
    assert not (tmp_path / "drafter").exists()
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        assert json.loads(line).get("heldout_accuracy", 0) == 0


def test_held_out_rows_without_a_token_to_learn_are_an_error(stores, tiny_llama, tmp_path):
    ids = torch.arange(5, 45)
    silent = (make_store(tmp_path / "silent", tiny_llama, [(ids, torch.arange(40) > 60)]),)
    with pytest.raises(ValueError, match="held-out rows hold no token to learn"):
        train(config(stores, tmp_path / "run", eval_shards=silent, steps=1))


def test_a_run_whose_every_step_was_skipped_exports_nothing(stores, tiny_llama, tmp_path):
    ids = torch.arange(5, 45)
    silent = (make_store(tmp_path / "silent", tiny_llama, [(ids, torch.arange(40) > 37)] * 3),)
    with pytest.raises(ValueError, match="none of 3 steps changed anything"):
        train(config(stores, tmp_path / "run", shards=silent, row_tokens=20, steps=3))
    assert not (tmp_path / "run" / "drafter").exists()


def test_the_mask_token_must_not_be_produced_in_held_out_data_either(stores, tiny_llama, tmp_path):
    ids = torch.tensor([9, 9, 9, 3, 9, 9])
    heldout = (make_store(tmp_path / "held", tiny_llama, [(ids, torch.arange(6) > 1)]),)
    with pytest.raises(ValueError, match="mask token 3"):
        train(config(stores, tmp_path / "run", eval_shards=heldout, steps=1))


def test_a_data_set_that_is_not_complete_is_warned_of(stores, tmp_path, capsys):
    part = make_store(
        tmp_path / "part", stores["target"], random_documents(24), contract={"documents": 40}
    )
    train(config(stores, tmp_path / "run", shards=(part,), steps=1))
    assert f"{part} holds 24 of 40 documents" in capsys.readouterr().err


def test_an_untied_target_is_exported_as_untied_and_a_tied_one_as_tied(
    stores, tiny_qwen3, tmp_path
):
    train(config(stores, tmp_path / "untied", steps=1))
    store = (make_store(tmp_path / "store", tiny_qwen3, random_documents(3)),)
    tied = {"shards": store, "eval_shards": store, "target": tiny_qwen3}
    train(config(tied, tmp_path / "tied", steps=1))
    for run, expected in (("untied", False), ("tied", True)):
        exported = json.loads((tmp_path / run / "drafter" / "config.json").read_text())
        assert exported["tie_word_embeddings"] is expected


def test_the_run_folder_holds_log_config_and_an_export_without_strangers(stores, tmp_path):
    summary = train(config(stores, tmp_path, steps=2, keep_checkpoints=1, save_every=1))
    assert summary["steps"] == 2
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == 4
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    trained = weights(tmp_path)
    assert set(tensors) == set(trained)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, trained[name].bfloat16()), name


def test_shards_of_another_target_are_refused_by_name(stores, tiny_qwen3, tmp_path):
    with pytest.raises(ValueError, match=r"extracted from .*--target"):
        train(config(stores, tmp_path, target=tiny_qwen3, steps=1))


def test_eval_shards_of_other_layers_are_refused(stores, tiny_llama, tmp_path):
    other = make_store(tmp_path / "o", tiny_llama, random_documents(3), layer_ids=(1, 2, 4))
    with pytest.raises(ValueError, match=r"\[1, 2, 4\]"):
        train(config(stores, tmp_path / "run", eval_shards=(other,), steps=1))


def test_a_mask_token_that_the_target_produced_is_refused(stores, tmp_path):
    with pytest.raises(ValueError, match="mask token 17"):
        train(config(stores, tmp_path, mask_token_id=17, steps=1))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"mask_token_id": None}, "no mask token is known"),
        ({"mask_token_id": 512}, "outside the embedding's 512 rows"),
        ({"mask_token_id": 323}, "ends or pads text"),
    ],
)
def test_mask_tokens_that_cannot_serve_are_refused(stores, tmp_path, knobs, message):
    with pytest.raises(ValueError, match=message):
        train(config(stores, tmp_path, steps=1, **knobs))


def test_a_gradient_that_is_never_finite_ends_the_run_and_keeps_the_weights(
    stores, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        torch.nn.utils, "get_total_norm", lambda gradients: torch.tensor(float("nan"))
    )
    with pytest.raises(ValueError, match=r"in a row changed nothing .* not finite"):
        train(config(stores, tmp_path, steps=50))


def test_rows_without_a_token_to_learn_end_the_run_instead_of_training_on_nothing(
    stores, tiny_llama, tmp_path
):
    ids = torch.arange(5, 45)
    silent = (make_store(tmp_path / "silent", tiny_llama, [(ids, torch.arange(40) > 37)] * 3),)
    with pytest.raises(ValueError, match=r"no token to learn.*--row-tokens"):
        train(config(stores, tmp_path / "run", shards=silent, row_tokens=20, steps=50))


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_as_if_nothing_had_been(stores, tmp_path):
    """SIGTERM in the middle, for real; then the same command with --resume."""
    knobs = {**SHAPE, **stores, "steps": 400, "save_every": 400, "eval_every": 400, "log_every": 1}
    process = subprocess.Popen(
        [PROGRAM, "train", *as_flags({**knobs, "output": tmp_path / "run"})],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        for line in process.stderr:
            if "step 5/" in line:
                process.terminate()
                break
        said = process.stderr.read()
    assert process.returncode == 130
    assert "asked to stop: this step is finished and saved" in said
    assert "--resume goes on from the newest checkpoint" in said
    stopped = max(losses(tmp_path / "run"))
    assert 5 <= stopped < 400
    short = {**knobs, "steps": 400, "log_every": 100}
    train(TrainConfig(**short, output=tmp_path / "run", resume=True))
    train(TrainConfig(**short, output=tmp_path / "whole"))
    one, two = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize(
    "knobs", [{"weighting": "dpace"}, {"feature_noise": 0.2}, {"schedule": "wsd"}]
)
def test_other_objectives_noise_and_schedules_train_and_resume_exactly(stores, tmp_path, knobs):
    plain = train(config(stores, tmp_path / "plain", steps=4, save_every=2))
    whole = train(config(stores, tmp_path / "whole", steps=4, save_every=2, **knobs))
    assert whole["heldout loss"] != plain["heldout loss"]
    for folder in (tmp_path / "whole" / "checkpoints").glob("step-00000004"):
        shutil.rmtree(folder)
    train(config(stores, tmp_path / "whole", steps=4, save_every=2, resume=True, **knobs))
    again = weights(tmp_path / "whole")
    train(config(stores, tmp_path / "twice", steps=4, save_every=2, **knobs))
    assert all(torch.equal(again[n], value) for n, value in weights(tmp_path / "twice").items())


@pytest.mark.parametrize("norm", ["before-norm", "after-norm"])
def test_distilling_needs_final_hidden_states_and_learns_from_them(
    tiny_qwen35, stores, tmp_path, norm
):
    with pytest.raises(ValueError, match="holds no final hidden states; extract with --final-hid"):
        train(config(stores, tmp_path / "none", steps=1, objective="kl"))
    data = tmp_path / "data.jsonl"
    g = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(6):
        ids = torch.randint(5, 200, (30,), generator=g).tolist()
        lines.append(json.dumps({"input_ids": ids, "loss_mask": [0] * 4 + [1] * 26}) + "\n")
    data.write_text("".join(lines))
    shards = tmp_path / "shards"
    extract(
        ExtractConfig(
            target=tiny_qwen35, data=(data,), output=shards, final_hidden=norm, device="cpu",
            target_layer_ids=(1, 3), codec="raw", final_codec="raw",
        )
    )  # fmt: skip
    own = {"shards": (shards,), "eval_shards": (shards,), "target": tiny_qwen35}
    knobs = {**SHAPE, **own, "steps": 12, "log_every": 1, "lr": 3e-3, "mask_token_id": 3}
    train(TrainConfig(**knobs, output=tmp_path / "run", objective="kl"))
    found = losses(tmp_path / "run")
    assert found[12] < found[1]
    assert found[1] > 0


def test_a_warm_start_begins_where_another_drafter_ended(stores, tmp_path):
    train(config(stores, tmp_path / "first", steps=3))
    start = {"warm_start": tmp_path / "first" / "drafter", "lr": 0.0}
    train(config(stores, tmp_path / "second", steps=1, **start))
    first, second = (load_file(tmp_path / n / "drafter" / "model.safetensors") for n in RUNS)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_best_drafter_is_kept_with_its_acceptance_length(stores, tmp_path):
    train(config(stores, tmp_path / "run", steps=6, eval_every=2, eval_documents=2))
    entries = [e for e in log_of(tmp_path / "run") if "heldout_acceptance_length" in e]
    best = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    assert len(entries) == 3
    assert best["score"] == max(e["heldout_acceptance_length"] for e in entries)
    assert best["measure"] == "heldout_acceptance_length"
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()


def test_rows_that_ranks_cannot_share_are_refused_before_any_rank_starts(
    stores, tmp_path, monkeypatch
):
    monkeypatch.setattr(train_stage, "run_on_all", None)  # whoever calls it fails
    with pytest.raises(ValueError, match=r"--rows-per-step 2 is no multiple of the 3 ranks.*--gp"):
        train(config(stores, tmp_path / "run", gpus=3))
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_plan_of_rows_is_not_gone_on_with_unseen(stores, tmp_path, monkeypatch):
    train(config(stores, tmp_path / "run", steps=2))
    facts = train_stage.resumable_facts
    monkeypatch.setattr(
        train_stage, "resumable_facts", lambda setup: {**facts(setup), "plan of rows": "another"}
    )
    with pytest.raises(ValueError, match="was made with plan of rows = 'best fit', this run has"):
        train(config(stores, tmp_path / "run", steps=2, resume=True))
