"""Weighted cross-entropy over blocks against the frozen head, and what the blocks got right.

The head is frozen, so its gradient is never needed and the gradient of a row's hidden state can be
made in the forward pass, from the logits at hand: no logits are kept and none are computed twice.
Rows go through in chunks, so peak memory does not depend on the number of rows; rows of zero
weight and the anchors' own slots never reach the head.

All results are sums; ranks and micro-batches just add, and one global count divides.
Letters: R rows (slots), D hidden, V vocabulary, A anchor slots, K block size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_offline.anchors import Blocks

TOP = (1, 4, 8)
# Logits held at once, by kind of device: chunks this size keep a GPU busy; on a CPU larger ones
# would be fresh memory every time, and touching it first costs more than the arithmetic.
_CHUNK_LOGITS = {"cuda": 1 << 29, "cpu": 1 << 22}


class _HeadCrossEntropy(torch.autograd.Function):
    """sum_r weight_r * CE(head @ hidden_r, label_r), and the rank of each label in its logits."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_RD: Tensor,
        head_VD: Tensor,
        labels_R: Tensor,
        weights_R: Tensor,
    ) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        ranks = torch.empty_like(labels_R)
        gradient = torch.empty_like(hidden_RD)
        rows = max(1, _CHUNK_LOGITS[hidden_RD.device.type] // head_VD.shape[0])
        for start in range(0, len(labels_R), rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden_RD[part], head_VD).float()
            labels, weights = labels_R[part, None], weights_R[part, None]
            own = logits.gather(1, labels)
            ranks[part] = label_ranks(logits, labels, own)
            log_probs = logits.log_softmax(1)
            loss -= (log_probs.gather(1, labels) * weights).sum()
            d_logits = log_probs.exp_().mul_(weights)
            d_logits.scatter_add_(1, labels, -weights)
            gradient[part] = d_logits.to(head_VD.dtype) @ head_VD
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ranks)
        return loss, ranks

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, d_loss: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * d_loss.to(gradient.dtype), None, None, None


def label_ranks(logits_RV: Tensor, labels_R1: Tensor, own_R1: Tensor) -> Tensor:
    """int64 [R]: how many tokens the drafter prefers to the label; 0 = the label is its argmax.

    Ties go to the lower id, as argmax does. One pass gives top-1, top-4 and top-8 hits at once.
    A logit that is NaN counts as preferred, so a broken drafter is never right.
    """
    ids = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    ahead = ~(logits_RV <= own_R1) | ((logits_RV == own_R1) & (ids < labels_R1))
    return ahead.sum(1)


@dataclass(frozen=True, eq=False)
class BlockLoss:
    """Sums over blocks, on the device; add them over ranks and micro-batches."""

    loss: Tensor
    """[]: sum of weight * cross-entropy, times the `scale` that block_loss was given."""
    weight: Tensor
    """[]: sum of weights."""
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


def block_loss(hidden_QD: Tensor, head_VD: Tensor, blocks: Blocks, scale: float) -> BlockLoss:
    """Loss of one row's blocks; `loss` is multiplied by `scale` and carries the gradient.

    `scale` is one over the global sum of weights, so that the gradients of ranks and
    micro-batches add up to that of one big batch.
    """
    weights = blocks.weights_AK.flatten()
    # A frozen head makes rows of zero weight pure waste; the anchors' slots alone are 1 in K.
    rows = weights.nonzero().flatten()
    loss, ranks = _HeadCrossEntropy.apply(
        hidden_QD[rows], head_VD, blocks.labels_AK.flatten()[rows], weights[rows] * scale
    )
    ranks_AK = torch.full_like(blocks.labels_AK, head_VD.shape[0])
    ranks_AK.view(-1)[rows] = ranks
    sums = hit_sums(ranks_AK, blocks.weights_AK > 0)
    return BlockLoss(loss=loss, weight=weights.sum(), **sums)
