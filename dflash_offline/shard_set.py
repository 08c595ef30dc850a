"""The committed documents of one or several data sets, read as one list.

Opening costs a fraction of a millisecond a shard and reads no hidden states. Where several ranks
read the same data sets, one of them makes the index and gives it to the others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_offline.codec import Codec
from dflash_offline.commit import ShardRecord
from dflash_offline.dataset import Dataset, differences
from dflash_offline.facts import canonical_hash
from dflash_offline.shards import ShardReader
from dflash_offline.spec import TargetSpec

# Parts of a contract that give the states their meaning: data sets read together share them.
_MEANING = ("target.content_hash", "target_layer_ids", "layer_convention", "loss_mask_rule")
# Parts that only round the states another way.
_ROUNDING = ("dtype", "kernels")


@dataclass(frozen=True)
class ShardIndex:
    """Which documents there are, as the manifests and the shards' small arrays say."""

    data_sets: tuple[str, ...]
    """sha256 of their dataset.json."""
    shards: tuple[tuple[int, ShardRecord], ...]
    """Place of the data set, and the shard's record."""
    lengths: Tensor
    """Tokens of each document, int64."""
    supervised: Tensor
    document_index: Tensor
    """Place of each document in the corpus that it was extracted from."""

    @classmethod
    def read(cls, paths: Iterable[Path]) -> "ShardIndex":
        """Look at every shard once. ValueError names what is damaged."""
        datasets = _open_all(paths)
        shards = [(k, record) for k, d in enumerate(datasets) for record in _records_or_refuse(d)]
        lengths, supervised, document_index = [], [], []
        for k, record in shards:
            reader = ShardReader(datasets[k], record)
            lengths.append(reader.offsets.diff())
            supervised.append(reader.supervised)
            document_index.append(reader.document_index)
        return cls(
            tuple(dataset.sha256 for dataset in datasets),
            tuple(shards),
            torch.cat(lengths),
            torch.cat(supervised),
            torch.cat(document_index),
        )


class ShardSet:
    """Documents in the order of the data sets given, of the shards' names and of their places.

    What is committed later is not seen. Holds no file open. A process that is given one by pickle
    reads the shards without looking at all of them again.
    """

    def __init__(self, paths: Iterable[Path | str], *, index: ShardIndex | None = None) -> None:
        """With an `index` that another process read, the shards are not looked at again."""
        folders = tuple(map(Path, paths))
        self._datasets = datasets = _open_all(folders)
        index = index or ShardIndex.read(folders)
        if index.data_sets != tuple(dataset.sha256 for dataset in datasets):
            raise ValueError(
                f"{' '.join(map(str, folders))} are other data sets than the first rank's; give "
                "every rank the same"
            )
        self.contract = datasets[0].contract
        self.target = TargetSpec.from_dict(self.contract["target"])
        self.target_layer_ids = tuple(self.contract["target_layer_ids"])
        self.lengths, self.supervised = index.lengths, index.supervised
        self._document_index = index.document_index
        self._shards = [(datasets[place], record) for place, record in index.shards]
        self._first_document = np.cumsum([0] + [record.documents for _, record in self._shards])
        self._open_nothing()
        self.codecs, self._codec_numbers = _distinct(datasets, lambda d: d.codec)
        self.final_codecs, self._final_numbers = _distinct(datasets, lambda d: d.final_codec)

    def _open_nothing(self) -> None:
        # An open reader takes some 20 KB, or 350 KB once its tokens were asked for.
        self._reader = lru_cache(maxsize=256)(lambda place: ShardReader(*self._shards[place]))
        self._codecs: dict[tuple[Path, str], Codec] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_reader", "_codecs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_nothing()

    def __len__(self) -> int:
        return len(self.lengths)

    def _find(self, i: int) -> tuple[int, slice]:
        """The place of document i's shard, and its tokens there."""
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        place = int(np.searchsorted(self._first_document, i, side="right")) - 1
        within = i - int(self._first_document[place])
        start, stop = self._reader(place).offsets[within : within + 2].tolist()
        return place, slice(start, stop)

    def tokens(self, i: int) -> tuple[Tensor, Tensor]:
        """Ids int32 [T] and loss mask bool [T] of document i; touches no hidden states."""
        place, span = self._find(i)
        reader = self._reader(place)
        return reader.input_ids[span], reader.loss_mask[span]

    def shard_tokens(self, rank: int = 0, size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and loss mask of one whole shard after the other; of this rank's share of them."""
        for place in range(rank, len(self._shards), size):
            reader = self._reader(place)
            yield reader.input_ids, reader.loss_mask

    def taps(self, i: int, *, device: torch.device | str = "cpu") -> Tensor:
        """Hidden states bf16 [T, L, D] of document i; they cross to `device` in coded form."""
        place, span = self._find(i)
        planes = self._reader(place).planes(span.start, span.stop)
        codec = self._codec_on(self._shards[place][0], device)
        return codec.decode({name: plane.to(device) for name, plane in planes.items()})

    def final_hidden(self, i: int, *, device: torch.device | str = "cpu") -> Tensor:
        """Last hidden state bf16 [T, D] of document i, where --final-hidden stored it.

        `contract["final_hidden"]` says whether the final norm was applied.
        """
        place, span = self._find(i)
        reader = self._reader(place)
        planes = reader.final_planes(span.start, span.stop)
        assert reader.final_codec  # or there would be no planes
        codec = reader.final_codec.to(device)
        return codec.decode({name: plane.to(device) for name, plane in planes.items()})[:, 0]

    def codec_number(self, i: int, *, final: bool = False) -> int:
        """Place of document i's codec in `codecs`, or of its final state's in `final_codecs`."""
        path = self.data_set(i)
        return self._final_numbers[path] if final else self._codec_numbers[path]

    def planes(self, i: int, tokens: int, *, final: bool = False) -> dict[str, Tensor]:
        """The states of document i, of at most its first `tokens` tokens, in coded form."""
        place, span = self._find(i)
        reader, stop = self._reader(place), min(span.stop, span.start + tokens)
        read = reader.final_planes if final else reader.planes
        return read(span.start, stop)

    def final_norm(self) -> str:
        """What the final hidden states are: "before-norm" or "after-norm".

        ValueError if a data set has none or others than the first.
        """
        kinds = {dataset.path: dataset.contract.get("final_hidden") for dataset in self._datasets}
        first = next(iter(kinds))
        for path, kind in kinds.items():
            if kind is None:
                raise ValueError(
                    f"{path} holds no final hidden states; extract with --final-hidden"
                )
            if kind != kinds[first]:
                raise ValueError(
                    f"{path} holds final hidden states {kind}, but {first} {kinds[first]}; "
                    "extract both with the same --final-hidden"
                )
        return str(kinds[first])

    def _codec_on(self, dataset: Dataset, device: torch.device | str) -> Codec:
        key = (dataset.path, str(device))
        if key not in self._codecs:
            self._codecs[key] = dataset.codec.to(device)
        return self._codecs[key]

    def data_set(self, i: int) -> Path:
        """The data set that document i is in."""
        return self._shards[self._find(i)[0]][0].path

    def coverage(self) -> list[tuple[Path, int, int | None]]:
        """Of each data set: its path, its documents here, and those planned, if it says so."""
        stored: Counter[Path] = Counter()
        for dataset, record in self._shards:
            stored[dataset.path] += record.documents
        return [(d.path, stored[d.path], d.contract.get("documents")) for d in self._datasets]

    def other_rounding(self, first: "ShardSet") -> list[tuple[Path, str, Any, Any]]:
        """Data sets whose states were computed another way than the first one of `first`.

        Path, field of the contract, the first one's value and this one's, where both are known.
        """
        return [
            (dataset.path, field, old, new)
            for dataset in self._datasets
            for field, old, new in differences(first.contract, dataset.contract)
            if field.startswith(_ROUNDING) and old is not None and new is not None
        ]

    def data_hashes(self) -> set[str]:
        """sha256 of the files of conversations that the documents came from, as far as known."""
        return {
            sha for dataset in self._datasets for sha in dataset.contract.get("data_sha256", [])
        }

    def identity(self) -> str:
        """Hash of all that gives the content its meaning, and of the shards that are there."""
        contracts = {}
        for path, dataset in {dataset.path: dataset for dataset, _ in self._shards}.items():
            unnamed = {**dataset.contract["target"], "name": ""}
            contracts[path] = canonical_hash({**dataset.contract, "target": unnamed})
        return canonical_hash(
            [[contracts[d.path], record.name, record.commit_crc32c] for d, record in self._shards]
        )

    def document_index(self, i: int) -> int:
        """The document's place in the corpus that it was extracted from."""
        return int(self._document_index[i])


def _distinct(
    datasets: Sequence[Dataset], codec_of: Callable[[Dataset], Codec | None]
) -> tuple[tuple[Codec, ...], dict[Path, int]]:
    """The codecs that differ, and which of them each data set has, if it has one."""
    found: list[Codec] = []
    numbers: dict[Path, int] = {}
    for dataset in datasets:
        codec = codec_of(dataset)
        if codec is None:
            continue
        number = next((n for n, other in enumerate(found) if _is_same(codec, other)), len(found))
        if number == len(found):
            found.append(codec)
        numbers[dataset.path] = number
    return tuple(found), numbers


def _is_same(one: Codec, other: Codec) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    return one.recipe() == other.recipe() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def _open_all(paths: Iterable[Path]) -> list[Dataset]:
    """The data sets, if they may be read together."""
    paths = tuple(paths)
    _refuse_twice(paths)
    datasets = [Dataset.open(path) for path in paths]
    _refuse_other_meaning(datasets)
    return datasets


def _records_or_refuse(dataset: Dataset) -> list[ShardRecord]:
    records = list(dataset.committed().values())
    if not any(record.documents for record in records):
        raise ValueError(f"{dataset.path} holds no committed document yet; run extract first")
    return records


def _refuse_twice(paths: Sequence[Path]) -> None:
    places = [path.resolve() for path in paths]
    for place, path in enumerate(paths):
        if places[place] in places[:place]:
            raise ValueError(f"{path} is given twice, and would count twice; name it once")


def _refuse_other_meaning(datasets: Sequence[Dataset]) -> None:
    first = datasets[0]
    for other in datasets[1:]:
        for field, ours, theirs in differences(first.contract, other.contract):
            if field in _MEANING:
                raise ValueError(
                    f"{first.path} has {field} = {ours!r}, but {other.path} has {theirs!r}; data "
                    "sets read together must come from one target and the same layers"
                )
