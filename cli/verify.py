"""`dflash-offline verify`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dflash_offline.cli.options import build, options_from
from dflash_offline.config import VerifyConfig


@click.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@options_from(VerifyConfig)
def verify(path: Path, **knobs: Any) -> None:
    """Read all of the data set PATH and check it: files, checksums, counts, decoded states.

    Lists the bad shards and exits with 1 if there are any. With --repair they are moved to
    PATH/bad, and running the same extract command again writes exactly those anew.
    """
    config = build(VerifyConfig, knobs)
    from dflash_offline.stages.verify import verify as run

    verdict = run(path, config)
    if config.json:
        click.echo(json.dumps(asdict(verdict)))
    else:
        for note in verdict.notes:
            click.echo(f"note: {note}")
        for name, what in verdict.bad.items():
            click.echo(f"BAD {name}: {what}")
        for name, aside in verdict.set_aside.items():
            click.echo(f"{name} set aside as {aside}; run the same extract again to redo it")
        good = verdict.shards - len(verdict.bad)
        click.echo(
            f"{good:,} of {verdict.shards:,} shards are good: {verdict.documents:,} documents, "
            f"{verdict.tokens:,} tokens"
        )
    if verdict.bad:
        sys.exit(1)
