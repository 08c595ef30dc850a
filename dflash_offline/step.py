"""One row to its loss, and one optimizer step over the rows of all ranks.

Letters: S row positions, M = taps * hidden, A anchor slots, K block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dflash_offline.batch import Batch
from dflash_offline.checkpoint import TrainState
from dflash_offline.drafter import Drafter
from dflash_offline.loss import BlockLoss, block_loss
from dflash_offline.mask import Mask, attention_mask, block_mask_mod
from dflash_offline.optim import set_rate
from dflash_offline.spec import DrafterSpec
from dflash_offline.target import FrozenEnds
from dflash_offline.world import World


def layer_masks(batch: Batch, spec: DrafterSpec) -> dict[str, Mask]:
    """The attention mask of each kind of layer that the drafter has."""
    blocks = batch.blocks
    queries = blocks.input_ids_AK.numel()
    keys = len(batch.document_ids_S) + queries
    masks = {}
    for kind in dict.fromkeys(spec.layer_types):
        sees = block_mask_mod(
            blocks.anchors_A,
            blocks.valid_A,
            batch.document_ids_S,
            block_size=spec.block_size,
            window=spec.sliding_window if kind == "sliding_attention" else None,
        )
        masks[kind] = attention_mask(sees, queries, keys, batch.taps_SM.device)
    return masks


def row_loss(drafter: Drafter, ends: FrozenEnds, batch: Batch, scale: float) -> BlockLoss:
    """Forward pass and loss of one row; `scale` is one over the global sum of weights."""
    blocks = batch.blocks
    hidden = drafter(
        batch.taps_SM[None],
        F.embedding(blocks.input_ids_AK.flatten(), ends.embedding)[None],
        context_positions_BS=batch.position_ids_S[None],
        block_positions_BQ=blocks.position_ids_AK.flatten()[None],
        masks=layer_masks(batch, drafter.spec),
    )
    return block_loss(hidden[0], ends.lm_head, blocks, scale)


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step saw, summed over all ranks."""

    sums: BlockLoss
    """`sums.loss` is the mean loss: it was divided by the global weight."""
    gradient_norm: float
    skipped: str
    """Why the step changed nothing; empty if it did its work."""


def train_step(
    state: TrainState,
    batches: Sequence[Batch],
    *,
    ends: FrozenEnds,
    world: World,
    rate: float,
    clip: float,
) -> StepResult:
    """One step: the sum of the gradients of all rows of all ranks, over one global weight.

    The weight is known before the first forward pass, so no rank's share counts too much. A step
    without weight or with a gradient that is not finite leaves parameters and optimizers alone.
    """
    own_weight = torch.tensor(sum(b.weight for b in batches), dtype=torch.float64)
    weight = float(world.sum_(own_weight.to(world.device)))
    packed = []
    for batch in batches:
        sums = row_loss(state.drafter, ends, batch, 1.0 / max(weight, 1e-6))
        sums.loss.backward()
        packed.append(sums.packed())
    world.sum_gradients(state.drafter.parameters())
    norm = torch.nn.utils.clip_grad_norm_(state.drafter.parameters(), clip)

    skipped = "no token to learn" if weight == 0 else ""
    if not torch.isfinite(norm):
        skipped = "gradient not finite"
    set_rate(state.optimizers, rate)
    for optimizer in state.optimizers:
        if not skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1
    total = world.sum_(torch.stack(packed).sum(0))
    return StepResult(
        BlockLoss.unpacked(total, state.drafter.spec.block_size), float(norm), skipped
    )
