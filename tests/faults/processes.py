"""Runs of the command line, each in a process of its own and started within milliseconds.

torch and transformers take seconds to import. A fork server imports them once; each run is a fork
of it, which calls the product's own `main` with the run's arguments.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "dflash_offline.cli.extract",
        "dflash_offline.cli.verify",
        "dflash_offline.stages.extract",
        "dflash_offline.stages.verify",
        "transformers.models.llama.modeling_llama",
    ]
)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Outcome:
    """How a run ended. A signal's code is its negative number."""

    code: int
    out: str
    err: str

    @property
    def error(self):
        """The one line that a failed run ends with."""
        assert self.code == 1, self
        assert "Traceback" not in self.err, self.err
        last = self.err.splitlines()[-1]
        assert last.startswith("Error: "), self.err
        return last.removeprefix("Error: ")


@dataclass(frozen=True)
class Run:
    """A run that has been started."""

    process: multiprocessing.Process
    out: Path
    err: Path
    patience: float

    def is_going(self):
        return self.process.is_alive()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)

    def wait(self):
        self.process.join(self.patience)
        if self.process.is_alive():
            self.kill()
            pytest.fail(f"hangs after {self.err.read_text()!r}")
        return Outcome(self.process.exitcode, self.out.read_text(), self.err.read_text())


class CommandLine:
    """Starts runs; what they print goes to files in `folder`.

    One that takes longer than `patience` seconds hangs: on a quiet machine none here takes three.
    """

    def __init__(self, folder, patience=60.0):
        self.folder, self.patience = folder, patience
        self.started = 0

    def start(self, *arguments, before=(), **environment):
        """`before`: functions that the new process calls before anything else."""
        self.started += 1
        out, err = (self.folder / f"{self.started}.{name}" for name in ("out", "err"))
        out.touch()
        err.touch()
        given = ([str(argument) for argument in arguments], out, err, environment, before)
        process = _SERVER.Process(target=_main, args=given)
        process.start()
        return Run(process, out, err, self.patience)

    def run(self, *arguments, before=(), **environment):
        return self.start(*arguments, before=before, **environment).wait()


def _main(arguments, out, err, environment, before):
    import torch

    from dflash_offline.cli.main import main

    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    torch.set_num_threads(1)  # how a sum is split over threads changes its last bit
    os.environ.update(environment)
    for function in before:
        function()
    main(arguments)


def wait_until(condition, *, while_going):
    """Look again and again; False if the run ended first."""
    while while_going.is_going():
        if condition():
            return True
        time.sleep(0.0005)
    return False


def limit_memory(more):
    """For `before`: no more than `more` bytes of address space beyond what is taken now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def enter_namespace(process_id):
    """For `before`: see the mounts that this process sees."""
    for kind in ("user", "mnt"):
        own, other = (Path(f"/proc/{who}/ns/{kind}") for who in ("self", process_id))
        if own.readlink() == other.readlink():
            continue
        with other.open() as file:
            if _LIBC.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")
