"""Who this process is among the ranks, and sums over them.

A world of one needs no launcher. Under torchrun, or a launcher that sets the same variables (RANK,
WORLD_SIZE, LOCAL_RANK), they name the rank; collectives run over NCCL on GPUs and gloo on CPUs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Rank facts. `device` is where this rank computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks in place; a world of one leaves it as it is."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, own: bool) -> bool:
        """Whether it is so on any rank."""
        if self.size == 1:
            return own
        return bool(self.sum_(torch.tensor(float(own), device=self.device)) > 0)

    def replicate(self, module: nn.Module) -> nn.Module:
        """The module with its gradients summed over all ranks while they are made.

        In buckets, in their own precision (fp32). A world of one leaves the module as it is.
        """
        if self.size == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        replica = DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
        replica.register_comm_hook(None, _sum_bucket)
        return replica

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, on every rank; a ValueError or OSError likewise."""
        if self.size == 1:
            return make()
        outcome: list[Any] = [None]
        if self.is_first:
            try:
                outcome = [make()]
            except (ValueError, OSError) as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def _sum_bucket(
    _: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Where DDP by itself would take the mean over ranks, whatever each of them has seen."""
    summing = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summing.then(lambda done: done.value()[0])


def refuse_unset_rank() -> None:
    """ValueError for a task of srun that does not know its rank: each would do all of the work."""
    if "RANK" not in os.environ and os.environ.get("SLURM_PROCID", "0") != "0":
        raise ValueError(
            f"srun started this as task {os.environ['SLURM_PROCID']}, but RANK is not set; start "
            "one torchrun per node, or set RANK, WORLD_SIZE and LOCAL_RANK"
        )


def processes_of_host(gpus: int | None, device: str) -> int:
    """How many a command has to start here: one, itself, where a launcher has set RANK.

    ValueError if --gpus asks for more than there are.
    """
    if "RANK" in os.environ:
        return 1
    refuse_unset_rank()
    available = torch.cuda.device_count() if device != "cpu" else 0
    if available and gpus and gpus > available:
        raise ValueError(f"--gpus is {gpus}, but torch sees {available}")
    return gpus or max(available, 1)


def current_world(device: str) -> World:
    """Rank facts from the environment. Starts no process group: extraction needs none.

    Raises ValueError if `device` is cuda and there is none.
    """
    refuse_unset_rank()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if not 0 <= rank < size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE {size}; ranks are 0 to WORLD_SIZE - 1")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu or auto")
    if device == "cpu" or not has_cuda:
        return World(rank, size, torch.device("cpu"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: torch sees "
            f"{torch.cuda.device_count()}; start fewer processes on this host"
        )
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return World(rank, size, chosen)


def join(world: World) -> None:
    """Start the process group of a world of several ranks."""
    if world.size > 1 and not dist.is_initialized():
        if world.device.type == "cuda":
            dist.init_process_group("nccl", device_id=world.device)
        else:
            dist.init_process_group("gloo")


def leave(world: World) -> None:
    """End the process group, so that the last rank's exit does not look like a failure."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
