"""Damage to any file of a data set is found by the reader or by verify; no wrong number is read.

What `verify --repair` and the same extract make of it is the data set that was there before.
"""

import json
import random
import shutil

import pytest
import seen

from dflash_offline.config import VerifyConfig
from dflash_offline.dataset import Dataset
from dflash_offline.stages.verify import verify

PLANES = {
    "raw": ["bits"],
    "lossless": ["exponents", "signs_mantissas"],
    "int8": ["codes", "scales"],
}
NARROW = ("input_ids", "loss_mask", "offsets", "document_index", "supervised")
FLIPS = 6
# Three shards of two documents: those of the first two have as many tokens.
LENGTHS, SHARD_TOKENS = (75, 75, 75, 75, 80, 90), 170
SHARDS = tuple(f"shard-00000{i}" for i in range(3))
BAD = SHARDS[1]


@pytest.fixture(scope="module", params=PLANES)
def job(request, make_job):
    return make_job(request.param, LENGTHS, SHARD_TOKENS)


@pytest.fixture
def store(job, tmp_path):
    """A copy to spoil."""
    shutil.copytree(job.whole, tmp_path / "out")
    seen.assert_nothing_wrong(tmp_path / "out", job.documents)
    return tmp_path / "out"


def flip(place):
    """One bit, at a place from 0.0, the first bit, to 1.0, the last."""

    def change(content):
        bit = int(place * (8 * len(content) - 1))
        flipped = bytes([content[bit // 8] ^ 1 << bit % 8])
        return content[: bit // 8] + flipped + content[bit // 8 + 1 :]

    return change


def changes(seed):
    """Content of a file -> what it is damaged to, or None for a file that is gone."""
    rng = random.Random(seed)
    return [
        *(flip(place) for place in (0.0, 1.0, *(rng.random() for _ in range(FLIPS - 2)))),
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: None,
    ]


def put(path, content):
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(content)


def is_refused(path, documents, names):
    """Whether the reader refuses, naming the place. If it does not, all that it gives is right."""
    try:
        found = seen.read_documents(path)
    except (ValueError, OSError) as error:
        assert names in str(error)
        return True
    seen.assert_right(found, documents)
    return False


def assert_found(store, documents, file):
    is_refused(store, documents, BAD)
    bad = verify(store, VerifyConfig()).bad
    assert list(bad) == [BAD]
    assert file.split("/c/")[0] in bad[BAD]


def files_of_a_shard(codec):
    arrays = [*PLANES[codec], *NARROW]
    chunks = [f"{plane}/c/0/0/0" for plane in PLANES[codec]] + [f"{n}/c/0" for n in NARROW]
    return ["COMMIT.json", "zarr.json", *(f"{name}/zarr.json" for name in arrays), *chunks]


CASES = [(codec, file) for codec in PLANES for file in files_of_a_shard(codec)]


def test_the_cases_are_all_files_of_a_shard(job):
    committed = json.loads((job.whole / "shards" / BAD / "COMMIT.json").read_text())["files"]
    codec = json.loads((job.whole / "dataset.json").read_text())["contract"]["codec"]
    assert sorted([*committed, "COMMIT.json"]) == sorted(files_of_a_shard(codec))


@pytest.mark.parametrize(("job", "file"), CASES, indirect=["job"])
def test_damage_to_a_shards_file_is_found_and_mended(store, job, cli, file):
    path = store / "shards" / BAD / file
    content = path.read_bytes()
    for change in changes(file):
        put(path, change(content))
        assert_found(store, job.documents, file)
    put(path, random.Random(file).choice(changes(file))(content))
    assert_mended(store, job, cli)


def assert_mended(store, job, cli):
    """verify --repair, then the same extract: the bad shard is as it was, the others untouched."""
    kept = {file: stamp for file, stamp in seen.stamps(store).items() if f"/{BAD}/" not in file}
    repaired = cli.run("verify", store, "--repair")
    assert repaired.code == 1
    assert f"BAD {BAD}" in repaired.out
    assert f"{BAD} set aside" in repaired.out
    done = cli.run(*job.into(store))
    assert done.code == 0, done.err
    seen.assert_same_contents(store, job.contents)
    assert kept.items() <= seen.stamps(store).items()


@pytest.mark.parametrize(("job", "file"), CASES, indirect=["job"])
def test_file_of_another_shard_is_found(store, job, file):
    """Each is whole in itself; those of one size are told apart by nothing but their content."""
    path = store / "shards" / BAD / file
    others = [store / "shards" / other / file for other in SHARDS if other != BAD]
    for content in {other.read_bytes() for other in others} - {path.read_bytes()}:
        path.write_bytes(content)
        assert_found(store, job.documents, file)


def test_shards_swapped_as_a_whole_are_found_and_mended(store, job, cli):
    one, two = (store / "shards" / name for name in SHARDS[:2])
    one.rename(store / "spare")
    two.rename(one)
    (store / "spare").rename(two)
    assert is_refused(store, job.documents, one.name)
    assert list(verify(store, VerifyConfig()).bad) == [one.name, two.name]
    assert cli.run("verify", store, "--repair").code == 1
    assert cli.run(*job.into(store)).code == 0
    seen.assert_same_contents(store, job.contents)


SHARED = [*((codec, "dataset.json") for codec in PLANES), ("int8", "calibration.safetensors")]


@pytest.mark.parametrize(("job", "file"), SHARED, indirect=["job"])
def test_damage_to_what_all_shards_share_is_refused(store, job, file):
    path = store / file
    content = path.read_bytes()
    for change in changes(file):
        put(path, change(content))
        with pytest.raises((ValueError, FileNotFoundError), match=path.name):
            Dataset.open(store)
        assert is_refused(store, job.documents, file)


@pytest.mark.parametrize("job", ["int8"], indirect=True)
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("dataset.json", "calibration.safetensors is not the one that dataset.json names"),
        ("calibration.safetensors", "calibration.safetensors is not the one"),
        ("manifest/rank-00.jsonl", "COMMIT.json is not the one that the manifest names"),
    ],
)
def test_what_another_data_set_has_in_its_place_is_refused(store, job, make_job, file, words):
    other = make_job("int8", (*LENGTHS[:-1], 91), SHARD_TOKENS + 1)
    assert (other.whole / file).read_bytes() != (store / file).read_bytes()
    shutil.copyfile(other.whole / file, store / file)
    assert is_refused(store, job.documents, words)


def test_damage_to_a_manifest_hides_shards_but_never_changes_them(store, job, cli):
    """A line that is cut off was never a commit: verify names the shard, extract adopts it."""
    path = store / "manifest" / "rank-00.jsonl"
    content = path.read_bytes()
    refused = 0
    for change in changes("manifest"):
        put(path, change(content))
        try:
            verdict = verify(store, VerifyConfig())
        except ValueError as error:
            assert "rank-00.jsonl line" in str(error)
            assert is_refused(store, job.documents, "rank-00.jsonl line")
            refused += 1
            continue
        hidden = [note for note in verdict.notes if "is in no manifest" in note]
        assert len(hidden) == job.shards - verdict.shards
        assert seen.assert_nothing_wrong(store, job.documents) == verdict.shards
        kept = seen.stamps(store)
        assert cli.run(*job.into(store)).code == 0
        assert seen.stamps(store) == kept
        seen.assert_same_contents(store, job.contents)
    assert 0 < refused < len(changes("manifest"))
