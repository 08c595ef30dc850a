"""What a shard or a data set holds, as plain facts.

Opens every shard, but reads hidden states of one alone, and of that one at most 8,192 tokens,
spread over it: at 5 x 5120 that takes 1 to 2 s on one core, whatever the size of the data.

N tokens, L tapped layers, D hidden, P bit patterns of a bf16 without its sign.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_offline.chat import load_tokenizer
from dflash_offline.commit import ShardRecord
from dflash_offline.config import InspectConfig
from dflash_offline.dataset import Dataset
from dflash_offline.shards import CHUNK_TOKENS, ShardReader
from dflash_offline.spec import TargetSpec

_BF16_BYTES = 2
_PATTERNS = 1 << 15
_HISTOGRAM_TOKENS = 8192


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
class TapSummary:
    """One tapped layer over all shards. Errors are the shards' own quantiles of relative L2."""

    max_abs: float
    p50_median: float
    p50_max: float
    p99_median: float
    p99_max: float
    worst_shard: str
    """The one of the largest p99."""


@dataclass(frozen=True)
class Histogram:
    """How often |x| of decoded states lies between two powers of two, per tapped layer."""

    tokens: int
    """Seen, of `shard_tokens`: whole chunks, evenly over the shard."""
    shard_tokens: int
    exponents: list[int]
    """Bin e counts 2**e <= |x| < 2**(e + 1)."""
    zeros: list[int]
    """Per tap; they are in no bin."""
    counts: list[list[int]]
    """Per tap and bin."""


@dataclass(frozen=True)
class Inspection:
    """Totals over `shards`, but `taps`, `histogram` and `document` belong to `shard`."""

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
    tap_names: list[str]
    """Of what `taps`, `all_taps` and `histogram` list: layers, and the final hidden state."""
    taps: list[dict[str, float]]
    all_taps: list[TapSummary]
    histogram: Histogram
    document: DocumentView


def inspect(path: Path, config: InspectConfig) -> Inspection:
    """Facts of a shard folder (DATASET/shards/NAME) or, with totals, of a data set."""
    dataset, records = _find(path)
    readers = [ShardReader(dataset, record) for record in records]
    first = readers[0]
    document = _view(dataset, first, config)
    lengths = torch.cat([reader.offsets.diff() for reader in readers])
    tokens = int(lengths.sum())
    supervised = sum(record.supervised for record in records)
    size = sum(reader.bytes for reader in readers)
    payload = sum(_payload_bytes(reader, dataset.plane_specs) for reader in readers)
    states = len(dataset.tap_names) * dataset.codec.width
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
        tap_names=dataset.tap_names,
        taps=first.statistics,
        all_taps=_summarise(readers),
        histogram=_histogram(first),
        document=document,
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


def _payload_bytes(reader: ShardReader, planes: Iterable[str]) -> int:
    chunks = tuple(f"{plane}/c/" for plane in planes)
    return sum(f["bytes"] for name, f in reader.files.items() if name.startswith(chunks))


def _summarise(readers: Sequence[ShardReader]) -> list[TapSummary]:
    """Per tap: what the attributes of all shards say of it."""
    summaries = []
    for taps in zip(*(reader.statistics for reader in readers), strict=True):
        p50s, p99s = ([tap[f"relative_l2_{q}"] for tap in taps] for q in ("p50", "p99"))
        summaries.append(
            TapSummary(
                max_abs=max(tap["max_abs"] for tap in taps),
                p50_median=float(np.median(p50s)),
                p50_max=max(p50s),
                p99_median=float(np.median(p99s)),
                p99_max=max(p99s),
                worst_shard=readers[p99s.index(max(p99s))].record.name,
            )
        )
    return summaries


def _histogram(reader: ShardReader) -> Histogram:
    """Counts each bit pattern, of which there are few, and only then asks for its exponent."""
    spans = _spread(reader.record.tokens)
    seen_LP = torch.stack([_count_patterns(reader.states(*span)) for span in spans]).sum(0)
    values_P = torch.arange(_PATTERNS, dtype=torch.int16).view(torch.bfloat16)
    exponents_P = values_P.float().frexp().exponent - 1  # of a mantissa from 1 to 2
    zeros_L, seen_LP[:, 0] = seen_LP[:, 0].clone(), 0
    found = exponents_P[seen_LP.any(0)].tolist() or [0]
    bins = range(min(found), max(found) + 1)
    counts = [seen_LP[:, exponents_P == e].sum(1) for e in bins]
    return Histogram(
        tokens=sum(stop - start for start, stop in spans),
        shard_tokens=reader.record.tokens,
        exponents=list(bins),
        zeros=zeros_L.tolist(),
        counts=torch.stack(counts, 1).tolist(),
    )


def _spread(tokens: int) -> list[tuple[int, int]]:
    """Start and stop of chunks that lie evenly over a shard; all of them, if they are few."""
    chunks = -(-tokens // CHUNK_TOKENS)
    count = min(chunks, _HISTOGRAM_TOKENS // CHUNK_TOKENS)
    starts = [i * chunks // count * CHUNK_TOKENS for i in range(count)]
    return [(start, min(start + CHUNK_TOKENS, tokens)) for start in starts]


def _count_patterns(taps_NLD: Tensor) -> Tensor:
    """How often each bit pattern of |x| occurs, int64 [L, P]."""
    bits_NLD = taps_NLD.view(torch.int16).int() & (_PATTERNS - 1)
    layers = bits_NLD.unbind(1)
    return torch.stack([layer.flatten().bincount(minlength=_PATTERNS) for layer in layers])


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
