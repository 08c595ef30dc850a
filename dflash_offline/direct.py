"""Rows of a plane straight from and into zarr's files: the fast path of shards.

A plane's file is a zarr v3 shard: inner chunks, each its rows' bytes and a crc32c, and at the end
an index of (offset, bytes) per chunk with a crc32c of its own (zarr's sharding-indexed codec). A
read goes from the file into the result with no copy between, and every chunk is checked; a write
makes the very bytes that zarr would. Where an entropy coder is in the chain, zarr itself is used
instead; both are tested to agree.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

_CRC_BYTES = 4
_ABSENT = 2**64 - 1  # offset of a chunk that holds nothing but the fill value


@dataclass(frozen=True)
class PlaneFiles:
    """The files of one plane under `folder`."""

    folder: Path
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    file_rows: int
    fill: int

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Rows start..stop-1. ValueError names the file whose checksum or index is wrong."""
        first, last = start // self.chunk_rows, -(-stop // self.chunk_rows)
        whole = np.empty(((last - first) * self.chunk_rows, *self.row_shape), self.dtype)
        chunks = whole.reshape(last - first, -1).view(np.uint8)
        per_file = self.file_rows // self.chunk_rows
        for file in range(first // per_file, -(-last // per_file)):
            low, high = max(first, file * per_file), min(last, (file + 1) * per_file)
            self._read_file(file, low - file * per_file, chunks[low - first : high - first])
        offset = first * self.chunk_rows
        return whole[start - offset : stop - offset]

    def write(self, file: int, rows: NDArray[Any]) -> None:
        """Make file number `file` of its rows; only the last file has fewer than `file_rows`."""
        path = self._path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        index = np.full((self.file_rows // self.chunk_rows, 2), _ABSENT, "<u8")
        with path.open("wb") as out:
            for number, start in enumerate(range(0, len(rows), self.chunk_rows)):
                chunk = rows[start : start + self.chunk_rows]
                if len(chunk) < self.chunk_rows:
                    whole = np.full((self.chunk_rows, *self.row_shape), self.fill, self.dtype)
                    whole[: len(chunk)] = chunk
                    chunk = whole
                index[number] = out.tell(), chunk.nbytes + _CRC_BYTES
                _write_checked(out, chunk)
            _write_checked(out, index)

    def _path(self, file: int) -> Path:
        return self.folder.joinpath("c", str(file), *["0"] * len(self.row_shape))

    def _read_file(self, file: int, first_chunk: int, chunks: NDArray[Any]) -> None:
        path = self._path(file)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            index = self._index(descriptor, path)[first_chunk : first_chunk + len(chunks)]
            for chunk, (offset, size) in zip(chunks, index.tolist(), strict=True):
                if offset == _ABSENT:
                    chunk.view(self.dtype)[:] = self.fill
                elif size != chunk.nbytes + _CRC_BYTES:
                    raise ValueError(f"{path}: the index gives a chunk {size} bytes")
                else:
                    _read_checked(descriptor, offset, chunk, path)
        finally:
            os.close(descriptor)

    def _index(self, descriptor: int, path: Path) -> NDArray[Any]:
        index = np.empty((self.file_rows // self.chunk_rows, 2), "<u8")
        start = os.fstat(descriptor).st_size - index.nbytes - _CRC_BYTES
        if start < 0:
            raise ValueError(f"{path} is too short for its index")
        _read_checked(descriptor, start, index.reshape(-1).view(np.uint8), path)
        return index


def _read_checked(descriptor: int, offset: int, into: NDArray[Any], path: Path) -> None:
    """Fill `into` from the file and compare it with the crc32c that follows it there."""
    stored = bytearray(_CRC_BYTES)
    done = os.preadv(descriptor, [into.data, stored], offset)
    if done != into.nbytes + _CRC_BYTES:
        raise ValueError(f"{path} ends in the middle of a chunk")
    if google_crc32c.value(into) != int.from_bytes(stored, "little"):
        raise ValueError(f"{path}: the stored and computed checksum do not match")


def _write_checked(out: BinaryIO, data: NDArray[Any]) -> None:
    """The array's bytes and their crc32c."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    out.write(flat.data)
    out.write(google_crc32c.value(flat).to_bytes(_CRC_BYTES, "little"))
