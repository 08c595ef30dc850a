"""One process per GPU from one command, each started again by itself if it dies.

For work whose ranks share nothing (extraction): a rank that is killed or crashes loses what it had
open, the others do not notice. Where a launcher has set RANK, nothing is started here.

What a rank prints goes to a file of its own. Ranks end with their parent, however it ends.
"""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

from dflash_offline.metrics import say

_MOST_RESTARTS = 3  # of one rank
_POLL_SECONDS = 0.5
_SECONDS_TO_STOP = 10.0
# An error in one sentence: to start again would end in the same one. Tracebacks have code 3.
_CODES_OF_OURS = (1, 2)
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_SHOWN_LINES = 5  # of a failed rank's log
_MAIN = "from dflash_offline.cli.main import main; main()"


class Ranks:
    """The processes of one host.

    with Ranks(["extract", ...], size=8, logs=folder) as ranks:
        ranks.wait(each_poll)
    """

    def __init__(self, arguments: Sequence[str], *, size: int, logs: Path) -> None:
        self._arguments, self._size, self._logs = arguments, size, logs
        self._restarts = [0] * size
        logs.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(logs)
        for rank in range(size):
            self.log_path(rank).unlink(missing_ok=True)
        self._processes = [self._start(rank) for rank in range(size)]

    def log_path(self, rank: int) -> Path:
        return self._logs / f"rank-{rank:02}.log"

    def wait(self, each_poll: Callable[[], None]) -> None:
        """Until all ranks are done. ValueError, and all of them stopped, if one fails for good."""
        running = set(range(self._size))
        while running:
            time.sleep(_POLL_SECONDS)
            for rank in sorted(running):
                code = self._processes[rank].poll()
                if code == 0:
                    running.remove(rank)
                elif code is not None:
                    self._start_again(rank, code)
            each_poll()

    def _start_again(self, rank: int, code: int) -> None:
        log = self.log_path(rank)
        if code in _CODES_OF_OURS:
            raise ValueError(f"rank {rank} failed: {_last_lines(log)}")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        self._restarts[rank] += 1
        if self._restarts[rank] > _MOST_RESTARTS:
            raise ValueError(
                f"rank {rank} died {self._restarts[rank]} times, the last time of {how}; {log} "
                f"ends in: {_last_lines(log)}"
            )
        say(
            f"warning: rank {rank} died of {how}; started again, {self._restarts[rank]} of "
            f"{_MOST_RESTARTS} times ({log})"
        )
        self._processes[rank] = self._start(rank)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._size)}
        with self.log_path(rank).open("ab") as log:
            return subprocess.Popen(
                # -P: the folder it runs in is no place to import from.
                [sys.executable, "-P", "-c", _MAIN, *self._arguments],
                env={**os.environ, **ranks},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # ctrl-C reaches the parent alone, which asks them to stop
                preexec_fn=partial(end_with_parent, os.getpid()),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ask those that still run to stop, and after ten seconds make them."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_STOP
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        os.close(self._lock)


def _lock(logs: Path) -> int:
    """Held while the ranks run; ValueError if those of another command do."""
    descriptor = os.open(logs / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"another command's processes write their logs to {logs}; wait for it or stop it"
        ) from None
    return descriptor


def end_with_parent(parent: int) -> None:
    """In the new process: SIGTERM when the parent dies, where the system offers that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


def _last_lines(log: Path) -> str:
    """The error of a command of ours in its own sentence, or how the log ends."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return " | ".join(errors[-1:] or lines[-_SHOWN_LINES:]) or "it said nothing"
