"""The `dflash-offline` command. Imports no torch, so that `--help` answers at once."""

import importlib
import os
import signal
import sys
import threading
import traceback
from typing import NoReturn

import click

from dflash_offline import __version__

EXIT_CRASHED, EXIT_STOPPED = 3, 130
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_AGAIN_SECONDS = 0.05
# Commands by name -> the module that holds the click command of the same name.
COMMANDS = {
    "estimate": "dflash_offline.cli.estimate",
    "extract": "dflash_offline.cli.extract",
    "train": "dflash_offline.cli.train",
    "evaluate": "dflash_offline.cli.evaluate",
    "inspect-shard": "dflash_offline.cli.inspect_shard",
    "verify": "dflash_offline.cli.verify",
}
# Where the same command, given again, does not start anew.
RESUME_HINTS = {
    "extract": "; finished shards are kept; the same command goes on with the rest",
    "train": "; the same command with --resume goes on from the newest checkpoint",
}


class CommandGroup(click.Group):
    """Imports a command's module only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Train DFlash drafters offline: extract hidden states once, then train over the shards."""


def _one_line(error: BaseException) -> str:
    """A library's message may have several."""
    return " ".join(str(error).split()) or type(error).__name__


def _is_out_of_memory(error: BaseException) -> bool:
    """Torch's errors by name and text, because torch is not imported here."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "can't allocate memory" in str(error)


class StopOnSignal:
    """SIGTERM ends a command as ctrl-C does: what is open is put away first.

    Once: launchers send both, and a second one would break into putting things away. But Python
    swallows an exception where an object is being deleted: then it is raised again.
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, *_: object) -> None:
        if not self.asked:
            self.asked = True
            raise KeyboardInterrupt

    def swallowed(self, lost: "sys.UnraisableHookArgs") -> None:
        """For sys.unraisablehook."""
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            sys.__unraisablehook__(lost)
            return
        self.asked = False
        threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _is_stop(error: BaseException | None) -> bool:
    """Whether it is a stop on request or came up while one was under way."""
    while error is not None and not isinstance(error, (click.Abort, KeyboardInterrupt)):
        error = error.__context__
    return error is not None


def _tell(error: BaseException, args: list[str], *, was_asked: bool) -> int:
    """Say on stderr how the command ended; the exit code.

    Once it `was_asked` to stop, whatever came up is of that: some libraries turn an interrupt of
    their import into an error of their own.
    """
    if was_asked or _is_stop(error):
        if not isinstance(error, (click.Abort, KeyboardInterrupt)):
            click.echo(f"while stopping: {_one_line(error)}", err=True)
        command = next((argument for argument in args if argument in COMMANDS), "")
        click.echo(f"stopped on request{RESUME_HINTS.get(command, '')}", err=True)
        return EXIT_STOPPED
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return 1  # whoever read the output, `head` say, has seen enough
    if isinstance(error, (ValueError, OSError)):
        click.echo(f"Error: {_one_line(error)}", err=True)
        return 1
    if _is_out_of_memory(error):
        click.echo(
            f"Error: memory is full ({str(error).split('. ')[0]}); lower --batch-tokens or, in "
            "training, --anchors, --row-tokens or the drafter's sizes (a data set that is begun "
            "keeps its --batch-tokens: choose another --output)",
            err=True,
        )
        return 1
    traceback.print_exception(error)
    return EXIT_CRASHED


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command. What a user can mend ends in one sentence: exit 1, or 2 for wrong usage.

    A fault of the program or the machine ends in a traceback and exit 3.
    """
    args = sys.argv[1:] if args is None else args
    code = 0
    stop, hook = StopOnSignal(), sys.unraisablehook
    before = {number: signal.signal(number, stop) for number in _STOPPING}
    sys.unraisablehook = stop.swallowed
    try:
        cli.main(args=args, prog_name="dflash-offline", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        code = _tell(error, args, was_asked=stop.asked)
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
    sys.exit(code)
