"""Anchors and the blocks that start at them: what the drafter is asked, and what is right.

An anchor is a token that the target produced and that is followed by one more; its block asks for
the K - 1 tokens after it. A block may overrun its document or its turn: those slots weigh zero, so
the last tokens of a turn are anchors as well.

Anchors are drawn anew for every row and epoch, in each document the same share of its tokens,
whatever it is packed with. Only where a row would need more anchors than it has slots is the
surplus left out, evenly over the row.

Letters: S row positions, A anchor slots, K block size, C candidates, N documents.
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


@dataclass(frozen=True)
class Coverage:
    """How much of what rows could teach their blocks ask for. Counts, so rows just add."""

    supervised: int
    """Tokens that some block could ask for."""
    covered: int
    """Of these, the ones that a block of their row does ask for."""
    anchors: int
    dropped: int
    """Anchors that were drawn but found no slot."""

    def __add__(self, other: "Coverage") -> "Coverage":
        return Coverage(
            self.supervised + other.supervised,
            self.covered + other.covered,
            self.anchors + other.anchors,
            self.dropped + other.dropped,
        )

    @property
    def share(self) -> float:
        return self.covered / max(self.supervised, 1)


def sampling_rate(lengths: Tensor, supervised: Tensor, row_tokens: int, anchors: int) -> float:
    """The share of supervised tokens that become anchors if rows fill their slots on average.

    From the tokens and the supervised tokens of each document, int64. Where a document is cut to a
    row, its supervised tokens are taken to lie evenly.
    """
    kept = lengths.clamp(max=row_tokens)
    per_token = float((supervised.double() * kept / lengths).sum() / kept.sum())
    return min(1.0, anchors / max(per_token * row_tokens, 1e-6))


def eligible_positions(row: Row) -> Tensor:
    """bool [S]: positions that may anchor a block: supervised, and so is their successor."""
    follows = torch.zeros_like(row.loss_mask_S)
    follows[:-1] = row.loss_mask_S[1:] & (row.document_ids_S[1:] == row.document_ids_S[:-1])
    return row.loss_mask_S & follows & (row.document_ids_S >= 0)


def sample_anchors(
    eligible_S: Tensor,
    document_ids_S: Tensor,
    *,
    slots: int,
    rate: float,
    generator: torch.Generator,
) -> tuple[Tensor, int]:
    """Ascending positions, int64 on the CPU, and how many more were drawn than there are slots.

    Of n candidates in a document, rate x n are drawn, rounded up or down by chance so that this
    is the mean; each is as likely as any other.
    """
    candidates_C = eligible_S.nonzero().flatten()
    drawn_C = _share_of_each(document_ids_S[candidates_C], rate, generator)
    drawn = candidates_C[drawn_C]
    kept = torch.randperm(len(drawn), generator=generator)[:slots]
    return drawn[kept].sort().values, len(drawn) - len(kept)


def _share_of_each(documents_C: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """bool [C]: a random share of the candidates of each document, which lie side by side."""
    _, which_C, counts_N = documents_C.unique_consecutive(return_inverse=True, return_counts=True)
    share_N = rate * counts_N.double()
    chance_N = torch.rand(len(counts_N), generator=generator, dtype=torch.float64)
    take_N = share_N.floor() + (chance_N < share_N.frac())

    # A random order of all candidates, then, keeping that order, one document after the other.
    shuffled_C = torch.randperm(len(documents_C), generator=generator)
    order_C = shuffled_C[which_C[shuffled_C].sort(stable=True).indices]
    place_C = torch.arange(len(documents_C)) - (counts_N.cumsum(0) - counts_N)[which_C]
    drawn_C = torch.zeros(len(documents_C), dtype=torch.bool)
    drawn_C[order_C] = place_C < take_N[which_C]
    return drawn_C


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

    places_AK, supervised_AK = _asked_places(row, anchors_A, block_size)
    input_ids_AK = torch.full((slots, block_size), mask_token_id, dtype=torch.long)
    input_ids_AK[:, 0] = torch.where(valid_A, row.input_ids_S[anchors_A], mask_token_id)
    return Blocks(
        anchors_A=anchors_A,
        valid_A=valid_A,
        input_ids_AK=input_ids_AK,
        position_ids_AK=row.position_ids_S[anchors_A][:, None] + torch.arange(block_size),
        labels_AK=row.input_ids_S[places_AK],
        weights_AK=slot_weights(block_size, gamma) * (supervised_AK & valid_A[:, None]),
    )


def _asked_places(row: Row, anchors_A: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """int64 and bool [A, K]: each slot's position in the row, and whether its token is supervised.

    A slot past the end of the row has the last position and is not supervised.
    """
    places_AK = anchors_A[:, None] + torch.arange(block_size)
    inside_AK = places_AK.clamp(max=len(row.input_ids_S) - 1)
    same_document = row.document_ids_S[inside_AK] == row.document_ids_S[anchors_A][:, None]
    return inside_AK, (places_AK == inside_AK) & same_document & row.loss_mask_S[inside_AK]


def measure_coverage(row: Row, anchors: Tensor, block_size: int, *, dropped: int) -> Coverage:
    """What the blocks at `anchors` ask for, of all that blocks could ask for in this row."""

    def asked(anchors_A: Tensor) -> int:
        places_AK, supervised_AK = _asked_places(row, anchors_A, block_size)
        is_asked_S = torch.zeros_like(row.loss_mask_S)
        is_asked_S[places_AK[:, 1:][supervised_AK[:, 1:]]] = True
        return int(is_asked_S.sum())

    all_anchors = eligible_positions(row).nonzero().flatten()
    return Coverage(asked(all_anchors), asked(anchors), len(anchors), dropped)
