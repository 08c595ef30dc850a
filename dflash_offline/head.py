"""The frozen head: rows of hidden states -> losses against labels or a teacher, in one pass.

The head is frozen, so its gradient is never needed, and that of a hidden state can be made in the
forward pass from the logits at hand: no logits are kept and none are computed twice. Rows go
through in chunks of a fixed size, so peak memory does not depend on the vocabulary or the number
of rows, and one compiled pass serves all of them.

What comes out are losses by row, each with the gradient of its own: whatever weighs them, even by
what the drafter made of the whole block, weighs the gradients too, in ordinary autograd. The price
is one more rounding of the gradient, to the precision of the head.

Letters: Q block tokens, R rows that count, C rows of a chunk, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_offline.fp8 import multiply, quantise_rows

# Logits held at once, by kind of device: chunks this size keep a GPU busy; on a CPU larger ones
# would be fresh memory every time, and touching it first costs more than the arithmetic.
_CHUNK_LOGITS = {"cuda": 1 << 29, "cpu": 1 << 22}

FourTensors = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class RowLosses:
    """Of each row; only `loss_R` carries a gradient."""

    loss_R: Tensor
    """Cross-entropy with the label, or with the teacher's distribution less its entropy (KL)."""
    label_loss_R: Tensor
    """Cross-entropy with the label in either case."""
    rank_R: Tensor
    """int64: how many tokens the drafter prefers to the label."""


class Head:
    """The target's lm_head, ready to be asked for losses."""

    def __init__(self, weight_VD: Tensor, *, compiled: bool = False, fp8: bool = False) -> None:
        """`compiled` fuses the passes over a chunk's logits; for a GPU.

        With `fp8` logits are fp8 products, of codes that are made here once; gradients are not,
        since most probabilities lie below what e4m3 can tell from zero.
        """
        self.weight_VD = weight_VD
        self._codes = quantise_rows(weight_VD) if fp8 else None
        self._pass: Callable[..., FourTensors] = (
            torch.compile(_chunk, dynamic=False) if compiled else _chunk
        )
        self._chunk_rows = max(1, _CHUNK_LOGITS[weight_VD.device.type] // len(weight_VD))
        self._is_fixed = compiled

    def losses(
        self, hidden_QD: Tensor, rows_R: Tensor, labels_R: Tensor, teacher_RD: Tensor | None = None
    ) -> RowLosses:
        """Of `hidden_QD[rows_R]`. `teacher_RD`: the target's hidden states before the head."""
        return RowLosses(*_HeadLosses.apply(hidden_QD, rows_R, labels_R, teacher_RD, self))

    def run(self, hidden_RD: Tensor, labels_R: Tensor, teacher_RD: Tensor | None) -> FourTensors:
        """loss, label loss, rank [R] and the gradient [R, D], chunk after chunk."""
        starts = range(0, max(len(labels_R), 1), self._chunk_rows)  # one at the least, of no rows
        slices = [slice(start, start + self._chunk_rows) for start in starts]
        parts = [
            self._run_chunk(
                hidden_RD[own], labels_R[own], None if teacher_RD is None else teacher_RD[own]
            )
            for own in slices
        ]
        loss_R, label_loss_R, rank_R, gradient_RD = (
            torch.cat(part) for part in zip(*parts, strict=True)
        )
        return loss_R, label_loss_R, rank_R, gradient_RD

    def _run_chunk(
        self, hidden_CD: Tensor, labels_C: Tensor, teacher_CD: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows = len(labels_C)
        lacking = self._chunk_rows - rows if self._is_fixed else 0
        if lacking:  # the last chunk runs at full size, or it would be compiled for its own
            hidden_CD = F.pad(hidden_CD, (0, 0, 0, lacking))
            labels_C = F.pad(labels_C, (0, lacking))
            teacher_CD = None if teacher_CD is None else F.pad(teacher_CD, (0, 0, 0, lacking))
        parts = self._pass(hidden_CD, self.weight_VD, self._codes, labels_C, teacher_CD)
        return tuple(part[:rows] for part in parts)


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_QD: Tensor,
        rows_R: Tensor,
        labels_R: Tensor,
        teacher_RD: Tensor | None,
        head: Head,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss_R, label_loss_R, rank_R, gradient_RD = head.run(
            hidden_QD[rows_R], labels_R, teacher_RD
        )
        ctx.save_for_backward(gradient_RD, rows_R)
        ctx.tokens = len(hidden_QD)  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(label_loss_R, rank_R)
        return loss_R, label_loss_R, rank_R

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, d_loss_R: Tensor, *_: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        gradient_RD, rows_R = ctx.saved_tensors  # type: ignore[attr-defined]
        d_hidden_QD = gradient_RD.new_zeros(ctx.tokens, gradient_RD.shape[1])  # type: ignore[attr-defined]
        # Each row occurs once: nothing is added up, in whatever order.
        d_hidden_QD[rows_R] = (gradient_RD * d_loss_R[:, None]).to(gradient_RD.dtype)
        return d_hidden_QD, None, None, None, None


def _chunk(
    hidden_CD: Tensor,
    head_VD: Tensor,
    codes: tuple[Tensor, Tensor] | None,
    labels_C: Tensor,
    teacher_CD: Tensor | None,
) -> FourTensors:
    """Losses, ranks and gradients of a chunk; everything over the vocabulary in float32."""
    logits_CV = _logits(hidden_CD, head_VD, codes)
    own_C1 = logits_CV.gather(1, labels_C[:, None])
    rank_C = label_ranks(logits_CV, labels_C[:, None], own_C1)
    log_probs_CV = logits_CV.log_softmax(1)
    label_loss_C = -log_probs_CV.gather(1, labels_C[:, None])[:, 0]
    if teacher_CD is None:
        loss_C = label_loss_C
        d_logits_CV = _less_one_at(labels_C, log_probs_CV.exp())
    else:
        wanted_CV = _logits(teacher_CD, head_VD, codes).log_softmax(1)
        loss_C = (wanted_CV.exp() * (wanted_CV - log_probs_CV)).sum(1)
        d_logits_CV = log_probs_CV.exp() - wanted_CV.exp()
    return loss_C, label_loss_C, rank_C, d_logits_CV.to(head_VD.dtype) @ head_VD


def _logits(hidden_CD: Tensor, head_VD: Tensor, codes: tuple[Tensor, Tensor] | None) -> Tensor:
    if codes is None:
        return F.linear(hidden_CD, head_VD).float()
    return multiply(quantise_rows(hidden_CD), codes, hidden_CD.dtype).float()


def _less_one_at(labels_C: Tensor, probs_CV: Tensor) -> Tensor:
    """Probabilities less the label's one; uncompiled that is one write a row."""
    if torch.compiler.is_compiling():
        ids_V = torch.arange(probs_CV.shape[1], device=probs_CV.device)
        return torch.where(ids_V == labels_C[:, None], probs_CV - 1, probs_CV)
    return probs_CV.scatter_add_(1, labels_C[:, None], probs_CV.new_full((len(labels_C), 1), -1))


def label_ranks(logits_RV: Tensor, labels_R1: Tensor, own_R1: Tensor) -> Tensor:
    """int64 [R]: how many tokens the drafter prefers to the label; 0 = the label is its argmax.

    Ties go to the lower id, as argmax does. One pass gives top-1, top-4 and top-8 hits at once.
    A logit that is NaN counts as preferred, so a broken drafter is never right.
    """
    ids = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    ahead = ~(logits_RV <= own_R1) | ((logits_RV == own_R1) & (ids < labels_R1))
    return ahead.sum(1)
