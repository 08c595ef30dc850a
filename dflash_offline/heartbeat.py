"""A file that tells from outside whether a run lives and what it is at.

A thread writes it anew every 10 s, whole, as one JSON object. What readers may rely on:

- `time` (UTC) and `epoch` (seconds) say when it was written. While `outcome` is null and the beat
  is more than 30 s old, the process is gone, frozen, or cannot write there.
- `phase`, `done`, `total`, `unit` and `last_progress` (epoch seconds) say what it is at; they are
  null between two tasks. A beat that is fresh with a `last_progress` that is old is a run that is
  stalled. Without `unit` the work is not counted, and `last_progress` is when it began.
- `host`, `pid` and `resident_bytes` (null where the system does not tell) say where it lives.
- `outcome` of the last beat: "finished", "stopped on request" or "failed: ..." with the reason.

Beside them stand the facts of whoever beats. A beat is not forced to the disk: that would take
longer than its period when a run fills the disk's queue; a power cut may leave a damaged file.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dflash_offline.metrics import running, say

_BEAT_SECONDS = 10.0
_LAST_BEAT_SECONDS = 5.0  # to wait for it at the end: a dead file system must not hold the exit
_MARKS = {"epoch", "pid", "phase", "last_progress", "outcome"}  # of a beat, for its reader


class Heartbeat:
    """Beats at once, every 10 s, and when the block ends, saying how it ended.

    with Heartbeat(path, facts=lambda: {"rank": 3}):
        work()

    `facts` gives JSON values and is called from another thread: nothing in it may call torch.
    Neither a fault in it nor a disk that refuses ends the run; each is told once.
    """

    def __init__(self, path: Path, *, facts: Callable[[], Mapping[str, Any]] = dict) -> None:
        self.path, self._facts = path, facts
        self._outcome: str | None = None
        self._ended = threading.Event()
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError):  # the beat will tell
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._outcome = _outcome_of(error)
        self._ended.set()
        self._thread.join(_LAST_BEAT_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self._beat()
        self._beat()

    def _beat(self) -> None:
        # What is promised wins over a fact of the same name.
        content = {**self._facts_now(), **_life(), "outcome": self._outcome}
        try:
            _replace(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            self._tell_once(f"the heartbeat {self.path} cannot be written", error)

    def _facts_now(self) -> dict[str, Any]:
        try:
            return {str(name): _json_value(value) for name, value in self._facts().items()}
        except Exception as error:
            self._tell_once(f"facts for the heartbeat {self.path} cannot be had", error)
            return {}

    def _tell_once(self, what: str, error: Exception) -> None:
        if what not in self._told:
            self._told.add(what)
            say(f"warning: {what} ({_one_line(error)}); the run goes on")


def read_heartbeat(path: Path) -> dict[str, Any] | None:
    """The last beat; None if there is none, or the file is damaged or something else."""
    try:
        beat = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return beat if isinstance(beat, dict) and beat.keys() >= _MARKS else None


def _life() -> dict[str, Any]:
    """What every beat says of the process."""
    now, at = time.time(), running()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "epoch": now,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "resident_bytes": _resident_bytes(),
        "phase": at and at.label,
        "done": at and _json_value(at.done),
        "total": at and _json_value(at.total),
        "unit": at and at.unit,
        "last_progress": at and at.last_advance,
    }


def _resident_bytes() -> int | None:
    """Memory that the process holds now; Linux alone tells it in a file."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _json_value(value: Any) -> Any:
    """The value as JSON has it: what is not finite is null, what it does not know is text."""
    if isinstance(value, Mapping):
        return {str(name): _json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _outcome_of(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt):
        return "stopped on request"
    return f"failed: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _replace(path: Path, text: str) -> None:
    """A reader finds the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
