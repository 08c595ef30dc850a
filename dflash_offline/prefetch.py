"""One thread and a bounded queue, ahead of the work (`prefetch`) or behind it (`Behind`).

The thread reads, decodes, copies and writes; it must never call anything compiled (torch.compile's
tracing state is process-wide). Its exception surfaces at the next item, or a few calls later, with
its own traceback.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _Prefetched(Generic[Item]):
    def __init__(self, source: Iterator[Item], depth: int) -> None:
        self._source = source
        self._ready: queue.Queue[Item | _Failure] = queue.Queue(depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
            self._put(_Failure(StopIteration()))
        except BaseException as error:
            self._put(_Failure(error))

    def _put(self, item: Item | _Failure) -> bool:
        while not self._stopping.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self._ready.get()
        if isinstance(item, _Failure):
            self._ready.put(item)  # whoever asks again gets the same answer
            raise item.error
        return item

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()


@contextmanager
def prefetch(source: Iterator[Item], depth: int = 2) -> Iterator[Iterator[Item]]:
    """`with prefetch(items) as ready:` at most `depth` items are made ahead of use."""
    ready = _Prefetched(source, depth)
    try:
        yield ready
    finally:
        ready.close()


class Behind:
    """Runs calls in order in a thread of its own, a few of them behind.

    with Behind(depth=2) as behind:
        behind.call(write, rows)

    Leaving the block waits for all calls. After an exception, of a call or the block, no further
    call is made: what comes after may rely on what failed.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._waiting: deque[Future[Any]] = deque()
        self._has_failed = False
        self._asked = self._done = 0  # two numbers: other threads may read them at any time

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Have `function` called; first waits until fewer than `depth` calls wait."""
        while len(self._waiting) >= self._depth:
            self._waiting.popleft().result()
        self._asked += 1
        self._waiting.append(self._thread.submit(self._run, function, *args))

    def waiting(self) -> int:
        """How many calls are not done."""
        return self._asked - self._done

    def finish(self) -> None:
        """Wait for all calls."""
        while self._waiting:
            self._waiting.popleft().result()

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        if self._has_failed:
            return
        try:
            function(*args)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._done += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self._has_failed |= failure is not None
        try:
            if failure is None:
                self.finish()
        finally:
            self._thread.shutdown(cancel_futures=True)
