"""Which documents share a shard, a forward pass and the calibration: pure functions of lengths.

Every rank computes the same plan from the same corpus, so nobody has to hand out work, and a rerun
finds the shards that are there under the names it expects.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from dflash_offline.conversations import Document

# Documents are sorted by length inside windows of this size before shards are cut: batches then
# hold about 1 % padding instead of 8 %.
WINDOW_TOKENS = 1_000_000

Plan = Mapping[str, Sequence[Document]]
"""Shard name -> its documents in order."""


def plan_shards(documents: Sequence[Document], shard_tokens: int) -> Plan:
    """Whole documents in shards of at most `shard_tokens`; a longer one has a shard to itself."""
    windows = _cut(documents, WINDOW_TOKENS)
    in_order = [document for window in windows for document in sorted(window, key=len)]
    return {f"shard-{i:06}": shard for i, shard in enumerate(_cut(in_order, shard_tokens))}


def _cut(documents: Sequence[Document], most_tokens: int) -> Iterator[list[Document]]:
    part: list[Document] = []
    tokens = 0
    for document in documents:
        if part and tokens + len(document) > most_tokens:
            yield part
            part, tokens = [], 0
        part.append(document)
        tokens += len(document)
    if part:
        yield part


def cut_batches(documents: Sequence[Document], batch_tokens: int) -> Iterator[list[Document]]:
    """Documents in order, as many at a time as fit `batch_tokens` padded to the longest."""
    batch: list[Document] = []
    longest = 0
    for document in documents:
        longest = max(longest, len(document))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest = [], len(document)
        batch.append(document)
    if batch:
        yield batch


def draw_sample(documents: Sequence[Document], tokens: int, seed: int) -> list[Document]:
    """Random documents with `tokens` tokens together, or all there are; shortest first."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))
    sample: list[Document] = []
    drawn = 0
    for i in order.tolist():
        if drawn >= tokens:
            break
        sample.append(documents[i])
        drawn += len(documents[i])
    return sorted(sample, key=len)
