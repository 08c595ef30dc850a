"""A disk that runs full at any moment: nothing is half-committed, and with room it goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import seen
from processes import Outcome
from volumes import Volume, unshare

PROGRAM = Path(sys.executable).parent / "dflash-offline"
ENOUGH = "size=64m"
PAGE = 4096


@pytest.fixture(scope="module")
def job(make_job):
    return make_job("int8", (45, 38, 60, 31, 52))


@pytest.fixture
def volume(tmp_path):
    command, why_not = unshare()
    if why_not:
        pytest.skip(f"no small disk can be mounted: {why_not}")
    path = tmp_path / "disk"
    path.mkdir()
    holder = subprocess.Popen(
        [*command, "sh", "-c", "echo ready; exec sleep 1000"], stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"ready\n"
    yield Volume(holder.pid, path)
    holder.kill()
    holder.wait()
    holder.stdout.close()


def pages(path):
    """How many pages of a tmpfs the files below `path` take."""
    return sum(-(-file.stat().st_size // PAGE) for file in path.rglob("*") if file.is_file())


def test_run_into_a_full_disk_commits_nothing_half_and_goes_on_with_more_room(volume, cli, job):
    output, looked_at = volume.path / "out", volume.seen / "out"
    needed = pages(job.whole)
    committed = set()
    for size in range(1, needed, max(1, needed // 20)):
        volume.mount(f"size={size * PAGE}")
        assert cli.run(*job.into(output), "--allow-partial", before=[volume.enter]).error
        assert seen.temporary(looked_at) == []
        committed.add(seen.assert_nothing_wrong(looked_at, job.documents))
        assert_goes_on(volume, cli, job)
        volume.unmount()
    assert committed == set(range(job.shards))


def assert_goes_on(volume, cli, job):
    """With more room the same command finishes what an undisturbed run would have written."""
    kept = seen.stamps(volume.seen / "out")
    volume.resize(ENOUGH)
    done = cli.run(*job.into(volume.path / "out"), "--allow-partial", before=[volume.enter])
    assert done.code == 0, done.err
    assert kept.items() <= seen.stamps(volume.seen / "out").items()
    assert seen.temporary(volume.seen / "out") == []
    seen.assert_same_contents(volume.seen / "out", job.contents)


def test_disk_that_has_no_room_for_another_file_is_no_different(volume, cli, job):
    for files in (3, 8, 30, 70, 100):
        volume.mount(f"{ENOUGH},nr_inodes={files}")
        assert cli.run(
            *job.into(volume.path / "out"), "--allow-partial", before=[volume.enter]
        ).error
        seen.assert_nothing_wrong(volume.seen / "out", job.documents)
        volume.resize(f"{ENOUGH},nr_inodes=10000")
        assert_goes_on(volume, cli, job)
        volume.unmount()


def test_installed_program_is_stopped_by_a_full_disk_in_mid_shard(volume, cli, job):
    output = volume.path / "out"
    volume.mount(f"size={pages(job.whole) * PAGE // 2}")
    command = volume.command(PROGRAM, *job.into(output), "--allow-partial")
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert Outcome(done.returncode, done.stdout, done.stderr).error
    assert 0 < seen.assert_nothing_wrong(volume.seen / "out", job.documents) < job.shards
    assert seen.temporary(volume.seen / "out") == []
    assert_goes_on(volume, cli, job)


def test_full_disk_is_told_in_one_clear_sentence(volume, cli, job):
    volume.mount(f"size={pages(job.whole) * PAGE // 2}")
    error = cli.run(*job.into(volume.path / "out"), "--allow-partial", before=[volume.enter]).error
    assert "the disk is full" in error
    assert str(volume.path / "out") in error
    assert "free space and run the same command again" in error
