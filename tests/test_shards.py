"""The store: write, read, kill, corrupt, refuse."""

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import zlib
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import save

from dflash_offline import shard_set as shard_set_module
from dflash_offline import shards as shards_module
from dflash_offline.codec import make_codec, measure
from dflash_offline.commit import seal
from dflash_offline.config import VerifyConfig
from dflash_offline.contract import doubts
from dflash_offline.dataset import Dataset
from dflash_offline.facts import canonical_hash
from dflash_offline.shard_set import ShardIndex, ShardSet
from dflash_offline.shards import ShardReader, ShardWriter
from dflash_offline.stages.verify import verify

LAYERS, WIDTH = 3, 64
TARGET = {
    "name": "tiny",
    "content_hash": "c0ffee",
    "model_type": "llama",
    "num_layers": 8,
    "hidden_size": WIDTH,
    "mlp_width": 96,
    "vocab_size": 500,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_ids": [2],
    "tokenizer_hash": "70",
    "template_hash": "7e",
}


@dataclass(frozen=True, eq=False)
class Document:
    index: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor


def contract(**changes):
    return {
        "target": TARGET,
        "target_layer_ids": (1, 3, 5),
        "layer_convention": "output of block i",
        "max_length": 512,
        "codec": "int8",
        **changes,
    }


def make_document(index, tokens):
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, 500, (tokens,), generator=generator, dtype=torch.int32)
    return Document(index, ids, torch.rand(tokens, generator=generator) < 0.4)


def make_taps(document):
    generator = torch.Generator().manual_seed(1000 + document.index)
    return torch.randn(len(document.input_ids), LAYERS, WIDTH, generator=generator).bfloat16()


def make_dataset(path, codec="int8", **changes):
    sample = make_taps(make_document(999, 100))
    return Dataset.create_or_resume(
        path,
        contract=contract(codec=codec, **changes),
        make_codecs=lambda: (
            make_codec(codec, layers=LAYERS, width=WIDTH, calibration=sample),
            None,
        ),
        provenance={"torch": "any"},
    )


def append(writer, codec, documents):
    taps = torch.cat([make_taps(document) for document in documents])
    planes = codec.encode(taps)
    writer.append(documents, planes, measure(taps, codec.decode(planes)))


def write_shard(dataset, name, documents, rank=0):
    with ShardWriter(dataset, name, rank=rank) as writer:
        for document in documents:
            append(writer, dataset.codec, [document])
        return writer.commit()


DOCUMENTS = [make_document(i, tokens) for i, tokens in enumerate([5, 131, 1, 300, 64])]


def use_small_files(patch):
    """Several files a plane and several chunks a file, at sizes that do not divide."""
    patch.setattr(shards_module, "CHUNK_TOKENS", 16)
    patch.setattr(shards_module, "ZARR_SHARD_TOKENS", 64)


@pytest.fixture
def small_files(monkeypatch):
    use_small_files(monkeypatch)


@pytest.fixture(scope="module")
def written_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "data"
    with pytest.MonkeyPatch.context() as patch:
        use_small_files(patch)
        data = make_dataset(path)
        write_shard(data, "shard-000000", DOCUMENTS[:2])
        write_shard(data, "shard-000001", DOCUMENTS[2:])
    return path


@pytest.fixture
def dataset(tmp_path, small_files, written_once):
    """Two shards of 136 and 365 tokens, a copy for each test to spoil."""
    shutil.copytree(written_once, tmp_path / "data")
    return Dataset.open(tmp_path / "data")


def bf16_from_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_exact_data_set_gives_back_ids_masks_and_states_bit_for_bit(tmp_path, small_files, codec):
    data = make_dataset(tmp_path / "data", codec=codec)
    write_shard(data, "shard-000000", DOCUMENTS[:2])
    write_shard(data, "shard-000001", DOCUMENTS[2:])
    stored = ShardSet([tmp_path / "data"])
    assert len(stored) == 5
    assert stored.lengths.tolist() == [5, 131, 1, 300, 64]
    assert stored.lengths.dtype == stored.supervised.dtype == torch.int64
    assert stored.target_layer_ids == (1, 3, 5)
    assert stored.target.content_hash == "c0ffee"
    for i in torch.randperm(5).tolist():
        ids, mask = stored.tokens(i)
        assert ids.dtype == torch.int32 and mask.dtype == torch.bool
        assert torch.equal(ids, DOCUMENTS[i].input_ids)
        assert torch.equal(mask, DOCUMENTS[i].loss_mask)
        assert stored.supervised[i] == DOCUMENTS[i].loss_mask.sum()
        assert stored.document_index(i) == i
        assert torch.equal(stored.taps(i), make_taps(DOCUMENTS[i]))


def test_batches_of_documents_and_files_larger_than_a_shard_give_the_same(tmp_path):
    whole = make_dataset(tmp_path / "whole", codec="raw")
    with ShardWriter(whole, "a") as writer:
        append(writer, whole.codec, DOCUMENTS[:3])
        append(writer, whole.codec, DOCUMENTS[3:])
        writer.commit()
    stored = ShardSet([tmp_path / "whole"])
    for i, document in enumerate(DOCUMENTS):
        assert torch.equal(stored.taps(i), make_taps(document))


def test_plain_zarr_and_a_numpy_loop_read_an_int8_shard(dataset):
    group = zarr.open_group(dataset.shard_path("shard-000001"), mode="r")
    codes, scales, offsets = group["codes"][:], group["scales"][:], group["offsets"][:]
    assert codes.dtype == np.int8 and scales.dtype == np.uint16
    assert group["scales"].attrs["logical_dtype"] == "bfloat16"
    assert offsets.tolist() == [0, 1, 301, 365]
    assert group["document_index"][:].tolist() == [2, 3, 4]
    expected_ids = np.concatenate([d.input_ids for d in DOCUMENTS[2:]])
    np.testing.assert_array_equal(group["input_ids"][:], expected_ids)
    recipe = group.attrs["codec"]
    channel_scale = dataset.codec.tensors()["channel_scale"].numpy()
    stored = ShardSet([dataset.path])
    for i in range(3):
        rows = []
        for n in range(offsets[i], offsets[i + 1]):
            steps = np.repeat(bf16_from_bits(scales[n]), recipe["group"], axis=1)
            rows.append(codes[n].astype(np.float32) * steps * channel_scale)
        assert torch.equal(stored.taps(2 + i), torch.from_numpy(np.stack(rows)).bfloat16())


def test_plain_zarr_reads_a_lossless_shard_and_zstd_shrinks_its_exponents_only(tmp_path):
    data = make_dataset(tmp_path / "data", codec="lossless")
    document = make_document(3, 2000)
    write_shard(data, "shard-000000", [document])
    group = zarr.open_group(data.shard_path("shard-000000"), mode="r")
    exponents, rest = group["exponents"][:].astype(np.uint16), group["signs_mantissas"][:]
    bits = (rest.astype(np.uint16) & 0x80) << 8 | exponents << 7 | (rest & 0x7F)
    assert np.array_equal(bits.view(np.int16), make_taps(document).view(torch.int16).numpy())
    sizes = {
        plane: sum(p.stat().st_size for p in (data.shard_path("shard-000000") / plane).rglob("*"))
        for plane in ("exponents", "signs_mantissas")
    }
    values = exponents.size
    # A normal variable's exponent has an entropy of some 2.5 bits.
    assert sizes["exponents"] < 0.5 * values
    assert sizes["signs_mantissas"] > values


def test_every_chain_ends_in_crc32c_and_files_hold_many_chunks(dataset):
    metadata = dataset.shard_path("shard-000001").rglob("zarr.json")
    arrays = [json.loads(path.read_text()) for path in metadata]
    arrays = [array for array in arrays if array["node_type"] == "array"]
    assert len(arrays) == 7
    for array in arrays:
        outer = array["codecs"][-1]
        chain = outer["configuration"]["codecs"] if "chunk_shape" in str(outer) else [outer]
        assert chain[-1]["name"] == "crc32c"
    # 365 tokens in files of 64, and the last file holds no more than its tokens' chunks.
    files = sorted((dataset.shard_path("shard-000001") / "codes/c").rglob("*/0/0"))
    assert len(files) == 6
    assert files[-1].stat().st_size < files[0].stat().st_size


def test_attributes_carry_recipe_layers_and_what_was_measured(dataset):
    record = dataset.committed()["shard-000001"]
    attributes = ShardReader(dataset, record).attributes
    assert attributes["target_layer_ids"] == [1, 3, 5]
    assert attributes["layer_convention"] == "output of block i"
    assert (attributes["documents"], attributes["tokens"]) == (3, 365)
    exact = torch.cat([make_taps(d) for d in DOCUMENTS[2:]]).double().numpy()
    stored = ShardSet([dataset.path])
    decoded = torch.cat([stored.taps(i) for i in (2, 3, 4)]).double().numpy()
    relative = np.linalg.norm(decoded - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    for layer, facts in enumerate(attributes["taps"]):
        assert facts["mean"] == pytest.approx(exact[:, layer].mean(), abs=1e-6)
        assert facts["std"] == pytest.approx(exact[:, layer].std(), rel=1e-5)
        assert facts["max_abs"] == np.abs(exact[:, layer]).max()
        p50, p99 = np.quantile(relative[:, layer], (0.5, 0.99))
        assert facts["relative_l2_p50"] == pytest.approx(p50, rel=1e-4)
        assert facts["relative_l2_p99"] == pytest.approx(p99, rel=1e-4)


def test_shard_without_documents_counts_as_done_and_reads_as_nothing(dataset):
    write_shard(dataset, "shard-000002", [])
    assert dataset.resume(["shard-000002"]).missing == []
    assert len(ShardSet([dataset.path])) == 5


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_zeros_are_written_and_not_left_out_as_fill_values(tmp_path, codec):
    data = make_dataset(tmp_path / "data", codec=codec)
    nothing = torch.zeros(40, LAYERS, WIDTH, dtype=torch.bfloat16)
    document = Document(0, torch.zeros(40, dtype=torch.int32), torch.zeros(40, dtype=torch.bool))
    with ShardWriter(data, "a") as writer:
        writer.append([document], data.codec.encode(nothing), measure(nothing, nothing))
        writer.commit()
    stored = ShardSet([data.path])
    ids, mask = stored.tokens(0)
    assert not ids.any() and not mask.any()
    assert torch.equal(stored.taps(0), nothing)


def test_data_set_without_documents_is_refused(tmp_path):
    make_dataset(tmp_path / "data")
    with pytest.raises(ValueError, match="holds no committed document yet; run extract first"):
        ShardSet([tmp_path / "data"])


def test_non_finite_states_are_refused_by_the_documents_number(tmp_path):
    data = make_dataset(tmp_path / "data")
    taps = torch.cat([make_taps(document) for document in DOCUMENTS])
    taps[140] = float("nan")  # documents 0 to 2 end at token 137
    planes = data.codec.encode(taps)
    with (
        pytest.raises(ValueError, match="document 3 has hidden states that are inf or NaN"),
        ShardWriter(data, "a") as writer,
    ):
        writer.append(DOCUMENTS, planes, measure(taps, data.codec.decode(planes)))
    assert list((tmp_path / "data/shards").iterdir()) == []


def test_reader_sees_committed_shards_only_while_a_writer_writes(dataset):
    with ShardWriter(dataset, "shard-000002") as writer:
        append(writer, dataset.codec, [make_document(7, 200)])
        assert len(ShardSet([dataset.path])) == 5
        writer.commit()
    assert len(ShardSet([dataset.path])) == 6


def test_two_ranks_write_disjoint_shards_of_one_data_set(tmp_path, small_files):
    make_dataset(tmp_path / "data")
    names = [f"shard-{i:06}" for i in range(5)]
    ranks = [Dataset.open(tmp_path / "data", contract=contract()) for _ in range(2)]
    for i, name in enumerate(names):
        write_shard(ranks[i % 2], name, [DOCUMENTS[i]], rank=i % 2)
    manifests = sorted(p.name for p in (tmp_path / "data/manifest").glob("*.jsonl"))
    assert manifests == ["rank-00.jsonl", "rank-01.jsonl"]
    stored = ShardSet([tmp_path / "data"])
    assert [stored.document_index(i) for i in range(5)] == [0, 1, 2, 3, 4]
    assert ranks[0].resume(names).missing == []


def test_committed_shard_is_not_written_again(dataset):
    with pytest.raises(ValueError, match="shard-000000 exists already"):
        ShardWriter(dataset, "shard-000000")


def test_unsafe_shard_name_is_refused(dataset):
    with pytest.raises(ValueError, match=r"names a shard '\.\./out'"):
        ShardWriter(dataset, "../out")


KILLED_WRITER = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import test_shards as t
    from pathlib import Path
    from dflash_offline import dataset as d, shards as s
    s.CHUNK_TOKENS, s.ZARR_SHARD_TOKENS = 16, 64
    data = d.Dataset.open(Path({path!r}))
    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)
    if {moment!r} == "seal":
        s.seal = die
    if {moment!r} == "manifest":
        d.Dataset._name_in_manifest = die
    with s.ShardWriter(data, "shard-000002", rank=1) as writer:
        t.append(writer, data.codec, [t.make_document(7, 200)])
        if {moment!r} == "append":
            die()
        writer.commit()
"""


@pytest.fixture(scope="module")
def killed(written_once, tmp_path_factory):
    """Data sets whose writer of shard-000002 was killed at each moment; a copy of one of them."""
    originals = {}
    for moment in ("append", "seal", "manifest"):
        originals[moment] = tmp_path_factory.mktemp("killed") / moment
        shutil.copytree(written_once, originals[moment])
        program = KILLED_WRITER.format(
            tests=str(Path(__file__).parent), path=str(originals[moment]), moment=moment
        )
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=120,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL

    def copy(moment):
        path = tmp_path_factory.mktemp("killed") / "data"
        shutil.copytree(originals[moment], path)
        return Dataset.open(path)

    return copy


@pytest.mark.parametrize("moment", ["append", "seal"])
def test_killed_writer_leaves_nothing_to_read_and_its_rank_cleans_up(killed, small_files, moment):
    dataset = killed(moment)
    leftovers = [p.name for p in (dataset.path / "shards").glob(".tmp-1-*")]
    assert len(leftovers) == 1
    assert len(ShardSet([dataset.path])) == 5
    assert dataset.resume(["shard-000000"], rank=0, size=2).removed == 0
    found = dataset.resume(["shard-000002"], rank=1, size=2)
    assert (found.missing, found.removed, found.adopted) == (["shard-000002"], 1, 0)
    write_shard(dataset, "shard-000002", [make_document(7, 200)], rank=1)
    assert len(ShardSet([dataset.path])) == 6


def test_leftovers_of_many_ranks_are_cleaned_by_one(killed):
    dataset = killed("append")
    assert dataset.resume([], rank=0, size=1).removed == 1


def test_shard_renamed_but_not_in_the_manifest_is_verified_and_adopted(killed):
    dataset = killed("manifest")
    assert dataset.shard_path("shard-000002").is_dir()
    assert len(ShardSet([dataset.path])) == 5
    found = dataset.resume(["shard-000002"], rank=0)
    assert (found.missing, found.removed, found.adopted) == ([], 0, 1)
    stored = ShardSet([dataset.path])
    assert torch.equal(stored.tokens(5)[0], make_document(7, 200).input_ids)


def test_damaged_shard_outside_the_manifest_is_written_again_not_adopted(killed):
    dataset = killed("manifest")
    flip_bit(dataset.shard_path("shard-000002") / "codes/c/1/0/0", 100)
    found = dataset.resume(["shard-000002"])
    assert (found.missing, found.removed, found.adopted) == (["shard-000002"], 1, 0)


def test_shard_under_another_shards_name_is_not_adopted(killed):
    dataset = killed("manifest")
    shutil.move(dataset.shard_path("shard-000002"), dataset.shard_path("shard-000003"))
    assert dataset.resume(["shard-000003"]).missing == ["shard-000003"]


def test_torn_last_manifest_line_is_no_commit_and_the_shard_is_adopted(dataset):
    manifest = dataset.path / "manifest/rank-00.jsonl"
    content = manifest.read_bytes()
    for cut in (1, 10, 40):
        manifest.write_bytes(content[:-cut])
        assert list(dataset.committed()) == ["shard-000000"]
    found = dataset.resume(["shard-000000", "shard-000001"])
    assert (found.missing, found.adopted) == ([], 1)
    assert manifest.read_bytes() == content


def test_damaged_manifest_line_is_refused_by_number(dataset):
    manifest = dataset.path / "manifest/rank-00.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b'"tokens": 136', b'"tokens": 135'))
    with pytest.raises(ValueError, match=r"rank-00.jsonl line 1 is damaged; delete that line"):
        ShardSet([dataset.path])


@pytest.mark.parametrize(
    "name", ["../../elsewhere", "/etc", "a/b", "..", ".tmp-0-aa", "", "a\x00"]
)
def test_hostile_shard_name_in_a_manifest_is_refused(dataset, name):
    facts = {"commit_crc32c": 1, "documents": 1, "name": name, "supervised": 0, "tokens": 1}
    text = json.dumps(facts, sort_keys=True)
    line = json.dumps({**facts, "crc32c": google_crc32c.value(text.encode())})
    (dataset.path / "manifest/rank-07.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"rank-07.jsonl line 1 names a shard"):
        ShardSet([dataset.path])


def flip_bit(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


FILES = [
    "zarr.json",
    "codes/zarr.json",
    "codes/c/2/0/0",
    "scales/c/0/0/0",
    "input_ids/c/0",
    "loss_mask/c/0",
    "offsets/c/0",
    "document_index/c/0",
    "supervised/c/0",
    "COMMIT.json",
]


def read_everything(path):
    stored = ShardSet([path])
    for i in range(len(stored)):
        stored.tokens(i)
        stored.taps(i)


def test_flipped_bit_in_a_compressed_chunk_is_refused(tmp_path):
    data = make_dataset(tmp_path / "data", codec="lossless")
    write_shard(data, "shard-000000", [make_document(3, 300)])
    read_everything(data.path)
    for plane in ("exponents", "signs_mantissas"):
        (file,) = (data.shard_path("shard-000000") / plane / "c").rglob("*/0/0")
        for place in (5, 900):
            flip_bit(file, place)
            with pytest.raises(ValueError, match=f"shard shard-000000: .*{plane}"):
                read_everything(data.path)
            flip_bit(file, place)  # and back
    read_everything(data.path)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("place", [7, -2])
def test_flipped_bit_is_refused_with_the_shard_and_the_file(dataset, file, place):
    read_everything(dataset.path)
    flip_bit(dataset.shard_path("shard-000001") / file, place)
    part = file.split("/c/")[0]
    with pytest.raises(ValueError, match=f"shard shard-000001: .*{part}.*then run extract again"):
        read_everything(dataset.path)


@pytest.mark.parametrize("file", FILES)
def test_truncated_or_missing_file_is_refused_at_opening(dataset, file):
    path = dataset.shard_path("shard-000001") / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"shard shard-000001: .*{file}"):
        ShardSet([dataset.path])
    path.unlink()
    with pytest.raises(ValueError, match=f"shard shard-000001: .*{file} is missing"):
        ShardSet([dataset.path])


def test_file_lost_after_opening_is_not_read_as_fill_values(dataset):
    stored = ShardSet([dataset.path])
    stored.taps(2)  # from now on the shard is open
    (dataset.shard_path("shard-000001") / "codes/c/2/0/0").unlink()
    assert stored.taps(2).isfinite().all()  # its file is there
    with pytest.raises(ValueError, match=r"codes/c/2/0/0 is missing"):
        stored.taps(3)


def test_swapped_files_and_swapped_shards_are_refused(dataset):
    one, two = (dataset.shard_path(f"shard-00000{i}") for i in range(2))
    shutil.move(one, one.with_name("spare"))
    shutil.move(two, one)
    shutil.move(one.with_name("spare"), two)
    with pytest.raises(ValueError, match=r"COMMIT.json is not the one that the manifest names"):
        ShardSet([dataset.path])


def test_commit_that_names_files_outside_the_shard_is_refused(dataset):
    folder = dataset.shard_path("shard-000001")
    commit = json.loads((folder / "COMMIT.json").read_text())
    commit["files"]["../../dataset.json"] = {"bytes": 1, "crc32": 0}
    content = json.dumps(commit).encode()
    (folder / "COMMIT.json").write_bytes(content)
    record = dataset.committed()["shard-000001"]
    hostile = type(record)(**{**vars(record), "commit_crc32c": google_crc32c.value(content)})
    with pytest.raises(ValueError, match=r"names '\.\./\.\./dataset.json', outside"):
        ShardReader(dataset, hostile)


@pytest.mark.parametrize(
    ("changes", "field", "old", "new"),
    [
        ({"max_length": 256}, "max_length", "512", "256"),
        ({"target_layer_ids": (1, 3, 6)}, "target_layer_ids", r"\[1, 3, 5\]", r"\[1, 3, 6\]"),
        (
            {"target": {**TARGET, "content_hash": "decaf"}},
            r"target\.content_hash",
            "'c0ffee'",
            "'decaf'",
        ),
        ({"truncation": "end"}, "truncation", "None", "'end'"),
    ],
)
def test_resume_with_another_contract_names_field_and_both_values(
    dataset, changes, field, old, new
):
    with pytest.raises(ValueError, match=f"made with {field} = {old}, but now it is {new}; go"):
        make_dataset(dataset.path, **changes)


def test_moved_target_folder_is_still_the_same_target(dataset):
    again = make_dataset(dataset.path, target={**TARGET, "name": "moved"})
    assert list(again.committed()) == ["shard-000000", "shard-000001"]


def test_resumed_data_set_keeps_its_calibration(dataset):
    def calibrate_again():
        raise AssertionError("calibrated twice")

    again = Dataset.create_or_resume(
        dataset.path, contract=contract(), make_codecs=calibrate_again, provenance={"torch": "new"}
    )
    assert torch.equal(
        again.codec.tensors()["channel_scale"], dataset.codec.tensors()["channel_scale"]
    )
    assert again.provenance == {"torch": "any"}


def test_data_sets_of_one_target_are_read_as_one_list(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", codec="raw", max_length=256)
    write_shard(other, "shard-000000", [make_document(3, 33)])
    stored = ShardSet([dataset.path, other.path])
    assert stored.lengths.tolist() == [5, 131, 1, 300, 64, 33]
    assert torch.equal(stored.taps(5), make_taps(make_document(3, 33)))
    with pytest.raises(IndexError):
        stored.tokens(6)


def test_data_sets_of_different_layers_are_refused_together(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", target_layer_ids=(0, 3, 5))
    write_shard(other, "shard-000000", [make_document(3, 33)])
    with pytest.raises(ValueError, match=r"target_layer_ids = \[1, 3, 5\], but .*other has \[0"):
        ShardSet([dataset.path, other.path])


def test_edited_dataset_file_is_refused(dataset):
    file = dataset.path / "dataset.json"
    file.write_text(file.read_text().replace('"max_length": 512', '"max_length": 513'))
    with pytest.raises(ValueError, match=r"dataset.json does not match its own sha256"):
        Dataset.open(dataset.path)


def test_other_or_lost_calibration_is_refused(dataset):
    file = dataset.path / "calibration.safetensors"
    flip_bit(file, -1)
    with pytest.raises(ValueError, match=r"calibration.safetensors is not the one"):
        Dataset.open(dataset.path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"calibration.safetensors is missing"):
        Dataset.open(dataset.path)


def test_store_of_a_newer_schema_is_refused(dataset, monkeypatch):
    monkeypatch.setattr("dflash_offline.dataset.SCHEMA_VERSION", 0)
    with pytest.raises(ValueError, match="schema_version 2, newer than 0; upgrade"):
        Dataset.open(dataset.path)


OLD_STORES = Path(__file__).parent / "data" / "store-1"


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_store_of_schema_1_is_read_and_not_written_into(tmp_path, codec):
    """Written by version 0.1.0: state [n, l, d] is ((7 n + 3 l + 5 d) mod 64 - 32) / 8."""
    path = tmp_path / codec
    shutil.copytree(OLD_STORES / codec, path)
    stored = ShardSet([path])
    expected = np.array(
        [[[((7 * n + 3 * t + 5 * d) % 64 - 32) / 8 for d in range(32)] for t in (0, 1)]
         for n in range(11)]
    )  # fmt: skip
    for i, span in enumerate([slice(0, 5), slice(5, 11)]):
        taps = stored.taps(i).float().numpy()
        np.testing.assert_allclose(taps, expected[span], atol=0.06 if codec == "int8" else 0)
    assert stored.tokens(1)[0].tolist() == [20, 21, 22, 23, 24, 25]
    assert verify(path, VerifyConfig()).bad == {}
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="schema_version 1: it can be read, but this version"):
        Dataset.open(path, contract=stored.contract)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


def test_disk_that_fails_while_files_are_forced_to_it_commits_nothing(
    tmp_path, small_files, monkeypatch
):
    data = make_dataset(tmp_path / "data")

    def fail(path):
        if path.match("codes/c/1/*/*"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(shards_module, "sync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_shard(data, "shard-000000", DOCUMENTS[:2])
    assert data.committed() == {}
    assert list((data.path / "shards").iterdir()) == []


def test_folder_with_other_files_is_never_written_into(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds other files and no data set"):
        make_dataset(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_data_sets_that_round_differently_are_read_together_and_told_of(tmp_path):
    paths = []
    for name, kernels in (("a", "sdpa"), ("b", "sdpa"), ("c", "flash_attention_2")):
        changes = {"dtype": "bfloat16", "kernels": {"attention": kernels}}
        data = make_dataset(tmp_path / name, codec="raw", **changes)
        write_shard(data, "shard-000000", [make_document(0, 9)])
        paths.append(data.path)
    assert doubts(ShardSet(paths[:2])) == []
    (warning,) = doubts(ShardSet(paths))
    assert f"{paths[2]} was made with kernels.attention = 'flash_attention_2'" in warning
    assert "the first data set with 'sdpa'" in warning
    assert doubts(ShardSet(paths[2:]), ShardSet(paths[:1])) == [warning]
    unknown = make_dataset(tmp_path / "d", codec="raw", dtype="bfloat16", kernels={})
    write_shard(unknown, "shard-000000", [make_document(0, 9)])
    assert doubts(ShardSet([paths[0], unknown.path])) == []
    unknown.refuse_other_kernels({"attention": "sdpa"})


def test_an_index_made_elsewhere_saves_the_look_at_every_shard(dataset, tmp_path, monkeypatch):
    index = pickle.loads(pickle.dumps(ShardIndex.read([dataset.path])))
    opened = []
    reader = shard_set_module.ShardReader
    monkeypatch.setattr(
        shard_set_module, "ShardReader", lambda *args: opened.append(args) or reader(*args)
    )
    stored = ShardSet([dataset.path], index=index)
    assert opened == [] and stored.lengths.tolist() == [5, 131, 1, 300, 64]
    assert torch.equal(stored.tokens(3)[0], DOCUMENTS[3].input_ids)
    assert [record.name for _, record in opened] == ["shard-000001"]
    other = make_dataset(tmp_path / "other", max_length=100)
    with pytest.raises(ValueError, match="other data sets than the first rank's"):
        ShardSet([other.path], index=index)


def test_opening_a_shard_takes_no_zarr(dataset, monkeypatch):
    monkeypatch.setattr(shards_module, "zarr", None)
    (record, _) = dataset.committed().values()
    reader = ShardReader(dataset, record)
    assert reader.offsets.tolist() == [0, 5, 136]
    assert torch.equal(reader.input_ids[:5], DOCUMENTS[0].input_ids)
    assert len(reader.statistics) == LAYERS


def test_path_that_is_no_data_set_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is no data set"):
        ShardSet([tmp_path / "nowhere"])


def test_codec_runs_where_the_states_are_wanted(dataset):
    on_meta = ShardSet([dataset.path]).taps(1, device="meta")
    assert on_meta.device.type == "meta"
    assert on_meta.shape == (131, LAYERS, WIDTH) and on_meta.dtype == torch.bfloat16


def replace_dataset_json(path, change):
    """dataset.json with `change` made to its content, and a sha256 that agrees."""
    facts = json.loads((path / "dataset.json").read_text())
    del facts["sha256"]
    facts = change(facts) or facts
    (path / "dataset.json").write_text(json.dumps({**facts, "sha256": canonical_hash(facts)}))


def test_shards_without_their_dataset_json_are_not_written_into(dataset):
    (dataset.path / "dataset.json").unlink()
    with pytest.raises(
        ValueError, match=r"has no dataset.json, but .*shard-000000 is there; rest"
    ):
        make_dataset(dataset.path)
    shutil.rmtree(dataset.path / "shards")
    with pytest.raises(ValueError, match=r"has no dataset.json, but .*rank-00.jsonl is there"):
        make_dataset(dataset.path)


def test_shard_of_another_data_set_is_neither_read_nor_adopted(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", max_length=256)
    shutil.copytree(dataset.path / "shards", other.path / "shards", dirs_exist_ok=True)
    found = other.resume(["shard-000000", "shard-000001"])
    assert (len(found.missing), found.adopted, found.removed) == (2, 0, 2)
    assert len(list((other.path / "bad").iterdir())) == 2  # kept for a look, not deleted
    replace_dataset_json(dataset.path, lambda facts: facts["provenance"].update(torch="other"))
    with pytest.raises(
        ValueError, match=r"shard-000000: .*COMMIT.json belongs to another data set"
    ):
        ShardSet([dataset.path])
    bad = verify(dataset.path, VerifyConfig()).bad
    assert all("belongs to another data set" in why for why in bad.values()) and len(bad) == 2


LIVE_WRITER = """
    import sys
    sys.path.insert(0, {tests!r})
    import test_shards as t
    from pathlib import Path
    from dflash_offline import dataset as d, shards as s
    data = d.Dataset.open(Path({path!r}))
    data.resume([], rank={rank}, size={rank} + 1)
    with s.ShardWriter(data, "shard-000002", rank={rank}) as writer:
        t.append(writer, data.codec, [t.make_document(7, 200)])
        print("writing", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("rank", [0, 3])
def test_second_extract_is_refused_and_takes_nothing_from_a_live_one(dataset, rank):
    program = LIVE_WRITER.format(
        tests=str(Path(__file__).parent), path=str(dataset.path), rank=rank
    )
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"writing\n"
        (live,) = (dataset.path / "shards").glob(".tmp-*")
        with pytest.raises(ValueError, match=f"another extract writes to .* as rank {rank}; wait"):
            dataset.resume(["shard-000002"])
        assert live.is_dir()
        process.kill()
    assert dataset.resume(["shard-000002"]).removed == 1
    assert not live.exists()


def test_two_starts_of_one_data_set_are_not_both_calibrated(tmp_path):
    (tmp_path / "manifest").mkdir()
    with (tmp_path / "manifest/rank-00.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another extract writes to .* as rank 0"):
            make_dataset(tmp_path)
    assert make_dataset(tmp_path).committed() == {}


@pytest.mark.parametrize("lost", ["codes/c/1", "input_ids", "scales/zarr.json", "."])
def test_shard_that_lost_files_while_it_was_written_is_not_committed(
    tmp_path, small_files, monkeypatch, lost
):
    data = make_dataset(tmp_path / "data")

    def seal_after_loss(folder, *args, **kwargs):
        path = folder / lost
        path.unlink() if path.is_file() else shutil.rmtree(path)
        return seal(folder, *args, **kwargs)

    monkeypatch.setattr(shards_module, "seal", seal_after_loss)
    with pytest.raises(ValueError, match=r"removed or changed while its shard was written; stop"):
        write_shard(data, "shard-000000", DOCUMENTS[:2])
    assert data.committed() == {}
    assert list((data.path / "shards").iterdir()) == []


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        {"name": 5},
        {"name": None},
        {"documents": "2"},
        {"documents": -1},
        {"documents": 137},
        {"tokens": 2**41},
        {"tokens": 136.0},
        {"supervised": None},
        {"supervised": 137},
        {"commit_crc32c": "1"},
        {"extra": 1},
        DEEP,
        "5",
    ],
)
def test_manifest_line_with_a_right_checksum_and_wrong_facts_is_refused(dataset, change):
    manifest = dataset.path / "manifest/rank-00.jsonl"
    line = manifest.read_text().splitlines()[0]
    if isinstance(change, dict):
        facts = {**json.loads(line), **change}
        del facts["crc32c"]
        text = json.dumps(facts, sort_keys=True)
        line = json.dumps({**facts, "crc32c": google_crc32c.value(text.encode())})
    manifest.write_text(line + "\n" if isinstance(change, dict) else change + "\n")
    with pytest.raises(ValueError, match=r"rank-00.jsonl line 1 (is damaged|names a shard)"):
        ShardSet([dataset.path])


def test_manifest_that_counts_other_supervised_tokens_is_refused(dataset):
    record = dataset.committed()["shard-000000"]
    with pytest.raises(ValueError, match=f"supervised is not {record.supervised - 1} in all"):
        ShardReader(dataset, dataclasses.replace(record, supervised=record.supervised - 1))


@pytest.mark.parametrize(
    "change",
    [
        "not JSON",
        "[]",
        "null",
        DEEP,
        {"files": None},
        {"files": []},
        {"files": {"zarr.json": 5}},
        {"files": {"zarr.json": {"bytes": 1}}},
        {"files": {"zarr.json": {"crc32": 1}}},
        {"files": {"zarr.json": {"bytes": "1", "crc32": 1}}},
        {"files": {"zarr.json": {"bytes": 1, "crc32": 1.5}}},
        {"files": {"a\0b": {"bytes": 1, "crc32": 1}}},
        {"files": {"\ud800": {"bytes": 1, "crc32": 1}}},
        {"documents": "2"},
        {"dataset_sha256": 5},
    ],
)
def test_commit_file_of_another_form_is_refused_and_not_adopted(dataset, change):
    file = dataset.shard_path("shard-000000") / "COMMIT.json"
    if isinstance(change, dict):
        change = json.dumps({**json.loads(file.read_text()), **change})
    file.write_text(change)
    record = dataset.committed()["shard-000000"]
    record = dataclasses.replace(record, commit_crc32c=google_crc32c.value(file.read_bytes()))
    if '"2"' not in change:  # the manifest's count is the one that readers go by
        with pytest.raises(
            ValueError, match=r"shard shard-000000: .*COMMIT.json .*run extract aga"
        ):
            ShardReader(dataset, record)
    (dataset.path / "manifest/rank-00.jsonl").unlink()
    assert dataset.resume(["shard-000000"]).missing == ["shard-000000"]


def set_in(*keys, value):
    def change(facts):
        for key in keys[:-1]:
            facts = facts[key]
        facts[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: {"nothing": 1},
        *(
            lambda facts, key=key: {k: v for k, v in facts.items() if k != key}
            for key in ("schema_version", "contract", "codec", "provenance")
        ),
        set_in("schema_version", value="1"),
        set_in("contract", value={}),
        set_in("contract", value=[1]),
        set_in("contract", "target", value={**TARGET, "extra": 1}),
        set_in("contract", "target", value={"name": "tiny"}),
        set_in("contract", "target", "hidden_size", value="64"),
        set_in("contract", "target", "eos_token_ids", value=2),
        set_in("contract", "target_layer_ids", value="1,3,5"),
        set_in("contract", "target_layer_ids", value=[1, 3]),
        set_in("contract", "documents", value="many"),
        set_in("contract", "data_sha256", value="c0ffee"),
        set_in("codec", value={}),
        set_in("codec", value=["int8"]),
        set_in("codec", "name", value="int7"),
        set_in("codec", "group", value=0),
        set_in("codec", "group", value="32"),
        set_in("codec", "width", value=64.0),
        set_in("codec", "layers", value=2**50),
        set_in("calibration_sha256", value=None),
        set_in("calibration_sha256", value=5),
    ],
)
def test_dataset_json_with_a_right_checksum_and_wrong_facts_is_refused(dataset, change):
    replace_dataset_json(dataset.path, change)
    with pytest.raises(ValueError, match=r"dataset.json.*(restore it|upgrade)"):
        Dataset.open(dataset.path)


def test_empty_dataset_json_is_refused(dataset):
    (dataset.path / "dataset.json").write_text("{}")
    with pytest.raises(ValueError, match=r"does not match its own sha256; restore it, or extract"):
        Dataset.open(dataset.path)


@pytest.mark.parametrize(
    "content",
    [
        b"not safetensors",
        save({}),
        save({"channel_scale": torch.ones(LAYERS, WIDTH + 1)}),
        save({"channel_scale": torch.ones(LAYERS, WIDTH).half()}),
        save({"channel_scale": torch.full((LAYERS, WIDTH), float("nan"))}),
    ],
)
def test_calibration_of_another_form_is_refused(dataset, content):
    (dataset.path / "calibration.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    replace_dataset_json(dataset.path, set_in("calibration_sha256", value=digest))
    with pytest.raises(ValueError, match=r"(dataset.json|calibration.safetensors).*restore it"):
        Dataset.open(dataset.path)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("zarr.json", lambda facts: []),
        ("zarr.json", set_in("node_type", value="array")),
        ("codes/zarr.json", lambda facts: {}),
        ("codes/zarr.json", set_in("codecs", value=[{"name": "bytes"}])),
        ("codes/zarr.json", set_in("chunk_grid", "configuration", "chunk_shape", 0, value=2**40)),
        ("offsets/zarr.json", set_in("chunk_grid", "configuration", "chunk_shape", value=[2**40])),
    ],
)
def test_array_metadata_with_a_right_checksum_and_wrong_facts_is_refused(dataset, file, change):
    folder = dataset.shard_path("shard-000000")
    facts = json.loads((folder / file).read_text())
    changed = change(facts)
    content = json.dumps(facts if changed is None else changed).encode()
    (folder / file).write_bytes(content)
    commit = json.loads((folder / "COMMIT.json").read_text())
    commit["files"][file] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    text = json.dumps(commit).encode()
    (folder / "COMMIT.json").write_bytes(text)
    record = dataset.committed()["shard-000000"]
    record = dataclasses.replace(record, commit_crc32c=google_crc32c.value(text))
    with pytest.raises(ValueError, match=f"shard shard-000000: .*{file} .*then run extract again"):
        ShardReader(dataset, record).planes(0, 1)


def test_lost_folders_are_made_again_and_sound_shards_adopted(dataset):
    names = ["shard-000000", "shard-000001"]
    shutil.rmtree(dataset.path / "manifest")
    with pytest.raises(ValueError, match="holds no committed document yet"):
        ShardSet([dataset.path])
    assert dataset.resume(names).adopted == 2
    read_everything(dataset.path)
    shutil.rmtree(dataset.path / "shards")
    assert list(verify(dataset.path, VerifyConfig(repair=True)).bad) == names
    assert dataset.resume(names).missing == names
    write_shard(dataset, "shard-000000", DOCUMENTS[:2])


@pytest.mark.parametrize("name", ["shard-000002", ".tmp-0-abc"])
def test_link_at_a_shards_place_is_refused_and_left_alone(dataset, tmp_path, name):
    (tmp_path / "precious").mkdir()
    for target in (tmp_path / "precious", tmp_path / "nowhere"):
        dataset.shard_path(name).symlink_to(target)
        with pytest.raises(ValueError, match=f"{name} is a link or a file, not a shard; remove"):
            dataset.resume(["shard-000002"])
        dataset.shard_path(name).unlink()
    assert (tmp_path / "precious").is_dir()


def test_output_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"{path} is no folder; choose another output"):
            make_dataset(path)


def test_coverage_and_sources_are_told_per_data_set(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", documents=9, data_sha256=["aa", "bb"])
    write_shard(other, "shard-000000", [make_document(3, 33)])
    stored = ShardSet([other.path, dataset.path])
    assert stored.coverage() == [(other.path, 1, 9), (dataset.path, 5, None)]
    assert stored.data_hashes() == {"aa", "bb"}


def test_data_set_that_is_given_twice_is_refused(dataset, tmp_path):
    (tmp_path / "link").symlink_to(dataset.path)
    with pytest.raises(ValueError, match="link is given twice"):
        ShardSet([dataset.path, tmp_path / "link"])
