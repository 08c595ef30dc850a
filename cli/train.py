"""`dflash-offline train`."""

from typing import Any

import click

from dflash_offline.cli.options import VariadicCommand, build, options_from
from dflash_offline.config import TrainConfig


@click.command(cls=VariadicCommand)
@options_from(TrainConfig)
def train(**knobs: Any) -> None:
    """Train a drafter over shards; stage two.

    Logs to OUTPUT/log.jsonl, saves checkpoints there, and ends with the drafter in OUTPUT/drafter
    in z-lab's format, which vLLM, SGLang and z-lab's client read.
    """
    config = build(TrainConfig, knobs)
    from dflash_offline.metrics import summary_table
    from dflash_offline.stages.train import train as run

    summary = run(config)
    if summary:
        summary_table("trained", summary)
