"""Two extractions into one folder at once: the second is refused, or both are right."""

import random
import time

import pytest
import seen

TAKEN = "another extract writes to"
MOMENTS = 6


@pytest.fixture(scope="module")
def job(make_job):
    rng = random.Random(2)
    return make_job("int8", tuple(rng.randint(31, 60) for _ in range(12)))


def start_world(cli, arguments, size):
    return [cli.start(*arguments, RANK=str(r), WORLD_SIZE=str(size)) for r in range(size)]


def assert_refused_or_right(runs, refusals):
    """The outcomes' codes; every failure is one of the sentences in `refusals`."""
    outcomes = [run.wait() for run in runs]
    for outcome in outcomes:
        if outcome.code != 0:
            assert any(words in outcome.error for words in refusals), outcome.error
    return [outcome.code for outcome in outcomes]


def assert_finished_by_a_rerun(output, cli, job):
    seen.assert_nothing_wrong(output, job.documents)
    kept = seen.stamps(output)
    assert cli.run(*job.into(output)).code == 0
    assert kept.items() <= seen.stamps(output).items()
    assert seen.assert_nothing_wrong(output, job.documents) == job.shards
    seen.assert_same_contents(output, job.contents)
    assert seen.temporary(output) == []


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_second_of_two_runs_of_one_command_is_refused(tmp_path, cli, job, seed):
    output = tmp_path / "out"
    first = cli.start(*job.into(output))
    time.sleep(random.Random(seed).choice([0.0, 0.0, 0.05, 0.2]))
    codes = assert_refused_or_right([first, cli.start(*job.into(output))], [TAKEN])
    assert sorted(codes) == [0, 1]
    assert seen.assert_nothing_wrong(output, job.documents) == job.shards
    seen.assert_same_contents(output, job.contents)
    assert_finished_by_a_rerun(output, cli, job)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_worlds_of_different_size_do_not_spoil_each_other(tmp_path, cli, job, sizes, seed):
    output = tmp_path / "out"
    rng = random.Random(seed)
    runs = []
    for size in sizes:
        runs += start_world(cli, job.into(output), size)
        time.sleep(rng.choice([0.0, 0.1, 0.3]))
    codes = assert_refused_or_right(runs, [TAKEN, "exists already"])
    assert set(codes) <= {0, 1}
    assert_finished_by_a_rerun(output, cli, job)
