"""Rows of a plane straight from and into zarr's files: the fast path of shards.

A plane's file is a zarr v3 shard: inner chunks, each its rows' bytes (through zstd, where that
pays) and a crc32c, and at the end an index of (offset, bytes) per chunk with a crc32c of its own
(zarr's sharding-indexed codec). A write makes the very bytes that zarr would, as rows come, and
holds at most one chunk in memory. A read goes from the file into the result with no copy between,
and every chunk is checked; chunks of zstd are left to zarr. Both ways are tested to agree.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

CRC_BYTES = 4
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

    def path(self, file: int) -> Path:
        """Where zarr looks for file number `file`."""
        return self.folder.joinpath("c", str(file), *["0"] * len(self.row_shape))

    def _read_file(self, file: int, first_chunk: int, chunks: NDArray[Any]) -> None:
        path = self.path(file)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            index = self._index(descriptor, path)[first_chunk : first_chunk + len(chunks)]
            for chunk, (offset, size) in zip(chunks, index.tolist(), strict=True):
                if offset == _ABSENT:
                    chunk.view(self.dtype)[:] = self.fill
                elif size != chunk.nbytes + CRC_BYTES:
                    raise ValueError(f"{path}: the index gives a chunk {size} bytes")
                else:
                    _read_checked(descriptor, offset, chunk, path)
        finally:
            os.close(descriptor)

    def _index(self, descriptor: int, path: Path) -> NDArray[Any]:
        index = np.empty((self.file_rows // self.chunk_rows, 2), "<u8")
        start = os.fstat(descriptor).st_size - index.nbytes - CRC_BYTES
        if start < 0:
            raise ValueError(f"{path} is too short for its index")
        _read_checked(descriptor, start, index.reshape(-1).view(np.uint8), path)
        return index


def _read_checked(descriptor: int, offset: int, into: NDArray[Any], path: Path) -> None:
    """Fill `into` from the file and compare it with the crc32c that follows it there."""
    stored = bytearray(CRC_BYTES)
    done = os.preadv(descriptor, [into.data, stored], offset)
    if done != into.nbytes + CRC_BYTES:
        raise ValueError(f"{path} ends in the middle of a chunk")
    if google_crc32c.value(into) != int.from_bytes(stored, "little"):
        raise ValueError(f"{path}: the stored and computed checksum do not match")


class PlaneWriter:
    """Writes the rows of one plane, in order, file after file.

    `on_file` is told of each file that is complete, with its bytes and crc32c. Nothing is on the
    disk for certain before someone syncs it.
    """

    def __init__(
        self,
        files: PlaneFiles,
        *,
        zstd_level: int | None,
        on_file: Callable[[Path, dict[str, int]], None],
    ) -> None:
        self._files = files
        self._on_file = on_file
        self._zstd = None if zstd_level is None else Zstd(level=zstd_level)
        self._chunk = np.empty((files.chunk_rows, *files.row_shape), files.dtype)
        self._file: _CheckedFile | None = None
        self._index = self._empty_index()
        self.rows = 0  # so far, those that wait in `_chunk` included

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows; whole chunks among them go to the file without a copy."""
        whole = self._files.chunk_rows
        while len(rows):
            filled = self.rows % whole
            part, rows = rows[: whole - filled], rows[whole - filled :]
            if len(part) < whole:
                self._chunk[filled : filled + len(part)] = part
            if filled + len(part) == whole:
                self._write_chunk(self._chunk if filled else part)
            self.rows += len(part)

    def close(self) -> None:
        """Write what is pending; the last chunk is filled up to its size, as zarr has it."""
        if filled := self.rows % self._files.chunk_rows:
            self._chunk[filled:] = self._files.fill
            self._write_chunk(self._chunk)
        if self._file:
            self._end_file()

    def abandon(self) -> None:
        """Close what is open; its content is worth nothing."""
        if self._file:
            with suppress(OSError):  # a full disk has been reported before
                self._file.close()

    def _write_chunk(self, rows: NDArray[Any]) -> None:
        """The chunk that row number `self.rows` is in."""
        number, row = divmod(self.rows, self._files.file_rows)
        if self._file is None:
            self._file = _CheckedFile(self._files.path(number))
        content = _bytes_of(rows)
        if self._zstd:
            content = np.frombuffer(self._zstd.encode(content), np.uint8)
        chunk = row // self._files.chunk_rows
        self._index[chunk] = self._file.size, len(content) + CRC_BYTES
        self._file.write(content)
        if chunk == len(self._index) - 1:
            self._end_file()

    def _end_file(self) -> None:
        assert self._file
        self._file.write(_bytes_of(self._index))
        done, self._file, self._index = self._file, None, self._empty_index()
        self._on_file(done.path, done.close())

    def _empty_index(self) -> NDArray[Any]:
        return np.full((self._files.file_rows // self._files.chunk_rows, 2), _ABSENT, "<u8")


class _CheckedFile:
    """A file of pieces, each with its crc32c; keeps count of its size and of its own crc32c."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.size = path, 0
        self._file = path.open("wb")
        self._crc32c = google_crc32c.Checksum()

    def write(self, content: NDArray[np.uint8]) -> None:
        stored = google_crc32c.value(content).to_bytes(CRC_BYTES, "little")
        self._file.write(content.data)
        self._file.write(stored)
        self._crc32c.update(content)
        self._crc32c.update(stored)
        self.size += len(content) + CRC_BYTES

    def close(self) -> dict[str, int]:
        """Bytes and crc32c of the whole, as COMMIT.json has them."""
        self._file.close()
        return {"bytes": self.size, "crc32c": int.from_bytes(self._crc32c.digest(), "big")}


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
