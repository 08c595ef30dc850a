"""`dflash-offline evaluate`."""

from typing import Any

import click

from dflash_offline.cli.options import VariadicCommand, build, options_from
from dflash_offline.config import EvaluateConfig


@click.command(cls=VariadicCommand)
@options_from(EvaluateConfig)
def evaluate(**knobs: Any) -> None:
    """Replay held-out documents as greedy decoding would and report acceptance lengths.

    Needs no target forward: the shards hold its hidden states and its tokens.
    """
    config = build(EvaluateConfig, knobs)
    from dflash_offline.metrics import summary_table
    from dflash_offline.stages.evaluate import evaluate as run

    summary_table("evaluated", run(config))
