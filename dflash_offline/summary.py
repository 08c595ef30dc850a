"""What an extraction tells at its end: of one rank, and of all.

Documents add up: those read are those kept, those dropped for each reason, and the broken ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_offline.dataset import Dataset
from dflash_offline.documents import Corpus
from dflash_offline.quarantine import all_broken
from dflash_offline.shards import ShardReader


def corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """Counts over all files, whatever the number of ranks."""
    counts = dict(vars(corpus.counts))
    read, dropped = counts.pop("documents"), counts.pop("dropped")
    reasons = {f"dropped ({why})": n for why, n in sorted(dropped.items())}
    return {**counts, "documents_read": read, **reasons}


def disk_facts(readers: Sequence[ShardReader]) -> dict[str, Any]:
    tokens = sum(reader.record.tokens for reader in readers)
    size = sum(reader.bytes for reader in readers)
    bf16_size = sum(reader.bf16_bytes for reader in readers)
    errors = [tap["relative_l2_p99"] for reader in readers for tap in reader.statistics]
    return {
        "tokens": tokens,
        "supervised_tokens": sum(reader.record.supervised for reader in readers),
        "bytes_per_token": size / max(tokens, 1),
        "ratio_to_bf16": bf16_size / max(size, 1),
        "relative_error_p99": max(errors, default=0.0),
    }


def total_summary(output: Path, shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of all ranks: of the corpus as rank 0 has it, sums, and what is on the disk."""
    dataset = Dataset.open(output)
    records = dataset.committed().values()
    if not any(record.documents for record in records):
        raise ValueError(all_broken(dataset.contract["documents"]))
    first = shares[0]
    own = {"shards of rank", "shards", "documents", "seconds"}
    summed = ("shards_written_now", "broken_documents", "tokens_per_second")
    return {
        **{name: value for name, value in first.items() if name not in own},
        "shards": len(records),
        "documents": sum(record.documents for record in records),
        **{name: sum(share[name] for share in shares) for name in summed},
        **disk_facts([ShardReader(dataset, record) for record in records]),
    }
