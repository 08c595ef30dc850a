"""`dflash-offline estimate`."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from dflash_offline.cli.options import VariadicCommand, build, options_from
from dflash_offline.config import EstimateConfig
from dflash_offline.metrics import bytes_text, duration, summary_table

if TYPE_CHECKING:
    from dflash_offline.stages.estimate import Estimate


@click.command(cls=VariadicCommand)
@options_from(EstimateConfig)
def estimate(**knobs: Any) -> None:
    """Tell what an extract of DATA would take: tokens, bytes in each codec, hours, disk speed.

    Loads no model and reads no more of DATA than the sampled lines: it answers in a second.
    Options that extract has too mean the same.
    """
    config = build(EstimateConfig, knobs)
    from dflash_offline.stages.estimate import estimate as run

    found = run(config)
    if config.json:
        click.echo(json.dumps(asdict(found), default=str))
        return
    summary_table("estimated", _facts(found))
    Console().print(_codecs(found), _paces(found))


def _facts(found: "Estimate") -> dict[str, Any]:
    data, work = found.data, found.work
    is_whole = data.lines_read == data.lines
    about = "" if is_whole else "about "
    error = f" +- {data.tokens_error:,} (95 %)"
    return {
        "target": f"{work.target}, layers {list(work.target_layer_ids)} of {work.layers}, width "
        f"{work.width:,}",
        "lines tokenised": f"{data.lines_read:,} of {about}{data.lines:,} "
        f"({bytes_text(data.bytes)})",
        "documents": f"{about}{data.documents:,}",
        "tokens": f"{about}{data.tokens:,}{'' if is_whole else error}",
        "shards": f"about {found.shards:,}",
        "work": f"{work.flop_per_token / 1e9:,.4g} GFLOP a token: 2 x {work.weights:,} weights of "
        f"{work.layers_run} layers",
        "free space": f"{found.room} at {found.output}",
    }


def _codecs(found: "Estimate") -> Table:
    final = f", final hidden state in {found.final_codec}" if found.final_codec else ""
    table = Table(
        title=f"\ncodecs{final}",
        title_justify="left",
        caption="lossless depends on the states: reckoned at 0.71 of bf16, as measured",
        caption_justify="left",
    )
    table.add_column("codec")
    for name in ("bytes a token", "in all", "inodes", "fits"):
        table.add_column(name, justify="right")
    for name, size in found.codecs.items():
        per_token = f"{size.bytes_per_token:,.0f}"
        fits = "yes" if size.fits else "NO"
        table.add_row(name, per_token, bytes_text(size.bytes), f"{size.inodes:,}", fits)
    return table


def _paces(found: "Estimate") -> Table:
    table = Table(title=f"\nat {found.tflops:,g} TFLOP/s a GPU", title_justify="left")
    for name in ("GPUs", "tokens/s", "time", f"GB/s to disk ({found.codec})"):
        table.add_column(name, justify="right")
    for pace in found.paces:
        table.add_row(
            f"{pace.gpus:,}",
            f"{pace.tokens_per_second:,.0f}",
            duration(3600 * pace.hours),
            f"{pace.gigabytes_per_second:,.2f}",
        )
    return table
