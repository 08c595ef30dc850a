"""What a run says: progress and lines on stderr, tables on stdout, one JSON line per log entry."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")

# Where nobody watches (a pipe, a log file) a bar is noise: a line this often keeps silence away.
_LINE_SECONDS = 15.0


def say(text: str) -> None:
    """One line on stderr, at once."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


class _RateColumn(ProgressColumn):
    """Units per second, from the task's own clock."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {self.unit}/s")


class ProgressBar:
    """Counts units of one task; a bar on a terminal, a line every 15 s elsewhere."""

    def __init__(self, label: str, total: float | None, unit: str, bar: Progress | None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self._before = 0.0
        self.started = self._last_line = time.monotonic()
        self._bar = bar
        self._task = bar.add_task(label, total=total) if bar else None

    def set_total(self, total: float) -> None:
        """Tell what there is to do, once it is known."""
        self.total = total
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=total)

    def skip(self, units: float) -> None:
        """Units that were done before: they say nothing of the rate."""
        self._before += units
        self.done += units
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, total=self.total, completed=int(self.done))

    def advance(self, units: float = 1.0) -> None:
        self.done += units
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, units)
        elif time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            say(self._line())

    def _line(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = (self.done - self._before) / seconds
        text = f"{self.label}: {self.done:,.0f}"
        if self.total:
            text += f"/{self.total:,.0f} {self.unit}"
            if rate:
                text += f", {(self.total - self.done) / rate:,.0f} s left"
        else:
            text += f" {self.unit}"
        return f"{text}, {rate:,.0f} {self.unit}/s"


@contextmanager
def progress(label: str, *, total: float | None, unit: str) -> Iterator[ProgressBar]:
    """Show how far a task is: `with progress("loading", total=n, unit="tok") as bar: ...`"""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressBar(label, total, unit, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield ProgressBar(label, total, unit, bar)


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
        self._waited = 0.0

    def wait_for(self, items: Iterator[Item]) -> Item:
        """The next item; the time until it is there counts as waiting for data."""
        started = time.monotonic()
        item = next(items)
        self._waited += time.monotonic() - started
        return item

    def facts(self, step: int, steps: int, tokens_per_step: int) -> dict[str, float]:
        """Rates since the last call, which is best made after the first step and then rarely."""
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
            "data_wait": self._waited / seconds,
            "eta": per_step * (steps - step),
        }
        self._since, self._waited, self._last_step = now, 0.0, step
        return facts
