"""States of a row -> planes on the CPU, without making the target wait.

Codecs run where the states are; the planes are copied on a side stream into pinned memory, which
torch keeps for the next rows (three rows of 16,384 tokens at 5 x 5120 take 1.3 GB). Whoever writes
waits for the copy, not the target.

N tokens of a row, L tapped layers (and the final hidden state after them, if it is stored), D
hidden; 4 facts of codec.measure.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.codec import measure
from dflash_offline.dataset import FINAL_PREFIX, Dataset
from dflash_offline.documents import Document
from dflash_offline.planning import Row


@dataclass(frozen=True, eq=False)
class Encoded:
    """Planes and facts of a row, on the CPU once `copied` has happened."""

    planes: dict[str, Tensor]
    facts_NL4: Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        if self.copied:
            self.copied.synchronize()


def make_encoder(
    dataset: Dataset, device: torch.device, *, compiled: bool = False
) -> Callable[[Tensor], Encoded]:
    """A function: states [N, L, D] on `device` -> planes and facts on their way to the CPU.

    `compiled` fuses some fifteen passes over the states into two; it takes 10 s at the first row.
    """
    codecs = [("", dataset.codec.to(device))]
    if dataset.final_codec:
        codecs.append((FINAL_PREFIX, dataset.final_codec.to(device)))
    copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def code(taps_NLD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts = taps_NLD.split([codec.layers for _, codec in codecs], dim=1)
        planes: dict[str, Tensor] = {}
        facts: list[Tensor] = []
        for (prefix, codec), part_NLD in zip(codecs, parts, strict=True):
            coded = codec.encode(part_NLD)
            facts.append(measure(part_NLD, codec.decode(coded)))
            planes |= {prefix + name: plane for name, plane in coded.items()}
        return planes, torch.cat(facts, 1)

    # Without the option what is decoded would not be rounded to bf16, as it is for a reader.
    run = torch.compile(code, options={"emulate_precision_casts": True}) if compiled else code

    @torch.no_grad()
    def encode(taps_NLD: Tensor) -> Encoded:
        torch._dynamo.maybe_mark_dynamic(taps_NLD, 0)  # one compilation for rows of all lengths
        return to_cpu(*run(taps_NLD), copying)

    return encode


def to_cpu(
    planes: dict[str, Tensor], facts_NL4: Tensor, stream: torch.cuda.Stream | None
) -> Encoded:
    """Copies into pinned memory on `stream`, so that the target's next row need not wait."""
    if stream is None:
        return Encoded(planes, facts_NL4, None)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copied = {}
        for name, plane in {**planes, "": facts_NL4}.items():
            copied[name] = torch.empty(plane.shape, dtype=plane.dtype, pin_memory=True)
            copied[name].copy_(plane, non_blocking=True)
            plane.record_stream(stream)  # or its memory would be used again too soon
        event = torch.cuda.Event()
        event.record(stream)
    return Encoded(copied, copied.pop(""), event)


@dataclass(frozen=True, eq=False)
class Sound:
    """A row without the documents that have broken states."""

    row: Row
    planes: dict[str, Tensor]
    facts_NL4: Tensor
    broken: list[tuple[Document, int]]
    """The others, and how many of their tokens are broken."""


def keep_sound(row: Row, planes: dict[str, Tensor], facts_NL4: Tensor) -> Sound:
    """Leave out each document that has a state that is inf, NaN or zero throughout."""
    largest_NL = facts_NL4[..., 2]
    sound_N = (facts_NL4.isfinite().all(-1) & (largest_NL > 0)).all(-1)
    if sound_N.all():
        return Sound(row, planes, facts_NL4, [])
    kept: list[Document] = []
    broken: list[tuple[Document, int]] = []
    for document, own_T in zip(row, sound_N.split([len(d) for d in row]), strict=True):
        if own_T.all():
            kept.append(document)
        else:
            broken.append((document, int((~own_T).sum())))
            own_T[:] = False  # a view: the whole document goes
    planes = {name: plane[sound_N] for name, plane in planes.items()}
    return Sound(kept, planes, facts_NL4[sound_N], broken)
