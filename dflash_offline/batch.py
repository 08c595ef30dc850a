"""One row from the shards, on the device, with its blocks.

Letters: S row positions, M = taps * hidden, A anchor slots, K block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.anchors import Blocks, eligible_positions, make_blocks, sample_anchors
from dflash_offline.packing import load_row, load_taps
from dflash_offline.shard_set import ShardSet
from dflash_offline.spec import DrafterSpec


@dataclass(frozen=True)
class RowShape:
    """The fixed sizes of a row, and how its slots are weighted."""

    row_tokens: int
    anchors: int
    gamma: float


@dataclass(frozen=True, eq=False)
class Batch:
    """One row on the device, with its blocks."""

    taps_SM: Tensor
    document_ids_S: Tensor
    position_ids_S: Tensor
    blocks: Blocks
    weight: float
    """Sum of the block weights, known before anything has run on the device."""


def load_batch(
    data: ShardSet,
    documents: Sequence[int],
    *,
    spec: DrafterSpec,
    shape: RowShape,
    seed: int,
    device: torch.device,
) -> Batch:
    """The row of these documents, its anchors drawn from `seed` alone, whatever rank asks."""
    row = load_row(data, documents, shape.row_tokens)
    generator = torch.Generator().manual_seed(seed)
    blocks = make_blocks(
        row,
        sample_anchors(eligible_positions(row), shape.anchors, generator),
        slots=shape.anchors,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        gamma=shape.gamma,
    )
    return Batch(
        taps_SM=load_taps(data, documents, shape.row_tokens, device),
        document_ids_S=row.document_ids_S.to(device),
        position_ids_S=row.position_ids_S.to(device),
        blocks=blocks.to(device),
        weight=float(blocks.weights_AK.sum()),
    )
