"""Rows: documents packed side by side into a fixed number of context tokens.

The plan of an epoch is a pure function of (document lengths, row size, seed, epoch), so every rank
makes the same one and the position in the data is a single integer, the number of rows taken.
Each document goes to the row that it fills best among a few open ones, which leaves 1-3 % of the
rows empty; documents longer than a row are cut. A million documents take 2.5 s.

Letters: S row positions.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.shard_set import ShardSet

_OPEN_ROWS = 16


@dataclass(frozen=True, eq=False)
class Row:
    """One packed row on the CPU, without its hidden states."""

    input_ids_S: Tensor
    """int64; 0 in the padding."""
    document_ids_S: Tensor
    """int64, 0, 1, ... in the row; -1 in the padding."""
    position_ids_S: Tensor
    """int64, restarting with each document."""
    loss_mask_S: Tensor
    """bool: tokens the target produced."""


def plan_rows(
    lengths: Sequence[int], row_tokens: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Documents of each row of an epoch, every document once."""
    order = list(range(len(lengths)))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    rows: list[list[int]] = []
    free: list[int] = []  # tokens in each open row, ascending
    open_rows: list[list[int]] = []
    for document in order:
        length = min(lengths[document], row_tokens)
        place = bisect_left(free, length)
        if place < len(free):
            left, documents = free.pop(place) - length, open_rows.pop(place)
            documents.append(document)
        else:
            left, documents = row_tokens - length, [document]
            if len(free) == _OPEN_ROWS:
                del free[0]
                rows.append(open_rows.pop(0))
        place = bisect_left(free, left)
        free.insert(place, left)
        open_rows.insert(place, documents)
    return rows + open_rows


class RowStream:
    """The endless sequence of rows, epoch after epoch: `stream[n]` is row n's documents.

    Plans an epoch when it is first asked for, and holds one.
    """

    def __init__(self, lengths: Sequence[int], row_tokens: int, *, seed: int) -> None:
        self._lengths, self._row_tokens, self._seed = lengths, row_tokens, seed
        self._planned, self._rows = -1, list[list[int]]()
        self._starts = [0]  # first row of each epoch that is known, and of the one after them

    def __getitem__(self, n: int) -> list[int]:
        epoch = self._epoch_of(n)
        self._plan(epoch)
        return self._rows[n - self._starts[epoch]]

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch; later ones differ by a few."""
        return self._starts[self._epoch_of(0) + 1]

    def epoch(self, n: int) -> float:
        """How many epochs are done when row n is next."""
        epoch = self._epoch_of(n)
        start, stop = self._starts[epoch : epoch + 2]
        return epoch + (n - start) / (stop - start)

    def _epoch_of(self, n: int) -> int:
        while n >= self._starts[-1]:
            self._plan(len(self._starts) - 1)
            self._starts.append(self._starts[-1] + len(self._rows))
        return bisect_right(self._starts, n) - 1

    def _plan(self, epoch: int) -> None:
        if epoch != self._planned:
            self._rows = plan_rows(self._lengths, self._row_tokens, seed=self._seed, epoch=epoch)
            self._planned = epoch


def pack_row(documents: Sequence[tuple[Tensor, Tensor]], row_tokens: int) -> Row:
    """(input_ids, loss_mask) of each document, side by side in `row_tokens` positions."""
    input_ids = torch.zeros(row_tokens, dtype=torch.long)
    document_ids = torch.full((row_tokens,), -1, dtype=torch.long)
    position_ids = torch.zeros(row_tokens, dtype=torch.long)
    loss_mask = torch.zeros(row_tokens, dtype=torch.bool)
    start = 0
    for number, (ids, mask) in enumerate(documents):
        stop = min(start + len(ids), row_tokens)
        input_ids[start:stop] = ids[: stop - start]
        loss_mask[start:stop] = mask[: stop - start]
        document_ids[start:stop] = number
        position_ids[start:stop] = torch.arange(stop - start)
        start = stop
    return Row(input_ids, document_ids, position_ids, loss_mask)


def load_row(shards: ShardSet, documents: Sequence[int], row_tokens: int) -> Row:
    return pack_row([shards.tokens(i) for i in documents], row_tokens)
