"""What a beat says, that readers find it whole, and that nothing about it ends a run."""

import json
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from datetime import datetime

import pytest

from dflash_offline import heartbeat as module
from dflash_offline.heartbeat import Heartbeat, read_heartbeat
from dflash_offline.metrics import phase, progress


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.005)


def wait_until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def newer(path):
    """The first beat that began after this call."""
    now = time.time()
    wait_until(lambda: (beat := read_heartbeat(path)) and beat["epoch"] > now)
    return read_heartbeat(path)


def strict(text):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_beat_is_there_at_once_and_says_who_lives(tmp_path):
    path, before = tmp_path / "logs" / "rank-00.heartbeat.json", time.time()
    with Heartbeat(path):
        beat = strict(path.read_text())
        assert before <= beat["epoch"] <= time.time()
        assert datetime.fromisoformat(beat["time"]).timestamp() == int(beat["epoch"])
        assert datetime.fromisoformat(beat["time"]).utcoffset().total_seconds() == 0
        assert (beat["host"], beat["pid"]) == (platform.node(), os.getpid())
        for unknown in ("phase", "done", "total", "unit", "last_progress", "outcome"):
            assert beat[unknown] is None


def test_a_beat_says_what_runs_and_when_it_last_went_on(tmp_path, fast):
    path = tmp_path / "beat.json"
    with Heartbeat(path), progress("reading", total=40, unit="B") as bar:
        time.sleep(0.02)
        before = time.time()
        bar.advance(12)
        after = time.time()
        beat = newer(path)
        assert [beat[k] for k in ("phase", "done", "total", "unit")] == ["reading", 12, 40, "B"]
        assert before <= beat["last_progress"] <= after
        assert newer(path)["last_progress"] == beat["last_progress"]
        with phase("compiling"):
            beat = newer(path)
        assert [beat[k] for k in ("phase", "total", "unit")] == ["compiling", None, None]
        assert beat["last_progress"] >= after


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_resident_memory_is_what_the_process_holds(tmp_path, fast):
    path = tmp_path / "beat.json"
    with Heartbeat(path):
        before = newer(path)["resident_bytes"]
        held = b"x" * 2**26
        beat = newer(path)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert before + 0.9 * len(held) <= beat["resident_bytes"] <= most + 2**22


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "stopped on request"),
        (ValueError("a line\n  and\tanother"), "failed: a line and another"),
        (MemoryError(), "failed: MemoryError"),
    ],
)
def test_the_last_beat_says_how_it_ended(tmp_path, error, outcome):
    path = tmp_path / "beat.json"

    def work():
        with Heartbeat(path, facts=lambda: {"shards": shards}):
            shards.append("shard-000007")
            if error:
                raise error

    shards = []
    if error:
        with pytest.raises(type(error)):
            work()
    else:
        work()
    beat = read_heartbeat(path)
    assert (beat["outcome"], beat["shards"]) == (outcome, ["shard-000007"])
    assert list(tmp_path.iterdir()) == [path]


def test_facts_become_json_and_take_no_promised_name(tmp_path):
    facts = {
        "rate": float("nan"),
        "eta": float("inf"),
        "rows": (1, 2.5, -float("inf")),
        "by": {3: True, "path": tmp_path},
        "epoch": "mine",
    }
    path = tmp_path / "beat.json"
    with Heartbeat(path, facts=lambda: facts):
        pass
    beat = strict(path.read_text())
    assert isinstance(beat["epoch"], float)
    assert {name: beat[name] for name in facts if name != "epoch"} == {
        "rate": None,
        "eta": None,
        "rows": [1, 2.5, None],
        "by": {"3": True, "path": str(tmp_path)},
    }


def test_a_fault_in_the_facts_is_told_once_and_beats_go_on(tmp_path, fast, capsys):
    path, counts = tmp_path / "beat.json", {}
    with Heartbeat(path, facts=lambda: {"rate": 1 / counts["seconds"]}):
        newer(path)
        assert "rate" not in newer(path)
        counts["seconds"] = 4
        wait_until(lambda: read_heartbeat(path).get("rate") == 0.25)
    err = capsys.readouterr().err
    assert err.count("warning: facts for the heartbeat") == 1
    assert str(path) in err and "'seconds'" in err


def test_a_folder_that_goes_ends_no_run_and_is_told_once(tmp_path, fast, capsys):
    folder = tmp_path / "logs"
    path, beats = folder / "beat.json", []
    with Heartbeat(path, facts=lambda: {"beats": beats.append(1)}):
        newer(path)
        folder.rename(tmp_path / "elsewhere")
        missed = len(beats)
        wait_until(lambda: len(beats) > missed + 3)
        assert not folder.exists()
        (tmp_path / "elsewhere").rename(folder)
        newer(path)
    err = capsys.readouterr().err
    assert err.count("warning") == 1
    assert f"the heartbeat {path} cannot be written ([Errno 2]" in err
    assert read_heartbeat(path)["outcome"] == "finished"


def test_a_place_where_nothing_can_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    with Heartbeat(tmp_path / "file" / "beat.json"):
        worked = True
    assert worked
    assert "cannot be written" in capsys.readouterr().err


def test_a_dead_file_system_does_not_hold_the_exit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LAST_BEAT_SECONDS", 0.05)
    revived = threading.Event()
    with Heartbeat(tmp_path / "beat.json") as heartbeat:
        monkeypatch.setattr(module, "_replace", lambda *_: revived.wait())
    assert heartbeat._thread.is_alive()
    revived.set()
    heartbeat._thread.join()


def test_a_reader_always_finds_a_whole_beat(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.0)
    path = tmp_path / "beat.json"
    with Heartbeat(path, facts=lambda: {"text": "x" * 10**6}):
        for _ in range(200):
            assert len(read_heartbeat(path)["text"]) == 10**6


@pytest.mark.parametrize(
    "content", [b"", b'{"epoch": 1', b"[1]", b"{}", b"\xff\xfe", b"[" * 10**5]
)
def test_what_is_no_beat_is_none(tmp_path, content):
    path = tmp_path / "beat.json"
    assert read_heartbeat(path) is None
    assert read_heartbeat(tmp_path) is None
    path.write_bytes(content)
    assert read_heartbeat(path) is None


def test_a_killed_process_leaves_an_old_beat_without_outcome(tmp_path):
    path = tmp_path / "beat.json"
    program = """
import os, signal, sys
from pathlib import Path
from dflash_offline.heartbeat import Heartbeat
with Heartbeat(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", program, path]) as process:
        process.wait()
    beat = read_heartbeat(path)
    assert (beat["pid"], beat["outcome"]) == (process.pid, None)
    assert beat["epoch"] < time.time()
