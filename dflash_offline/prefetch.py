"""Make the next item while the last one is used: one thread, a bounded queue.

The thread reads, decodes and copies; it must never call anything compiled (torch.compile's tracing
state is process-wide). Its exception surfaces at the next item, with its own traceback.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

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
