"""A target's weights, read from its safetensors files straight to the device, as few as needed.

Each tensor is copied to its place out of the mapped file. Host memory holds nothing but the
kernel's page cache, of which a host has one: when several processes load the same target, the
first to touch a page waits for the disk and the others find it read.

A stored tensor may have a longer name than the tower gives it (multimodal wrappers), be one
expert's part of a tensor of all experts, or be fp8: e4m3 codes with a scale for each block, which
are multiplied out in float32. The price of doing without transformers' loader: its conversions of
other names and layouts are not made, and such a weight counts as lacking.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dflash_offline.facts import Facts, read_json, reason, shown
from dflash_offline.metrics import progress, say

_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors spells them
_CODES = "F8_E4M3"
_BLOCK = (128, 128)  # transformers' default where a config names none

Place = tuple[int | slice, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file, known by the file's header."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    """Its bytes, counted from the end of the header."""


@dataclass(frozen=True)
class Part:
    """A stored tensor and where it goes: `tower[target][place]`."""

    stored: Stored
    target: str
    place: Place


class Weights:
    """The tensors that a folder stores, by name; its files are mapped, only their headers read."""

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        """ValueError or FileNotFoundError names the file at fault."""
        self.folder = folder
        # With its index: to safetensors "cuda" is the first GPU, to torch the current one.
        self.device = torch.empty(0, device=device).device
        self._files = {path: _opened(path, self.device) for path in _paths(folder)}
        self._stored = {stored.name: stored for path in self._files for stored in _header(path)}
        if not self._stored:
            raise FileNotFoundError(
                f"{folder} holds no .safetensors file; convert the model first"
            )
        self._block = _fp8_block(folder / "config.json")

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def fill(self, tower: nn.Module) -> None:
        """Give a tower its weights, in the dtypes that it has now; what it says goes to stderr.

        Qwen3.5 stores A_log and the gated norm in float32 and, as in transformers, they are
        rounded to the tower's bfloat16.
        """
        wanted = tower.state_dict()
        parts = self.parts(wanted)
        total = sum(self.bytes_of(part.stored) for part in parts)
        started = time.monotonic()
        filled = {name: torch.empty_like(t, device=self.device) for name, t in wanted.items()}
        with progress("reading weights", total=total, unit="B") as bar:
            for part in parts:
                self.copy(part.stored, filled[part.target][part.place])
                bar.advance(self.bytes_of(part.stored))
        tower.load_state_dict(filled, assign=True)
        _say_pace(total, max(time.monotonic() - started, 1e-9))
        if quantised := sum(part.stored.dtype == _CODES for part in parts):
            say(f"dequantised {quantised:,} fp8 weights")

    def first(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """The first of these tensors that there is, on the device."""
        for name in names:
            if stored := self.find(name):
                whole = torch.empty(stored.shape, dtype=dtype, device=self.device)
                self.copy(stored, whole)
                return whole
        raise ValueError(f"{self.folder} has none of the weights {', '.join(names)}")

    def find(self, name: str) -> Stored | None:
        """What is stored under that name. ValueError if it is of a kind that cannot be read."""
        stored = self._stored.get(name)
        if stored and stored.dtype not in _FLOATS:
            self._check_codes(stored)
        return stored

    def copy(self, stored: Stored, out: Tensor) -> None:
        """Its values into `out`, a tensor of the same shape on the device."""
        values = self._read(stored)
        if scale := self._scale(stored):
            assert self._block is not None, "find() has refused it"
            values = dequantise(values, self._read(scale), self._block)
        out.copy_(values)

    def parts(self, tower: Mapping[str, Tensor]) -> list[Part]:
        """What is stored of the tower's tensors, in the order of the files.

        ValueError unless they are all there and have the tower's shapes.
        """
        prefix, parts, missing = self._prefix(tower), [], []
        for target, tensor in tower.items():
            is_whole = prefix + target in self
            places = {} if is_whole else _places_by_expert(target, tensor)
            for name, place in (places or {target: ()}).items():
                if stored := self.find(prefix + name):
                    parts.append(Part(stored, target, place))
                else:
                    missing.append(name)
        _refuse_missing(self.folder, missing)
        _refuse_mismatched(self.folder, parts, tower)
        return sorted(parts, key=lambda part: (part.stored.path, part.stored.start))

    def bytes_of(self, stored: Stored) -> int:
        """What has to be read for it, its scales included."""
        scale = self._scale(stored)
        return stored.stop - stored.start + (scale.stop - scale.start if scale else 0)

    def _read(self, stored: Stored) -> Tensor:
        tensor: Tensor = self._files[stored.path].get_tensor(stored.name)
        return tensor

    def _scale(self, stored: Stored) -> Stored | None:
        return self._stored.get(f"{stored.name}_scale_inv") if stored.dtype == _CODES else None

    def _check_codes(self, stored: Stored) -> None:
        scale, block = self._scale(stored), self._block
        if scale is None or scale.dtype not in _FLOATS or block is None or len(stored.shape) < 2:
            raise ValueError(
                f"{stored.path}: {stored.name} is stored as {stored.dtype}; readable are floats, "
                "and F8_E4M3 with block scales that config.json's quantization_config tells of"
            )
        blocks = (-(-n // size) for n, size in zip(stored.shape[-2:], block, strict=True))
        if scale.shape != (expected := (*stored.shape[:-2], *blocks)):
            raise ValueError(
                f"{scale.path}: {scale.name} is {scale.shape}, by blocks of {block[0]} x "
                f"{block[1]} it should be {expected}"
            )

    def _prefix(self, tower: Mapping[str, Tensor]) -> str:
        """What stands before the tower's names in the files; most of them have to agree."""
        found: Counter[str] = Counter()
        for words in (name.split(".") for name in self._stored):
            for i in range(len(words)):
                if ".".join(words[i:]) in tower:
                    found["".join(f"{word}." for word in words[:i])] += 1
        if not found:
            return ""
        (best, most), *others = found.most_common(2)
        if others and others[0][1] == most:
            raise ValueError(
                f"{self.folder} holds as many weights of a text tower under {best!r} as under "
                f"{others[0][0]!r}; leave one of the two towers in its files"
            )
        return best


def dequantise(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [..., R, C] of e4m3 codes and a factor for each block of them, cut at the edges."""
    rows, columns = codes.shape[-2:]
    scales = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return codes.float().mul_(scales.repeat_interleave(block[1], -1)[..., :columns])


def _say_pace(total: float, seconds: float) -> None:
    gigabytes = total / 1e9
    say(f"read {gigabytes:.1f} GB in {seconds:.1f} s, {gigabytes / seconds:.1f} GB/s")


def _places_by_expert(name: str, tensor: Tensor) -> dict[str, Place]:
    """Where the matrices of single experts go in a tensor of all: none if it is no such tensor.

    transformers keeps [experts, out, in], the gate's rows before the up projection's.
    """
    layer, _, kind = name.rpartition(".experts.")
    if kind not in ("gate_up_proj", "down_proj"):
        return {}
    rows = tensor.shape[1] // 2
    halves: dict[str, Place] = {"gate_proj": (slice(rows),), "up_proj": (slice(rows, None),)}
    whole: dict[str, Place] = {"down_proj": ()}
    return {
        f"{layer}.experts.{expert}.{matrix}.weight": (expert, *place)
        for expert in range(tensor.shape[0])
        for matrix, place in (halves if kind == "gate_up_proj" else whole).items()
    }


def _refuse_missing(folder: Path, missing: Sequence[str]) -> None:
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of its text tower, "
            f"{', '.join(sorted(missing)[:3])} among them; the target's folder is incomplete, or "
            "calls them by names that are not known here"
        )


def _refuse_mismatched(folder: Path, parts: Sequence[Part], tower: Mapping[str, Tensor]) -> None:
    expected = [tuple(tower[part.target][part.place].shape) for part in parts]
    mismatched = sorted(
        (part.stored.name, part.stored.shape, shape)
        for part, shape in zip(parts, expected, strict=True)
        if part.stored.shape != shape
    )
    if mismatched:
        name, found, shape = mismatched[0]
        raise ValueError(
            f"{folder}: {len(mismatched)} weights do not fit its config.json: {name} is "
            f"{found}, by the config {shape}"
        )


def _fp8_block(config_path: Path) -> tuple[int, int] | None:
    """Sides of the blocks that share a scale; None if the weights are not quantised."""
    config = Facts.read(config_path)
    for part in (config, config.inner("text_config")):
        quantised = part.inner("quantization_config")
        if not quantised.values:
            continue
        method = quantised.text("quant_method")
        block = quantised.values.get("weight_block_size", list(_BLOCK))
        is_block = isinstance(block, list) and len(block) == 2
        if method != "fp8" or not is_block or not all(type(n) is int and n > 0 for n in block):
            raise ValueError(
                f"{config_path}: weights quantised by {shown(method)}, weight_block_size "
                f"{shown(block)}, cannot be read, only fp8 in blocks; give the folder of the "
                "model that is not quantised"
            )
        return block[0], block[1]
    return None


def _paths(folder: Path) -> list[Path]:
    """In transformers' order: one whole file goes before an index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    return _indexed(index) if index.exists() else sorted(folder.glob("*.safetensors"))


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, all of its own folder and of those the identity covers."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index}: weight_map is {shown(names)}; it must name each weight's file")
    for name in names.values():
        is_name = isinstance(name, str) and Path(name).name == name
        if not is_name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index} names {shown(name)}, which is no .safetensors file of that folder"
            )
    return [index.with_name(name) for name in sorted(set(names.values()))]


def _opened(path: Path, device: torch.device) -> Any:
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:  # the latter may name no file
        raise ValueError(f"{path} is not a whole safetensors file: {reason(error)}") from None


def _header(path: Path) -> list[Stored]:
    """The tensors of a file that was opened, hence has a whole header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return [
        Stored(name, path, facts["dtype"], tuple(facts["shape"]), *facts["data_offsets"])
        for name, facts in header.items()
    ]
