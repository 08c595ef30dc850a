"""Checkpoints that resume exactly, and the export that engines read.

A checkpoint is a folder that appears under its final name only when complete:
    RUN/checkpoints/step-00001000/{drafter.safetensors, optimizer.pt, state.json}
The export is z-lab's Hugging Face form: config.json and one model.safetensors with bare keys in
bf16; no embedding, no head, no inverse frequencies.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_offline.drafter import Drafter
from dflash_offline.files import publish_folder, start_folder
from dflash_offline.spec import DrafterSpec, read_json


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
    final = run / "checkpoints" / f"step-{state.step:08d}"
    folder = start_folder(final)
    tensors = {name: p.detach().contiguous() for name, p in state.drafter.state_dict().items()}
    save_file(tensors, folder / "drafter.safetensors")
    torch.save([o.state_dict() for o in state.optimizers], folder / "optimizer.pt")
    facts = {"step": state.step, "rows": state.rows, "config": config}
    (folder / "state.json").write_text(json.dumps(facts, indent=1))
    publish_folder(folder, final)
    for old in list_checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def load_checkpoint(folder: Path, state: TrainState, config: dict[str, Any]) -> None:
    """Put a checkpoint into `state`. Raises ValueError naming the knob that differs."""
    facts = read_json(folder / "state.json")
    for name, value in config.items():
        if facts["config"].get(name) != value:
            raise ValueError(
                f"{folder} was made with {name} = {facts['config'].get(name)!r}, this run has "
                f"{value!r}; resume with the same value or choose another --output"
            )
    try:
        state.drafter.load_state_dict(load_file(folder / "drafter.safetensors"))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{folder / 'drafter.safetensors'} is damaged: {error}; remove the checkpoint"
        ) from None
    for optimizer, values in zip(
        state.optimizers, _load_optimizers(folder / "optimizer.pt"), strict=True
    ):
        optimizer.load_state_dict(values)
    state.step, state.rows = facts["step"], facts["rows"]


def _load_optimizers(path: Path) -> list[dict[str, Any]]:
    try:
        states: list[dict[str, Any]] = torch.load(path, map_location="cpu", weights_only=True)
        return states
    except (RuntimeError, EOFError, UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{path} is damaged: {reason}; remove the checkpoint") from None


def export_drafter(drafter: Drafter, folder: Path) -> None:
    """Write the drafter in z-lab's format; `folder` appears when complete."""
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
    drafter = Drafter(spec)
    try:
        tensors = load_file(folder / "model.safetensors")
        drafter.load_state_dict(tensors, strict=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder / 'model.safetensors'} does not exist") from None
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{folder} does not hold the drafter it describes: {error}") from None
    return drafter.to(device, dtype).eval()
