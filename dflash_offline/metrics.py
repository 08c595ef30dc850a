"""What a run says: progress and lines on stderr, tables on stdout, one JSON line per log entry.

Progress is a bar on a terminal. Elsewhere, a thread says where the innermost block is every 15 s,
also while nothing moves: a compilation and a stuck disk are told apart from a dead process.
"""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")

# Where nobody watches (a pipe, a log file) a bar is noise: a line this often keeps silence away.
_LINE_SECONDS = 15.0


def say(text: str) -> None:
    """One line on stderr, at once."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


@dataclass(frozen=True)
class Running:
    """What the process was at when it was asked. Without `unit`, it is work that is not counted.

    `last_advance` is in seconds since the epoch; until a first advance, it is when it began.
    """

    label: str
    done: float
    total: float | None
    unit: str | None
    last_advance: float


class ProgressBar:
    """Counts units of one task, and tells in words how far it is."""

    def __init__(
        self,
        label: str,
        *,
        total: float | None = None,
        unit: str | None = None,
        details: Callable[[], str] | None = None,
    ) -> None:
        self.label, self.total, self.unit, self._details = label, total, unit, details
        self.done = self._before = 0.0
        self.started = time.monotonic()
        self._touch()

    def _touch(self) -> None:
        self._touched, self._touched_at = time.monotonic(), time.time()

    def set_total(self, total: float) -> None:
        """Tell what there is to do, once it is known."""
        self.total = total

    def skip(self, units: float) -> None:
        """Units that were done before: they say nothing of the rate."""
        self._before += units
        self.advance(units)

    def advance(self, units: float = 1.0) -> None:
        self.done += units
        if units:
            self._touch()

    def snapshot(self) -> Running:
        return Running(self.label, self.done, self.total, self.unit, self._touched_at)

    def line(self) -> str:
        return self.label + (" ... " if self.unit is None else ": ") + self.state()

    def state(self) -> str:
        """All that a line says after the label."""
        now = time.monotonic()
        seconds, quiet = max(now - self.started, 1e-9), now - self._touched
        if self.unit is None:
            return f"{seconds:,.0f} s"
        parts = [self._counted(seconds)]
        if quiet >= _LINE_SECONDS:
            parts.append(f"nothing new for {quiet:,.0f} s")
        if self._details and (details := self._detailed(self._details)):
            parts.append(details)
        return ", ".join(parts)

    def _counted(self, seconds: float) -> str:
        rate = (self.done - self._before) / seconds
        text = f"{self.done:,.0f}"
        if self.total:
            text += f"/{self.total:,.0f} {self.unit}"
            if rate:
                text += f", {(self.total - self.done) / rate:,.0f} s left"
        else:
            text += f" {self.unit}"
        return f"{text}, {rate:,.0f} {self.unit}/s"

    @staticmethod
    def _detailed(details: Callable[[], str]) -> str:
        """A fault in `details` is told in their place: it must not silence the rest."""
        try:
            return details()
        except Exception as error:
            return f"no details ({error!r})"


# Of the process, because it has one stderr: the open blocks, outermost first, ...
_OPEN: list[ProgressBar] = []
# ... and when the last line was said of one: many short blocks make no long silence.
_last_line = time.monotonic()


def running() -> Running | None:
    """The innermost open block of `progress` or `phase`, if there is one."""
    innermost = _OPEN[-1:]
    return innermost[0].snapshot() if innermost else None


@contextmanager
def progress(
    label: str, *, total: float | None, unit: str, details: Callable[[], str] | None = None
) -> Iterator[ProgressBar]:
    """Show how far a task is: `with progress("loading", total=n, unit="tok") as bar: ...`

    `details` gives more to say; it is called from another thread, a few times a second at most.
    """
    with _shown(ProgressBar(label, total=total, unit=unit, details=details)) as bar:
        yield bar


@contextmanager
def phase(label: str) -> Iterator[None]:
    """Show that work goes on whose amount is not known: `with phase("compiling"): ...`"""
    with _shown(ProgressBar(label)):
        yield


@contextmanager
def _shown(bar: ProgressBar) -> Iterator[ProgressBar]:
    """The outermost block shows itself and all within; blocks are opened by one thread."""
    is_outermost = not _OPEN
    _OPEN.append(bar)
    try:
        if is_outermost:
            with _display():
                yield bar
        else:
            yield bar
    finally:
        _OPEN.remove(bar)


def _display() -> AbstractContextManager[object]:
    # Not rich's own guess, which FORCE_COLOR turns to a terminal even where a file is written.
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    return Live(get_renderable=_bars, console=console) if console.is_interactive else _lines()


def _bars() -> Table:
    """The open blocks as rich draws them, one below the other."""
    table = Table.grid(padding=(0, 1))
    for bar in tuple(_OPEN):
        drawn = Bar(bar.total, bar.done, width=20, pulse=bar.total is None)
        table.add_row(Text(bar.label), drawn, Text(bar.state()))
    return table


@contextmanager
def _lines() -> Iterator[None]:
    """A thread says lines as long as the block lasts, and none after it."""
    ended = threading.Event()
    thread = threading.Thread(target=_say_lines, args=(ended,), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _say_lines(ended: threading.Event) -> None:
    global _last_line
    while not ended.wait(_last_line + _LINE_SECONDS - time.monotonic()):
        say(_OPEN[-1].line())
        _last_line = time.monotonic()


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def summary_table(title: str, facts: Mapping[str, Any]) -> None:
    """The final table of a command, on stdout."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _cell(value))
    Console().print(table)


class Log:
    """A run's log: JSON lines in `path`, and the same as lines for the eye.

    Opened for appending and flushed line by line: a killed run keeps what it logged.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8") if path else None

    def write(self, entry: Mapping[str, Any], line: str) -> None:
        if self._file is None:
            return
        finite = {k: None if v != v or v in (math.inf, -math.inf) else v for k, v in entry.items()}
        self._file.write(json.dumps(finite) + "\n")  # NaN and inf are not JSON
        self._file.flush()
        say(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def duration(seconds: float) -> str:
    """`93784` -> `1d02h03m`, `75` -> `1m15s`: at most three units."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02}h{minutes:02}m"
    if hours:
        return f"{hours}h{minutes:02}m{whole % 60:02}s"
    return f"{minutes}m{whole % 60:02}s" if minutes else f"{seconds:.1f}s"


def bytes_text(count: float) -> str:
    """`26007` -> `26.0 KB`: thousands, as disks are sold."""
    unit = "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if count < 999.95:
            break
        count, unit = count / 1000, larger
    return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"


class Pace:
    """What the time since the last log line was spent on, and what is left.

    The first step of a process compiles, so the time left is told by the steps after it.
    """

    def __init__(self, step: int) -> None:
        self.started = self._since = time.monotonic()
        self._first_step = self._last_step = step
        self._first_step_took = 0.0

    def facts(
        self, step: int, steps: int, tokens_per_step: int, waited: float
    ) -> dict[str, float]:
        """Rates since the last call, which is best made after the first step and then rarely.

        `waited`: the seconds of that time for which the next row was not there.
        """
        now = time.monotonic()
        seconds, done = max(now - self._since, 1e-9), step - self._last_step
        if self._last_step == self._first_step:
            self._first_step_took = seconds
        later_steps = step - self._first_step - 1
        later_seconds = now - self.started - self._first_step_took
        per_step = later_seconds / later_steps if later_steps > 0 else seconds / max(done, 1)
        facts = {
            "elapsed": now - self.started,
            "tokens_per_second": done * tokens_per_step / seconds,
            "seconds_per_step": seconds / max(done, 1),
            "data_wait": waited / seconds,
            "eta": per_step * (steps - step),
        }
        self._since, self._last_step = now, step
        return facts
