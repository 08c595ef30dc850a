"""Process groups of several sizes, one after the other, on the same few processes."""

import multiprocessing

import torch
import torch.distributed as dist

from dflash_offline.world import World


def in_worlds(work, sizes, *given):
    """`work(world, *given)` on every rank of a world of each size, in this order of sizes.

    `given` starts with a folder. `work` is a function of a module's top.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, work, sizes, *given))
        for rank in range(max(sizes))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * max(sizes)


def _rank(rank, work, sizes, folder, *given):
    torch.set_num_threads(1)  # as in the tests' own process
    for turn, size in enumerate(sizes):
        if rank < size:
            store = dist.FileStore(str(folder / f"store-{turn}"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            work(World(rank, size, torch.device("cpu")), folder, *given)
            dist.destroy_process_group()
