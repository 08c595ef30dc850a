"""The commit protocol step by step: death before each, a power cut after each sync."""

import functools
import signal
from pathlib import Path

import crashing
import pytest
import seen

INSIDE = 16  # of the many steps inside a temporary folder one in so many is tried


@pytest.fixture(scope="module")
def job(make_job):
    return make_job("int8", (43, 29))


def chosen(log):
    """Numbers of the points to die at: all of the protocol's own, and some inside a shard."""
    paths = [Path(line.split(maxsplit=1)[1]) for line in log.read_text().splitlines()]
    return [k for k, path in enumerate(paths) if is_protocol(path) or k % INSIDE == 0]


def is_protocol(path):
    return ".tmp-" not in path.parent.as_posix() or path.name == "COMMIT.json"


def test_death_before_any_step_leaves_whole_shards_and_a_rerun_finishes(tmp_path, cli, job):
    root, log = tmp_path / "counted", tmp_path / "points"
    count = functools.partial(crashing.list_points, root, log)
    assert cli.run(*job.into(root), before=[count]).code == 0
    numbers = chosen(log)
    assert len(numbers) > 50
    committed = []
    for number in numbers:
        output = tmp_path / str(number)
        die = functools.partial(crashing.die_at, output, number)
        assert cli.run(*job.into(output), before=[die]).code == -signal.SIGKILL
        committed.append(seen.assert_nothing_wrong(output, job.documents))
        kept = seen.stamps(output)
        done = cli.run(*job.into(output))
        assert done.code == 0, (number, done.err)
        assert kept.items() <= seen.stamps(output).items(), number
        seen.assert_same_contents(output, job.contents)
        assert seen.temporary(output) == []
    assert set(committed) == {0, 1, 2}


def test_power_cut_after_any_sync_leaves_whole_shards_and_a_rerun_finishes(tmp_path, cli, job):
    root, cuts = tmp_path / "root", tmp_path / "cuts"
    root.mkdir()
    cuts.mkdir()
    keep = functools.partial(crashing.keep_power_cuts, root, cuts)
    assert cli.run(*job.into(root / "out"), before=[keep]).code == 0
    states = sorted(cuts.iterdir(), key=lambda folder: int(folder.name))
    committed = [seen.assert_nothing_wrong(state / "out", job.documents) for state in states]
    assert committed == sorted(committed), "a commit was undone"
    assert committed[0] == 0
    assert committed[-1] == 2
    for state in states[:: len(states) // 20]:
        kept = seen.files_of(state / "out")
        assert cli.run(*job.into(state / "out")).code == 0
        assert set(kept) <= set(seen.files_of(state / "out"))
        seen.assert_same_contents(state / "out", job.contents)
