"""Which documents share a shard, a forward pass and the calibration: pure functions of lengths.

Every rank computes the same plan from the same corpus, so nobody has to hand out work, and a rerun
finds the shards that are there under the names it expects.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from dflash_offline.documents import Document

T = TypeVar("T")

# Documents are dealt to rows inside windows of this size: rows are full but for 1 %, and what
# is near in the corpus stays near in the store.
WINDOW_TOKENS = 1_000_000

Row = Sequence[Document]
"""Documents that the target runs over at once."""
Plan = Mapping[str, Sequence[Row]]
"""Shard name -> its rows in order."""


def plan_shards(documents: Sequence[Document], *, shard_tokens: int, row_tokens: int) -> Plan:
    """Rows of whole documents in shards of at most `shard_tokens`.

    A document that is longer than a row or a shard has one to itself.
    """
    windows = _cut(documents, WINDOW_TOKENS, len)
    row_tokens = min(row_tokens, shard_tokens)
    rows = [row for window in windows for row in pack_rows(window, row_tokens)]
    shards = _cut(rows, shard_tokens, row_length)
    return {f"shard-{i:06}": shard for i, shard in enumerate(shards)}


def row_length(row: Row) -> int:
    """Tokens of its documents."""
    return sum(map(len, row))


def pack_rows(documents: Sequence[Document], row_tokens: int) -> Sequence[Row]:
    """Documents in rows of at most `row_tokens`: the longest first, each where it fits best."""
    rows: list[list[Document]] = []
    space: list[tuple[int, int]] = []  # of each row that has some: tokens left, place in `rows`
    for document in sorted(documents, key=len, reverse=True):
        fit = bisect_left(space, (len(document), 0))
        left, place = space.pop(fit) if fit < len(space) else (row_tokens, len(rows))
        if place == len(rows):
            rows.append([])
        rows[place].append(document)
        if left > len(document):
            insort(space, (left - len(document), place))
    return rows


def cut_row(row: Row, tokens: int) -> list[Row]:
    """The row in consecutive parts of at most so many tokens, or of one document."""
    return list(_cut(row, tokens, len))


def _cut(items: Sequence[T], most_tokens: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    part: list[T] = []
    tokens = 0
    for item in items:
        if part and tokens + size(item) > most_tokens:
            yield part
            part, tokens = [], 0
        part.append(item)
        tokens += size(item)
    if part:
        yield part


def draw_sample(documents: Sequence[Document], tokens: int, seed: int) -> list[Document]:
    """Random documents with `tokens` tokens together, or all there are."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))
    sample: list[Document] = []
    drawn = 0
    for i in order.tolist():
        if drawn >= tokens:
            break
        sample.append(documents[i])
        drawn += len(documents[i])
    return sample
