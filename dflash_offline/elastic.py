"""One training command on all GPUs of this host, through torch's elastic agent.

The ranks of a training step together, so they fall together: when one is gone, the agent ends the
others, and all start again from the newest checkpoint. An agent starts ranks again after whatever
ended them, and an error in one sentence would only be told again; so each agent here has one
start, and what a rank died of decides about the next.

A stop is different: a rank may save for a minute first, and the agent would kill it after half of
that. So the ranks learn of it by themselves, from a pipe that the command holds open: its end is
a request to stop, and it ends with the command, however that ends.

Rank 0 has the terminal, the others a log each. What a rank says about its own end goes to its log
too, because the end of one is the end of all: the command that started them tells it, once.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Self

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dflash_offline.metrics import say

_MAIN = (
    "from dflash_offline.cli.main import main; "
    "from dflash_offline.elastic import as_rank; as_rank(main)"
)
_RUN_ID = "dflash-offline"  # by which a rank knows that it is one of these
# Of a command of ours: an error in one sentence; a traceback; stopped on request.
_ERRORS, _CRASHED, _STOPPED = (1, 2), 3, 130
# A rank whose neighbour left fails too, in a traceback. It stays this long, so that the agent
# sees the neighbour's end first and takes that for the cause.
_SECONDS_TO_LINGER = 3.0
_SECONDS_OF_ONE_REQUEST = 3.0  # launchers send SIGINT and SIGTERM for one
_SHOWN_LINES = 5  # of a failed rank's log


@dataclass(frozen=True)
class _End:
    """Of the rank that failed first. `code` is minus the signal if one killed it."""

    rank: int
    code: int

    def __str__(self) -> str:
        how = f"signal {signal.Signals(-self.code).name}" if self.code < 0 else f"code {self.code}"
        return f"rank {self.rank} died of {how}"


def run_on_all(
    arguments: Sequence[str],
    *,
    processes: int,
    max_restarts: int,
    logs: Path,
    seconds_to_stop: float = 10.0,
) -> None:
    """Run `dflash-offline ARGUMENTS` as the ranks of one process group, until all are done.

    After a death that is no error of ours, all start again, with --resume. ValueError if there is
    such an error, or after too many deaths. SIGTERM and ctrl-C are passed on and end in
    KeyboardInterrupt; a rank that has not ended `seconds_to_stop` later is killed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("rank-*.log"):
        old.unlink()
    for start in range(max_restarts + 1):
        again = ["--resume"] if start and "--resume" not in arguments else []
        settings = [str(logs.resolve()), str(start), str(seconds_to_stop)]
        end = _run_once([*settings, *arguments, *again], processes, logs)
        if end is None:
            return
        log = log_path(logs, end.rank)
        if end.code in _ERRORS:
            raise ValueError(f"rank {end.rank} failed: {_last_words(log)}")
        if start < max_restarts:
            say(
                f"warning: {end}; all {processes} ranks start again from the newest checkpoint, "
                f"{start + 1} of {max_restarts} times ({log})"
            )
    raise ValueError(
        f"{end}, after {max_restarts} starts anew (--max-restarts); {log} ends in: "
        f"{_last_words(log)}"
    )


def log_path(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank:02}.log"


def _run_once(arguments: Sequence[str], processes: int, logs: Path) -> _End | None:
    """Start all ranks and wait until all are gone; how the first that failed ended, if one did.

    KeyboardInterrupt if they stopped on request.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=_RUN_ID,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # or it leaves folders in /tmp
        signals_to_handle="SIGQUIT",  # the others are not its business here
    )
    end = None
    with _agent_in_log(logs / "agent.log"), _Pipe() as pipe:
        # The agent takes `$` in arguments for macros of its own.
        spelled = [argument.replace("$", "$$") for argument in (str(pipe.path), *arguments)]
        try:
            # -P: the folder it runs in is no place to import from.
            elastic_launch(config, sys.executable)("-P", "-c", _MAIN, *spelled)
        except ChildFailedError as error:
            rank, failure = next(iter(error.failures.items()))  # in the order it saw them
            end = _End(rank, failure.exitcode)
        except SignalException as error:
            raise KeyboardInterrupt from error
        if pipe.is_closed or (end is None and pipe.stopped.exists()):
            raise KeyboardInterrupt
    return end


class _Pipe:
    """What the ranks hold on to: a request to stop closes it, and so does the command's end.

    Another request, seconds later, ends the command at once, and with it the ranks.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="dflash-offline-")
        self.path = Path(self._folder.name) / "pipe"
        self.stopped = _stopped_mark(self.path)
        self.is_closed = False
        self._asked = 0.0
        os.mkfifo(self.path)
        self._writer = os.open(self.path, os.O_RDWR)  # to write alone would wait for a reader

    def _ask(self, _: int, __: FrameType | None) -> None:
        if not self.is_closed:
            self._close()
            self._asked = time.monotonic()
        elif time.monotonic() - self._asked > _SECONDS_OF_ONE_REQUEST:
            raise KeyboardInterrupt

    def _close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            os.close(self._writer)

    def __enter__(self) -> Self:
        # SIGQUIT's, because the agent leaves its own behind.
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
        self._before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers[:2]:
            signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._close()
        self._folder.cleanup()


def _stopped_mark(pipe: Path) -> Path:
    """A file beside the pipe, which says that a rank ended on request."""
    return pipe.with_name("stopped")


@contextmanager
def _agent_in_log(path: Path) -> Iterator[None]:
    """The agent's own log goes to a file: on the terminal it would bury the one sentence."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)
        handler.close()


def _last_words(log: Path) -> str:
    """The error of a rank in its own sentence, or how its log ends."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return " | ".join(errors[-1:] or lines[-_SHOWN_LINES:]) or "see above what it said"


def is_restart() -> bool:
    """Whether this process stands in for one that died: it goes on from the newest checkpoint."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def as_rank(main: Callable[[], object]) -> None:
    """In the process of a rank: run the command `main` and end as the others expect it."""
    pipe, logs, start, seconds_to_stop = sys.argv[1:5]
    del sys.argv[1:5]
    _stop_with(Path(pipe), float(seconds_to_stop))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = start  # the agent knows of no start but its own
    log = log_path(Path(logs), int(os.environ["RANK"]))
    if os.environ["RANK"] != "0":
        _redirect(log, sys.stdout.fileno(), sys.stderr.fileno())
    if "OMP_NUM_THREADS" not in os.environ:
        share = torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(max(1, share))
    try:
        main()
    except SystemExit as end:
        if end.code == _CRASHED:
            time.sleep(_SECONDS_TO_LINGER)
        if end.code != _STOPPED:
            raise
        # No failure to the agent, which would end the others, who may still save.
        _stopped_mark(Path(pipe)).touch()


def _stop_with(pipe: Path, seconds: float) -> None:
    """Ask this process to stop when the pipe ends, and end it `seconds` later at the latest.

    In a thread: Python's signal handlers wait for the main one, which may sit in a collective
    whose other ranks are gone. What this process has started ends with it.
    """
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # nobody may be there to write
    os.set_blocking(descriptor, True)

    def watch() -> None:
        os.read(descriptor, 1)  # nothing is ever written
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="stop with the pipe", daemon=True).start()


@contextmanager
def last_words_in_log(logs: Path) -> Iterator[None]:
    """What a rank of `run_on_all` says after an error in this block goes to its log alone."""
    try:
        yield
    except BaseException:
        if os.environ.get("TORCHELASTIC_RUN_ID") == _RUN_ID:
            _redirect(log_path(logs, int(os.environ["RANK"])), sys.stderr.fileno())
        raise


def _redirect(log: Path, *descriptors: int) -> None:
    """From here on, everything that is written to these, by libraries too, goes to the log."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        for descriptor in descriptors:
            os.dup2(file.fileno(), descriptor)
