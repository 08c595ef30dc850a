"""What a data set takes: bytes, inodes and arithmetic, reckoned before a target is loaded.

Bytes follow from the store's format alone: a plane is chunks of 128 tokens, each with a crc32c and
the last one filled up, and an index per file of 16,384 tokens; the narrow arrays and metadata come
on top. Only `lossless` depends on the states, since zstd shrinks its exponents; it is reckoned at
36.2 KB of 51.2, which random states with loud channels take. Tests compare with shards on a disk.

Arithmetic is 2 FLOP per weight that a token meets, counted in the headers of the safetensors,
which say it for any architecture. Attention scores are left out: 2 % at 4,096 tokens.

Without torch, so that `estimate` can answer at once.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_offline.config import CODECS, ExtractConfig
from dflash_offline.facts import Facts, failing_as
from dflash_offline.metrics import bytes_text, say

# The store's format (codec.py, shards.py, direct.py), repeated here because those import torch.
_GROUP_SIZES = (128, 64, 32)
_CHUNK_TOKENS, _FILE_TOKENS, _NARROW_FILE_ROWS = 128, 16_384, 1 << 16
_CRC_BYTES, _INDEX_ENTRY_BYTES = 4, 16
_TOKEN_BYTES = 4 + 1  # input_ids, loss_mask
_DOCUMENT_BYTES = 8 + 8 + 4  # offsets, document_index, supervised
_METADATA_BYTES = 8_000  # a shard's zarr.json files and COMMIT.json, nearly
_EXPONENTS_SHARE = 0.413

_LAYER = re.compile(r"(?:model|model\.language_model|language_model\.model)\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Need:
    """What is to be written."""

    bytes: int
    inodes: int


@dataclass(frozen=True)
class Room:
    """What a file system has left for this user; `inodes` is None where it has no limit."""

    bytes: int
    inodes: int | None

    @classmethod
    def at(cls, path: Path) -> "Room":
        """On the file system that `path` is on, or will be on once it is made."""
        whole = path.resolve()
        found = os.statvfs(next(place for place in (whole, *whole.parents) if place.exists()))
        return cls(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)

    def holds(self, need: Need) -> bool:
        return need.bytes <= self.bytes and (self.inodes is None or need.inodes <= self.inodes)

    def __str__(self) -> str:
        inodes = "inodes without limit" if self.inodes is None else f"{self.inodes:,} inodes"
        return f"{bytes_text(self.bytes)} and {inodes}"


@dataclass(frozen=True)
class ShardFormat:
    """Shards of `layers` taps of `width`, and of a final hidden state if that has a codec."""

    codec: str
    layers: int
    width: int
    final_codec: str | None = None

    @property
    def plane_bytes(self) -> tuple[float, ...]:
        """Bytes that a token takes in each plane. ValueError if a codec takes no such width."""
        final = _plane_bytes(self.final_codec, 1, self.width) if self.final_codec else ()
        return _plane_bytes(self.codec, self.layers, self.width) + final

    def shard(self, documents: int, tokens: int) -> Need:
        """One shard of that many."""
        chunks, files = -(-tokens // _CHUNK_TOKENS), -(-tokens // _FILE_TOKENS)
        index = _FILE_TOKENS // _CHUNK_TOKENS * _INDEX_ENTRY_BYTES + _CRC_BYTES
        planes = sum(chunks * (_CHUNK_TOKENS * size + _CRC_BYTES) for size in self.plane_bytes)
        planes += len(self.plane_bytes) * files * index
        narrow = tokens * _TOKEN_BYTES + documents * _DOCUMENT_BYTES
        # An array is a folder, its zarr.json, a folder `c`; a plane's file has two more around it.
        inodes = 3 + len(self.plane_bytes) * (3 + 3 * files)  # 3: the shard, zarr.json, COMMIT
        inodes += 2 * (3 + -(-tokens // _NARROW_FILE_ROWS)) + 3 * (3 + 1)
        return Need(round(planes) + narrow + _METADATA_BYTES, inodes)

    def shards(self, sizes: Iterable[tuple[int, int]]) -> Need:
        """Shards of these numbers of documents and tokens."""
        needs = [self.shard(*size) for size in sizes]
        return Need(sum(need.bytes for need in needs), sum(need.inodes for need in needs))

    def even_shards(self, documents: int, tokens: int, shards: int) -> Need:
        """So many shards that share documents and tokens alike."""
        one = self.shard(-(-documents // shards), -(-tokens // shards))
        return Need(shards * one.bytes, shards * one.inodes)


def _plane_bytes(codec: str, layers: int, width: int) -> tuple[float, ...]:
    values = layers * width
    if codec == "raw":
        return (2 * values,)
    if codec == "lossless":
        return (_EXPONENTS_SHARE * values, values)
    group = next((size for size in _GROUP_SIZES if width % size == 0), None)
    if not group:
        raise ValueError(
            f"codec int8 needs a width that 32 divides, but the target's is {width}; use raw"
        )
    return (values, 2 * values // group)


def codecs_for(width: int) -> list[str]:
    """Those that can store states of that width."""
    return [codec for codec in CODECS if codec != "int8" or width % _GROUP_SIZES[-1] == 0]


def count_shards(tokens: int, *, shard_tokens: int, batch_tokens: int) -> int:
    """Shards of as many whole rows as one may hold, all rows full, as they are but for 1 %."""
    row = min(batch_tokens, shard_tokens)
    return max(1, -(-tokens // (shard_tokens // row * row)))


def layer_weights(folder: Path, depth: int) -> int:
    """Weights of the first `depth` layers of the target in `folder` that one token meets.

    Of a mixture's experts only as many count as a token is sent to. ValueError if a layer lacks.
    """
    share = _experts_share(folder)
    of_layer: dict[int, float] = {}
    for name, shape in _weights(folder):
        if match := _LAYER.match(name):
            layer, met = int(match[1]), share if ".experts." in name else 1.0
            of_layer[layer] = of_layer.get(layer, 0.0) + met * math.prod(shape)
    if lacking := [i for i in range(depth) if i not in of_layer]:
        raise ValueError(
            f"{folder} holds no weights of layer {lacking[0]} in its .safetensors files, under "
            "the names that Llama and Qwen give them; the target's folder is incomplete"
        )
    return round(sum(of_layer[i] for i in range(depth)))


def _experts_share(folder: Path) -> float:
    config = Facts.read(folder / "config.json")
    text = config.inner("text_config") if config.has("text_config") else config
    name = "num_experts" if text.has("num_experts") else "num_local_experts"
    if not text.has(name):
        return 1.0
    experts: int = text.whole(name)
    return text.whole("num_experts_per_tok", most=experts) / experts


def _weights(folder: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """Name and shape of every weight; one whole file goes before several, as in transformers."""
    whole = folder / "model.safetensors"
    seen: set[str] = set()
    for path in [whole] if whole.exists() else sorted(folder.glob("*.safetensors")):
        with failing_as(f"{path} is not a whole safetensors file"):
            header = _header(path)
            shapes = {n: facts["shape"] for n, facts in header.items() if n != "__metadata__"}
        yield from ((name, shape) for name, shape in shapes.items() if name not in seen)
        seen |= shapes.keys()


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def check_room(
    config: ExtractConfig, form: ShardFormat, missing: Sequence[tuple[int, int]]
) -> None:
    """ValueError unless the shards still missing fit on the disk; a warning if that is allowed.

    `missing` are their documents and tokens, of all ranks. What other ranks are writing at this
    moment counts twice: as missing, and as space that is gone.
    """
    need, room = form.shards(missing), Room.at(config.output)
    if room.holds(need):
        return
    lossless = "lossless" in (form.codec, form.final_codec)
    found = (
        f"the {sum(tokens for _, tokens in missing):,} tokens still to be extracted take "
        f"{bytes_text(need.bytes)} and {need.inodes:,} inodes in codec {form.codec}"
        f"{' (reckoned at 0.71 of bf16; it depends on the states)' if lossless else ''}, but "
        f"the file system of {config.output} has {room} left"
    )
    if config.allow_partial:
        say(f"warning: {found}; --allow-partial goes on until it is full")
        return
    raise ValueError(
        f"{found}; choose {_smaller_codec(form, missing, room)}another disk for --output, or "
        "--allow-partial to write what fits"
    )


def _smaller_codec(form: ShardFormat, missing: Sequence[tuple[int, int]], room: Room) -> str:
    """A remedy, if it is one."""
    if form.codec == "int8" or "int8" not in codecs_for(form.width):
        return ""
    need = replace(form, codec="int8").shards(missing)
    return f"--codec int8 ({bytes_text(need.bytes)}), " if room.holds(need) else ""
