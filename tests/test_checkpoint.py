"""Checkpoints and exports: whole or not at all, and refused when they are damaged."""

import json
import shutil

import pytest
import torch
from drafters import small_drafter, small_spec

from dflash_offline.checkpoint import (
    TrainState,
    export_drafter,
    list_checkpoints,
    load_checkpoint,
    load_drafter,
    save_checkpoint,
)

CPU = torch.device("cpu")


def state_of(seed=0, step=0):
    drafter = small_drafter(small_spec(), seed)
    return TrainState(drafter, [torch.optim.AdamW(drafter.parameters())], step, step * 4)


def saved(tmp_path, steps=(1,), keep=9):
    for step in steps:
        save_checkpoint(tmp_path, state_of(step=step), {"lr": 0.5}, keep=keep)
    return list_checkpoints(tmp_path)


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


def test_files_of_one_checkpoint_do_not_fit_another(tmp_path):
    first, second = saved(tmp_path, (1, 2))
    for name in ("drafter.safetensors", "optimizer.pt"):
        shutil.copytree(second, tmp_path / name)
        (tmp_path / name / name).write_bytes((first / name).read_bytes() + b" ")
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            load_checkpoint(tmp_path / name, state_of(), {"lr": 0.5})


def test_a_drafter_with_nan_is_neither_exported_nor_loaded(tmp_path):
    from safetensors.torch import load_file, save_file

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
    load_checkpoint(folder, state, {"lr": 0.5})
    assert (state.step, state.rows) == (3, 12)
    assert torch.equal(state.drafter.fc.weight, small_drafter(small_spec(), 0).fc.weight)


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    (folder,) = saved(tmp_path)
    weights = folder / "drafter.safetensors"
    whole = weights.read_bytes()
    for wrong in (whole[:100], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], b""):
        weights.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"drafter\.safetensors is damaged"):
            load_checkpoint(folder, state_of(), {"lr": 0.5})
    weights.write_bytes(whole)
    text = (folder / "state.json").read_text()
    for wrong in (text.replace('"step": 1', '"step": 2'), "{}", '{"sha256": 3}'):
        (folder / "state.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"state\.json is damaged"):
            load_checkpoint(folder, state_of(), {"lr": 0.5})
    (folder / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json is not JSON"):
        load_checkpoint(folder, state_of(), {"lr": 0.5})


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut"])
def test_a_damaged_optimizer_state_is_refused_by_name(tmp_path, content):
    (folder,) = saved(tmp_path)
    (folder / "optimizer.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"optimizer\.pt is damaged"):
        load_checkpoint(folder, state_of(), {"lr": 0.5})


def test_an_export_is_reloaded_as_it_was_trained(tmp_path):
    drafter = small_drafter(small_spec())
    export_drafter(drafter, tmp_path / "drafter")
    again = load_drafter(tmp_path / "drafter", device=CPU, dtype=torch.float32)
    assert again.spec == drafter.spec
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().float()), name


def test_an_export_with_a_missing_or_a_strange_tensor_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

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
