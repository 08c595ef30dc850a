"""Rank facts come from the environment, and a launcher that is misunderstood is refused."""

import multiprocessing
import os
import socket

import pytest
import torch

from dflash_offline.world import current_world, join, leave


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_without_a_launcher():
    world = current_world("cpu")
    assert (world.rank, world.size, world.is_first) == (0, 1, True)
    assert world.device == torch.device("cpu")
    assert world.sum_(torch.tensor([2.0])).tolist() == [2.0]


def test_ranks_of_torchrun(monkeypatch):
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    world = current_world("cpu")
    assert (world.rank, world.size, world.is_first) == (3, 4, False)


def test_tasks_of_srun_without_ranks_do_not_all_take_themselves_for_the_first(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "2")
    with pytest.raises(ValueError, match="srun started this as task 2"):
        current_world("cpu")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert current_world("cpu").rank == 2


@pytest.mark.parametrize(("rank", "size"), [("5", "2"), ("-1", "2"), ("1", "1")])
def test_a_rank_outside_the_world_is_refused(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=f"RANK is {rank}"):
        current_world("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="--device cuda"):
        current_world("cuda")
    assert current_world("auto").device.type == "cpu"


def ask_the_first(rank, port, answers):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(port)
    world = current_world("cpu")
    join(world)

    def fail():
        raise FileNotFoundError(f"rank {rank} looked in vain")

    found = world.from_first(lambda: (rank, torch.arange(3)))
    try:
        world.from_first(fail)
    except FileNotFoundError as error:
        answers.put((found[0], found[1].tolist(), str(error)))
    leave(world)


def test_what_rank_0_makes_or_fails_with_reaches_every_rank():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=ask_the_first, args=(r, port, answers)) for r in (0, 1)]
    for process in ranks:
        process.start()
    assert [answers.get(timeout=120) for _ in ranks] == [
        (0, [0, 1, 2], "rank 0 looked in vain")
    ] * 2
    for process in ranks:
        process.join()
        assert process.exitcode == 0
