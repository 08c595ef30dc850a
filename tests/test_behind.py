"""Calls are made in order, errors surface, and nothing is left running."""

import threading

import pytest

from dflash_offline.behind import Behind


def test_calls_are_made_in_order_and_all_of_them_before_the_block_is_left():
    made = []
    with Behind(depth=2) as behind:
        for i in range(20):
            behind.call(made.append, i)
    assert made == list(range(20))


def test_no_more_calls_than_the_depth_wait():
    free, begun = threading.Event(), []

    def wait(i):
        begun.append(i)
        free.wait(10)

    with Behind(depth=2) as behind:
        for i in range(2):
            behind.call(wait, i)
        third = threading.Thread(target=behind.call, args=(wait, 2))
        third.start()
        third.join(0.2)
        assert third.is_alive() and begun == [0]
        free.set()
        third.join()
    assert begun == [0, 1, 2]


def test_an_error_of_a_call_surfaces_and_no_call_is_made_after_it():
    made, queued = [], threading.Event()

    def fail():
        queued.wait(10)  # until there are calls behind this one
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"), Behind(depth=4) as behind:
        behind.call(made.append, 0)
        behind.call(fail)
        behind.call(made.append, 1)
        behind.call(made.append, 2)
        queued.set()
        for i in range(3, 9):
            behind.call(made.append, i)
    assert made == [0]


def test_an_error_of_the_block_lets_no_further_call_begin():
    made, free = [], threading.Event()
    with pytest.raises(KeyboardInterrupt), Behind(depth=9) as behind:
        behind.call(free.wait, 10)
        for i in range(5):
            behind.call(made.append, i)
        threading.Timer(0.2, free.set).start()
        raise KeyboardInterrupt
    assert made == []
