"""Checkpoints that resume exactly, and the export that engines read.

A checkpoint is a folder that appears under its final name only when complete:
    RUN/checkpoints/step-00001000/{drafter.safetensors, optimizer.pt, state.json}
The export is z-lab's Hugging Face form: config.json and one model.safetensors with bare keys in
bf16; no embedding, no head, no inverse frequencies.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_offline.drafter import Drafter
from dflash_offline.facts import canonical_hash, read_json
from dflash_offline.files import publish_folder, sha256_of, start_folder
from dflash_offline.spec import DrafterSpec

_WEIGHTS, _OPTIMIZERS, _FACTS = "drafter.safetensors", "optimizer.pt", "state.json"
_NAME = re.compile(r"step-\d{8}")


@dataclass(eq=False)
class TrainState:
    """Everything that resumes, and nothing else.

    Order, anchors and initial weights are functions of the seed and of `rows`, so no random state
    needs saving.
    """

    drafter: Drafter
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    rows: int = 0
    """Rows taken from the stream by all ranks: the position in the data."""


def save_checkpoint(run: Path, state: TrainState, config: dict[str, Any], *, keep: int) -> Path:
    """Write RUN/checkpoints/step-N and drop all but the newest `keep`. Rank 0 only."""
    check_finite(state.drafter, "saved")
    final = run / "checkpoints" / f"step-{state.step:08d}"
    folder = start_folder(final)
    tensors = {name: p.detach().contiguous() for name, p in state.drafter.state_dict().items()}
    save_file(tensors, folder / _WEIGHTS)
    torch.save([o.state_dict() for o in state.optimizers], folder / _OPTIMIZERS)
    facts: dict[str, Any] = {
        "step": state.step,
        "rows": state.rows,
        "config": config,
        "sha256": {name: sha256_of(folder / name) for name in (_WEIGHTS, _OPTIMIZERS)},
    }
    facts["sha256"]["state"] = canonical_hash(facts)
    (folder / _FACTS).write_text(json.dumps(facts, indent=1))
    publish_folder(folder, final)
    for old in list_checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return final


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
    folders = (run / "checkpoints").glob("step-*")
    return sorted(f for f in folders if _NAME.fullmatch(f.name) and (f / _FACTS).is_file())


def load_checkpoint(folder: Path, state: TrainState, config: dict[str, Any]) -> None:
    """Put a checkpoint into `state`. Raises ValueError naming the file or knob at fault."""
    facts = _checked_facts(folder)
    for name, value in config.items():
        if facts["config"].get(name) != value:
            raise ValueError(
                f"{folder} was made with {name} = {facts['config'].get(name)!r}, this run has "
                f"{value!r}; resume with the same value or choose another --output"
            )
    state.drafter.load_state_dict(load_file(folder / _WEIGHTS))
    saved = torch.load(folder / _OPTIMIZERS, map_location="cpu", weights_only=True)
    for optimizer, values in zip(state.optimizers, saved, strict=True):
        optimizer.load_state_dict(values)
    state.step, state.rows = facts["step"], facts["rows"]


def _checked_facts(folder: Path) -> dict[str, Any]:
    """state.json, once it and the files it names are what was saved."""
    facts = read_json(folder / _FACTS)
    hashes = facts.get("sha256")
    own = hashes.pop("state", None) if isinstance(hashes, dict) else None
    if own is None or own != canonical_hash(facts):
        raise ValueError(f"{folder / _FACTS} is damaged; remove the checkpoint {folder.name}")
    for name, expected in facts["sha256"].items():
        if not (folder / name).is_file() or sha256_of(folder / name) != expected:
            raise ValueError(f"{folder / name} is damaged; remove the checkpoint {folder.name}")
    return facts


def export_drafter(drafter: Drafter, folder: Path) -> None:
    """Write the drafter in z-lab's format; `folder` appears when complete."""
    check_finite(drafter, "exported")
    unfinished = start_folder(folder)
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in drafter.state_dict().items()
    }
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(drafter.spec.to_config(), indent=2)
    (unfinished / "config.json").write_text(config + "\n")
    publish_folder(unfinished, folder)


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
