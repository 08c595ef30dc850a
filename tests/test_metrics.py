"""What a run says, where it says it, and that what was logged survives."""

import json
import time

import pytest

from dflash_offline.metrics import Log, Pace, duration, progress, say, summary_table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2s"), (59.0, "59.0s"), (75, "1m15s"), (3600, "1h00m00s"), (93784, "1d02h03m")],
)
def test_durations_have_three_units_at_most(seconds, text):
    assert duration(seconds) == text


def test_lines_and_progress_go_to_stderr_and_results_to_stdout(capsys):
    say("note [1] of %d")
    with progress("reading", total=3, unit="tok") as bar:
        bar.advance(3)
    summary_table("done", {"tokens": 1234567, "share": 0.5, "path": "x"})
    seen = capsys.readouterr()
    assert "note [1] of %d" in seen.err
    assert "1,234,567" in seen.out
    assert "1,234,567" not in seen.err
    assert "note" not in seen.out


def test_a_long_task_without_a_terminal_says_how_far_it_is(capsys, monkeypatch):
    with progress("reading", total=100, unit="tok") as bar:
        bar.advance(10)
        assert capsys.readouterr().err == ""
        bar._last_line -= 20  # as if 20 seconds had passed
        bar.advance(15)
    line = capsys.readouterr().err
    assert "reading: 25/100 tok" in line
    assert "tok/s" in line
    assert "s left" in line


def test_a_log_line_is_on_disk_when_it_is_written(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        log.write({"step": 1}, "step 1")
        assert json.loads(path.read_text()) == {"step": 1}
    with Log(path) as log:  # a resumed run goes on
        log.write({"step": 2}, "step 2")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    assert "step 2" in capsys.readouterr().err


def test_what_is_not_finite_is_null_in_the_log(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        log.write({"a": float("nan"), "b": float("inf"), "c": 1.5, "d": 3}, "line")
    assert path.read_text() == '{"a": null, "b": null, "c": 1.5, "d": 3}\n'


def test_ranks_without_a_log_say_nothing(capsys):
    with Log(None) as log:
        log.write({"step": 1}, "step 1")
    assert capsys.readouterr().err == ""


def test_pace_tells_waiting_apart_and_leaves_the_first_step_out_of_the_time_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def batches():
        while True:
            now[0] += 1.0  # a second of waiting for each
            yield "batch"

    source = batches()
    pace = Pace(step=7)
    assert pace.wait_for(source) == "batch"
    now[0] += 239.0  # the first step compiles for four minutes
    first = pace.facts(8, 107, tokens_per_step=50)
    assert first["data_wait"] == pytest.approx(1 / 240)
    for _ in range(9):
        pace.wait_for(source)
        now[0] += 1.0
    later = pace.facts(17, 107, tokens_per_step=50)
    assert later["data_wait"] == pytest.approx(0.5)
    assert later["seconds_per_step"] == pytest.approx(2.0)
    assert later["tokens_per_second"] == pytest.approx(25.0)
    assert later["elapsed"] == pytest.approx(258.0)
    assert later["eta"] == pytest.approx(90 * 2.0)


def test_what_was_done_before_counts_as_done_and_not_for_the_rate(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dflash_offline.metrics.time.monotonic", lambda: now[0])
    with progress("extracting", total=1000, unit="tok") as bar:
        assert bar._line() == "extracting: 0/1,000 tok, 0 tok/s"
        bar.skip(900)
        now[0] += 10
        bar.advance(20)
        assert bar._line() == "extracting: 920/1,000 tok, 40 s left, 2 tok/s"
