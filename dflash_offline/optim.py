"""AdamW, or Muon for the matrices and AdamW for the norms; learning rates over time.

Both keep fp32 masters, because the parameters are fp32 themselves.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dflash_offline.config import TrainConfig

# AdamW: the paper states no betas; these are SpecForge's and the field's usual ones.
_BETAS = (0.9, 0.95)


def make_optimizers(drafter: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers that together update every parameter once.

    Each group remembers its peak rate as `peak_lr`, which `set_rate` scales.
    """
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    vectors = [p for p in drafter.parameters() if p.ndim != 2]
    if config.optimizer == "adamw":
        optimizers: list[torch.optim.Optimizer] = [_adamw([*matrices, *vectors], config)]
    else:
        muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
        optimizers = [muon, _adamw(vectors, config)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _adamw(parameters: Iterable[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=_BETAS, weight_decay=config.weight_decay, fused=True
    )


def rate(step: int, steps: int, warmup: float) -> float:
    """Share of the peak rate at `step`: linear warm-up over a share of the steps, then cosine."""
    warm_steps = max(1, round(warmup * steps))
    if step < warm_steps:
        return (step + 1) / warm_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warm_steps) / max(1, steps - warm_steps)))


def set_rate(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
