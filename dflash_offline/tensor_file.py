"""A safetensors file written tensor by tensor, with its checksum on the way.

The library's own writer wants all tensors at once, in the memory of one process. A checkpoint of
20 GB whose optimizer state is spread over ranks has them one after the other: here it takes the
memory of the largest. The checksum is crc32c, which a core does several times as fast as sha256.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import google_crc32c
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_BLOCK = 1 << 22


@dataclass(frozen=True)
class TensorFacts:
    """What the file's header says of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FileFacts:
    """By which a file is known to be what was written."""

    bytes: int
    crc32c: int


def facts_of(tensors: Mapping[str, Tensor]) -> list[TensorFacts]:
    return [TensorFacts(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def write_tensors(
    path: Path, facts: Sequence[TensorFacts], tensors: Iterable[Tensor]
) -> FileFacts:
    """Write `tensors`, which `facts` describe in the same order. Taken one at a time."""
    size = crc = 0
    with path.open("wb") as file:
        for block in _blocks(facts, tensors):
            file.write(block)
            size, crc = size + len(block), google_crc32c.extend(crc, block)
    return FileFacts(size, crc)


def _blocks(facts: Sequence[TensorFacts], tensors: Iterable[Tensor]) -> Iterator[bytes]:
    yield _header(facts)
    for expected, tensor in zip(facts, tensors, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (expected.dtype, expected.shape), expected
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        for start in range(0, len(content), _BLOCK):
            yield content[start : start + _BLOCK].tobytes()


def _header(facts: Sequence[TensorFacts]) -> bytes:
    described: dict[str, dict[str, object]] = {}
    end = 0
    for tensor in facts:
        start, end = end, end + prod(tensor.shape) * tensor.dtype.itemsize
        described[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned in a mapped file
    return struct.pack("<Q", len(text)) + text


def read_facts(path: Path) -> FileFacts:
    """Bytes and checksum as they are on the disk now: reads all of the file."""
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), google_crc32c.extend(crc, block)
    return FileFacts(size, crc)


def copy_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Fill `into` from a file with the same names and shapes, one at a time, in its own dtypes.

    FileNotFoundError if there is no such file, ValueError if it is none or does not fit.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with torch.no_grad(), safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if strange := names ^ into.keys():
                what = "lacks" if min(strange) in into else "holds an unknown"
                raise ValueError(f"{path} {what} tensor {min(strange)}")
            for name, place in into.items():
                tensor = file.get_tensor(name)
                if tensor.shape != place.shape:
                    shapes = f"{list(tensor.shape)} instead of {list(place.shape)}"
                    raise ValueError(f"{path}: {name} has shape {shapes}")
                place.copy_(tensor)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file or cut short: {error}") from None
