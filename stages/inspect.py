"""What a shard or a data set holds, as plain facts. Reads one document's tokens, no others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline.commit import ShardRecord
from dflash_offline.config import InspectConfig
from dflash_offline.conversations import load_tokenizer
from dflash_offline.dataset import Dataset
from dflash_offline.shards import ShardReader
from dflash_offline.spec import TargetSpec

_BF16_BYTES = 2


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens that are all supervised, or all not. `text` needs a tokenizer."""

    supervised: bool
    input_ids: list[int]
    text: str | None


@dataclass(frozen=True)
class DocumentView:
    """One document of a shard, cut where supervision starts or ends."""

    place: int
    index: int
    tokens: int
    spans: list[Span]


@dataclass(frozen=True)
class Inspection:
    """Counts and bytes are totals over `shards`; `taps` and `document` belong to `shard`."""

    path: str
    schema_version: int
    contract: dict[str, Any]
    provenance: dict[str, Any]
    codec: dict[str, Any]
    shards: int
    documents: int
    tokens: int
    supervised: int
    supervised_share: float
    shortest: int
    median: float
    longest: int
    bytes: int
    bytes_per_token: float
    payload_bytes_per_token: float
    """Of the hidden states alone, their chunks' checksums included."""
    ratio_to_bf16: float
    """bf16 bytes of the hidden states over all bytes on disk."""
    shard: str
    taps: list[dict[str, float]]
    document: DocumentView


def inspect(path: Path, config: InspectConfig) -> Inspection:
    """Facts of a shard folder (DATASET/shards/NAME) or, with totals, of a data set."""
    dataset, records = _find(path)
    readers = [ShardReader(dataset, record) for record in records]
    first = readers[0]
    lengths = torch.cat([reader.offsets.diff() for reader in readers])
    tokens = int(lengths.sum())
    supervised = sum(record.supervised for record in records)
    size = sum(reader.bytes for reader in readers)
    payload = sum(_payload_bytes(reader) for reader in readers)
    states = dataset.codec.layers * dataset.codec.width
    return Inspection(
        path=str(path),
        schema_version=first.attributes["schema_version"],
        contract=dataset.contract,
        provenance=dataset.provenance,
        codec=dataset.codec.recipe(),
        shards=len(records),
        documents=len(lengths),
        tokens=tokens,
        supervised=supervised,
        supervised_share=supervised / tokens,
        shortest=int(lengths.min()),
        median=float(np.median(lengths.numpy())),
        longest=int(lengths.max()),
        bytes=size,
        bytes_per_token=size / tokens,
        payload_bytes_per_token=payload / tokens,
        ratio_to_bf16=states * _BF16_BYTES * tokens / size,
        shard=first.record.name,
        taps=first.attributes["taps"],
        document=_view(dataset, first, config),
    )


def _find(path: Path) -> tuple[Dataset, list[ShardRecord]]:
    """The data set and those of its shards that `path` means, the ones with documents."""
    if Dataset.exists(path):
        dataset = Dataset.open(path)
        records = list(dataset.committed().values())
    elif shard := next((p for p in (path.resolve(), path.absolute()) if _is_shard(p)), None):
        dataset = Dataset.open(shard.parent.parent)
        records = [r for r in dataset.committed().values() if r.name == shard.name]
        if not records:
            raise ValueError(f"{path} was never committed: no manifest of its data set names it")
    else:
        raise FileNotFoundError(
            f"{path} is neither a data set (with a dataset.json) nor a shard (DATASET/shards/NAME)"
        )
    filled = [record for record in records if record.documents]
    if not filled:
        raise ValueError(f"{path} holds no committed document; run extract first")
    return dataset, filled


def _is_shard(path: Path) -> bool:
    """Asked of a path with its links and without: shards/ and shards may be links themselves."""
    return path.is_dir() and path.parent.name == "shards" and Dataset.exists(path.parent.parent)


def _payload_bytes(reader: ShardReader) -> int:
    chunks = tuple(f"{plane}/c/" for plane in reader.codec.arrays())
    return sum(f["bytes"] for name, f in reader.files.items() if name.startswith(chunks))


def _view(dataset: Dataset, reader: ShardReader, config: InspectConfig) -> DocumentView:
    place = config.document
    if place >= reader.record.documents:
        raise ValueError(
            f"--document {place}: shard {reader.record.name} holds documents 0 to "
            f"{reader.record.documents - 1}"
        )
    start, stop = reader.offsets[place : place + 2].tolist()
    ids, mask = reader.input_ids[start:stop], reader.loss_mask[start:stop]
    tokenizer = _tokenizer(dataset, config.target) if config.target else None
    edges = (mask[1:] != mask[:-1]).nonzero().flatten() + 1
    spans = [
        Span(bool(part_mask[0]), part_ids.tolist(), tokenizer and tokenizer.decode(part_ids))
        for part_ids, part_mask in zip(
            ids.tensor_split(edges), mask.tensor_split(edges), strict=True
        )
    ]
    return DocumentView(place, int(reader.document_index[place]), stop - start, spans)


def _tokenizer(dataset: Dataset, folder: Path) -> Any:
    """The tokenizer in `folder`, if it is the one that the documents were made with."""
    target = TargetSpec.read(folder)
    stored = dataset.contract["target"]["tokenizer_hash"]
    if target.tokenizer_hash != stored:
        raise ValueError(
            f"--target {folder} has another tokenizer ({target.tokenizer_hash[:12]}) than the "
            f"target that was extracted ({stored[:12]})"
        )
    return load_tokenizer(folder)
