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
from dflash_offline.conversations import Document
from dflash_offline.dataset import FINAL_PREFIX, Dataset
from dflash_offline.metrics import say
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


def make_encoder(dataset: Dataset, device: torch.device) -> Callable[[Tensor], Encoded]:
    """A function: states [N, L, D] on `device` -> planes and facts on their way to the CPU."""
    codecs = [("", dataset.codec.to(device))]
    if dataset.final_codec:
        codecs.append((FINAL_PREFIX, dataset.final_codec.to(device)))
    copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def encode(taps_NLD: Tensor) -> Encoded:
        parts = taps_NLD.split([codec.layers for _, codec in codecs], dim=1)
        planes: dict[str, Tensor] = {}
        facts: list[Tensor] = []
        for (prefix, codec), part_NLD in zip(codecs, parts, strict=True):
            coded = codec.encode(part_NLD)
            facts.append(measure(part_NLD, codec.decode(coded)))
            planes |= {prefix + name: plane for name, plane in coded.items()}
        return to_cpu(planes, torch.cat(facts, 1), copying)

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


def keep_sound(
    row: Row, planes: dict[str, Tensor], facts_NL4: Tensor
) -> tuple[Row, dict[str, Tensor], Tensor]:
    """The row without documents that have a state that is inf, NaN or zero throughout."""
    largest_NL = facts_NL4[..., 2]
    sound_N = (facts_NL4.isfinite().all(-1) & (largest_NL > 0)).all(-1)
    if sound_N.all():
        return row, planes, facts_NL4
    kept: list[Document] = []
    keep_N = torch.zeros_like(sound_N)
    start = 0
    for document in row:
        own = slice(start, start := start + len(document))
        if sound_N[own].all():
            kept.append(document)
            keep_N[own] = True
        else:
            bad = int((~sound_N[own]).sum())
            say(f"warning: document {document.index} left out: broken states of {bad} tokens")
    return kept, {name: plane[keep_N] for name, plane in planes.items()}, facts_NL4[keep_N]
