"""The direct reader against zarr's own on the same files, and on files that are wrong."""

import random

import numpy as np
import pytest
import zarr
from test_shards import bf16_from_bits, flip_bit, make_dataset, make_document, write_shard
from zarr.codecs import Crc32cCodec, ZstdCodec

from dflash_offline.commit import chunk_crcs
from dflash_offline.direct import PlaneFiles, PlaneWriter

CHUNK, FILE, SHAPE = 8, 32, (3, 5)


def make_array(folder, rows, dtype="int8", fill=-128, values=None, zstd=()):
    array = zarr.create_array(
        folder, shape=(rows, *SHAPE), dtype=dtype, chunks=(CHUNK, *SHAPE), shards=(FILE, *SHAPE),
        compressors=[*zstd, Crc32cCodec()], filters=None, fill_value=fill, zarr_format=3,
    )  # fmt: skip
    if values is None:
        values = np.random.default_rng(rows).integers(-127, 128, (rows, *SHAPE))
    array[:] = values.astype(dtype)
    return array


def files_of(folder, dtype="int8", fill=-128, zstd_level=None):
    return PlaneFiles(folder, SHAPE, np.dtype(dtype), CHUNK, FILE, fill, zstd_level)


@pytest.mark.parametrize("rows", [1, 8, 31, 32, 33, 100, 131])
@pytest.mark.parametrize("dtype", ["int8", "uint16"])
def test_every_range_equals_what_zarr_reads(tmp_path, rows, dtype):
    fill = {"int8": -128, "uint16": 0xFFFF}[dtype]
    array = make_array(tmp_path / "plane", rows, dtype, fill)
    direct = files_of(tmp_path / "plane", dtype, fill)
    draw = random.Random(rows)
    ranges = [(0, rows), (0, 1), (rows - 1, rows)]
    ranges += [sorted((draw.randrange(rows), draw.randrange(rows) + 1)) for _ in range(40)]
    for start, stop in ranges:
        if start < stop:
            got = direct.read(start, stop)
            assert got.dtype == array.dtype
            np.testing.assert_array_equal(got, array[start:stop])


@pytest.mark.parametrize("rows", [1, 8, 31, 32, 33, 100, 131])
@pytest.mark.parametrize("pieces", [1, 7, 8, 1000])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "zstd"])
def test_files_written_directly_are_zarrs_byte_for_byte(tmp_path, rows, pieces, dtype):
    level, dtype = (1, "int8") if dtype == "zstd" else (None, dtype)
    fill = {"int8": -128, "uint16": 0xFFFF}[dtype]
    zstd = [ZstdCodec(level=level)] if level else []
    array = make_array(tmp_path / "zarr", rows, dtype, fill, zstd=zstd)
    told = {}
    files = files_of(tmp_path / "direct", dtype, fill, level)
    writer = PlaneWriter(files, on_file=told.__setitem__)
    for start in range(0, rows, pieces):
        writer.append(array[start : min(start + pieces, rows)])
    writer.close()
    theirs, ours = (
        {
            p.relative_to(tmp_path / way): p
            for p in (tmp_path / way / "c").rglob("*")
            if p.is_file()
        }
        for way in ("zarr", "direct")
    )
    assert ours.keys() == theirs.keys()
    assert sorted(told) == sorted(ours.values())
    for name, path in theirs.items():
        content = path.read_bytes()
        assert ours[name].read_bytes() == content, name
        facts = told[ours[name]]
        assert facts["bytes"] == len(content)
        # zarr's chunks lie one after the other, each with its crc32c at its end.
        chunks = np.frombuffer(content[-FILE // CHUNK * 16 - 4 : -4], "<u8").reshape(-1, 2)
        stored = [
            int.from_bytes(content[offset + size - 4 : offset + size], "little")
            for offset, size in chunks.tolist()
            if offset < len(content)
        ]
        assert chunk_crcs(facts).tolist() == stored


@pytest.mark.parametrize("level", [None, 1])
def test_a_chunk_of_another_file_is_noticed_where_its_crc_is_known(tmp_path, level):
    rows = np.random.default_rng(3).integers(-127, 128, (2, 45, *SHAPE)).astype("int8")
    known = {}
    planes = [files_of(tmp_path / name, zstd_level=level) for name in "ab"]
    for plane, content in zip(planes, rows, strict=True):
        writer = PlaneWriter(plane, on_file=known.__setitem__)
        writer.append(content)
        writer.close()
    crcs = {path: chunk_crcs(facts) for path, facts in known.items()}
    one, other = planes
    np.testing.assert_array_equal(one.read(3, 44, crcs.get), rows[0, 3:44])
    other.path(1).replace(one.path(1))
    np.testing.assert_array_equal(one.read(3, 32, crcs.get), rows[0, 3:32])
    with pytest.raises(ValueError, match="a chunk is not the one that was committed"):
        one.read(3, 33, crcs.get)


def test_a_chunk_of_nothing_but_fill_is_left_out_by_zarr_and_read_as_fill(tmp_path):
    values = np.full((40, *SHAPE), 7)
    values[8:16] = -128
    array = make_array(tmp_path / "plane", 40, values=values)
    np.testing.assert_array_equal(files_of(tmp_path / "plane").read(0, 40), array[:])


def test_each_flipped_byte_of_a_file_is_noticed(tmp_path):
    make_array(tmp_path / "plane", 30)
    direct = files_of(tmp_path / "plane")
    path = tmp_path / "plane" / "c" / "0" / "0" / "0"
    whole = direct.read(0, 30).copy()
    for place in range(path.stat().st_size):
        flip_bit(path, place)
        with pytest.raises(ValueError, match="c/0/0/0"):
            direct.read(0, 30)
        flip_bit(path, place)
    np.testing.assert_array_equal(direct.read(0, 30), whole)


@pytest.mark.parametrize("keep", [0, 3, 60, 400, -1])
def test_a_file_that_is_cut_is_noticed(tmp_path, keep):
    make_array(tmp_path / "plane", 30)
    path = tmp_path / "plane" / "c" / "0" / "0" / "0"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="c/0/0/0"):
        files_of(tmp_path / "plane").read(0, 30)


def test_shards_are_read_directly_and_equal_plain_zarr(tmp_path):
    from dflash_offline.shards import ShardReader

    data = make_dataset(tmp_path / "data")
    record = write_shard(data, "shard-000000", [make_document(0, 700)])
    reader = ShardReader(data, record)
    group = zarr.open_group(data.shard_path("shard-000000"), mode="r")
    planes = reader.planes(100, 611)
    np.testing.assert_array_equal(planes["codes"].numpy(), group["codes"][100:611])
    np.testing.assert_array_equal(
        bf16_from_bits(planes["scales"].numpy()), bf16_from_bits(group["scales"][100:611])
    )
