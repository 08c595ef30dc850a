"""What a row's blocks cost and what they got right: weights over slots, and sums.

Each slot weighs by its place (exponential decay: the early slots decide how far a draft gets), or
by what the drafter itself makes of the slots before it (D-PACE, arXiv:2605.18810). Rows of zero
weight and the anchors' own slots never reach the head.

All results are sums; ranks and micro-batches just add, and one global count divides.
Letters: R rows (slots that count), D hidden, A anchor slots, K block size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_offline.anchors import Blocks
from dflash_offline.head import Head

TOP = (1, 4, 8)


@dataclass(frozen=True)
class Objective:
    """What is learnt, and what a slot weighs."""

    distils: bool = False
    """From the target's own distribution instead of its tokens."""
    dpace_alpha: float | None = None
    """None: the blocks' own weights, which decay with the slot."""


@dataclass(frozen=True, eq=False)
class BlockLoss:
    """Sums over blocks, on the device; add them over ranks and micro-batches."""

    loss: Tensor
    """[]: sum of weight * loss; carries the gradient."""
    weight: Tensor
    """[]: what the loss is to be divided by: the sum of weights, or with D-PACE of slots."""
    slots_K: Tensor
    """Supervised slots, by place in the block."""
    top_hits_3K: Tensor
    """Slots whose label is among the drafter's first 1, 4, 8 choices."""
    reached_K: Tensor
    """Supervised slots all of whose earlier slots were top-1 hits."""
    reached_hits_K: Tensor
    """... and which are hits themselves."""
    blocks: Tensor
    """[]: blocks with at least one supervised slot."""
    run: Tensor
    """[]: sum over blocks of the leading run of hits."""

    def packed(self) -> Tensor:
        """One flat tensor, so that a reduction over ranks is one collective."""
        return torch.cat([value.detach().float().flatten() for value in vars(self).values()])

    def ratios(self, prefix: str = "") -> dict[str, float]:
        """Readable quotients, for a log.

        `streak` is the mean leading run of hits plus one, the target's own token: 1 means that no
        first draft was right.
        """
        slots = max(float(self.slots_K.sum()), 1.0)
        hits = [float(count) / slots for count in self.top_hits_3K.sum(1)]
        streak = 1.0 + float(self.run) / max(float(self.blocks), 1.0)
        names = ("accuracy", *(f"top{k}" for k in TOP[1:]), "streak")
        return {prefix + name: value for name, value in zip(names, (*hits, streak), strict=True)}

    @staticmethod
    def packed_size(block_size: int) -> int:
        return 4 + 6 * block_size

    @classmethod
    def unpacked(cls, flat: Tensor, block_size: int) -> "BlockLoss":
        k = block_size
        loss, weight, slots, top, reached, reached_hits, blocks, run = flat.split(
            [1, 1, k, 3 * k, k, k, 1, 1]
        )
        return cls(
            loss[0], weight[0], slots, top.view(3, k), reached, reached_hits, blocks[0], run[0]
        )


def hit_sums(ranks_AK: Tensor, supervised_AK: Tensor) -> dict[str, Tensor]:
    """The counting part of a BlockLoss, from the rank of each slot's label."""
    hits = (ranks_AK == 0) & supervised_AK
    # Slot 0 is the anchor itself: it is always right and is not counted.
    alive = F.pad(hits[:, 1:-1], (2, 0), value=True).int().cumprod(1).bool() & supervised_AK
    top = torch.stack([((ranks_AK < k) & supervised_AK).sum(0) for k in TOP])
    return {
        "slots_K": supervised_AK.sum(0),
        "top_hits_3K": top,
        "reached_K": alive.sum(0),
        "reached_hits_K": (alive & hits).sum(0),
        "blocks": supervised_AK.any(1).sum(),
        "run": (alive & hits).sum(),
    }


def block_loss(
    hidden_QD: Tensor,
    head: Head,
    blocks: Blocks,
    rows_R: Tensor,
    objective: Objective,
    *,
    teacher_RD: Tensor | None = None,
) -> BlockLoss:
    """Loss of one row's blocks. `rows_R`: the flat places (a * K + j) of the slots that count.

    They come from where the blocks were made: to find them on a GPU would mean to wait for it.
    """
    labels_R = blocks.labels_AK.flatten()[rows_R]
    losses = head.losses(hidden_QD, rows_R, labels_R, teacher_RD)
    supervised_AK = blocks.weights_AK > 0
    if objective.dpace_alpha is None:
        weights_AK, total = blocks.weights_AK, blocks.weights_AK.sum()
    else:
        probability_AK = torch.ones_like(blocks.weights_AK)
        probability_AK.view(-1)[rows_R] = torch.exp(-losses.label_loss_R)
        weights_AK = dpace_weights(probability_AK, supervised_AK, objective.dpace_alpha)
        total = supervised_AK.sum()
    # Slots that do not count rank last; no label can.
    ranks_AK = torch.full_like(blocks.labels_AK, len(head.weight_VD))
    ranks_AK.view(-1)[rows_R] = losses.rank_R
    return BlockLoss(
        loss=(losses.loss_R * weights_AK.flatten()[rows_R]).sum(),
        weight=total.float(),
        **hit_sums(ranks_AK, supervised_AK),
    )


def dpace_weights(probability_AK: Tensor, supervised_AK: Tensor, alpha: float) -> Tensor:
    """float32 [A, K]: what each slot adds to the expected length of a draft (arXiv:2605.18810).

    With q' = (1 - alpha) q + alpha, and 1 where nothing is supervised, C_j is the product of q' up
    to slot j; slot j weighs the sum of C over the supervised slots from j on.
    """
    smooth_AK = torch.where(supervised_AK, (1 - alpha) * probability_AK + alpha, 1.0)
    reach_AK = smooth_AK.cumprod(1) * supervised_AK
    return reach_AK.flip(1).cumsum(1).flip(1) * supervised_AK
