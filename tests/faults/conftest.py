"""Small corpora, and what undisturbed runs over them write: built once."""

import functools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import seen
import torch
from processes import CommandLine


@dataclass(frozen=True)
class Job:
    """An extraction without its output folder, and what it writes when nothing disturbs it."""

    arguments: tuple
    whole: Path
    contents: dict
    documents: dict
    shards: int
    seconds: float

    def into(self, output):
        return (*self.arguments, "--output", output)


@pytest.fixture
def cli(tmp_path):
    (tmp_path / "printed").mkdir()
    return CommandLine(tmp_path / "printed")


@pytest.fixture(scope="session")
def make_job(tmp_path_factory, tiny_llama):
    """make_job(codec, lengths): a shard a document, unless `shard_tokens` lets it hold more."""

    @functools.cache
    def make(codec, lengths, shard_tokens=1):
        folder = tmp_path_factory.mktemp(codec)
        rows = write_rows(folder / "data.jsonl", lengths)
        arguments = (
            *("extract", "--target", tiny_llama, "--data", folder / "data.jsonl"),
            *("--device", "cpu", "--codec", codec, "--target-layer-ids", "1,3"),
            *("--shard-tokens", shard_tokens, "--batch-tokens", 1),
        )
        whole, cli = folder / "whole", CommandLine(folder)
        assert cli.run("--help").code == 0  # the first run of all waits for the fork server
        started = time.monotonic()
        done = cli.run(*arguments, "--output", whole)
        seconds = time.monotonic() - started
        assert done.code == 0, done.err
        documents = seen.read_documents(whole)
        for index, row in enumerate(rows):
            assert documents[index][0].tolist() == row["input_ids"]
            assert documents[index][1].tolist() == [bool(value) for value in row["loss_mask"]]
            assert torch.isfinite(documents[index][2]).all()
        assert len(documents) == len(rows)
        return Job(arguments, whole, seen.contents(whole), documents, seen.lines(whole), seconds)

    return make


def write_rows(path, lengths):
    """Random ids; prompts of two to eight tokens."""
    rng = random.Random(0)
    rows = []
    for i, length in enumerate(lengths):
        prompt = 2 + i % 7
        mask = [0] * prompt + [1] * (length - prompt)
        rows.append({"input_ids": rng.choices(range(400), k=length), "loss_mask": mask})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
