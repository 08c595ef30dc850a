"""Rows: documents packed side by side into a fixed number of context tokens.

The plan of an epoch is a pure function of (document lengths, row size, seed, epoch), so every rank
makes the same one and the position in the data is a single integer, the number of rows taken.
First-fit over a few open rows leaves 1-3 % of a row empty; documents longer than a row are cut.

Letters: S row positions, L tapped layers, D hidden width.
"""

import random
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
    open_rows: list[tuple[int, list[int]]] = []  # free tokens, documents
    for document in order:
        length = min(lengths[document], row_tokens)
        place = next((i for i, (free, _) in enumerate(open_rows) if free >= length), None)
        if place is None:
            if len(open_rows) == _OPEN_ROWS:
                fullest = min(range(_OPEN_ROWS), key=lambda i: open_rows[i][0])
                rows.append(open_rows.pop(fullest)[1])
            open_rows.append((row_tokens, []))
            place = len(open_rows) - 1
        free, documents = open_rows[place]
        documents.append(document)
        open_rows[place] = (free - length, documents)
    return rows + [documents for _, documents in open_rows]


class RowStream:
    """The endless sequence of rows, epoch after epoch: `stream[n]` is row n's documents."""

    def __init__(self, lengths: Sequence[int], row_tokens: int, *, seed: int) -> None:
        self._lengths, self._row_tokens, self._seed = lengths, row_tokens, seed
        self._epoch, self._start = 0, 0
        self._rows = self._plan(0)

    def _plan(self, epoch: int) -> list[list[int]]:
        return plan_rows(self._lengths, self._row_tokens, seed=self._seed, epoch=epoch)

    def __getitem__(self, n: int) -> list[int]:
        if n < self._start:
            self._epoch, self._start, self._rows = 0, 0, self._plan(0)
        while n >= self._start + len(self._rows):
            self._start += len(self._rows)
            self._epoch += 1
            self._rows = self._plan(self._epoch)
        return self._rows[n - self._start]

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the epoch that was asked for last."""
        return len(self._rows)

    def epoch(self, n: int) -> float:
        """How many epochs are done when row n is next."""
        self[n]
        return self._epoch + (n - self._start) / len(self._rows)


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


def load_taps(
    shards: ShardSet, documents: Sequence[int], row_tokens: int, device: torch.device
) -> Tensor:
    """bf16 [S, L * D] on `device`: the row's hidden states, decoded there; 0 in the padding."""
    layers, width = len(shards.target_layer_ids), shards.target.hidden_size
    taps_SLD = torch.zeros(row_tokens, layers, width, dtype=torch.bfloat16, device=device)
    start = 0
    for document in documents:
        states = shards.taps(document, device=device)[: row_tokens - start]
        taps_SLD[start : start + len(states)] = states
        start += len(states)
    return taps_SLD.flatten(1)
