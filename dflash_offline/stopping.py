"""A request to stop that waits for a good place, and a second one that does not.

SIGTERM and ctrl-C mean: finish this step, save, end. Whoever is asked twice ends at once, as a
command without this would.
"""

import signal
import time
from types import FrameType
from typing import Any, Self

from dflash_offline.metrics import say

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Launchers send both signals, and to a whole group, beside the parent that passes them on.
_ONE_REQUEST_SECONDS = 3.0


class StopRequest:
    """with StopRequest("saving after this step") as stop:
        while not stop.asked: ...

    Signals reach the main thread alone, which has to be the one that enters.
    """

    def __init__(self, what_follows: str) -> None:
        self.asked = False
        self._asked_at = 0.0
        self._what_follows = what_follows
        self._before: dict[signal.Signals, Any] = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if time.monotonic() - self._asked_at < _ONE_REQUEST_SECONDS:
                return
            before = self._before[signal.Signals(number)]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt
        self.asked, self._asked_at = True, time.monotonic()
        say(f"asked to stop: {self._what_follows}; once more stops at once")

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
