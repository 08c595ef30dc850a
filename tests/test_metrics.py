"""What a run says, where it says it, and that what was logged survives."""

import io
import json
import sys
import time

import pytest

from dflash_offline import metrics
from dflash_offline.metrics import (
    Log,
    Pace,
    Running,
    duration,
    phase,
    progress,
    running,
    say,
    summary_table,
)


class Ticks:
    """Stands for the event that ends the lines: passed over `count` times at once, then set."""

    def __init__(self, count):
        self.left = count

    def wait(self, _seconds):
        self.left -= 1
        return self.left < 0


class Clock:
    """Both clocks of `time`, moved by hand; epoch seconds are a million ahead."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 1e6)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def replace_stderr_by_a_terminal(monkeypatch):
    """Within a test: pytest puts its own stderr in place between a fixture and the test."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return sys.stderr


def said(capsys, ticks=1):
    metrics._say_lines(Ticks(ticks))
    return capsys.readouterr().err.splitlines()


def wait_for(capsys, words):
    """All of stderr until a line with these words is there."""
    seen = ""
    for _ in range(3000):
        seen += capsys.readouterr().err
        if any(words in line for line in seen.splitlines()):
            return seen
        time.sleep(0.01)
    raise AssertionError(f"no {words!r} in {seen!r}")


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


def test_a_stuck_task_without_a_terminal_says_so_until_it_ends(capsys, monkeypatch):
    monkeypatch.setattr(metrics, "_LINE_SECONDS", 0.02)
    with progress("reading", total=100, unit="tok") as bar:
        bar.advance(25)
        line = wait_for(capsys, "nothing new for 0 s").splitlines()[-1]
    assert line.startswith("reading: 25/100 tok, ")
    assert "s left, " in line and " tok/s, nothing" in line
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_short_task_without_a_terminal_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(metrics, "_last_line", time.monotonic())
    with progress("reading", total=100, unit="tok") as bar, phase("compiling"):
        bar.advance(100)
    assert capsys.readouterr().err == ""


def test_short_tasks_one_after_the_other_make_no_long_silence(capsys, monkeypatch):
    monkeypatch.setattr(metrics, "_last_line", time.monotonic() - 16)
    with phase("compiling"):
        assert wait_for(capsys, "compiling") == "compiling ... 0 s\n"
    with phase("testing"):
        pass
    assert capsys.readouterr().err == ""


def test_a_line_says_since_when_nothing_is_new(clock):
    with progress("extracting", total=None, unit="tok") as bar:
        clock.now += 10
        bar.advance(100)
        clock.now += 14
        assert bar.line() == "extracting: 100 tok, 4 tok/s"
        clock.now += 28
        bar.advance(0)  # a look that found nothing
        assert bar.line() == "extracting: 100 tok, 2 tok/s, nothing new for 42 s"
        bar.advance(900)
        assert bar.line() == "extracting: 1,000 tok, 19 tok/s"


def test_details_are_appended_and_their_fault_is_told(clock):
    texts = ["padding 2 %", ""]
    with progress("extracting", total=80, unit="tok", details=lambda: texts.pop(0)) as bar:
        clock.now += 10
        bar.advance(20)
        assert bar.line() == "extracting: 20/80 tok, 30 s left, 2 tok/s, padding 2 %"
        assert bar.line() == "extracting: 20/80 tok, 30 s left, 2 tok/s"
        assert bar.line().endswith("2 tok/s, no details (IndexError('pop from empty list'))")


def test_only_the_innermost_block_says_lines(capsys, clock):
    with progress("reading", total=9, unit="tok"):
        with phase("compiling [all]"):
            clock.now += 75
            assert said(capsys, ticks=2) == ["compiling [all] ... 75 s"] * 2
        assert said(capsys) == ["reading: 0/9 tok, 0 tok/s, nothing new for 75 s"]


def test_what_runs_is_known_to_the_process(clock):
    assert running() is None
    with pytest.raises(OSError), progress("reading", total=9, unit="tok") as bar:
        assert running() == Running("reading", 0, 9, "tok", last_advance=1000100)
        clock.now += 5
        bar.advance(3)
        clock.now += 20
        with phase("compiling"):
            clock.now += 1
            assert running() == Running("compiling", 0, None, None, last_advance=1000125)
        assert running() == Running("reading", 3, 9, "tok", last_advance=1000105)
        raise OSError("a full disk")
    assert running() is None


def test_a_terminal_shows_all_open_blocks(monkeypatch):
    terminal = replace_stderr_by_a_terminal(monkeypatch)
    with progress("reading [1]", total=50, unit="tok", details=lambda: "padding 2 %") as bar:
        bar.advance(20)
        with phase("compiling"):
            for _ in range(3000):
                if "compiling" in terminal.getvalue():
                    break
                time.sleep(0.01)
    seen = terminal.getvalue()
    drawn = seen[: seen.index("compiling")]
    assert "reading [1]" in drawn and "20/50 tok" in drawn and "padding 2 %" in drawn
    assert "compiling" not in seen[seen.rindex("reading [1]") :]


def test_a_file_gets_lines_even_where_colour_is_forced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(metrics, "_last_line", time.monotonic() - 16)
    with progress("reading", total=50, unit="tok"):
        seen = wait_for(capsys, "reading")
    seen += capsys.readouterr().err
    assert "\x1b[?25l" not in seen  # hides the cursor, as a bar does


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

    pace = Pace(step=7)
    now[0] += 240.0  # the first step compiles for four minutes
    first = pace.facts(8, 107, tokens_per_step=50, waited=1.0)
    assert first["data_wait"] == pytest.approx(1 / 240)
    now[0] += 18.0  # nine more, each a second of waiting and one of work
    later = pace.facts(17, 107, tokens_per_step=50, waited=9.0)
    assert later["data_wait"] == pytest.approx(0.5)
    assert later["seconds_per_step"] == pytest.approx(2.0)
    assert later["tokens_per_second"] == pytest.approx(25.0)
    assert later["elapsed"] == pytest.approx(258.0)
    assert later["eta"] == pytest.approx(90 * 2.0)


def test_what_was_done_before_counts_as_done_and_not_for_the_rate(clock):
    with progress("extracting", total=1000, unit="tok") as bar:
        assert bar.line() == "extracting: 0/1,000 tok, 0 tok/s"
        bar.skip(900)
        clock.now += 10
        bar.advance(20)
        assert bar.line() == "extracting: 920/1,000 tok, 40 s left, 2 tok/s"


def test_a_total_that_is_known_later_is_shown(clock):
    with progress("extracting", total=None, unit="tok") as bar:
        bar.set_total(40)
        bar.advance(8)
        clock.now += 4
        assert bar.line() == "extracting: 8/40 tok, 16 s left, 2 tok/s"
