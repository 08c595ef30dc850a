"""One row to its loss, and one optimizer step over the rows of all ranks.

Gradients are sums over slots. What they are divided by, the weight of all rows of all ranks, is
known when the last row has been read, so the division comes last: one factor, the clipping in it.

Letters: S row positions, R slots that count, D hidden, A anchor slots, K block size.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dflash_offline.anchors import Coverage
from dflash_offline.batch import Batch
from dflash_offline.checkpoint import TrainState
from dflash_offline.head import Head
from dflash_offline.loss import BlockLoss, Objective, block_loss
from dflash_offline.mask import Mask, attention_mask, block_mask_mod
from dflash_offline.spec import DrafterSpec
from dflash_offline.world import World


@dataclass(frozen=True, eq=False)
class Task:
    """What a drafter is trained for: the target's ends and the objective."""

    spec: DrafterSpec
    embedding_VD: Tensor
    head: Head
    objective: Objective
    final_norm: nn.Module | None = None
    """The target's, where hidden states to distil from were stored before it."""


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


@dataclass(frozen=True)
class Noise:
    """Uniform noise on the context features, the same whichever rank takes a row."""

    share: float = 0.0
    """Its largest size, as a share of the root mean square of each tap; 0: none."""
    seed: int = 0
    """Of the step's first row; that of its row n is n more."""


NO_NOISE = Noise()


def row_loss(
    drafter: nn.Module, task: Task, batch: Batch, *, noise: Noise = NO_NOISE, row: int = 0
) -> BlockLoss:
    """Forward pass and loss of one row; `drafter` is a Drafter or its replica among ranks.

    `row` is its place in the step, by which it is shaken.
    """
    blocks = batch.blocks
    hidden_1QD = drafter(
        shaken(batch.taps_SM, task.spec, noise, row)[None],
        F.embedding(blocks.input_ids_AK.flatten(), task.embedding_VD)[None],
        context_positions_BS=batch.position_ids_S[None],
        block_positions_BQ=blocks.position_ids_AK.flatten()[None],
        masks=layer_masks(batch, task.spec),
    )
    teacher_RD = teacher_states(task, batch) if task.objective.distils else None
    return block_loss(
        hidden_1QD[0], task.head, blocks, batch.rows, task.objective, teacher_RD=teacher_RD
    )


def shaken(taps_SM: Tensor, spec: DrafterSpec, noise: Noise, row: int) -> Tensor:
    """The features with the noise of that row of the step."""
    if not noise.share:
        return taps_SM
    taps_SLD = taps_SM.unflatten(1, (len(spec.target_layer_ids), -1)).float()
    size_SL1 = taps_SLD.square().mean(-1, keepdim=True).sqrt()
    generator = torch.Generator(taps_SM.device).manual_seed(noise.seed + row)
    shake_SLD = torch.rand(taps_SLD.shape, generator=generator, device=taps_SM.device)
    shake_SLD = (2 * shake_SLD - 1) * noise.share * size_SL1
    return (taps_SLD + shake_SLD).flatten(1).to(taps_SM.dtype)


def teacher_states(task: Task, batch: Batch) -> Tensor:
    """[R, D]: what the target's head makes the distribution of each slot from.

    The token at a position is predicted by the state one position before it.
    """
    assert batch.final_SD is not None, "the feed reads it where the objective distils"
    block_size = batch.blocks.labels_AK.shape[1]
    anchors_R = batch.blocks.anchors_A[batch.rows // block_size]
    states_RD = batch.final_SD[anchors_R + batch.rows % block_size - 1]
    states_RD = states_RD.to(task.head.weight_VD.dtype)
    return task.final_norm(states_RD) if task.final_norm else states_RD


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step saw, summed over all ranks; on the device until someone asks."""

    sums: BlockLoss
    gradient_norm: Tensor
    """[]: of the mean loss, before clipping."""
    coverage: Coverage
    """Of this rank's rows."""
    skipped: str
    """Why the step changed nothing; empty if it did its work."""

    @property
    def loss(self) -> float:
        """Mean over all that counts."""
        return float(self.sums.loss / self.sums.weight.clamp(min=1e-6))


def train_step(
    state: TrainState,
    replica: nn.Module,
    batches: Iterable[Batch],
    *,
    rows: int,
    task: Task,
    world: World,
    rate: float,
    clip: float,
    noise: Noise = NO_NOISE,
) -> StepResult:
    """One step: the sum of the gradients of all rows of all ranks, over one global weight.

    No rank's share counts too much. A step without weight or with a gradient that is not finite
    leaves parameters and optimizers alone. Batches, `rows` of them, are taken one at a time.
    """
    sums, coverage = accumulate(replica, batches, rows=rows, task=task, world=world, noise=noise)
    gradients = [p.grad for p in state.drafter.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) / sums.weight.clamp(min=1e-6)
    skipped = why_skipped(sums.weight, norm)
    if not skipped:
        factor = (clip / norm.clamp(min=1e-12)).clamp(max=1.0) / sums.weight
        torch._foreach_mul_(gradients, factor)
        state.optimizers.set_rate(rate)
        state.optimizers.step()
    state.optimizers.zero_grad()
    state.step += 1
    return StepResult(sums, norm, coverage, skipped)


def accumulate(
    replica: nn.Module,
    batches: Iterable[Batch],
    *,
    rows: int,
    task: Task,
    world: World,
    noise: Noise,
) -> tuple[BlockLoss, Coverage]:
    """Backward passes of this rank's rows; gradients of all ranks are summed during the last."""
    total = torch.zeros(BlockLoss.packed_size(task.spec.block_size), device=world.device)
    coverage = Coverage(0, 0, 0, 0)
    for place, batch in enumerate(batches):
        row, is_last = world.rank + place * world.size, place == rows - 1
        with nullcontext() if is_last else unsynchronised(replica):
            sums = row_loss(replica, task, batch, noise=noise, row=row)
            sums.loss.backward()
        total += sums.packed()
        coverage += batch.coverage
    return BlockLoss.unpacked(world.sum_(total), task.spec.block_size), coverage


def unsynchronised(replica: nn.Module) -> AbstractContextManager[None]:
    """Gradients that are made meanwhile stay here until the next ones are summed."""
    if isinstance(replica, DistributedDataParallel):
        return replica.no_sync()
    return nullcontext()


def why_skipped(weight: Tensor, norm: Tensor) -> str:
    """The one place of a step where the host waits for the device.

    It costs 0.1 ms: the optimizer's long kernels follow, behind which the next row is launched.
    """
    is_empty, is_finite = torch.stack([weight == 0, norm.isfinite()]).tolist()
    if is_empty:
        return "no token to learn"
    return "" if is_finite else "gradient not finite"
