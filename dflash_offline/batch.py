"""One row from the shards, with its blocks: read on the CPU in coded form, decoded on the device.

Coded in int8, half the bytes of bf16 cross to the device. What `read_row` gives depends on its
arguments alone, whatever process runs it.

Letters: S row positions, D hidden, M = taps * D, A anchor slots, K block size, R slots with a
weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dflash_offline.anchors import (
    Blocks,
    Coverage,
    eligible_positions,
    make_blocks,
    measure_coverage,
    sample_anchors,
)
from dflash_offline.coded import Span, StateCoding, decode_flat
from dflash_offline.packing import Row, load_row
from dflash_offline.shard_set import ShardSet
from dflash_offline.slab import Shapes, Slab, slab_bytes
from dflash_offline.spec import DrafterSpec


@dataclass(frozen=True)
class RowShape:
    """The fixed sizes of a row, and how its slots are filled and weighted."""

    row_tokens: int
    anchors: int
    gamma: float
    sampling_rate: float = 1.0
    """The share of eligible tokens that become anchors; anchors.sampling_rate says which fits."""


@dataclass(frozen=True, eq=False)
class CodedRow:
    """One row with its states still coded, in memory of any kind."""

    slab: Slab
    """What `token_shapes` names, then the planes of the taps and, if asked for, the last state."""
    taps: tuple[Span, ...]
    final: tuple[Span, ...]
    """Empty if it was not asked for."""
    weight: float
    supervised_slots: int
    coverage: Coverage

    def in_memory(self, memory: Tensor) -> "CodedRow":
        """The same row, where the start of `memory` holds what its own does."""
        return replace(self, slab=self.slab.in_memory(memory))

    def pin_memory(self) -> "CodedRow":
        """A copy in page-locked memory, from where it crosses to a GPU beside other work."""
        return self.in_memory(self.slab.memory.pin_memory())

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "CodedRow":
        return self.in_memory(self.slab.memory.to(device, non_blocking=non_blocking))


@dataclass(frozen=True, eq=False)
class Batch:
    """One row on the device, with its blocks. Its numbers are there before the device has run."""

    taps_SM: Tensor
    """bf16; 0 in the padding, as in `final_SD`."""
    final_SD: Tensor | None
    """The target's last hidden state, if it was asked for."""
    document_ids_S: Tensor
    position_ids_S: Tensor
    blocks: Blocks
    rows: Tensor
    """int64 [R]: a * K + j of every slot with a weight, ascending."""
    supervised_slots: int
    """R"""
    weight: float
    """Sum of the block weights."""
    coverage: Coverage


def load_batch(
    data: ShardSet,
    documents: Sequence[int],
    *,
    spec: DrafterSpec,
    shape: RowShape,
    seed: int,
    device: torch.device,
    final_hidden: bool = False,
) -> Batch:
    """The row of these documents, read and decoded at once."""
    row = read_row(data, documents, spec=spec, shape=shape, seed=seed, final_hidden=final_hidden)
    return RowDecoder(data, device, final_hidden=final_hidden).decode(row.to(device))


def read_row(
    shards: ShardSet,
    documents: Sequence[int],
    *,
    spec: DrafterSpec,
    shape: RowShape,
    seed: int,
    final_hidden: bool = False,
    memory: Tensor | None = None,
) -> CodedRow:
    """The row of these documents, its anchors drawn from `seed`; in `memory`, if that is given.

    ValueError names the shard that is damaged, or the data set without final hidden states.
    """
    row = load_row(shards, documents, shape.row_tokens)
    blocks, coverage = draw_blocks(row, spec, shape, seed)
    rows_R = blocks.weights_AK.flatten().nonzero().flatten()
    taps = StateCoding(shards)
    final = StateCoding(shards, final=True) if final_hidden else None

    shapes = dict(token_shapes(spec, shape))
    for coding in (taps, final) if final else (taps,):
        shapes |= coding.shapes(coding.choose(documents)[0], shape.row_tokens)
    slab = Slab.of(shapes, memory)
    for holder in (row, blocks):
        slab.fill({f.name: getattr(holder, f.name) for f in fields(holder)})
    slab["rows"].zero_()[: len(rows_R)] = rows_R
    return CodedRow(
        slab,
        taps=taps.read(documents, slab, shape.row_tokens),
        final=final.read(documents, slab, shape.row_tokens) if final else (),
        weight=float(blocks.weights_AK.sum()),
        supervised_slots=len(rows_R),
        coverage=coverage,
    )


def draw_blocks(
    row: Row, spec: DrafterSpec, shape: RowShape, seed: int
) -> tuple[Blocks, Coverage]:
    """Blocks of a row on the CPU, at anchors that depend on row and seed alone."""
    anchors, dropped = sample_anchors(
        eligible_positions(row),
        row.document_ids_S,
        slots=shape.anchors,
        rate=shape.sampling_rate,
        generator=torch.Generator().manual_seed(seed),
    )
    blocks = make_blocks(
        row,
        anchors,
        slots=shape.anchors,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        gamma=shape.gamma,
    )
    return blocks, measure_coverage(row, anchors, spec.block_size, dropped=dropped)


def token_shapes(spec: DrafterSpec, shape: RowShape) -> Shapes:
    """What a coded row holds besides states: the tensors of Row and of Blocks, and `rows`.

    `rows` is filled up with zeros, so that rows of one shape take the same memory.
    """
    positions, slots = shape.row_tokens, shape.anchors
    per_slot = (slots, spec.block_size)
    return {
        "input_ids_S": ((positions,), torch.int64),
        "document_ids_S": ((positions,), torch.int64),
        "position_ids_S": ((positions,), torch.int64),
        "loss_mask_S": ((positions,), torch.bool),
        "anchors_A": ((slots,), torch.int64),
        "valid_A": ((slots,), torch.bool),
        "input_ids_AK": (per_slot, torch.int64),
        "position_ids_AK": (per_slot, torch.int64),
        "labels_AK": (per_slot, torch.int64),
        "weights_AK": (per_slot, torch.float32),
        "rows": ((slots * spec.block_size,), torch.int64),
    }


def row_bytes(
    shards: ShardSet, *, spec: DrafterSpec, shape: RowShape, final_hidden: bool = False
) -> int:
    """The most that a coded row takes."""
    shapes = dict(token_shapes(spec, shape))
    for final in (False, True) if final_hidden else (False,):
        shapes |= StateCoding(shards, final=final).largest(shape.row_tokens)
    return slab_bytes(shapes)


class RowDecoder:
    """Coded rows on the device -> batches.

    `compiled` fuses the passes over the states; it takes seconds at the first row, and `decode` is
    then for the thread that runs all else that is compiled.
    """

    def __init__(
        self,
        shards: ShardSet,
        device: torch.device,
        *,
        compiled: bool = False,
        final_hidden: bool = False,
    ) -> None:
        self._taps = StateCoding(shards, device=device)
        self._final = StateCoding(shards, final=True, device=device) if final_hidden else None
        self._whole = torch.compile(decode_flat, dynamic=False) if compiled else decode_flat

    @torch.no_grad()
    def decode(self, row: CodedRow) -> Batch:
        """The batch, which does not keep the coded row's memory but where that holds bf16."""
        final = self._final
        names = [field.name for field in fields(Blocks)]
        tokens = row.slab.copy_of(["document_ids_S", "position_ids_S", *names, "rows"])
        return Batch(
            taps_SM=self._taps.decode(row.slab, row.taps, self._whole),
            final_SD=final.decode(row.slab, row.final, self._whole) if final else None,
            document_ids_S=tokens["document_ids_S"],
            position_ids_S=tokens["position_ids_S"],
            blocks=Blocks(**{name: tokens[name] for name in names}),
            rows=tokens["rows"][: row.supervised_slots],
            supervised_slots=row.supervised_slots,
            weight=row.weight,
            coverage=row.coverage,
        )
