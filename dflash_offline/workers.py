"""A function over many items by several processes; the results come in the items' order.

For work that holds Python's lock. Each process is a new interpreter (spawn: threads and CUDA do
not survive a fork) that imports what the function needs, so it pays where there are many seconds
of work for each. What is ahead of the result that is waited for is bounded, and so is the memory.
"""

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # items of each process: the one it works on and the next


def in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    processes: int,
    start: Callable[[int], None],
) -> Generator[Result, None, None]:
    """`function` of each item. The first item, in their order, that raises ends it with its error.

    `function`, items and results must pickle. `start` is called in each process, with the id of
    this one. Whoever may stop early closes the generator, which ends the processes at once.
    """
    # Items are best small: before Python 3.11.5, ending the processes hangs on large ones.
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=start, initargs=(os.getpid(),)
    )
    running: deque[Future[Result]] = deque()
    with pool:
        try:
            for item in items:
                running.append(_submit(pool, function, item))
                if len(running) == _AHEAD * processes:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"one of {processes} worker processes was killed, perhaps for want of memory; "
                "see to that and run the same command again"
            ) from error
        except BaseException:
            for worker in list(pool._processes.values()):  # kill_workers() in Python 3.14
                worker.kill()
            raise


def _submit(
    pool: ProcessPoolExecutor, function: Callable[[Item], Result], item: Item
) -> Future[Result]:
    """A worker that is started here never gets ctrl-C, which is the parent's to answer.

    It inherits what is blocked; the parent gets a ctrl-C of this moment right after it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(function, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
