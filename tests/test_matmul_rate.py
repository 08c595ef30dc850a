"""The yardstick against the clock."""

import itertools

import pytest
import torch

from dflash_offline import matmul_rate as module
from dflash_offline.matmul_rate import measure_matmul_rate


def test_rate_is_the_median_of_ten_products_after_three_to_warm_up(monkeypatch):
    """128 x 512 x 2048 multiply-adds, of which the median takes half a second."""
    taken = [9.0, 9.0, 9.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9]
    ticks = itertools.chain.from_iterable((0.0, seconds) for seconds in taken)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    rate = measure_matmul_rate(torch.device("cpu"), torch.float32)
    assert rate == pytest.approx(2 * 128 * 512 * 2048 / 0.5)
    assert next(ticks, None) is None


def test_rate_of_a_real_cpu_is_one():
    """A core does 1 GFLOP/s at the least, a machine below 1 PFLOP/s."""
    assert 1e9 < measure_matmul_rate(torch.device("cpu"), torch.float32) < 1e15
