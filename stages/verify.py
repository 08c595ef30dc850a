"""Reads all of a data set and believes nothing: files, checksums, counts and decoded states.

Opening a data set already checks dataset.json, the calibration and every manifest line. What is
found beyond that belongs to one shard each, so a bad shard can be set aside and written again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dflash_offline.codec import Codec
from dflash_offline.commit import ShardRecord, check_shard
from dflash_offline.config import VerifyConfig
from dflash_offline.dataset import Dataset
from dflash_offline.metrics import progress
from dflash_offline.shards import ShardReader
from dflash_offline.spec import TargetSpec

_TOKENS_AT_ONCE = 4096  # decoded together: 210 MB of bf16 at 5 x 5120


@dataclass
class Verdict:
    """What a full check found; `bad` is empty for a data set that can be trusted."""

    path: str
    shards: int = 0
    documents: int = 0
    tokens: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    """Shard -> the first thing that is wrong with it."""
    notes: list[str] = field(default_factory=list)
    """What is unfinished or left over, and harmless."""
    set_aside: dict[str, str] = field(default_factory=dict)
    """With --repair: bad shard -> where it went."""


def verify(path: Path, config: VerifyConfig) -> Verdict:
    """Check every shard that the manifests name. ValueError if the data set itself is damaged."""
    dataset = Dataset.open(path)
    records = list(dataset.committed().values())
    verdict = Verdict(str(path), len(records))
    verdict.notes += _leftovers(dataset, records)
    seen: dict[int, str] = {}  # document -> shard
    with progress("verifying", total=sum(r.tokens for r in records), unit="tok") as bar:
        for record in records:
            try:
                _check(dataset, record, seen)
                verdict.documents += record.documents
                verdict.tokens += record.tokens
            except (ValueError, OSError) as error:
                verdict.bad[record.name] = str(error)
            bar.advance(record.tokens)
    verdict.notes += _holes(dataset, records, verdict)
    if config.repair:
        for name in verdict.bad:
            verdict.set_aside[name] = str(dataset.set_aside(name))
    return verdict


def _check(dataset: Dataset, record: ShardRecord, seen: dict[int, str]) -> None:
    """ValueError says what is wrong with a shard. Documents of sound shards go into `seen`."""
    reader = ShardReader(dataset, record)
    reader.check_layout()  # before files are read that claim to be larger than they can be
    check_shard(dataset.shard_path(record.name), record, dataset.sha256)
    documents = reader.document_index.tolist()
    for document in documents:
        if document in seen:
            raise ValueError(f"document {document} is also in {seen[document]}")
    if len(set(documents)) < len(documents):
        raise ValueError("a document is in it twice")
    target = TargetSpec.from_dict(dataset.contract["target"])
    _check_tokens(reader, target.vocab_size)
    for start in range(0, record.tokens, _TOKENS_AT_ONCE):
        stop = min(start + _TOKENS_AT_ONCE, record.tokens)
        _check_states(reader, start, stop)
    seen.update(dict.fromkeys(documents, record.name))


def _check_tokens(reader: ShardReader, vocab_size: int) -> None:
    ids, mask = reader.input_ids, reader.loss_mask
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise ValueError(f"input_ids reach outside the target's {vocab_size} tokens")
    by_document = torch.tensor([int(part.sum()) for part in _split(mask, reader)])
    if not torch.equal(by_document, reader.supervised):
        raise ValueError("supervised does not count what loss_mask marks")


def _split(tokens: Tensor, reader: ShardReader) -> Iterator[Tensor]:
    yield from tokens.split(reader.offsets.diff().tolist())


def _check_states(reader: ShardReader, start: int, stop: int) -> None:
    _check_planes(reader.codec, reader.planes(start, stop), f"tokens {start} to {stop}")
    if reader.final_codec:
        planes = reader.final_planes(start, stop)
        _check_planes(reader.final_codec, planes, f"final, tokens {start} to {stop}")


def _check_planes(codec: Codec, planes: Mapping[str, Tensor], what: str) -> None:
    for name, spec in codec.arrays().items():
        if spec.fill_is_illegal and bool((planes[name] == spec.fill).any()):
            raise ValueError(f"{name} holds fill values ({what}), so parts were never written")
    if not bool(codec.decode(planes).isfinite().all()):
        raise ValueError(f"hidden states ({what}) are inf or NaN")


def _leftovers(dataset: Dataset, records: list[ShardRecord]) -> Iterator[str]:
    named = {record.name for record in records}
    for folder in sorted((dataset.path / "shards").glob("*")):
        if folder.name.startswith(".tmp-"):
            yield f"{folder.name} is a shard being written, or left by a killed run"
        elif folder.name not in named:
            yield f"{folder.name} is in no manifest; extract adopts it or writes it again"


def _holes(dataset: Dataset, records: list[ShardRecord], verdict: Verdict) -> Iterator[str]:
    planned = dataset.contract.get("documents")
    stored = sum(record.documents for record in records)
    if planned is not None and stored < planned and not verdict.bad:
        yield (
            f"{planned - stored:,} of {planned:,} documents are not here: extract is unfinished, "
            "or left them out as broken"
        )
