"""Anchors and the blocks that start at them: what the drafter is asked, and what is right.

An anchor is a token that the target produced and that is followed by one more; its block asks for
the K - 1 tokens after it. Anchors are drawn anew for every row and epoch. A block may overrun its
document or its turn: those slots weigh zero, so the last tokens of a turn are anchors as well.

Letters: S row positions, A anchor slots, K block size.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dflash_offline.packing import Row


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one row. Fixed A and K, so that one graph serves every row."""

    anchors_A: Tensor
    """int64, row positions, ascending; 0 where invalid."""
    valid_A: Tensor
    """bool; false fills up rows with fewer eligible positions than slots."""
    input_ids_AK: Tensor
    """int64: the anchor token, then mask tokens."""
    position_ids_AK: Tensor
    labels_AK: Tensor
    """int64: the token at each slot's own position (no shift)."""
    weights_AK: Tensor
    """float32: 0 in slot 0, outside the document and outside the loss mask."""

    def to(self, device: torch.device) -> "Blocks":
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return replace(self, **moved)


def eligible_positions(row: Row) -> Tensor:
    """bool [S]: positions that may anchor a block: supervised, and so is their successor."""
    follows = torch.zeros_like(row.loss_mask_S)
    follows[:-1] = row.loss_mask_S[1:] & (row.document_ids_S[1:] == row.document_ids_S[:-1])
    return row.loss_mask_S & follows & (row.document_ids_S >= 0)


def sample_anchors(eligible_S: Tensor, slots: int, generator: torch.Generator) -> Tensor:
    """At most `slots` positions, uniform without replacement, ascending. int64 on the CPU."""
    candidates = eligible_S.nonzero().flatten()
    chosen = torch.randperm(len(candidates), generator=generator)[:slots]
    return candidates[chosen].sort().values


def default_gamma(block_size: int) -> float:
    """Decay of the slot weights as in the DFlash paper: 7, 5, 4 for blocks of 16, 10, 8."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """float32 [K]: exp(-(j - 1) / gamma) for slot j >= 1, and 0 for the anchor's own slot."""
    return torch.tensor([0.0, *(math.exp(-j / gamma) for j in range(block_size - 1))])


def make_blocks(
    row: Row,
    anchors: Tensor,
    *,
    slots: int,
    block_size: int,
    mask_token_id: int,
    gamma: float,
) -> Blocks:
    """The blocks at `anchors` (ascending row positions); invalid ones fill up to `slots`."""
    count = len(anchors)
    anchors_A = torch.zeros(slots, dtype=torch.long)
    anchors_A[:count] = anchors
    valid_A = torch.arange(slots) < count

    places_AK = anchors_A[:, None] + torch.arange(block_size)
    inside_AK = places_AK.clamp(max=len(row.input_ids_S) - 1)
    same_document = row.document_ids_S[inside_AK] == row.document_ids_S[anchors_A][:, None]
    supervised = (
        (places_AK == inside_AK) & same_document & row.loss_mask_S[inside_AK] & valid_A[:, None]
    )
    input_ids_AK = torch.full((slots, block_size), mask_token_id, dtype=torch.long)
    input_ids_AK[:, 0] = torch.where(valid_A, row.input_ids_S[anchors_A], mask_token_id)
    return Blocks(
        anchors_A=anchors_A,
        valid_A=valid_A,
        input_ids_AK=input_ids_AK,
        position_ids_AK=row.position_ids_S[anchors_A][:, None] + torch.arange(block_size),
        labels_AK=row.input_ids_S[inside_AK],
        weights_AK=slot_weights(block_size, gamma) * supervised,
    )
