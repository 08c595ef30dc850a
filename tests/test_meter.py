"""Rates against counts and a clock set by hand."""

import pytest

from dflash_offline import meter as module
from dflash_offline.meter import Meter, add_up, tell


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def running_meter(folder, monkeypatch, queued=0):
    """2 FLOP a token of a card of 100 FLOP/s: 50 tok/s are all it can do."""
    clock, meter = Clock(monkeypatch), Meter(folder)
    meter.begin(flop_per_token=2.0, matmul_rate=100.0, queued=lambda: queued)
    return clock, meter


def test_rates_are_counts_over_seconds(tmp_path, monkeypatch):
    clock, meter = running_meter(tmp_path, monkeypatch, queued=1)
    for _ in range(4):
        clock.now += 2.5
        meter.ran(75, 100)
    meter.wrote(5000)
    facts = meter.facts()
    assert facts["tokens"] == 300
    assert facts["tokens_per_second"] == pytest.approx(30)
    assert facts["matmul_share"] == pytest.approx(0.6)
    assert facts["filler_share"] == pytest.approx(0.25)
    assert facts["bytes_per_second"] == pytest.approx(500)
    assert facts["queued"] == 1
    assert facts["free_bytes"] > 0


def test_rates_are_those_of_the_last_minute(tmp_path, monkeypatch):
    clock, meter = running_meter(tmp_path, monkeypatch)
    for _ in range(100):  # 100 s at 40 tok/s
        clock.now += 1
        meter.ran(40, 40)
    for _ in range(61):  # then slower
        clock.now += 1
        meter.ran(10, 10)
    assert meter.facts()["tokens_per_second"] == pytest.approx(10, rel=0.05)
    clock.now += 600  # and then nothing
    assert meter.facts()["tokens_per_second"] < 1


def test_a_meter_has_no_facts_before_the_first_row(tmp_path):
    assert Meter(tmp_path).facts() == {}
    assert tell({}) == tell(add_up([{}, {}])) == ""


def test_ranks_add_up():
    one = {
        "tokens_per_second": 100.0, "matmul_share": 0.5, "filler_share": 0.1, "queued": 1,
        "bytes_per_second": 3e6, "free_bytes": 70e9,
    }  # fmt: skip
    two = {**one, "tokens_per_second": 300.0, "matmul_share": 0.7, "free_bytes": 60e9}
    facts = add_up([one, two, {"phase": "reading weights", "filler_share": None}])
    assert facts["tokens_per_second"] == 400
    assert (facts["slowest"], facts["fastest"], facts["ranks"]) == (100, 300, 2)
    assert facts["matmul_share"] == pytest.approx(0.6)
    assert (facts["queued"], facts["bytes_per_second"], facts["free_bytes"]) == (2, 6e6, 60e9)
    line = tell(facts)
    assert "400 tok/s now, 2 ranks of 100 to 300 each, 60% of the matmul rate" in line
    assert "10.0% filler, 2 queued, 6.0 MB/s written, 60.0 GB free" in line
