"""A full check finds each damage in the shard that has it; repair redoes exactly that shard."""

import json
import shutil

import pytest
import torch
from test_extract import config as extract_config
from test_extract import documents_of, write_rows
from test_shards import (
    FILES,
    dataset,  # noqa: F401 (a fixture)
    flip_bit,
    make_dataset,
    make_document,
    make_taps,
    small_files,  # noqa: F401
    write_shard,
    written_once,  # noqa: F401
)

from dflash_offline.cli.main import main
from dflash_offline.codec import measure
from dflash_offline.config import VerifyConfig
from dflash_offline.shard_set import ShardSet
from dflash_offline.shards import ShardWriter
from dflash_offline.stages.extract import extract
from dflash_offline.stages.verify import verify

CHECK, REPAIR = VerifyConfig(), VerifyConfig(repair=True)


@pytest.mark.parametrize("codec", ["int8", "raw", "lossless"])
def test_a_sound_data_set_is_good(tmp_path, codec):
    data = make_dataset(tmp_path / "data", codec=codec, documents=3)
    write_shard(data, "shard-000000", [make_document(0, 30)])
    write_shard(data, "shard-000001", [make_document(1, 200), make_document(2, 7)])
    verdict = verify(data.path, CHECK)
    assert (verdict.bad, verdict.notes) == ({}, [])
    assert (verdict.shards, verdict.documents, verdict.tokens) == (2, 3, 237)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "swap"])
def test_each_damage_to_each_file_is_found_and_named(dataset, file, damage):  # noqa: F811
    path = dataset.shard_path("shard-000001") / file
    if damage == "flip":
        flip_bit(path, path.stat().st_size // 2)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "delete":
        path.unlink()
    else:
        shutil.copy(dataset.shard_path("shard-000000") / "COMMIT.json", path)
    if damage == "swap" and file == "COMMIT.json":
        file = "COMMIT.json is not the one"
    verdict = verify(dataset.path, CHECK)
    assert list(verdict.bad) == ["shard-000001"]
    assert file in verdict.bad["shard-000001"]
    assert verdict.documents == 2  # the other shard's


def write_bad(data, name, document, change):
    """A shard whose files agree with their checksums, but whose content is wrong."""
    taps = make_taps(document)
    planes = data.codec.encode(taps)
    facts = measure(taps, data.codec.decode(planes))
    change(planes)
    with ShardWriter(data, name) as writer:
        writer.append([document], planes, facts)
        writer.commit()


def test_states_that_decode_to_nan_are_found(tmp_path):
    data = make_dataset(tmp_path / "data")

    def poison(planes):
        planes["scales"][5, 1] = 0x7FC0  # a NaN, and not the fill value

    write_bad(data, "shard-000000", make_document(0, 30), poison)
    assert "inf or NaN" in verify(data.path, CHECK).bad["shard-000000"]


def test_places_that_were_never_written_are_found(tmp_path):
    data = make_dataset(tmp_path / "data")

    def leave_out(planes):
        planes["codes"][5, 1, 3] = -128

    write_bad(data, "shard-000000", make_document(0, 30), leave_out)
    assert "codes holds fill values" in verify(data.path, CHECK).bad["shard-000000"]


def test_tokens_outside_the_vocabulary_are_found(tmp_path):
    data = make_dataset(tmp_path / "data")
    document = make_document(0, 30)
    document.input_ids[3] = 500
    write_shard(data, "shard-000000", [document])
    assert "outside the target's 500 tokens" in verify(data.path, CHECK).bad["shard-000000"]


def test_a_document_in_two_shards_or_twice_in_one_is_found(tmp_path):
    data = make_dataset(tmp_path / "data")
    twice, once = make_document(0, 30), make_document(1, 20)
    write_shard(data, "shard-000000", [twice])
    write_shard(data, "shard-000001", [once, twice])
    write_shard(data, "shard-000002", [make_document(2, 9), make_document(2, 9)])
    bad = verify(data.path, CHECK).bad
    assert bad == {
        "shard-000001": "document 0 is also in shard-000000",
        "shard-000002": "a document is in it twice",
    }


def test_what_is_unfinished_is_noted_and_is_no_fault(tmp_path):
    data = make_dataset(tmp_path / "data", documents=9)
    write_shard(data, "shard-000000", [make_document(0, 30)])
    data.temporary_folder(3).mkdir()
    shutil.copytree(data.shard_path("shard-000000"), data.shard_path("shard-000007"))
    verdict = verify(data.path, CHECK)
    assert verdict.bad == {}
    temporary, orphan, hole = verdict.notes
    assert temporary.startswith(".tmp-3-")
    assert "shard-000007 is in no manifest" in orphan
    assert "8 of 9 documents are not here" in hole


def test_repair_and_extract_redo_exactly_the_bad_shards(tmp_path, tiny_llama):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    settings = extract_config(tiny_llama, data, output, shard_tokens=80)
    assert extract(settings)["shards"] > 2
    before = documents_of(output)
    kept = {p.name: p.stat().st_ino for p in (output / "shards").iterdir()}
    flip_bit(next((output / "shards" / "shard-000001" / "codes" / "c").rglob("*/0/0")), 40)

    verdict = verify(output, REPAIR)
    assert list(verdict.bad) == ["shard-000001"]
    assert (output / "bad").is_dir()
    assert len(ShardSet([output])) < len(before)
    assert verify(output, CHECK).bad == {}

    again = extract(settings)
    assert again["shards_written_now"] == 1
    after = documents_of(output)
    assert after.keys() == before.keys()
    for index, parts in before.items():
        assert all(map(torch.equal, after[index], parts))
    for folder in (output / "shards").iterdir():
        assert (folder.stat().st_ino == kept[folder.name]) == (folder.name != "shard-000001")
    assert verify(output, CHECK).bad == {}


def test_the_command_lists_bad_shards_and_exits_with_one(dataset, capsys):  # noqa: F811
    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(dataset.path), *args])
        return ended.value.code, capsys.readouterr().out

    assert run() == (0, "2 of 2 shards are good: 5 documents, 501 tokens\n")
    flip_bit(dataset.shard_path("shard-000000") / "codes/c/0/0/0", 9)
    code, out = run()
    assert code == 1
    assert "BAD shard-000000" in out
    assert "1 of 2 shards are good" in out
    code, out = run("--json")
    assert code == 1
    assert list(json.loads(out)["bad"]) == ["shard-000000"]
    code, out = run("--repair")
    assert code == 1
    assert "set aside" in out
    assert run()[0] == 0
