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
    from dflash_offline.stages.inspect import DocumentView, Histogram, Inspection

_SHOWN_IDS = 24  # of a span without text: its first and last ids tell enough
# A narrower terminal breaks these lines by itself; a table made narrower would hide its values.
_NARROWEST = 80
_SHOWN_BINS = 32
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_DIGITS = "12345678"  # where blocks cannot be printed


@click.command("inspect-shard")
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@options_from(InspectConfig)
def inspect_shard(path: Path, **knobs: Any) -> None:
    """Show what a shard (DATASET/shards/NAME) or a whole data set holds.

    For a data set the counts are totals and the codec's error is told over all shards; taps,
    histogram and document are those of its first shard. Each column of the histogram is a power
    of two; a row's fullest is full, and a blank one holds no value.
    """
    config = build(InspectConfig, knobs)
    from dflash_offline.stages.inspect import inspect

    found = inspect(path, config)
    if config.json:
        click.echo(json.dumps(asdict(found)))
        return
    console = Console(width=max(Console().width, _NARROWEST))
    marks = _DIGITS if console.options.ascii_only else _BLOCKS
    console.print(_facts(found), _contract(found), _taps(found))
    if found.shards > 1:
        console.print(_all_taps(found))
    console.print(_histogram(found, marks), _document(found.document))


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
    for name in ("tap", "mean", "std", "max |x|", "error p50", "error p99"):
        table.add_column(name, justify="right")
    for name, tap in zip(found.tap_names, found.taps, strict=True):
        table.add_row(
            name,
            *(f"{tap[key]:.4g}" for key in ("mean", "std", "max_abs")),
            *(f"{tap[key]:.3%}" for key in ("relative_l2_p50", "relative_l2_p99")),
        )
    return table


def _all_taps(found: "Inspection") -> Table:
    worst = max(found.all_taps, key=lambda tap: tap.p99_max)
    table = Table(
        title=f"\ntaps of all {found.shards:,} shards",
        title_justify="left",
        caption=f"The largest error p99, {worst.p99_max:.3%}, is in {worst.worst_shard}.",
        caption_justify="left",
    )
    errors = [f"error {q}\n{of}" for q in ("p50", "p99") for of in ("median", "largest")]
    for name in ("tap", "max |x|", *errors):
        table.add_column(name, justify="right")
    for name, tap in zip(found.tap_names, found.all_taps, strict=True):
        values = (tap.p50_median, tap.p50_max, tap.p99_median, tap.p99_max)
        table.add_row(name, f"{tap.max_abs:.4g}", *(f"{value:.3%}" for value in values))
    return table


def _histogram(found: "Inspection", marks: str) -> Table:
    seen = found.histogram
    axis, drawn = _drawn(seen)
    caption = f"histogram over {seen.tokens:,} of {seen.shard_tokens:,} tokens"
    table = Table(
        title=f"\n|x| of {found.shard}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        min_width=len(caption),
    )
    table.add_column("tap", justify="right")
    table.add_column("zeros", justify="right")
    table.add_column(axis, no_wrap=True)
    for name, zeros, counts in zip(found.tap_names, seen.zeros, drawn, strict=True):
        table.add_row(name, f"{zeros:,}", _bars(counts, marks))
    return table


def _drawn(seen: "Histogram") -> tuple[str, list[list[int]]]:
    """An axis and counts of the highest bins; what is smaller is added to the first of them."""
    lower = max(0, len(seen.exponents) - _SHOWN_BINS)
    drawn = [[sum(counts[: lower + 1]), *counts[lower + 1 :]] for counts in seen.counts]
    first, last = seen.exponents[lower], seen.exponents[-1]
    left = f"<2^{first + 1}" if lower else f"2^{first}"
    right = f"2^{last + 1}"
    return left + right.rjust(max(len(drawn[0]) - len(left), len(right) + 1)), drawn


def _bars(counts: list[int], marks: str) -> str:
    top = max(counts)
    return "".join(marks[-(-n * len(marks) // top) - 1] if n else " " for n in counts)


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
