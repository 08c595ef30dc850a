"""Checkpoints that resume exactly, the best drafter so far, and the export that engines read.

A checkpoint is a folder that appears under its final name only when complete, and is checked
against its checksums before it is believed:
    RUN/checkpoints/step-00001000/{drafter.safetensors, optimizer.safetensors, state.json}
It does not depend on how many ranks wrote it. 12 bytes a parameter with AdamW, 8 with Muon.

The export is z-lab's Hugging Face form: config.json and one model.safetensors with bare keys in
bf16; no embedding, no head, no inverse frequencies. RUN/best is one, with a score beside it.
"""

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_offline.config import TrainConfig
from dflash_offline.drafter import Drafter
from dflash_offline.facts import canonical_hash, read_json, shown
from dflash_offline.files import naming_full_disk, publish_folder, sha256_of, start_folder
from dflash_offline.metrics import say
from dflash_offline.optim import Optimizers, StateEntry
from dflash_offline.spec import DrafterSpec
from dflash_offline.tensor_file import copy_tensors, facts_of, read_facts, write_tensors

_WEIGHTS, _OPTIMIZERS, _FACTS = "drafter.safetensors", "optimizer.safetensors", "state.json"
_OLD_OPTIMIZERS = "optimizer.pt"  # until checkpoints had a crc32c; torch.save of state dicts
_NAME = re.compile(r"step-\d{8}")
_BEST, _SCORE = "best", "best.json"


@dataclass(eq=False)
class TrainState:
    """Everything that resumes, and nothing else.

    Order, anchors and initial weights are functions of the seed and of `rows`, so no random state
    needs saving.
    """

    drafter: Drafter
    optimizers: Optimizers
    step: int = 0
    rows: int = 0
    """Rows taken from the stream by all ranks: the position in the data."""


def save_checkpoint(run: Path, state: TrainState, config: dict[str, Any], *, keep: int) -> Path:
    """Write RUN/checkpoints/step-N and drop all but the newest `keep`.

    All ranks call it: rank 0 writes, and gets what it lacks from the others, tensor by tensor.
    """
    check_finite(state.drafter, "saved")
    final = run / "checkpoints" / f"step-{state.step:08d}"
    entries = state.optimizers.entries()
    states = (state.optimizers.fetch(entry) for entry in entries)
    if not state.optimizers.world.is_first:
        for _ in states:  # sends what is this rank's
            pass
        return final
    with naming_full_disk(run):
        folder = start_folder(final)
        _write(folder, state, config, entries, (tensor for tensor in states if tensor is not None))
        publish_folder(folder, final)
    for old in list_checkpoints(run)[:-keep]:
        _remove(old)
    return final


def _write(
    folder: Path,
    state: TrainState,
    config: dict[str, Any],
    entries: Sequence[StateEntry],
    states: Iterable[Tensor],
) -> None:
    weights = state.drafter.state_dict()
    files = {
        _WEIGHTS: write_tensors(folder / _WEIGHTS, facts_of(weights), weights.values()),
        _OPTIMIZERS: write_tensors(folder / _OPTIMIZERS, entries, states),
    }
    facts: dict[str, Any] = {
        "step": state.step,
        "rows": state.rows,
        "ranks": state.optimizers.world.size,
        "config": config,
        "files": {name: asdict(written) for name, written in files.items()},
        "sha256": {},
    }
    facts["sha256"]["state"] = canonical_hash(facts)
    (folder / _FACTS).write_text(json.dumps(facts, indent=1))


def _remove(folder: Path) -> None:
    """What is removed in part, after a kill, must not be taken for a damaged checkpoint."""
    going = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    shutil.rmtree(going)


def check_finite(drafter: Drafter, what: str) -> None:
    """ValueError if a weight is inf or NaN: such a drafter must neither be kept nor believed."""
    for name, parameter in drafter.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(
                f"the drafter is not {what}: {name} holds inf or NaN; lower the learning rate or "
                "the weight decay, and go on from an earlier checkpoint"
            )


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [folder for folder in _folders(run) if (folder / _FACTS).is_file()]


def _folders(run: Path) -> list[Path]:
    folders = (run / "checkpoints").glob("step-*")
    return sorted(f for f in folders if _NAME.fullmatch(f.name) and f.is_dir())


def resume_newest(run: Path, state: TrainState, config: Mapping[str, Any]) -> Path | None:
    """Put the newest good checkpoint into `state`; None, and nothing done, if there is none.

    All ranks call it; rank 0 alone reads the files through to check them. ValueError if all are
    damaged, or names what `config` has otherwise than the run that was saved.
    """
    world = state.optimizers.world
    folder = world.from_first(lambda: newest_good(run))
    if folder is None:
        return None
    ranks = load_checkpoint(folder, state, config)
    if world.is_first:
        say(f"resumed {folder.name}: step {state.step:,}, {state.rows:,} rows")
        if ranks not in (None, world.size):
            say(
                f"ranks: {ranks} wrote it, {world.size} go on; rows and their order stay the "
                "same, sums over them are rounded in another order"
            )
    return folder


def newest_good(run: Path) -> Path | None:
    """The newest checkpoint that is what was saved, or None if there is none at all.

    Damaged newer ones are set aside as step-N.damaged-K, for the user to look at: so they count
    no more, neither here nor for how many stay. ValueError if all are damaged.
    """
    damaged: dict[Path, str] = {}
    for folder in reversed(_folders(run)):
        try:
            _check_files(folder, _read_facts(folder))
        except (ValueError, OSError) as error:
            damaged[folder] = str(error)
            continue
        for bad, why in damaged.items():
            aside = _set_aside(bad)
            say(
                f"warning: {why}; going on from {folder.name}. The damaged checkpoint is now "
                f"{aside} and may be deleted"
            )
        return folder
    if damaged:
        raise ValueError(
            f"no checkpoint in {run / 'checkpoints'} is whole ({'; '.join(damaged.values())}); "
            "restore one of them or begin anew with another --output"
        )
    return None


def _set_aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    return folder.rename(aside)


def load_checkpoint(folder: Path, state: TrainState, config: Mapping[str, Any]) -> int | None:
    """Put a checkpoint whose files are whole into `state`.

    Returns how many ranks wrote it, where that is known. ValueError names a knob that differs.
    """
    facts = _read_facts(folder)
    made_with = {**_defaults(), **facts["config"]}
    for name, value in config.items():
        if made_with.get(name) != value:
            raise ValueError(
                f"{folder} was made with {name} = {made_with.get(name)!r}, this run has "
                f"{value!r}; resume with the same value or choose another --output"
            )
    copy_tensors(folder / _WEIGHTS, state.drafter.state_dict())
    if _OLD_OPTIMIZERS in facts["sha256"]:
        states = _old_states(folder / _OLD_OPTIMIZERS, state.drafter)
        state.optimizers.load(states, states.__getitem__)
    else:
        with safe_open(folder / _OPTIMIZERS, framework="pt") as file:
            state.optimizers.load(file.keys(), file.get_tensor)
    state.step, state.rows = facts["step"], facts["rows"]
    ranks: int | None = facts.get("ranks")
    return ranks


def _defaults() -> dict[str, Any]:
    """What a checkpoint of before some knob existed was made with."""
    return {knob.name: knob.default for knob in fields(TrainConfig)}


def _old_states(path: Path, drafter: Drafter) -> dict[str, Tensor]:
    """By name, what used to be torch's own state dicts: matrices first, each in one's order."""
    names = [name for name, p in drafter.named_parameters() if p.ndim == 2]
    names += [name for name, p in drafter.named_parameters() if p.ndim != 2]
    left = iter(names)
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return {
        f"{name}/{key}": value
        for optimizer in saved
        for group in optimizer["param_groups"]
        for number, name in zip(group["params"], left, strict=False)
        for key, value in optimizer["state"].get(number, {}).items()
    }


def _read_facts(folder: Path) -> dict[str, Any]:
    """state.json, once it is what was saved."""
    facts = read_json(folder / _FACTS)
    hashes = facts.get("sha256")
    own = hashes.pop("state", None) if isinstance(hashes, dict) else None
    if own is None or own != canonical_hash(facts):
        raise ValueError(f"{folder / _FACTS} is damaged")
    return facts


def _check_files(folder: Path, facts: Mapping[str, Any]) -> None:
    """ValueError names the first file that is not what was saved. Reads all of them."""
    for name, expected in facts.get("files", {}).items():
        if not (folder / name).is_file() or asdict(read_facts(folder / name)) != expected:
            raise ValueError(f"{folder / name} is damaged")
    for name, expected in facts["sha256"].items():  # of older checkpoints
        if not (folder / name).is_file() or sha256_of(folder / name) != expected:
            raise ValueError(f"{folder / name} is damaged")


def export_drafter(drafter: Drafter, folder: Path) -> None:
    """Write the drafter in z-lab's format; `folder` appears when complete."""
    check_finite(drafter, "exported")
    unfinished = start_folder(folder)
    _write_export(drafter, unfinished)
    publish_folder(unfinished, folder)


def _write_export(drafter: Drafter, folder: Path) -> None:
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in drafter.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(drafter.spec.to_config(), indent=2)
    (folder / "config.json").write_text(config + "\n")


def save_best(run: Path, state: TrainState, score: float, *, measure: str) -> bool:
    """Export the drafter to RUN/best if its score is the highest so far; whether it is.

    Beside it stands best.json: step, score and the name of what was measured, by which a resumed
    run goes on comparing. Rank 0 only.
    """
    folder = run / _BEST
    _finish_replacing(folder)
    before = best_score(run, measure)
    if not math.isfinite(score) or (before is not None and score <= before):
        return False
    check_finite(state.drafter, "exported")
    unfinished = start_folder(folder)
    _write_export(state.drafter, unfinished)
    facts = {"step": state.step, "score": score, "measure": measure}
    (unfinished / _SCORE).write_text(json.dumps(facts, indent=1) + "\n")
    publish_folder(unfinished, folder)
    return True


def _finish_replacing(folder: Path) -> None:
    """A kill between the two renames of a replacement leaves the old folder under another name."""
    replaced = folder.with_name(f".{folder.name}.old")
    if replaced.is_dir() and not folder.exists():
        replaced.rename(folder)


def best_score(run: Path, measure: str) -> float | None:
    """The score of RUN/best; None if there is none, or it measured something else."""
    try:
        facts = read_json(run / _BEST / _SCORE)
    except (FileNotFoundError, ValueError):
        return None
    score = facts.get("score")
    is_same = facts.get("measure") == measure and isinstance(score, int | float)
    return score if is_same else None


def forget_best(run: Path) -> None:
    """For a run that begins anew: what an earlier one in its folder reached is not its own."""
    for name in (_BEST, f".{_BEST}.old"):
        shutil.rmtree(run / name, ignore_errors=True)


def load_drafter(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Drafter:
    """An exported drafter, ours or published; every tensor must be there and none besides."""
    spec = DrafterSpec.from_config(read_json(folder / "config.json"))
    with torch.device("meta"):  # a config may claim any size; the file says what there is
        drafter = Drafter(spec)
    try:
        tensors = load_file(folder / "model.safetensors")
        drafter.load_state_dict(tensors, strict=True, assign=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder / 'model.safetensors'} does not exist") from None
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{folder} does not hold the drafter it describes: {error}") from None
    check_finite(drafter, "loaded")
    return drafter.to(device, dtype).eval()


# What neither shapes a tensor of the drafter nor says what its values stand for.
_NOT_OF_THE_WEIGHTS = {
    "block_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}


def load_warm_start(folder: Path, drafter: Drafter) -> None:
    """Fill `drafter` with the weights of an exported one, ours or published, as fp32 masters.

    Another block size will do. ValueError names what else differs, or the file at fault.
    """
    theirs = asdict(DrafterSpec.from_config(read_json(folder / "config.json")))
    ours = asdict(drafter.spec)
    ignored = set(_NOT_OF_THE_WEIGHTS)
    if "sliding_attention" not in drafter.spec.layer_types:
        ignored.add("sliding_window")
    for name in ours:
        if name not in ignored and theirs[name] != ours[name]:
            raise ValueError(
                f"--warm-start {folder} has {name} = {shown(theirs[name])}, but this run has "
                f"{shown(ours[name])}; give the run that drafter's shape and target, or another "
                "drafter"
            )
    copy_tensors(folder / "model.safetensors", drafter.state_dict())
    check_finite(drafter, "loaded")
