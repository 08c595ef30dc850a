"""A thread behind the work: it copies and writes what the work has made.

It must never call anything compiled (torch.compile's tracing state is process-wide). Its exception
surfaces a few calls later, with its own traceback.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self


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
