"""How fast an extraction runs, against what its card can do: counters of one rank, sums of all.

The loop counts, other threads read: each counter is one number that only grows. Rates are those of
the last minute, so a run that slows down shows it; time left is told by all of the run.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_offline.metrics import bytes_text
from dflash_offline.sizing import Room

_WINDOW_SECONDS = 60.0


class Meter:
    """Of one rank; without facts until its first row."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._share_per_token: float | None = None
        self._queued: Callable[[], int] = int
        self._tokens = self._row_tokens = self._bytes = 0
        self._samples: deque[tuple[float, int, int]] = deque()

    def begin(
        self, *, flop_per_token: float, matmul_rate: float, queued: Callable[[], int]
    ) -> None:
        """`matmul_rate` in FLOP/s, measured; `queued` tells how many calls wait to be written."""
        self._samples.append((time.monotonic(), 0, 0))
        self._queued = queued
        self._share_per_token = flop_per_token / matmul_rate

    def ran(self, tokens: int, row_tokens: int) -> None:
        """A row of so many tokens, filler included, has been sent to the device."""
        self._tokens += tokens
        self._row_tokens += row_tokens
        now = time.monotonic()
        self._samples.append((now, self._tokens, self._bytes))
        while len(self._samples) > 2 and now - self._samples[1][0] > _WINDOW_SECONDS:
            self._samples.popleft()

    def wrote(self, size: int) -> None:
        """Bytes that went to the shard."""
        self._bytes += size

    def facts(self) -> dict[str, Any]:
        """JSON values, under the names that `add_up` and `tell` know."""
        if self._share_per_token is None or not self._tokens:
            return {}
        started, tokens, size = self._samples[0]
        seconds = max(time.monotonic() - started, 1e-9)
        rate = (self._tokens - tokens) / seconds
        return {
            "tokens": self._tokens,
            "tokens_per_second": rate,
            "matmul_share": rate * self._share_per_token,
            "filler_share": 1 - self._tokens / max(self._row_tokens, 1),
            "queued": self._queued(),
            "bytes_per_second": (self._bytes - size) / seconds,
            "free_bytes": Room.at(self._output).bytes,
        }


def add_up(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of several ranks as those of one; rates add up, shares are means."""

    def values(name: str) -> list[float]:
        return [rank[name] for rank in ranks if isinstance(rank.get(name), int | float)]

    def mean(name: str) -> float:
        return sum(values(name)) / max(len(values(name)), 1)

    rates = values("tokens_per_second")
    return {
        "tokens_per_second": sum(rates),
        "slowest": min(rates, default=0.0),
        "fastest": max(rates, default=0.0),
        "matmul_share": mean("matmul_share"),
        "filler_share": mean("filler_share"),
        "queued": sum(values("queued")),
        "bytes_per_second": sum(values("bytes_per_second")),
        "free_bytes": min(values("free_bytes"), default=None),
        "ranks": len(rates),
    }


def tell(facts: Mapping[str, Any]) -> str:
    """`11,950 tok/s now, 76% of the matmul rate, ...`; nothing before the first row."""
    if not facts.get("ranks", len(facts)):
        return ""
    parts = [f"{facts['tokens_per_second']:,.0f} tok/s now"]
    if facts.get("ranks", 1) > 1:
        each = f"{facts['slowest']:,.0f} to {facts['fastest']:,.0f} each"
        parts.append(f"{facts['ranks']} ranks of {each}")
    return ", ".join(
        [
            *parts,
            f"{facts['matmul_share']:.0%} of the matmul rate",
            f"{facts['filler_share']:.1%} filler",
            f"{facts['queued']:,.0f} queued",
            f"{bytes_text(facts['bytes_per_second'])}/s written",
            f"{bytes_text(facts['free_bytes'])} free",
        ]
    )
