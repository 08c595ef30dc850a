"""Shards: hidden states of whole documents as arrays that any zarr v3 library can open.

A shard is one zarr group: the codec's planes [N, ...] and input_ids, loss_mask [N], offsets
[documents + 1], document_index, supervised [documents]. Its attributes hold the codec's recipe
and, per tap, mean, std, max |x| and the error measured on what was written.

Every chunk ends in a crc32c that each read checks; a lost file, which zarr would read as fill
values, is caught by its size. A writer holds 16,384 tokens in memory (430 MB of int8 at 5 x 5120)
and, while zarr writes them, two more copies.

Only this file imports zarr. N tokens, L tapped layers, D hidden.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import zarr
from torch import Tensor
from zarr.codecs import Crc32cCodec, ZstdCodec

from dflash_offline.codec import ArraySpec, Codec
from dflash_offline.commit import (
    ShardRecord,
    check_checksums,
    check_sizes,
    damage,
    read_commit,
    seal,
)
from dflash_offline.dataset import SCHEMA_VERSION, Dataset, differences
from dflash_offline.direct import PlaneFiles
from dflash_offline.facts import canonical_hash
from dflash_offline.spec import TargetSpec

if TYPE_CHECKING:  # its tokenizers take seconds to import
    from dflash_offline.conversations import Document

CHUNK_TOKENS = 128  # a read fetches at most one chunk too much at either end of a document
ZARR_SHARD_TOKENS = 16_384  # tokens in one file; a writer holds one
_MOST_ROWS = 1 << 20  # that a reader believes to be in one file: it makes room for them
# What zarr raises about metadata that no writer of this store makes.
_NOT_ZARR = (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError)
# Parts of a contract that give the states their meaning: data sets read together share them.
_MEANING = ("target.content_hash", "target_layer_ids", "layer_convention")
# The arrays beside the codec's planes. zarr leaves chunks out that hold nothing but the fill, so
# the fill is a value that no data takes.
_TOKEN_ARRAYS = {"input_ids": ArraySpec((), "int32", -1), "loss_mask": ArraySpec((), "uint8", 255)}
_DOCUMENT_ARRAYS = {
    "offsets": ArraySpec((), "int64", -1),
    "document_index": ArraySpec((), "int64", -1),
    "supervised": ArraySpec((), "int32", -1),
}


def _create_array(group: Any, name: str, rows: int, spec: ArraySpec) -> Any:
    """Planes have small chunks inside large files; the narrow arrays need no second level."""
    is_plane = bool(spec.shape_per_token)
    chunk_rows = CHUNK_TOKENS if is_plane else max(1, min(rows, 1 << 16))
    return group.create_array(
        name,
        shape=(rows, *spec.shape_per_token),
        dtype=spec.dtype,
        chunks=(chunk_rows, *spec.shape_per_token),
        shards=(ZARR_SHARD_TOKENS, *spec.shape_per_token) if is_plane else None,
        filters=None,
        # crc32c is last: what is read is checked before it is inflated.
        compressors=[*([ZstdCodec(level=1)] if spec.compressed else []), Crc32cCodec()],
        fill_value=spec.fill,
        attributes={"logical_dtype": spec.logical_dtype or spec.dtype},
    )


def _files_of_rows(name: str, array: Any, start: int, stop: int) -> Iterator[str]:
    """The files, as paths in the shard, that hold rows start..stop-1 of an array."""
    step = (array.shards or array.chunks)[0]
    for file in range(start // step, -(-stop // step)):
        yield "/".join([name, "c", str(file), *["0"] * (array.ndim - 1)])


def _plane_files(folder: Path, array: Any, spec: ArraySpec) -> PlaneFiles:
    """A plane's files for use without zarr, as its metadata lays them out."""
    return PlaneFiles(
        folder, spec.shape_per_token, array.dtype, array.chunks[0], array.shards[0], spec.fill
    )


class ShardWriter:
    """Writes one shard into a temporary folder; `commit` makes it part of the data set.

    with ShardWriter(dataset, "shard-000000") as writer:
        writer.append(documents, planes, facts)
        writer.commit()

    Leaving the block without a commit removes the temporary folder.
    """

    def __init__(self, dataset: Dataset, name: str, *, rank: int = 0) -> None:
        dataset.refuse_taken(name)
        self.name = name
        self._dataset, self._rank = dataset, rank
        self._folder = dataset.temporary_folder(rank)
        self._group = zarr.create_group(self._folder, zarr_format=3)
        specs = dataset.codec.arrays()
        self._arrays = {
            plane: _create_array(self._group, plane, 0, spec) for plane, spec in specs.items()
        }
        self._buffers = {
            plane: np.empty((ZARR_SHARD_TOKENS, *spec.shape_per_token), spec.dtype)
            for plane, spec in specs.items()
        }
        self._buffered = self._flushed = 0
        self._documents: list[Document] = []
        self._facts_NL4: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(
        self, documents: Sequence["Document"], planes: Mapping[str, Tensor], facts_NL4: Tensor
    ) -> None:
        """Add documents. `planes` are their encoded states on one token axis, on the CPU.

        `facts_NL4` is `codec.measure` of these states; inf or NaN in it is refused.
        """
        lengths = [len(document.input_ids) for document in documents]
        assert all(len(rows) == sum(lengths) for rows in (*planes.values(), facts_NL4))
        for document, facts in zip(documents, facts_NL4.split(lengths), strict=True):
            if not facts.isfinite().all():
                raise ValueError(
                    f"document {document.index} has hidden states that are inf or NaN; leave it "
                    "out or run the target in another precision (--dtype float32)"
                )
        done = 0
        while done < len(facts_NL4):
            count = min(len(facts_NL4) - done, ZARR_SHARD_TOKENS - self._buffered)
            for plane, buffer in self._buffers.items():
                rows = planes[plane][done : done + count].numpy()
                buffer[self._buffered : self._buffered + count] = rows
            self._buffered += count
            done += count
            if self._buffered == ZARR_SHARD_TOKENS:
                self._flush()
        self._documents += documents
        self._facts_NL4.append(facts_NL4)

    def _flush(self) -> None:
        """Write the buffer as one file. A partial write would read and rewrite all of it."""
        start, stop = self._flushed, self._flushed + self._buffered
        for plane, spec in self._dataset.codec.arrays().items():
            array, rows = self._arrays[plane], self._buffers[plane][: stop - start]
            array.resize((stop, *array.shape[1:]))
            if spec.compressed:
                array[start:stop] = rows
            else:  # zarr's own pipeline takes twice as long
                _plane_files(self._folder / plane, array, spec).write(
                    start // ZARR_SHARD_TOKENS, rows
                )
        self._flushed, self._buffered = stop, 0

    def commit(self) -> ShardRecord:
        """Finish the shard: checksums, COMMIT.json, sync, rename, and last the manifest line."""
        if self._buffered:
            self._flush()
        supervised = self._write_small_arrays()
        counts = {
            "documents": len(self._documents),
            "tokens": self._flushed,
            "supervised": supervised,
        }
        contract, codec = self._dataset.contract, self._dataset.codec
        self._group.attrs.update(
            {
                "schema_version": SCHEMA_VERSION,
                "shard": self.name,
                **counts,
                "codec": codec.recipe(),
                "target_layer_ids": contract["target_layer_ids"],
                "layer_convention": contract["layer_convention"],
                "taps": _tap_statistics(self._facts_NL4),
            }
        )
        facts = {"shard": self.name, "dataset_sha256": self._dataset.sha256, **counts}
        crc32c = seal(self._folder, facts, required=self._expected_files())
        record = ShardRecord(self.name, **counts, commit_crc32c=crc32c)
        self._dataset.publish(self._folder, record, rank=self._rank)
        return record

    def _expected_files(self) -> Iterator[str]:
        """What is in the folder, unless someone removed it while this shard was written."""
        yield "zarr.json"
        for name, array in self._arrays.items():
            yield f"{name}/zarr.json"
            yield from _files_of_rows(name, array, 0, array.shape[0])

    def _write_small_arrays(self) -> int:
        """All arrays but the planes; returns how many tokens are supervised."""
        ids = [document.input_ids.numpy() for document in self._documents]
        masks = [document.loss_mask.numpy() for document in self._documents]
        supervised = [int(mask.sum()) for mask in masks]
        content = {
            "input_ids": np.concatenate([np.empty(0, "int32"), *ids]),
            "loss_mask": np.concatenate([np.empty(0, "bool"), *masks]),
            "offsets": np.cumsum([0, *map(len, ids)]),
            "document_index": np.array([document.index for document in self._documents]),
            "supervised": np.array(supervised),
        }
        for name, spec in (_TOKEN_ARRAYS | _DOCUMENT_ARRAYS).items():
            array = _create_array(self._group, name, len(content[name]), spec)
            array[:] = content[name].astype(spec.dtype)
            self._arrays[name] = array
        return sum(supervised)


def _tap_statistics(facts_NL4: Sequence[Tensor]) -> list[dict[str, float]]:
    """Per tap: mean, std and max |x| over all values; quantiles of the error over tokens."""
    statistics = []
    for facts_N4 in torch.cat(list(facts_NL4)).double().unbind(1) if facts_NL4 else ():
        mean_N, rms_N, top_N, error_N = facts_N4.unbind(1)
        mean = float(mean_N.mean())
        p50, p99 = np.quantile(error_N.numpy(), (0.5, 0.99))
        statistics.append(
            {
                "mean": mean,
                "std": max(float(rms_N.square().mean()) - mean**2, 0.0) ** 0.5,
                "max_abs": float(top_N.max()),
                "relative_l2_p50": float(p50),
                "relative_l2_p99": float(p99),
            }
        )
    return statistics


class ShardReader:
    """One committed shard. Opening reads metadata and three small arrays, no hidden states."""

    def __init__(self, dataset: Dataset, record: ShardRecord) -> None:
        self.path = path = dataset.shard_path(record.name)
        self.record, self.codec = record, dataset.codec
        self.files = read_commit(path, record, dataset.sha256)
        check_sizes(path, self.files)
        check_checksums(path, {n: f for n, f in self.files.items() if n.endswith("zarr.json")})
        try:
            self._group = zarr.open_group(path, mode="r", zarr_format=3)
        except _NOT_ZARR as error:
            raise damage(path, "zarr.json", f"is not a group's ({error})") from None
        self.attributes: dict[str, Any] = dict(self._group.attrs)
        specs = self.codec.arrays() | _TOKEN_ARRAYS | _DOCUMENT_ARRAYS
        self._arrays = {name: self._open_array(name, spec) for name, spec in specs.items()}
        self._direct = {
            name: _plane_files(path / name, self._arrays[name], spec)
            for name, spec in self.codec.arrays().items()
            if not spec.compressed
        }
        self.offsets = self._read("offsets", 0, record.documents + 1)
        self.document_index = self._read("document_index", 0, record.documents)
        self.supervised = self._read("supervised", 0, record.documents).long()
        ends = (int(self.offsets[0]), int(self.offsets[-1]))
        if ends != (0, record.tokens) or (self.offsets.diff() < 1).any():
            raise damage(path, "offsets", f"does not rise from 0 to {record.tokens}")
        if int(self.supervised.sum()) != record.supervised:
            raise damage(path, "supervised", f"is not {record.supervised} in all")

    def _open_array(self, name: str, spec: ArraySpec) -> Any:
        """An array, if its shape and type are what the manifest and the codec say."""
        rows = self.record.documents if name in _DOCUMENT_ARRAYS else self.record.tokens
        shape = (rows + (name == "offsets"), *spec.shape_per_token)
        if f"{name}/zarr.json" not in self.files:
            raise damage(self.path, name, "is missing")
        try:
            array: Any = self._group[name]
            rows_per_file, chunk = (array.shards or array.chunks)[0], array.chunks
        except _NOT_ZARR as error:
            raise damage(self.path, f"{name}/zarr.json", f"is not an array's ({error})") from None
        if array.shape != shape or array.dtype != np.dtype(spec.dtype):
            found = f"{array.dtype} {array.shape}"
            raise damage(self.path, name, f"is {found} instead of {spec.dtype} {shape}")
        is_plane = bool(spec.shape_per_token)
        if (
            chunk[1:] != spec.shape_per_token
            or (array.shards is not None) != is_plane
            or rows_per_file % chunk[0]
            or rows_per_file > _MOST_ROWS
        ):
            raise damage(
                self.path, f"{name}/zarr.json", "is cut into other chunks than a writer's"
            )
        return array

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        array = self._arrays[name]
        # zarr reads a file that is gone as fill values, so look for it before each read.
        for file in _files_of_rows(name, array, start, stop):
            check_sizes(self.path, {file: self.files.get(file, {"bytes": -1})})
        direct = self._direct.get(name)
        try:
            return torch.from_numpy(direct.read(start, stop) if direct else array[start:stop])
        except ValueError as error:
            what = f"is damaged in rows {start} to {stop} ({error})"
            raise damage(self.path, name, what) from None

    @property
    def bytes(self) -> int:
        """All of the shard on disk."""
        commit = (self.path / "COMMIT.json").stat().st_size
        return commit + sum(facts["bytes"] for facts in self.files.values())

    @cached_property
    def input_ids(self) -> Tensor:
        """int32 [N]"""
        return self._read("input_ids", 0, self.record.tokens)

    @cached_property
    def loss_mask(self) -> Tensor:
        """bool [N]"""
        return self._read("loss_mask", 0, self.record.tokens).bool()

    def planes(self, start: int, stop: int) -> dict[str, Tensor]:
        """The codec's planes of tokens start..stop-1; the crc of every chunk read is checked."""
        return {name: self._read(name, start, stop) for name in self.codec.arrays()}


class ShardSet:
    """The committed documents of one or several data sets, read as one list.

    Documents keep the order of the data sets given, of the shards' names and of their places in a
    shard. What is committed later is not seen. Holds no file open.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        paths = tuple(paths)
        _refuse_twice(paths)
        self._datasets = datasets = [Dataset.open(path) for path in paths]
        _refuse_other_meaning(datasets)
        self.contract = datasets[0].contract
        self.target = TargetSpec.from_dict(self.contract["target"])
        self.target_layer_ids = tuple(self.contract["target_layer_ids"])
        self._shards = [(d, record) for d in datasets for record in _records_or_refuse(d)]
        # An open reader takes some 20 KB, or 350 KB once its tokens were asked for.
        self._reader = lru_cache(maxsize=256)(lambda place: ShardReader(*self._shards[place]))
        self._codecs: dict[tuple[Path, str], Codec] = {}
        readers = [self._reader(place) for place in range(len(self._shards))]
        self.lengths = torch.cat([reader.offsets.diff() for reader in readers])
        self.supervised = torch.cat([reader.supervised for reader in readers])
        self._document_index = torch.cat([reader.document_index for reader in readers])
        self._first_document = np.cumsum([0] + [record.documents for _, record in self._shards])

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

    def shard_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and loss mask of one whole shard after the other."""
        for place in range(len(self._shards)):
            reader = self._reader(place)
            yield reader.input_ids, reader.loss_mask

    def taps(self, i: int, *, device: torch.device | str = "cpu") -> Tensor:
        """Hidden states bf16 [T, L, D] of document i; they cross to `device` in coded form."""
        place, span = self._find(i)
        planes = self._reader(place).planes(span.start, span.stop)
        codec = self._codec_on(self._shards[place][0], device)
        return codec.decode({name: plane.to(device) for name, plane in planes.items()})

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
