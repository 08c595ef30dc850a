"""SIGKILL at any moment: no short shard is readable, and a rerun redoes what is lost, no more."""

import random
import signal
import time

import pytest
import seen
from processes import wait_until

SHARDS = 40
KILLS_EACH, SEEDS = 10, 5


@pytest.fixture(scope="module")
def job(make_job):
    rng = random.Random(1)
    return make_job("int8", tuple(rng.randint(31, 60) for _ in range(SHARDS)))


def moments(rng, output, pace):
    """What to wait for, and for how many seconds longer: every phase of a run has its turn.

    `pace` is the time of a shard. To start takes some three of them, to calibrate two.
    """
    return [
        (lambda: True, rng.uniform(0, 4 * pace)),
        (lambda: (output / "manifest").exists(), rng.uniform(0, 2 * pace)),
        (lambda: seen.temporary(output), rng.uniform(0, pace)),
        *((grown(output, count), rng.uniform(0, pace)) for count in (1, 3, 1, 2, 0, 1, 2)),
    ]


def grown(output, count):
    """Whether `count` shards more are committed than at the first call."""
    before = []

    def is_grown():
        before.append(seen.lines(output))
        return before[-1] - before[0] >= count

    return is_grown


def killed_at(run, moment):
    event, longer = moment
    assert wait_until(event, while_going=run), run.wait()
    time.sleep(longer)
    run.kill()
    assert run.wait().code == -signal.SIGKILL


@pytest.mark.parametrize("seed", range(SEEDS))
def test_killed_runs_leave_whole_shards_and_redo_none(tmp_path, cli, job, seed):
    output = tmp_path / "out"
    finished, unfinished = [], []
    for moment in moments(random.Random(seed), output, job.seconds / job.shards):
        kept = seen.stamps(output)
        killed_at(cli.start(*job.into(output)), moment)
        finished.append(seen.assert_nothing_wrong(output, job.documents))
        unfinished += seen.temporary(output)
        assert kept.items() <= seen.stamps(output).items()
    assert len(finished) == KILLS_EACH
    assert len(set(finished)) >= 5, finished
    assert len(unfinished) >= 3, "no kill in the middle of a shard"
    kept = seen.stamps(output)
    assert 0 < seen.lines(output) < job.shards
    assert cli.run(*job.into(output)).code == 0
    assert kept.items() <= seen.stamps(output).items()
    assert seen.assert_nothing_wrong(output, job.documents) == job.shards
    assert seen.temporary(output) == []
    seen.assert_same_contents(output, job.contents)


def start_ranks(cli, arguments, size):
    return [cli.start(*arguments, RANK=str(r), WORLD_SIZE=str(size)) for r in range(size)]


@pytest.mark.parametrize(
    ("size", "killed", "then"), [(2, (0, 1), 1), (2, (0,), 3), (2, (1,), 1), (3, (2, 0, 1), 2)]
)
def test_killed_ranks_are_resumed_on_another_number_of_ranks(
    tmp_path, cli, job, size, killed, then
):
    output = tmp_path / "out"
    runs = start_ranks(cli, job.into(output), size)
    assert wait_until(grown(output, 5), while_going=runs[killed[0]])
    for rank in killed:
        runs[rank].kill()
    codes = [run.wait().code for run in runs]
    assert codes == [-signal.SIGKILL if rank in killed else 0 for rank in range(size)]
    committed = seen.assert_nothing_wrong(output, job.documents)
    assert 5 <= committed < job.shards
    kept = seen.stamps(output)
    outcomes = [run.wait() for run in start_ranks(cli, job.into(output), then)]
    assert [outcome.code for outcome in outcomes] == [0] * then, outcomes
    assert kept.items() <= seen.stamps(output).items()
    seen.assert_same_contents(output, job.contents)
