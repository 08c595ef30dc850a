"""What a data set holds: its bytes, its documents, and what reader and verify say of it."""

import json

import pytest
import torch

from dflash_offline.config import VerifyConfig
from dflash_offline.shard_set import ShardSet
from dflash_offline.stages.verify import verify


def files_of(path):
    """Every file of every shard under its final name, by its path in the data set."""
    shards = path / "shards"
    names = sorted(file.relative_to(path).as_posix() for file in shards.rglob("*"))
    return [n for n in names if "/.tmp-" not in n and (path / n).is_file()]


def contents(path):
    """All that another run of the same command must write alike, byte for byte.

    Only the time of its making sets a data set apart from its twin, and by it the hash of
    dataset.json, which every COMMIT.json carries.
    """
    facts = json.loads((path / "dataset.json").read_text())
    own_sha256, _ = facts.pop("sha256"), facts.pop("provenance")
    found = {name: (path / name).read_bytes() for name in files_of(path)}
    found = {name: content.replace(own_sha256.encode(), b"") for name, content in found.items()}
    if (path / "calibration.safetensors").exists():
        found["calibration.safetensors"] = (path / "calibration.safetensors").read_bytes()
    return {**found, "dataset.json": facts}


def assert_same_contents(path, expected):
    found = contents(path)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def stamps(path):
    """Inode and time of change of every file of every shard under its final name."""
    stats = {name: (path / name).stat() for name in files_of(path)}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def temporary(path):
    return sorted((path / "shards").glob(".tmp-*"))


def lines(path):
    """How many whole lines the manifests have: the shards that are committed."""
    return sum(file.read_bytes().count(b"\n") for file in (path / "manifest").glob("*.jsonl"))


def read_documents(path):
    """Number of the document -> ids, loss mask and hidden states."""
    shards = ShardSet([path])
    return {
        shards.document_index(i): (*shards.tokens(i), shards.taps(i)) for i in range(len(shards))
    }


def assert_nothing_wrong(path, documents):
    """A reader gets whole and right documents or none, and a full check finds nothing bad.

    Returns how many shards are committed.
    """
    if not (path / "dataset.json").exists():
        with pytest.raises(FileNotFoundError, match="is no data set"):
            ShardSet([path])
        return 0
    verdict = verify(path, VerifyConfig())
    assert verdict.bad == {}
    if not verdict.documents:
        with pytest.raises(ValueError, match="holds no committed document yet"):
            ShardSet([path])
        return 0
    found = read_documents(path)
    assert len(found) == verdict.documents
    assert_right(found, documents)
    return verdict.shards


def assert_right(found, documents):
    """Every document found is one of `documents`, bit for bit."""
    for index, parts in found.items():
        assert all(map(torch.equal, parts, documents[index]))
