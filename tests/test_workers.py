"""Order, bounds and ends of worker processes: by an error, by ctrl-C, by their parent's death."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dflash_offline.workers import in_order

HERE = Path(__file__).parent


def nothing(parent):
    assert os.getppid() == parent


def squared_slowly_at_first(number):
    time.sleep(0.2 if number % 5 == 0 else 0)
    return number**2


def test_results_come_in_the_order_of_the_items():
    found = in_order(squared_slowly_at_first, range(23), processes=3, start=nothing)
    assert list(found) == [number**2 for number in range(23)]


def test_items_are_taken_little_ahead_of_the_results():
    taken = []
    items = (taken.append(i) or i for i in range(100))
    found = in_order(squared_slowly_at_first, items, processes=2, start=nothing)
    ahead = []
    for number, _ in enumerate(found):
        ahead.append(len(taken) - number)
    assert len(taken) == 100
    assert 2 <= max(ahead) <= 4
    assert not multiprocessing.active_children()


def failing_at_two_and_three(number):
    if number == 2:
        time.sleep(1)
        raise KeyError("two")
    if number == 3:
        raise KeyError("three")
    if number > 3:
        time.sleep(200)
    return number


def test_the_first_item_that_fails_ends_all_processes():
    found = in_order(failing_at_two_and_three, range(50), processes=3, start=nothing)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(KeyError, match="two"):
        next(found)
    assert not multiprocessing.active_children()


def test_closing_ends_all_processes():
    found = in_order(failing_at_two_and_three, [0, 4, 5, 6], processes=2, start=nothing)
    assert next(found) == 0
    found.close()
    assert not multiprocessing.active_children()


def killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_told_of_in_one_sentence():
    with pytest.raises(ChildProcessError, match="one of 2 worker processes was killed"):
        list(in_order(killed, range(9), processes=2, start=nothing))
    assert not multiprocessing.active_children()


def telling_its_id(folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(200)


PROGRAM = """
    import sys
    from dflash_offline.launch import end_with_parent
    from dflash_offline.workers import in_order
    from test_workers import telling_its_id
    try:
        list(in_order(telling_its_id, sys.argv[1:] * 9, processes=2, start=end_with_parent))
    except KeyboardInterrupt:
        sys.exit(130)
"""


def program(folder):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder)],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )


def two_ids(folder):
    deadline = time.monotonic() + 60
    while len(files := list(folder.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(file.name) for file in files]


def end_of(pids):
    from test_launch import is_alive  # imports torch, and the workers import this file

    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    with program(tmp_path) as parent:
        pids = two_ids(tmp_path)
        parent.kill()
    assert end_of(pids)


def test_ctrl_c_ends_all_without_a_word(tmp_path):
    """A terminal sends it to all processes of the command."""
    with program(tmp_path) as parent:
        pids = two_ids(tmp_path)
        os.killpg(parent.pid, signal.SIGINT)
        _, err = parent.communicate(timeout=60)
    assert (parent.returncode, err) == (130, b"")
    assert end_of(pids)


def interrupted(number):
    os.kill(os.getpid(), signal.SIGINT)
    return number


def test_ctrl_c_is_the_parents_to_answer_from_the_start():
    """Or else each process that is still importing dies with a traceback."""
    assert list(in_order(interrupted, [3, 4], processes=2, start=interrupted)) == [3, 4]
