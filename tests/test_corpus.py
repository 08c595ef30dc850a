"""The kept corpus: the same as the one that was tokenised, or none at all."""

import hashlib
import json
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file
from test_conversations import FATES, facts_of, mixed_lines, write
from test_estimate import chats_of_every_kind

from dflash_offline import corpus as module
from dflash_offline.conversations import read_documents
from dflash_offline.corpus import (
    corpus_key,
    corpus_of,
    hash_files,
    load_corpus,
    save_corpus,
    tokenising_processes,
    wait_for_corpus,
)
from dflash_offline.documents import Corpus, Counts, Document
from dflash_offline.sampling import estimate_corpus
from dflash_offline.spec import TargetSpec

KEY = "k" * 64


def hand_made():
    """Documents 0, 2 and 5 of six, the last two of them views of one tensor."""
    ids, mask = torch.arange(9, dtype=torch.int32), torch.arange(9) % 3 > 0
    documents = [
        Document(0, torch.tensor([7, 6], dtype=torch.int32), torch.tensor([True, True])),
        Document(2, ids, mask, (0, 4)),
        Document(5, ids, mask, (4, 9)),
    ]
    counts = Counts(conversations=6, documents=6, dropped=Counter({"two": 2, "one": 1}))
    return Corpus(documents, counts, {"data.jsonl": "0" * 64})


def data(folder, *lines):
    return write(folder / "data.jsonl", lines or [{"input_ids": [1, 2], "loss_mask": [1, 1]}])


def kept_or_made(path, files, target, **how):
    how = {"max_length": 40, **how}
    return corpus_of(path, files, target=target, spec=TargetSpec.read(target), **how)


def test_a_document_may_be_a_view():
    document = hand_made().documents[2]
    assert (document.index, len(document)) == (5, 5)
    assert document.input_ids.tolist() == [4, 5, 6, 7, 8]
    assert document.loss_mask.tolist() == [True, True, False, True, True]


def test_a_corpus_is_loaded_as_it_was_saved(tmp_path):
    path = tmp_path / "new" / "corpus.safetensors"
    save_corpus(path, hand_made(), KEY)
    loaded = load_corpus(path, KEY)
    assert facts_of(loaded) == facts_of(hand_made())
    assert loaded.counts.dropped["never"] == 0
    assert loaded.documents[1].input_ids.dtype == torch.int32
    assert loaded.documents[1].loss_mask.dtype == torch.bool
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_safetensors_with_the_documents_end_to_end(tmp_path):
    save_corpus(tmp_path / "corpus", hand_made(), KEY)
    tensors = load((tmp_path / "corpus").read_bytes())
    assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
        "index": (torch.int64, [0, 2, 5]),
        "starts": (torch.int64, [0, 2, 6, 11]),
        "input_ids": (torch.int32, [7, 6, 0, 1, 2, 3, 4, 5, 6, 7, 8]),
        "loss_mask": (torch.bool, [bool(int(c)) for c in "11011011011"]),
    }


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_a_loaded_corpus_is_mapped_and_its_documents_are_views(tmp_path):
    path = tmp_path / "corpus.safetensors"
    save_corpus(path, hand_made(), KEY)
    loaded = load_corpus(path, KEY)
    assert str(path) in Path("/proc/self/maps").read_text()
    storages = {d.input_ids.untyped_storage().data_ptr() for d in loaded.documents}
    assert len(storages) == 1


def test_there_is_none_without_a_file_or_under_another_key(tmp_path):
    assert load_corpus(tmp_path / "corpus", KEY) is None
    save_corpus(tmp_path / "corpus", hand_made(), KEY)
    assert load_corpus(tmp_path / "corpus", "other") is None
    assert load_corpus(tmp_path, KEY) is None


def test_a_damaged_file_is_none(tmp_path):
    """Each byte of it changed, and each length that it may be cut to."""
    path = tmp_path / "corpus"
    save_corpus(path, hand_made(), KEY)
    sound, expected = path.read_bytes(), facts_of(hand_made())
    for place in range(len(sound)):
        path.write_bytes(sound[:place])
        assert load_corpus(path, KEY) is None
        for flip in (0x01, 0x20, 0x80):
            changed = bytes([sound[place] ^ flip])
            path.write_bytes(sound[:place] + changed + sound[place + 1 :])
            loaded = load_corpus(path, KEY)
            # White space that ends the header may be another one.
            assert loaded is None or (facts_of(loaded) == expected and changed.isspace())


@pytest.mark.parametrize(("before", "after"), [(b'"I32"', b'"F32"'), (b'"BOOL"', b'"U8"  ')])
def test_a_file_with_other_types_is_none(tmp_path, before, after):
    """The bytes of the tensors are the same."""
    save_corpus(tmp_path / "corpus", hand_made(), KEY)
    sound = (tmp_path / "corpus").read_bytes()
    assert sound.count(before) == 1
    (tmp_path / "corpus").write_bytes(sound.replace(before, after))
    assert load_corpus(tmp_path / "corpus", KEY) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        save({"index": torch.zeros(1)}),
        save({}, {"facts": "{}", "crc32c": "0"}),
        save({}, {"facts": "[]", "crc32c": "0"}),
        save({}, {"facts": json.dumps({"key": KEY}), "crc32c": "0"}),
    ],
    ids=range(6),
)
def test_a_file_of_another_kind_is_none(tmp_path, content):
    (tmp_path / "corpus").write_bytes(content)
    assert load_corpus(tmp_path / "corpus", KEY) is None


def test_what_a_killed_process_left_is_removed(tmp_path):
    other = tmp_path / ".corpus.txt"
    for name in (".corpus.safetensors.4f", ".corpus.txt"):
        (tmp_path / name).touch()
    save_corpus(tmp_path / "corpus.safetensors", hand_made(), KEY)
    assert set(tmp_path.iterdir()) == {tmp_path / "corpus.safetensors", other}


def test_the_key_is_of_all_that_decides_the_content(tmp_path, tiny_llama, monkeypatch):
    spec = TargetSpec.read(tiny_llama)
    how = {"target": tiny_llama, "spec": spec, "max_length": 9, "over_long": "drop"}
    hashes = {"one": "1" * 64, "two": "2" * 64}
    keys = [
        corpus_key(hashes, **how),
        corpus_key({"one": "1" * 64}, **how),
        corpus_key(dict(reversed(hashes.items())), **how),
        corpus_key(hashes, **{**how, "max_length": 10}),
        corpus_key(hashes, **{**how, "over_long": "truncate"}),
        *(
            corpus_key(hashes, **{**how, "spec": replace(spec, **{name: value})})
            for name, value in {
                "tokenizer_hash": "3" * 64,
                "template_hash": "3" * 64,
                "eos_token_ids": (1,),
                "vocab_size": 600,
            }.items()
        ),
    ]
    code = shutil.copytree(tiny_llama, tmp_path / "target")
    for text in ("one", "two"):
        (code / "tokenization.py").write_text(text)
        keys.append(corpus_key(hashes, **{**how, "target": code}, trust_remote_code=True))
    monkeypatch.setattr(module, "version", lambda package: "0")
    keys.append(corpus_key(hashes, **how))
    monkeypatch.setattr(module, "_FORMAT", 2)
    keys.append(corpus_key(hashes, **how))
    assert len(set(keys)) == len(keys) == 13


def test_the_key_is_not_of_names(tiny_llama):
    spec = TargetSpec.read(tiny_llama)
    how = {"target": tiny_llama, "max_length": 9, "over_long": "drop"}
    renamed = replace(spec, name="other", content_hash="3" * 64)
    assert corpus_key({"a": "1"}, spec=spec, **how) == corpus_key({"b": "1"}, spec=renamed, **how)


def test_files_are_hashed_and_refused_as_when_they_are_read(tmp_path, tiny_llama):
    one = write(tmp_path / "one.jsonl", [{"x": "y" * 5_000_000}])
    two = write(tmp_path / "two.jsonl", [{}])
    seen = []
    assert hash_files([two, one], seen.append) == {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (two, one)
    }
    assert sum(seen) == one.stat().st_size + two.stat().st_size
    (tmp_path / "empty").touch()
    with pytest.raises(FileNotFoundError, match=r"data file .*missing does not exist"):
        hash_files([one, tmp_path / "missing"])
    with pytest.raises(ValueError, match=r"data file .*one\.jsonl is given twice"):
        hash_files([one, one])
    with pytest.raises(ValueError, match="empty is empty"):
        hash_files([one, tmp_path / "empty"])


def test_a_second_run_reads_what_the_first_one_kept(tmp_path, tiny_qwen35, capsys, monkeypatch):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(mixed_lines()))
    path, seen = tmp_path / "corpus.safetensors", []
    first = kept_or_made(path, [file], tiny_qwen35, on_bytes=seen.append)
    assert sum(seen) == file.stat().st_size
    size = f"{path.stat().st_size / 1000:.1f} KB"
    assert f"tokenised, kept in {path} ({size})" in capsys.readouterr().err
    monkeypatch.setattr(module, "read_documents", None)
    moved = file.rename(tmp_path / "moved.jsonl")
    second = kept_or_made(path, [moved], tiny_qwen35, on_bytes=seen.append)
    assert sum(seen) == 2 * moved.stat().st_size
    assert f"tokenised corpus read from {path}" in capsys.readouterr().err
    assert facts_of(second)[:2] == facts_of(first)[:2]
    assert second.sha256 == {str(moved): hashlib.sha256(moved.read_bytes()).hexdigest()}
    assert second.counts.conversations == sum(2 * i + 1 for i in range(len(FATES)))


@pytest.mark.parametrize("change", ["data", "max_length", "over_long", "target", "damage"])
def test_what_is_not_of_this_run_is_made_anew(tmp_path, tiny_llama, capsys, change):
    target = shutil.copytree(tiny_llama, tmp_path / "target")
    path, file = tmp_path / "corpus", data(tmp_path, {"prompt": "how", "response": "two " * 50})
    how, seen = {"max_length": 30}, []
    kept_or_made(path, [file], target, **how)
    if change == "data":
        file.write_text(file.read_text() * 2)
    elif change == "max_length":
        how["max_length"] = 40
    elif change == "over_long":
        write(file, [json.loads(file.read_text()), {"input_ids": [1, 2], "loss_mask": [1, 1]}])
        kept_or_made(path, [file], target, **how)
        how["over_long"] = "drop"
    elif change == "target":
        template = target / "chat_template.jinja"
        template.write_text("yes" + template.read_text())
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\2")
    capsys.readouterr()
    found = kept_or_made(path, [file], target, on_bytes=seen.append, **how)
    told = capsys.readouterr().err
    assert f"{path} is damaged, or of other data or settings; it is made anew" in told
    assert sum(seen) == file.stat().st_size
    spec = TargetSpec.read(target)
    assert facts_of(found) == facts_of(read_documents([file], target=target, spec=spec, **how))
    kept_or_made(path, [file], target, **how)
    assert f"tokenised corpus read from {path}" in capsys.readouterr().err


def test_a_corpus_that_cannot_be_kept_is_used_with_a_warning(tmp_path, tiny_llama, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "corpus", tmp_path / "taken"):
        assert len(kept_or_made(path, [data(tmp_path)], tiny_llama).documents) == 1
        told = capsys.readouterr().err
        assert f"warning: the tokenised corpus cannot be kept in {path} (" in told
        with pytest.raises(OSError, match=rf"cannot be kept in {path} .*other ranks wait for it"):
            kept_or_made(path, [data(tmp_path)], tiny_llama, must_keep=True)
    assert {file.name for file in tmp_path.iterdir()} == {"taken", "file", "data.jsonl"}


def test_a_rank_waits_for_the_corpus_of_its_own_data(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    path, file = tmp_path / "corpus", data(tmp_path)
    save_corpus(path, hand_made(), KEY)
    how = {"target": tiny_llama, "spec": TargetSpec.read(tiny_llama), "max_length": 9}
    with pytest.raises(ValueError, match=rf"rank 0 made no {path} of this rank's .* in 0 s"):
        wait_for_corpus(path, [file], **how, seconds=0.05)
    first = threading.Timer(0.2, corpus_of, [path, [file]], how)
    first.start()
    found = wait_for_corpus(path, [file], **how, seconds=60)
    first.join()
    assert [d.input_ids.tolist() for d in found.documents] == [[1, 2]]
    assert list(found.sha256) == [str(file)]


def test_an_estimate_drops_the_documents_that_are_dropped(tmp_path, tiny_target):
    """One with exactly the most tokens, and one with one more."""
    edges = [{"input_ids": [7] * n, "loss_mask": [1] * n} for n in (60, 61)]
    file = data(tmp_path, *chats_of_every_kind(), *edges)
    how = {"target": tiny_target, "max_length": 60, "over_long": "drop"}
    read = read_documents([file], spec=TargetSpec.read(tiny_target), **how)
    assert read.counts.dropped["longer than --max-length"] >= 3
    found = estimate_corpus([file], sample_lines=100, seed=0, **how)
    assert (found.documents, found.tokens) == (len(read.documents), read.tokens)


@pytest.mark.parametrize(
    ("megabytes", "ranks", "cores", "expected"),
    [
        (1, 1, 64, 1),
        (31.9, 1, 64, 1),
        (32, 1, 64, 2),
        (100, 1, 64, 6),
        (100, 1, 4, 3),
        (100, 1, 2, 1),
        (100, 1, 1, 1),
        (100_000, 1, 64, 32),
        (100_000, 8, 64, 7),
        (100_000, 8, 4, 1),
    ],
)
def test_processes_grow_with_the_data_up_to_the_cores(
    monkeypatch, megabytes, ranks, cores, expected
):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(module.os, "cpu_count", lambda: cores)
    assert tokenising_processes(int(megabytes * 1e6), ranks) == expected


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("starts", [0, 9]),
        ("starts", [0, 7, 3, 12]),
        ("starts", [-2, 3, 7, 12]),
        ("starts", [0, 3, 7, 99]),
        ("index", [0.0, 1.0, 2.0]),
    ],
)
def test_a_forged_corpus_with_a_right_checksum_is_made_anew(tmp_path, name, values):
    documents = [
        Document(i, torch.arange(n, dtype=torch.int32), torch.ones(n, dtype=torch.bool))
        for i, n in enumerate((3, 4, 5))
    ]
    path = tmp_path / "corpus.safetensors"
    save_corpus(path, Corpus(documents, Counts(documents=3), {}), "key")
    assert len(load_corpus(path, "key").documents) == 3
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {n: file.get_tensor(n) for n in module._TENSORS}
    forged = {**{n: t.clone() for n, t in tensors.items()}, name: torch.tensor(values)}
    crc = module._checksum(metadata["facts"], forged)
    save_file(forged, path, {**metadata, "crc32c": str(crc)})
    assert load_corpus(path, "key") is None
