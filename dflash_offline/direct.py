"""Rows of a plane straight from and into zarr's files: the fast path of shards.

A plane's file is a zarr v3 shard: inner chunks, each its rows' bytes (through zstd, where that
pays) and a crc32c, and at the end an index of (offset, bytes) per chunk with a crc32c of its own
(zarr's sharding-indexed codec). A write makes the very bytes that zarr would, as rows come, and
holds at most one chunk in memory. A read goes from the file into the result with no copy between
(or is inflated into it), and every chunk is checked. Both ways are tested to agree with zarr.
"""

import math
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

from dflash_offline.commit import ABSENT, CRC_BYTES, chunk_facts


@dataclass(frozen=True)
class PlaneFiles:
    """The files of one plane under `folder`."""

    folder: Path
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    file_rows: int
    fill: int
    zstd_level: int | None = None
    """Chunks go through zstd if this is not None; reading takes any level."""

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk that is not compressed."""
        return self.chunk_rows * math.prod(self.row_shape) * self.dtype.itemsize

    def size_bounds(self, rows: int) -> dict[Path, tuple[int, int]]:
        """Fewest and most bytes that each file of a plane of `rows` rows may have."""
        bounds = {}
        for file in range(-(-rows // self.file_rows)):
            chunks = -(-min(rows - file * self.file_rows, self.file_rows) // self.chunk_rows)
            index = 16 * (self.file_rows // self.chunk_rows) + CRC_BYTES
            most = index + chunks * (self.chunk_bytes + CRC_BYTES)
            # What zstd cannot shrink it makes longer by less than 1 % and some bytes.
            packed = index, most + most // 64 + 64 * chunks
            bounds[self.path(file)] = (most, most) if self.zstd_level is None else packed
        return bounds

    def read(
        self, start: int, stop: int, known: Callable[[Path], NDArray[Any] | None] = lambda _: None
    ) -> NDArray[Any]:
        """Rows start..stop-1. ValueError names the file whose checksum or index is wrong.

        `known` gives the crc32c of each chunk of a file, where they are known from elsewhere: a
        chunk that is sound in itself may be another shard's.
        """
        first, last = start // self.chunk_rows, -(-stop // self.chunk_rows)
        whole = np.empty(((last - first) * self.chunk_rows, *self.row_shape), self.dtype)
        chunks = whole.reshape(last - first, -1).view(np.uint8)
        per_file = self.file_rows // self.chunk_rows
        for file in range(first // per_file, -(-last // per_file)):
            low, high = max(first, file * per_file), min(last, (file + 1) * per_file)
            own = slice(low - file * per_file, high - file * per_file)
            self._read_file(file, own, chunks[low - first : high - first], known)
        offset = first * self.chunk_rows
        return whole[start - offset : stop - offset]

    def path(self, file: int) -> Path:
        """Where zarr looks for file number `file`."""
        return self.folder.joinpath("c", str(file), *["0"] * len(self.row_shape))

    def _read_file(
        self,
        file: int,
        own: slice,
        chunks: NDArray[Any],
        known: Callable[[Path], NDArray[Any] | None],
    ) -> None:
        """Chunks number own.start to own.stop - 1 of a file."""
        path = self.path(file)
        crcs = known(path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            index = self._index(descriptor, path)[own].tolist()
            expected = [None] * len(index) if crcs is None else crcs[own].tolist()
            for chunk, (offset, size), crc in zip(chunks, index, expected, strict=True):
                found = self._read_chunk(descriptor, offset, size, chunk, path)
                if crc is not None and found != crc:
                    raise ValueError(f"{path}: a chunk is not the one that was committed")
        finally:
            os.close(descriptor)

    def _read_chunk(
        self, descriptor: int, offset: int, size: int, chunk: NDArray[Any], path: Path
    ) -> int:
        """Fill `chunk`; the crc32c of what lies in the file."""
        if offset == ABSENT:
            chunk.view(self.dtype)[:] = self.fill
            return 0
        if self.zstd_level is not None:
            return _inflate(descriptor, offset, size - CRC_BYTES, chunk, path)
        if size != chunk.nbytes + CRC_BYTES:
            raise ValueError(f"{path}: the index gives a chunk {size} bytes")
        return _read_checked(descriptor, offset, chunk, path)

    def _index(self, descriptor: int, path: Path) -> NDArray[Any]:
        index = np.empty((self.file_rows // self.chunk_rows, 2), "<u8")
        start = os.fstat(descriptor).st_size - index.nbytes - CRC_BYTES
        if start < 0:
            raise ValueError(f"{path} is too short for its index")
        _read_checked(descriptor, start, index.reshape(-1).view(np.uint8), path)
        return index


def _read_checked(descriptor: int, offset: int, into: NDArray[Any], path: Path) -> int:
    """Fill `into` from the file and compare it with the crc32c that follows it there; the crc."""
    stored = bytearray(CRC_BYTES)
    done = os.preadv(descriptor, [into.data, stored], offset)
    if done != into.nbytes + CRC_BYTES:
        raise ValueError(f"{path} ends in the middle of a chunk")
    crc = int(google_crc32c.value(into))
    if crc != int.from_bytes(stored, "little"):
        raise ValueError(f"{path}: the stored and computed checksum do not match")
    return crc


def _inflate(descriptor: int, offset: int, size: int, into: NDArray[Any], path: Path) -> int:
    """The same for a chunk that zstd shrank to `size` bytes."""
    if not 0 < size <= 2 * into.nbytes + 1024:
        raise ValueError(f"{path}: the index gives a chunk {size} bytes")
    packed = np.empty(size, np.uint8)
    crc = _read_checked(descriptor, offset, packed, path)
    if _content_size(packed.tobytes()[:14]) != into.nbytes:
        raise ValueError(f"{path}: a chunk does not say that it inflates to {into.nbytes} bytes")
    try:
        Zstd().decode(packed, out=into)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: a chunk cannot be inflated ({error})") from None
    return crc


def _content_size(header: bytes) -> int | None:
    """Bytes that a zstd frame says it inflates to (RFC 8878, 3.1.1.1); None if it does not."""
    if len(header) < 14 or header[:4] != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = header[4]
    is_single_segment = descriptor >> 5 & 1
    start = 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 3]
    length = (is_single_segment, 2, 4, 8)[descriptor >> 6]
    size = int.from_bytes(header[start : start + length], "little")
    return (size + 256 if length == 2 else size) if length else None


class PlaneWriter:
    """Writes the rows of one plane, in order, file after file.

    `on_file` is told of each file that is complete, with its facts for COMMIT.json. Nothing is on
    the disk for certain before someone syncs it.
    """

    def __init__(
        self, files: PlaneFiles, *, on_file: Callable[[Path, dict[str, Any]], None]
    ) -> None:
        self._files = files
        self._on_file = on_file
        self._zstd = None if files.zstd_level is None else Zstd(level=files.zstd_level)
        self._chunk = np.empty((files.chunk_rows, *files.row_shape), files.dtype)
        self._file: _CheckedFile | None = None
        self._index = self._empty_index()
        self._crcs: list[int] = []  # of the chunks of the open file
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
        self._crcs.append(self._file.write(content))
        if chunk == len(self._index) - 1:
            self._end_file()

    def _end_file(self) -> None:
        assert self._file
        self._file.write(_bytes_of(self._index))
        done, self._file = self._file, None
        done.close()
        facts = chunk_facts(done.size, self._crcs, len(self._index))
        self._crcs, self._index = [], self._empty_index()
        self._on_file(done.path, facts)

    def _empty_index(self) -> NDArray[Any]:
        return np.full((self._files.file_rows // self._files.chunk_rows, 2), ABSENT, "<u8")


class _CheckedFile:
    """A file of pieces, each with its crc32c."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.size = path, 0
        self._file = path.open("wb")

    def write(self, content: NDArray[np.uint8]) -> int:
        """Add a piece; its crc32c."""
        crc = int(google_crc32c.value(content))
        self._file.write(content.data)
        self._file.write(crc.to_bytes(CRC_BYTES, "little"))
        self.size += len(content) + CRC_BYTES
        return crc

    def close(self) -> None:
        self._file.close()


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
