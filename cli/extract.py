"""`dflash-offline extract`."""

from typing import Any

import click

from dflash_offline.cli.options import VariadicCommand, build, options_from
from dflash_offline.config import ExtractConfig


@click.command(cls=VariadicCommand)
@options_from(ExtractConfig)
def extract(**knobs: Any) -> None:
    """Run the target over conversations and store its hidden states; stage one.

    A line of DATA is {"messages": [...]}, {"prompt": ..., "response": ...} or {"input_ids": ...,
    "loss_mask": ...}. A run that was stopped goes on when the same command is given again. One
    process per GPU is started; under torchrun each rank writes its share of the shards.
    """
    config = build(ExtractConfig, knobs)
    from dflash_offline.metrics import summary_table
    from dflash_offline.stages.extract import extract as run

    # What did not happen is left out, but for what a reader would miss.
    told = {
        name: value
        for name, value in run(config).items()
        if value != 0 or name in ("documents", "broken_documents", "shards_written_now")
    }
    summary_table("extracted", told)
