"""AdamW, or Muon for the matrices and AdamW for the vectors; learning rates over time.

Both keep fp32 masters, because the parameters are fp32 themselves.

Of several ranks, each may own some of the matrices: it alone holds their optimizer state and
updates them, and then sends them to the others. Muon is always shared out like that: its
Newton-Schulz costs 197 TFLOP a step for the 1.73 B parameters of a drafter for Qwen3.6-27B, more
than a row forward and backward. AdamW is if the user wishes, for memory: its state takes 8 bytes a
parameter. The price is a broadcast of 4 bytes a parameter and step. Vectors are small, so every
rank updates all of them, from gradients that are the same on all ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_offline.config import TrainConfig
from dflash_offline.tensor_file import TensorFacts
from dflash_offline.world import World

# AdamW: the paper states no betas; these are SpecForge's and the field's usual ones.
_BETAS = (0.9, 0.95)
_ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Part:
    """Parameters that one optimizer updates."""

    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    """None where another rank owns them."""
    owner: int | None = None
    """The rank that updates them for all; None if each does for itself."""

    def own(self) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
        if self.optimizer is not None:
            for name, parameter in self.parameters.items():
                yield name, parameter, self.optimizer


@dataclass(frozen=True)
class StateEntry(TensorFacts):
    """A tensor of the optimizers' state, and the rank that has it.

    Its name is PARAMETER/KEY, where KEY is torch's: exp_avg, exp_avg_sq, step; momentum_buffer.
    """

    owner: int


class Optimizers:
    """What updates every parameter once, on one rank or on all of them together.

    All ranks call everything here, at the same time. To know what Newton-Schulz takes, time
    `step` (on a GPU between two synchronisations; the sending of what is updated is in it).
    """

    def __init__(self, parts: list[Part], world: World) -> None:
        self.world, self._parts = world, parts

    @property
    def own(self) -> list[torch.optim.Optimizer]:
        """Torch's own, of the parameters that this rank updates."""
        return [part.optimizer for part in self._parts if part.optimizer is not None]

    def set_rate(self, share: float) -> None:
        """`share` of each group's peak learning rate."""
        set_rate(self.own, share)

    def step(self) -> None:
        """Update all parameters from their gradients, which must be the same on all ranks.

        What is updated travels while the next matrix is under work.
        """
        travelling = []
        for part in self._parts:
            if part.optimizer is not None:
                part.optimizer.step()
            if part.owner is not None:
                for parameter in part.parameters.values():
                    sent = dist.broadcast(parameter.detach(), part.owner, async_op=True)
                    travelling.append(sent)
        for sent in travelling:
            sent.wait()

    def zero_grad(self) -> None:
        """Of all parameters, those of other ranks too."""
        for part in self._parts:
            for parameter in part.parameters.values():
                parameter.grad = None

    def entries(self) -> list[StateEntry]:
        """The whole state of all ranks, in one order; none before the first step."""
        first = self.world.is_first
        mine = [
            StateEntry(f"{name}/{key}", value.dtype, tuple(value.shape), self.world.rank)
            for part in self._parts
            for name, parameter, optimizer in part.own()
            for key, value in optimizer.state[parameter].items()
            if first or part.owner is not None
        ]
        if self.world.size == 1:
            return mine
        everyones: list[list[StateEntry]] = [[] for _ in range(self.world.size)]
        dist.all_gather_object(everyones, mine)
        return [entry for entries in everyones for entry in entries]

    def fetch(self, entry: StateEntry) -> Tensor | None:
        """The tensor on rank 0, which holds no more than this one of other ranks; else None."""
        if entry.owner != self.world.rank and not self.world.is_first:
            return None
        if entry.owner == 0:
            return self._state(entry.name)
        if not self.world.is_first:
            dist.send(self._state(entry.name), dst=0)
            return None
        received = torch.empty(entry.shape, dtype=entry.dtype, device=self.world.device)
        dist.recv(received, src=entry.owner)
        return received

    def _state(self, entry_name: str) -> Tensor:
        wanted, _, key = entry_name.rpartition("/")
        for part in self._parts:
            for name, parameter, optimizer in part.own():
                if name == wanted:
                    tensor: Tensor = optimizer.state[parameter][key]
                    return tensor
        raise KeyError(entry_name)

    def load(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        """Take over a state that any number of ranks wrote: this rank reads what is its own.

        `names` are those of all its entries; `read` may give views of a mapped file. ValueError
        if they are of other parameters.
        """
        keys: dict[str, list[str]] = {}
        for entry_name in names:
            name, _, key = entry_name.rpartition("/")
            keys.setdefault(name, []).append(key)
        expected = {name for part in self._parts for name in part.parameters}
        if strange := keys and keys.keys() ^ expected:
            raise ValueError(f"the optimizer state does not fit the drafter at {min(strange)}")
        for part in self._parts:
            if part.optimizer is not None and keys:
                states = {
                    number: {
                        # Copied on a CPU too, where it would stay tied to the file.
                        key: read(f"{name}/{key}").to(parameter.device, copy=True)
                        for key in keys[name]
                    }
                    for number, (name, parameter) in enumerate(part.parameters.items())
                }
                groups = part.optimizer.state_dict()["param_groups"]
                part.optimizer.load_state_dict({"state": states, "param_groups": groups})


def make_optimizers(drafter: nn.Module, config: TrainConfig, world: World = _ALONE) -> Optimizers:
    """The optimizers of this rank. Each group remembers its peak rate as `peak_lr`."""
    matrices = {name: p for name, p in drafter.named_parameters() if p.ndim == 2}
    vectors = {name: p for name, p in drafter.named_parameters() if p.ndim != 2}
    if world.size > 1 and (config.optimizer == "muon" or config.shard_optimizer):
        parts = _dealt(matrices, config, world)
    else:
        parts = [Part(matrices, _for_matrices(matrices.values(), config))]
    return Optimizers([*parts, Part(vectors, _adamw(vectors.values(), config))], world)


def _dealt(matrices: Mapping[str, nn.Parameter], config: TrainConfig, world: World) -> list[Part]:
    """A part for each matrix, in the order in which they are updated and sent."""
    is_muon = config.optimizer == "muon"
    work = {name: newton_schulz_flops(p) if is_muon else p.numel() for name, p in matrices.items()}
    parts = []
    for name, owner in in_turns(deal(work, world.size), world.size):
        is_own = owner == world.rank
        optimizer = _for_matrices([matrices[name]], config) if is_own else None
        parts.append(Part({name: matrices[name]}, optimizer, owner))
    return parts


def deal(work: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Who does what: the most work first, each to the rank that has the least so far."""
    loads = [0] * ranks
    owners = {}
    for name in sorted(work, key=lambda name: -work[name]):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += work[name]
    return owners


def in_turns(owners: Mapping[str, int], ranks: int) -> list[tuple[str, int]]:
    """One of each rank in turn, so that no rank's first matrix waits for another's last."""
    held = [[(name, o) for name, o in owners.items() if o == rank] for rank in range(ranks)]
    return [item for turn in zip_longest(*held) for item in turn if item is not None]


def newton_schulz_flops(matrix: Tensor) -> int:
    """Of one of its five iterations: X X^T, its square, and that times X."""
    short, long = sorted(matrix.shape)
    return 2 * short * short * (2 * long + short)


def _for_matrices(
    parameters: Iterable[nn.Parameter], config: TrainConfig
) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return _adamw(parameters, config)
    return _with_peak(
        torch.optim.Muon(parameters, lr=config.muon_lr, weight_decay=config.weight_decay)
    )


def _adamw(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    return _with_peak(
        torch.optim.AdamW(
            parameters, lr=config.lr, betas=_BETAS, weight_decay=config.weight_decay, fused=True
        )
    )


def _with_peak(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def rate(
    step: int,
    steps: int,
    warmup: float,
    schedule: str = "cosine",
    decay: float = 0.2,
    floor: float = 0.0,
) -> float:
    """Share of the peak rate at `step`: linear warm-up over a share of the steps, then the fall.

    cosine: one cosine from the warm-up to the end. wsd: constant, and a cosine over the last
    `decay` of the steps. Both to `floor`, which the step after the last would have.
    """
    warm_steps = max(1, round(warmup * steps))
    if step < warm_steps:
        return (step + 1) / warm_steps
    falling_steps = steps - warm_steps
    if schedule == "wsd":
        falling_steps = min(falling_steps, round(decay * steps))
    fallen = max(0, step - (steps - falling_steps)) / max(1, falling_steps)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * fallen))


def noise_share(step: int, steps: int, until: float) -> float:
    """Share of the largest feature noise: a line from 1 to 0 over `until` of the steps."""
    return max(0.0, 1 - step / (until * steps)) if until else 0.0


def set_rate(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
