"""`dflash-offline inspect-shard`."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_offline.cli.options import build, options_from
from dflash_offline.config import InspectConfig

if TYPE_CHECKING:
    from dflash_offline.stages.inspect import DocumentView, Inspection

_SHOWN_IDS = 24  # of a span without text: its first and last ids tell enough


@click.command("inspect-shard")
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@options_from(InspectConfig)
def inspect_shard(path: Path, **knobs: Any) -> None:
    """Show what a shard (DATASET/shards/NAME) or a whole data set holds.

    For a data set the counts are totals; taps and the document are those of its first shard.
    """
    config = build(InspectConfig, knobs)
    from dflash_offline.stages.inspect import inspect

    found = inspect(path, config)
    if config.json:
        click.echo(json.dumps(asdict(found)))
        return
    console = Console()
    for part in (_facts(found), _contract(found), _taps(found), _document(found.document)):
        console.print(part)


def _facts(found: "Inspection") -> Table:
    table = Table(title=found.path, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "shards": f"{found.shards:,}",
        "documents": f"{found.documents:,}",
        "tokens": f"{found.tokens:,}",
        "supervised": f"{found.supervised:,} ({found.supervised_share:.1%})",
        "lengths": f"{found.shortest:,} to {found.longest:,}, median {found.median:,.0f}",
        "bytes": f"{found.bytes:,}",
        "bytes per token": f"{found.bytes_per_token:,.1f} "
        f"({found.payload_bytes_per_token:,.1f} for the hidden states)",
        "ratio to bf16": f"{found.ratio_to_bf16:.2f}",
        "codec": ", ".join(f"{key} {value}" for key, value in found.codec.items()),
        "schema version": str(found.schema_version),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _contract(found: "Inspection") -> Table:
    table = Table(title="\ncontract", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for field, value in _leaves(found.contract, ""):
        table.add_row(field, Text(value if isinstance(value, str) else json.dumps(value)))
    return table


def _leaves(value: Any, field: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values, spelled as a refusal to mix contracts spells them."""
    if not isinstance(value, dict):
        yield field, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{field}.{key}".lstrip("."))


def _taps(found: "Inspection") -> Table:
    table = Table(title=f"\ntaps of {found.shard}", title_justify="left")
    for name in ("layer", "mean", "std", "max |x|", "error p50", "error p99"):
        table.add_column(name, justify="right")
    for layer, tap in zip(found.contract["target_layer_ids"], found.taps, strict=True):
        table.add_row(
            str(layer),
            *(f"{tap[key]:.4g}" for key in ("mean", "std", "max_abs")),
            *(f"{tap[key]:.3%}" for key in ("relative_l2_p50", "relative_l2_p99")),
        )
    return table


def _document(view: "DocumentView") -> Text:
    """Supervised tokens stand in [[ ]], in green on a terminal."""
    head = f"\ndocument {view.place} (number {view.index} of the corpus), {view.tokens:,} tokens, "
    shown = Text(f"{head}supervised ones in [[ ]]:\n", style="bold")
    for span in view.spans:
        text = _shorten(span.input_ids) if span.text is None else span.text
        if span.supervised:
            shown.append(f"[[{text}]]", style="green")
        else:
            shown.append(text, style="not bold")
        shown.append(" " if span.text is None else "")
    return shown


def _shorten(ids: list[int]) -> str:
    if len(ids) <= _SHOWN_IDS:
        return " ".join(map(str, ids))
    half = _SHOWN_IDS // 2
    return f"{_shorten(ids[:half])} ... {len(ids) - 2 * half:,} more ... {_shorten(ids[-half:])}"
