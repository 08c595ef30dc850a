"""Data sets made to do harm: refused in one sentence, with nothing outside touched.

Every checksum in them is right, so that only the facts themselves can give them away. Each command
runs in a process that may take half a GB more than it starts with: what is refused only after it
was allocated fails.
"""

import functools
import os
import shutil
import struct
import zlib

import google_crc32c
import pytest
import seen
from forging import BAD, forge_commit, forge_dataset, forge_file, forge_json, forge_line
from numcodecs.zstd import Zstd
from processes import limit_memory

ROOM = 1 << 29
ABSURD = 1 << 40  # what the store itself takes for the largest count there can be
DEEP = b"[" * 1_000_000
MOST_WORDS = 600  # characters of a sentence that are read to the end

BOMB = Zstd(level=19).encode(bytes(1 << 28)) * 16  # frames one after the other: 4 GB of zeros
CHUNKS_A_FILE = 16_384 // 128
limits = [functools.partial(limit_memory, ROOM)]


@pytest.fixture(scope="module")
def job(make_job):
    return make_job("lossless", (75, 80, 90))


@pytest.fixture
def cli(cli):
    """What is refused is refused at once."""
    cli.patience = 10.0
    return cli


@pytest.fixture
def store(job, tmp_path):
    shutil.copytree(job.whole, tmp_path / "out")
    return tmp_path / "out"


class Canary:
    """A folder of someone else's, which must look the same afterwards."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "folder").mkdir(parents=True)
        (folder / "secret").write_bytes(b"no line end in here")
        (folder / "folder" / "letter").write_text("dear all\n")
        self.before = self.look()

    def look(self):
        stats = {path: path.lstat() for path in [self.folder, *self.folder.rglob("*")]}
        facts = {path: (s.st_ino, s.st_mode, s.st_mtime_ns) for path, s in stats.items()}
        return facts, {path: path.read_bytes() for path in stats if path.is_file()}

    def assert_untouched(self):
        assert self.look() == self.before


@pytest.fixture
def canary(tmp_path):
    return Canary(tmp_path / "canary")


def assert_refused(outcome):
    said = outcome.out + outcome.err
    assert outcome.code == 1, said
    assert "Traceback" not in said
    assert "memory" not in said
    assert max(len(line) for line in said.splitlines()) < MOST_WORDS, said


def swell(file):
    """A file of 1 TB that takes no room on the disk."""
    os.truncate(file, ABSURD)


def each_of(attacks):
    return pytest.mark.parametrize("attack", attacks.values(), ids=attacks)


# What every reader goes through first. Each attack is given the data set and the canary.


def edits_line(**changes):
    return lambda store, canary: forge_line(store, lambda line: line.update(changes))


def names_the_canary(store, canary):
    forge_line(store, lambda line: line.update(name=str(canary / "folder")))


def appends(text):
    def attack(store, canary):
        with (store / "manifest" / "rank-00.jsonl").open("ab") as file:
            file.write(text + b"\n")

    return attack


def swells(name):
    return lambda store, canary: swell(store / name)


def puts_a_pipe(store, canary):
    (store / "manifest" / "rank-00.jsonl").unlink()
    os.mkfifo(store / "manifest" / "rank-00.jsonl")


def edits_dataset(change):
    return lambda store, canary: forge_dataset(store, change)


ON_ALL = {
    "name-above": edits_line(name="../../canary/folder"),
    "name-absolute": names_the_canary,
    "name-long": edits_line(name="a" * 100_000),
    "documents-negative": edits_line(documents=-1),
    "tokens-beyond-64-bits": edits_line(tokens=10**30),
    "tokens-float": edits_line(tokens=2.5),
    "line-deep": appends(DEEP),
    "line-long-number": appends(b'{"name": ' + b"9" * 1_000_000 + b"}"),
    "manifest-swollen": swells("manifest/rank-00.jsonl"),
    "manifest-pipe": puts_a_pipe,
    "dataset-deep": lambda store, canary: (store / "dataset.json").write_bytes(DEEP),
    "dataset-swollen": swells("dataset.json"),
    "dataset-layers": edits_dataset(lambda facts: facts["codec"].update(layers=ABSURD)),
    "dataset-documents": edits_dataset(lambda facts: facts["contract"].update(documents=-1)),
    "dataset-schema": edits_dataset(lambda facts: facts.update(schema_version=10**30)),
}


@each_of(ON_ALL)
def test_forged_data_set_is_refused_by_every_command(store, job, canary, cli, attack):
    attack(store, canary.folder)
    for command in (
        ("verify", store),
        ("inspect-shard", store),
        ("inspect-shard", store / "shards" / BAD),
        ("verify", store, "--repair"),
        job.into(store),
    ):
        assert_refused(cli.run(*command, before=limits))
    canary.assert_untouched()


# What one shard says of itself.


def edits_json(file, **changes):
    return lambda store, canary: forge_json(store, file, lambda facts: facts.update(changes))


def edits_commit(change):
    return lambda store, canary: forge_commit(store, change)


def adds_to_commit(name):
    """COMMIT.json names a file of the canary, with its true size and checksum."""

    def attack(store, canary):
        secret = (canary / "secret").read_bytes()
        facts = {"bytes": len(secret), "crc32": zlib.crc32(secret)}
        path = name.format(canary=canary)
        forge_commit(store, lambda commit: commit["files"].update({path: facts}))

    return attack


def swells_file(file):
    def attack(store, canary):
        swell(store / "shards" / BAD / file)
        forge_commit(store, lambda commit: commit["files"][file].update(bytes=ABSURD))

    return attack


def swells_commit(store, canary):
    swell(store / "shards" / BAD / "COMMIT.json")


def widen(store):
    """All that tells the width of a state agrees on one that no memory holds."""

    def widen_states(facts):
        facts["codec"].update(width=ABSURD)
        facts["contract"]["target"].update(hidden_size=ABSURD)

    def widen_plane(facts):
        facts["shape"][-1] = facts["chunk_grid"]["configuration"]["chunk_shape"][-1] = ABSURD
        facts["codecs"][0]["configuration"]["chunk_shape"][-1] = ABSURD

    forge_dataset(store, widen_states)
    for plane in ("exponents", "signs_mantissas"):
        forge_json(store, f"{plane}/zarr.json", widen_plane)


def inflates(store, canary):
    """The only chunk of a file is zstd of 4 GB."""
    index = struct.pack("<2Q", 0, len(BOMB) + 4) + b"\xff" * 16 * (CHUNKS_A_FILE - 1)
    content = BOMB + crc32c_of(BOMB) + index + crc32c_of(index)
    forge_file(store, "exponents/c/0/0/0", content)


def crc32c_of(content):
    return google_crc32c.value(content).to_bytes(4, "little")


ON_ONE = {
    "counts-absurd": edits_line(documents=ABSURD, tokens=ABSURD),
    "commit-above": adds_to_commit("../../../canary/secret"),
    "commit-deeper": adds_to_commit("codes/../../../../canary/secret"),
    "commit-absolute": adds_to_commit("{canary}/secret"),
    "commit-long-name": adds_to_commit("a" * 100_000),
    "commit-deep": edits_commit(lambda commit: DEEP),
    "commit-list": edits_commit(lambda commit: b"[]"),
    "commit-sizes": edits_commit(lambda commit: commit["files"]["zarr.json"].update(bytes=10**30)),
    "commit-swollen": swells_commit,
    "input-ids-swollen": swells_file("input_ids/c/0"),
    "plane-swollen": swells_file("signs_mantissas/c/0/0/0"),
    "metadata-swollen": swells_file("exponents/zarr.json"),
    "metadata-deep": lambda store, canary: forge_file(store, "exponents/zarr.json", DEEP),
    "shape-absurd": edits_json("exponents/zarr.json", shape=[ABSURD, 2, 64]),
    "shape-infinite": edits_json("exponents/zarr.json", shape=[float("inf"), 2, 64]),
    "shape-flat": edits_json("exponents/zarr.json", shape=[ABSURD]),
    "dtype-wide": edits_json("signs_mantissas/zarr.json", data_type="float64"),
    "dtype-text": edits_json("signs_mantissas/zarr.json", data_type="string"),
    "dtype-unknown": edits_json("exponents/zarr.json", data_type={"name": "os.system"}),
    "codec-unknown": edits_json("exponents/zarr.json", codecs=[{"name": "os.system"}]),
    "exponents-inflate": inflates,
}


@each_of(ON_ONE)
def test_forged_shard_is_refused_and_written_anew(store, job, canary, cli, attack):
    attack(store, canary.folder)
    for command in (
        ("verify", store),
        ("inspect-shard", store / "shards" / BAD),
        ("verify", store, "--repair"),
    ):
        outcome = cli.run(*command, before=limits)
        assert_refused(outcome)
        assert BAD in outcome.out + outcome.err
    done = cli.run(*job.into(store), before=limits)
    assert done.code == 0, done.err
    seen.assert_same_contents(store, job.contents)
    canary.assert_untouched()


def test_states_of_absurd_width_are_refused(store, cli):
    widen(store)
    for command in (("verify", store), ("inspect-shard", store / "shards" / BAD)):
        assert_refused(cli.run(*command, before=limits))


def test_what_a_shard_says_of_its_statistics_is_checked_as_it_is_shown(store, job, cli):
    forge_json(store, "zarr.json", lambda facts: facts["attributes"].update(taps="many"))
    for command in (("inspect-shard", store / "shards" / BAD), job.into(store)):
        assert_refused(cli.run(*command, before=limits))


# Links to the canary. Whoever owns a data set may link a shard to another disk; nothing may be
# written through a link.


def link(path, target):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("manifest/rank-00.jsonl", "secret"),
        ("manifest/rank-00.jsonl", "folder/letter"),
        ("manifest/rank-00.jsonl", "nothing-yet"),
        ("manifest/rank-00.lock", "secret"),
        ("manifest/rank-00.lock", "nothing-yet"),
        ("shards/shard-000001", "folder"),
        ("shards/shard-000001", "nothing-yet"),
        ("shards/.tmp-0-ab", "folder"),
        ("bad", "folder"),
    ],
)
def test_nothing_is_written_through_a_link(store, job, canary, cli, place, target):
    link(store / place, canary.folder / target)
    (store / "shards" / "shard-000000" / "input_ids" / "c" / "0").write_bytes(b"")
    for command in (("verify", store, "--repair"), job.into(store), ("verify", store)):
        outcome = cli.run(*command)
        assert outcome.code in (0, 1)
        assert "Traceback" not in outcome.err
    canary.assert_untouched()


def test_commands_on_a_sound_data_set_need_no_more_memory_than_is_allowed(store, job, cli):
    for command in (("verify", store), ("inspect-shard", store), job.into(store)):
        outcome = cli.run(*command, before=limits)
        assert outcome.code == 0, outcome.err
    shutil.rmtree(store)
    assert cli.run(*job.into(store), before=limits).code == 0
