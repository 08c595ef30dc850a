"""Shards: hidden states of whole documents as arrays that any zarr v3 library can open.

A shard is one zarr group: the codec's planes [N, ...] and input_ids, loss_mask [N], offsets
[documents + 1], document_index, supervised [documents]. Its attributes hold the codec's recipe
and, per tap, mean, std, max |x| and the error measured on what was written.

Where the data set keeps the target's last hidden state too, its planes stand beside the others
under names that start with final_.

Every chunk ends in a crc32c, which each read checks and compares with the one in COMMIT.json; a
lost file, which zarr would read as fill values, is caught by its size. Opening a shard takes
COMMIT.json and three small arrays; zarr comes in where planes are read. A writer holds one chunk
of each plane in memory.

Only this file imports zarr. N tokens, L tapped layers, D hidden.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from zarr.codecs import Crc32cCodec, ZstdCodec

from dflash_offline.codec import ArraySpec
from dflash_offline.commit import (
    CRC_BYTES,
    Files,
    ShardRecord,
    check_checksums,
    check_sizes,
    chunk_crcs,
    damage,
    read_checked,
    read_commit,
    seal,
)
from dflash_offline.dataset import FINAL_PREFIX, SCHEMA_VERSION, Dataset
from dflash_offline.direct import PlaneFiles, PlaneWriter
from dflash_offline.files import sync

if TYPE_CHECKING:  # its tokenizers take seconds to import
    from dflash_offline.documents import Document

_ZSTD_LEVEL = 1  # the exponents' entropy is reached at once; higher levels only take time
CHUNK_TOKENS = 128  # a read fetches at most one chunk too much at either end of a document
ZARR_SHARD_TOKENS = 16_384  # tokens in one file
_LARGEST_METADATA = 1 << 20
# Of what is measured per tap, and kept in the attributes.
_STATISTICS = ("mean", "std", "max_abs", "relative_l2_p50", "relative_l2_p99")
_MOST_ROWS = 1 << 20  # that a reader believes to be in one file: it makes room for them
# What zarr raises about metadata that no writer of this store makes.
_NOT_ZARR = (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError)
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
    chunk_rows = CHUNK_TOKENS if is_plane else _narrow_chunk(rows)
    return group.create_array(
        name,
        shape=(rows, *spec.shape_per_token),
        dtype=spec.dtype,
        chunks=(chunk_rows, *spec.shape_per_token),
        shards=(ZARR_SHARD_TOKENS, *spec.shape_per_token) if is_plane else None,
        filters=None,
        # crc32c is last: what is read is checked before it is inflated.
        compressors=[*([ZstdCodec(level=_ZSTD_LEVEL)] if spec.compressed else []), Crc32cCodec()],
        fill_value=spec.fill,
        attributes={"logical_dtype": spec.logical_dtype or spec.dtype},
    )


def _narrow_chunk(rows: int) -> int:
    """Rows in one file of an array that is no plane."""
    return max(1, min(rows, 1 << 16))


def _plane_files(folder: Path, spec: ArraySpec, chunk_rows: int, file_rows: int) -> PlaneFiles:
    return PlaneFiles(
        folder,
        spec.shape_per_token,
        np.dtype(spec.dtype),
        chunk_rows,
        file_rows,
        spec.fill,
        _ZSTD_LEVEL if spec.compressed else None,
    )


def _files_of_rows(name: str, array: Any, start: int, stop: int) -> Iterator[str]:
    """The files, as paths in the shard, that hold rows start..stop-1 of an array."""
    step = (array.shards or array.chunks)[0]
    for file in range(start // step, -(-stop // step)):
        yield "/".join([name, "c", str(file), *["0"] * (array.ndim - 1)])


class ShardWriter:
    """Writes one shard into a temporary folder; `commit` makes it part of the data set.

    with ShardWriter(dataset, "shard-000000") as writer:
        writer.append(documents, planes, facts)
        writer.commit()

    Leaving the block without a commit removes the temporary folder.
    """

    def __init__(
        self,
        dataset: Dataset,
        name: str,
        *,
        rank: int = 0,
        largest_error: float = math.inf,
    ) -> None:
        dataset.refuse_taken(name)
        self.name = name
        self._dataset, self._rank, self._largest_error = dataset, rank, largest_error
        self._folder = dataset.temporary_folder(rank)
        self._folder.mkdir()
        self._planes = {
            plane: PlaneWriter(
                _plane_files(self._folder / plane, spec, CHUNK_TOKENS, ZARR_SHARD_TOKENS),
                on_file=self._force_to_disk,
            )
            for plane, spec in dataset.plane_specs.items()
        }
        # Files go to the disk while the next ones are filled.
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._synced: list[Future[None]] = []
        self._files: Files = {}
        self._arrays: dict[str, Any] = {}
        self._documents: list[Document] = []
        self._facts_NL4: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._planes.values():
            writer.abandon()
        self._syncing.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(
        self, documents: Sequence["Document"], planes: Mapping[str, Tensor], facts_NL4: Tensor
    ) -> None:
        """Add documents. `planes` are their encoded states on one token axis, on the CPU.

        `facts_NL4` is `codec.measure` of these states, the final hidden state's after the taps';
        inf or NaN in it is refused.
        """
        lengths = [len(document.input_ids) for document in documents]
        assert all(len(rows) == sum(lengths) for rows in (*planes.values(), facts_NL4))
        for document, facts in zip(documents, facts_NL4.split(lengths), strict=True):
            if not facts.isfinite().all():
                raise ValueError(
                    f"document {document.index} has hidden states that are inf or NaN; leave it "
                    "out or run the target in another precision (--dtype float32)"
                )
        for plane, writer in self._planes.items():
            writer.append(planes[plane].numpy())
        self._documents += documents
        self._facts_NL4.append(facts_NL4)

    def _force_to_disk(self, path: Path, facts: dict[str, Any]) -> None:
        self._files[path.relative_to(self._folder).as_posix()] = facts
        self._synced.append(self._syncing.submit(sync, path))

    def commit(self) -> ShardRecord:
        """Finish the shard: checksums, COMMIT.json, sync, rename, and last the manifest line.

        ValueError, and no shard, if a tap's error is above `largest_error`.
        """
        statistics = _tap_statistics(self._facts_NL4)
        self._refuse_error(statistics)
        for writer in self._planes.values():
            writer.close()
        group = zarr.create_group(self._folder, zarr_format=3)
        tokens = sum(len(document.input_ids) for document in self._documents)
        for plane, spec in self._dataset.plane_specs.items():
            self._arrays[plane] = _create_array(group, plane, tokens, spec)
        supervised = self._write_small_arrays(group)
        counts = {"documents": len(self._documents), "tokens": tokens, "supervised": supervised}
        group.attrs.update({**self._describe(statistics), **counts})
        for synced in self._synced:
            synced.result()
        facts = {"shard": self.name, "dataset_sha256": self._dataset.sha256, **counts}
        crc32c = seal(self._folder, facts, known=self._files, required=self._expected_files())
        record = ShardRecord(self.name, **counts, commit_crc32c=crc32c)
        self._dataset.publish(self._folder, record, rank=self._rank)
        return record

    def _refuse_error(self, statistics: Sequence[Mapping[str, float]]) -> None:
        # No statistics if all documents were broken.
        for name, tap in zip(self._dataset.tap_names, statistics, strict=False):
            if tap["relative_l2_p99"] > self._largest_error:
                raise ValueError(
                    f"shard {self.name}: its codec stores {name} with a relative error of "
                    f"{tap['relative_l2_p99']:.1%} (p99 over tokens), above "
                    f"{self._largest_error:.1%}; use lossless (--codec, --final-codec), or raise "
                    "--max-codec-error"
                )

    def _describe(self, statistics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """The attributes that make the shard readable without dataset.json, but for tensors."""
        dataset = self._dataset
        taps = dataset.codec.layers
        facts = {
            "schema_version": SCHEMA_VERSION,
            "shard": self.name,
            "codec": dataset.codec.recipe(),
            "target_layer_ids": dataset.contract["target_layer_ids"],
            "layer_convention": dataset.contract["layer_convention"],
            "taps": statistics[:taps],
        }
        if dataset.final_codec:
            facts["final_hidden"] = {
                "norm": dataset.contract["final_hidden"],
                "codec": dataset.final_codec.recipe(),
                "statistics": statistics[taps:],
            }
        return facts

    def _expected_files(self) -> Iterator[str]:
        """What is in the folder, unless someone removed it while this shard was written."""
        yield "zarr.json"
        for name, array in self._arrays.items():
            yield f"{name}/zarr.json"
            yield from _files_of_rows(name, array, 0, array.shape[0])

    def _write_small_arrays(self, group: Any) -> int:
        """All arrays but the planes'; returns how many tokens are supervised."""
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
            array = _create_array(group, name, len(content[name]), spec)
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
    """One committed shard. Opening reads COMMIT.json and three small arrays, without zarr."""

    def __init__(self, dataset: Dataset, record: ShardRecord) -> None:
        self.path = path = dataset.shard_path(record.name)
        self.record, self.codec, self.final_codec = record, dataset.codec, dataset.final_codec
        self._specs = dataset.plane_specs
        self.files = read_commit(path, record, dataset.sha256)
        check_sizes(path, self.files)
        self.offsets = self._read_narrow("offsets")
        self.document_index = self._read_narrow("document_index")
        self.supervised = self._read_narrow("supervised").long()
        ends = (int(self.offsets[0]), int(self.offsets[-1]))
        if ends != (0, record.tokens) or (self.offsets.diff() < 1).any():
            raise damage(path, "offsets", f"does not rise from 0 to {record.tokens}")
        if int(self.supervised.sum()) != record.supervised:
            raise damage(path, "supervised", f"is not {record.supervised} in all")

    def _read_narrow(self, name: str) -> Tensor:
        """All of an array that is no plane, from its files: values and a crc32c of them."""
        dtype = np.dtype((_TOKEN_ARRAYS | _DOCUMENT_ARRAYS)[name].dtype)
        rows = self._rows(name)
        step = _narrow_chunk(rows)
        parts = [np.empty(0, dtype)]
        for number in range(-(-rows // step)):
            file = f"{name}/c/{number}"
            size = self.files.get(file, {"bytes": 0})["bytes"]
            if size != step * dtype.itemsize + CRC_BYTES:  # before so much is read
                raise damage(self.path, file, f"does not hold {step} values of {dtype}")
            content = read_checked(self.path, file, self.files)
            parts.append(np.frombuffer(content, dtype, count=step))
        return torch.from_numpy(np.concatenate(parts)[:rows])

    def _rows(self, name: str) -> int:
        rows = self.record.documents if name in _DOCUMENT_ARRAYS else self.record.tokens
        return rows + (name == "offsets")

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """What the shard says of itself: codec, layers, and per tap its range and its error."""
        try:
            attributes = json.loads(read_checked(self.path, "zarr.json", self.files))["attributes"]
        except _NOT_ZARR as error:
            raise damage(self.path, "zarr.json", f"is not a group's ({error})") from None
        if not isinstance(attributes, dict):
            raise damage(self.path, "zarr.json", "has no attributes")
        return attributes

    @property
    def statistics(self) -> list[dict[str, float]]:
        """Per tap, and of the final hidden state after them: range and error."""
        if not self.record.tokens:  # all its documents were broken
            return []
        states = self.codec.layers + (self.final_codec.layers if self.final_codec else 0)
        try:
            final = self.attributes.get("final_hidden", {"statistics": []})
            found = [*self.attributes["taps"], *final["statistics"]]
            sound = len(found) == states and all(
                math.isfinite(tap[key]) for tap in found for key in _STATISTICS
            )
        except (TypeError, KeyError, AttributeError, IndexError):
            sound = False
        if not sound:
            raise damage(self.path, "zarr.json", f"has no statistics of {states} taps")
        return found

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        """The arrays in zarr's hands, once their metadata is what a writer's is."""
        metadata = {n: facts for n, facts in self.files.items() if n.endswith("zarr.json")}
        for name, facts in metadata.items():
            if facts["bytes"] > _LARGEST_METADATA:
                raise damage(self.path, name, f"has {facts['bytes']:,} bytes, too many")
        check_checksums(self.path, metadata)
        try:
            group = zarr.open_group(self.path, mode="r", zarr_format=3)
        except _NOT_ZARR as error:
            raise damage(self.path, "zarr.json", f"is not a group's ({error})") from None
        specs = self._specs | _TOKEN_ARRAYS | _DOCUMENT_ARRAYS
        return {name: self._open_array(group, name, spec) for name, spec in specs.items()}

    @cached_property
    def _direct(self) -> dict[str, PlaneFiles]:
        """The planes' files, for use without zarr."""
        arrays = self._arrays
        return {
            name: _plane_files(
                self.path / name, spec, arrays[name].chunks[0], arrays[name].shards[0]
            )
            for name, spec in self._specs.items()
        }

    def check_layout(self) -> None:
        """ValueError unless COMMIT.json lists nothing but a shard's files, of plausible sizes.

        Reads metadata only: what claims to be larger than its rows is not read.
        """
        narrow = _TOKEN_ARRAYS | _DOCUMENT_ARRAYS
        metadata = ("zarr.json", *(f"{name}/zarr.json" for name in (*narrow, *self._specs)))
        bounds = dict.fromkeys(metadata, (1, _LARGEST_METADATA))
        for name, spec in narrow.items():
            step = _narrow_chunk(self._rows(name))
            size = step * np.dtype(spec.dtype).itemsize + CRC_BYTES
            for number in range(-(-self._rows(name) // step)):
                bounds[f"{name}/c/{number}"] = (size, size)
        for plane in self._direct.values():
            for path, limits in plane.size_bounds(self.record.tokens).items():
                bounds[path.relative_to(self.path).as_posix()] = limits
        for name, facts in self.files.items():
            if name not in bounds:
                raise damage(self.path, name, "is no file of a shard")
            low, high = bounds[name]
            if not low <= facts["bytes"] <= high:
                raise damage(self.path, name, f"has {facts['bytes']:,} bytes, too many or too few")

    def _open_array(self, group: Any, name: str, spec: ArraySpec) -> Any:
        """An array, if its shape and type are what the manifest and the codec say."""
        shape = (self._rows(name), *spec.shape_per_token)
        if f"{name}/zarr.json" not in self.files:
            raise damage(self.path, name, "is missing")
        try:
            array: Any = group[name]
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
        """Rows of a plane. A file's size is compared each time: it may have changed since."""
        for file in _files_of_rows(name, self._arrays[name], start, stop):
            check_sizes(self.path, {file: self.files.get(file, {"bytes": -1})})
        try:
            return torch.from_numpy(self._direct[name].read(start, stop, self._chunk_crcs))
        except ValueError as error:
            what = f"is damaged in rows {start} to {stop} ({error})"
            raise damage(self.path, name, what) from None

    def _chunk_crcs(self, path: Path) -> NDArray[Any] | None:
        return chunk_crcs(self.files[path.relative_to(self.path).as_posix()])

    @property
    def bytes(self) -> int:
        """All of the shard on disk."""
        commit = (self.path / "COMMIT.json").stat().st_size
        return commit + sum(facts["bytes"] for facts in self.files.values())

    @property
    def bf16_bytes(self) -> int:
        """What its hidden states would take in bf16."""
        states = self.codec.layers + (self.final_codec.layers if self.final_codec else 0)
        return 2 * self.record.tokens * states * self.codec.width

    @cached_property
    def input_ids(self) -> Tensor:
        """int32 [N]"""
        return self._read_narrow("input_ids")

    @cached_property
    def loss_mask(self) -> Tensor:
        """bool [N]"""
        return self._read_narrow("loss_mask").bool()

    def planes(self, start: int, stop: int) -> dict[str, Tensor]:
        """The codec's planes of tokens start..stop-1; the crc of every chunk read is checked."""
        return {name: self._read(name, start, stop) for name in self.codec.arrays()}

    def final_planes(self, start: int, stop: int) -> dict[str, Tensor]:
        """The same of the final hidden state, for `final_codec` to decode."""
        if self.final_codec is None:
            raise ValueError(
                f"{self.path} holds no final hidden states; extract with --final-hidden"
            )
        names = self.final_codec.arrays()
        return {name: self._read(FINAL_PREFIX + name, start, stop) for name in names}

    def states(self, start: int, stop: int) -> Tensor:
        """bf16 [N, L, D]: all states of tokens start..stop-1, the final one last if it is here."""
        taps_NLD = self.codec.decode(self.planes(start, stop))
        if self.final_codec is None:
            return taps_NLD
        return torch.cat([taps_NLD, self.final_codec.decode(self.final_planes(start, stop))], 1)
