"""Rows: every document once, never over-full, the same for everyone."""

import random

import pytest
import torch

from dflash_offline.packing import RowStream, pack_row, plan_rows


def lengths(count, seed=0):
    draw = random.Random(seed)
    return [draw.randint(1, 97) for _ in range(count)]


def test_every_document_is_packed_once_and_no_row_overflows():
    sizes = lengths(503)
    rows = plan_rows(sizes, 101, seed=3, epoch=0)
    assert sorted(d for row in rows for d in row) == list(range(503))
    assert max(sum(sizes[d] for d in row) for row in rows) <= 101


def test_little_of_a_row_stays_empty():
    sizes = lengths(4000)
    rows = plan_rows(sizes, 1000, seed=0, epoch=0)
    assert sum(sizes) / (len(rows) * 1000) > 0.97


def test_a_document_longer_than_a_row_gets_a_row_of_its_own():
    rows = plan_rows([10, 500, 20], 100, seed=0, epoch=0)
    assert [1] in rows


def test_the_plan_depends_on_seed_and_epoch_and_nothing_else():
    sizes = lengths(50)
    plan = plan_rows(sizes, 200, seed=1, epoch=2)
    assert plan == plan_rows(list(sizes), 200, seed=1, epoch=2)
    assert plan != plan_rows(sizes, 200, seed=1, epoch=3)
    assert plan != plan_rows(sizes, 200, seed=2, epoch=2)


def test_the_stream_is_epoch_after_epoch_and_can_be_entered_anywhere():
    sizes = lengths(40)
    expected = [row for e in range(3) for row in plan_rows(sizes, 200, seed=5, epoch=e)]
    stream = RowStream(sizes, 200, seed=5)
    assert [stream[n] for n in range(len(expected))] == expected
    assert stream[3] == expected[3]  # back to an earlier epoch
    assert RowStream(sizes, 200, seed=5)[len(expected) - 1] == expected[-1]


def test_epoch_counts_rows_taken():
    stream = RowStream([10] * 40, 100, seed=0)
    assert stream.epoch(0) == 0.0
    assert stream.epoch(2) == pytest.approx(0.5)
    assert stream.epoch(6) == pytest.approx(1.5)


def test_positions_restart_and_padding_belongs_to_nobody():
    a = torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([False, True, True])
    b = torch.tensor([8, 9], dtype=torch.int32), torch.tensor([False, True])
    row = pack_row([a, b], 7)
    assert row.input_ids_S.tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert row.document_ids_S.tolist() == [0, 0, 0, 1, 1, -1, -1]
    assert row.position_ids_S.tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert row.loss_mask_S.tolist() == [False, True, True, False, True, False, False]


def test_a_document_that_is_too_long_is_cut():
    ids = torch.arange(9, dtype=torch.int32)
    row = pack_row([(ids, ids > 2)], 4)
    assert row.input_ids_S.tolist() == [0, 1, 2, 3]
    assert row.loss_mask_S.tolist() == [False, False, False, True]
