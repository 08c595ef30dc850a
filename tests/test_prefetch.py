"""Items come in order, errors surface where they are used, and nothing is left running."""

import threading

import pytest

from dflash_offline.prefetch import prefetch


def test_items_come_in_order_and_end():
    with prefetch(iter(range(10))) as items:
        assert list(items) == list(range(10))
        with pytest.raises(StopIteration):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_an_error_of_the_source_surfaces_after_the_items_before_it():
    def source():
        yield 1
        raise ValueError("shard-000003 is damaged")

    with prefetch(source()) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="shard-000003"):
            next(items)


def test_no_more_than_the_depth_is_made_ahead():
    made = []

    def source():
        for i in range(100):
            made.append(i)
            yield i

    with prefetch(source(), depth=2) as items:
        assert next(items) == 0
        threading.Event().wait(0.3)
        assert len(made) <= 4  # one used, two ready, one in hand


def test_leaving_early_ends_the_thread():
    def endless():
        while True:
            yield 0

    with prefetch(endless()) as items:
        next(items)
    assert "prefetch" not in {t.name for t in threading.enumerate()}
