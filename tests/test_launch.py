"""Several processes from one command: shares, deaths, failures, and nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from click.testing import CliRunner
from test_extract import LENGTHS, config, documents_of, write_rows

from dflash_offline import launch
from dflash_offline.cli import extract as cli_extract
from dflash_offline.config import ExtractConfig, arguments_of
from dflash_offline.heartbeat import read_heartbeat
from dflash_offline.launch import Ranks
from dflash_offline.stages import extract as stage
from dflash_offline.stages.extract import extract
from dflash_offline.world import processes_of_host


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def replace_main(monkeypatch, program):
    monkeypatch.setattr(launch, "_MAIN", textwrap.dedent(program))


def test_two_processes_store_what_one_does(tmp_path, tiny_llama):
    data = tmp_path / "data.jsonl"
    write_rows(data)
    knobs = {"shard_tokens": 60, "batch_tokens": 1, "codec": "raw", "seed": 3}
    one = extract(config(tiny_llama, data, tmp_path / "one", **knobs))
    two = extract(config(tiny_llama, data, tmp_path / "two", gpus=2, **knobs))
    expected, found = documents_of(tmp_path / "one"), documents_of(tmp_path / "two")
    assert found.keys() == expected.keys()
    for index, parts in expected.items():
        assert all(map(torch.equal, found[index], parts))
    differing = {"seconds", "tokens_per_second", "written to"}
    assert {k: v for k, v in two.items() if k not in differing} == {
        k: v for k, v in one.items() if k not in differing
    }
    for rank in (0, 1):
        assert "target runs on cpu" in (tmp_path / f"two.logs/rank-0{rank}.log").read_text()


def test_a_rank_that_is_killed_is_started_again_alone(tmp_path, monkeypatch, capsys):
    replace_main(
        monkeypatch,
        """
        import os, signal, sys
        from pathlib import Path
        rank = os.environ["RANK"]
        starts = Path(sys.argv[1]) / rank
        starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
        if rank == "1" and starts.read_text() == "x":
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    with Ranks([str(tmp_path)], size=3, logs=tmp_path / "logs") as ranks:
        ranks.wait(lambda: None)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["x", "xx", "x"]
    assert "rank 1 died of signal SIGKILL; started again, 1 of 3" in capsys.readouterr().err


def test_a_rank_that_crashes_with_a_traceback_is_started_again(tmp_path, monkeypatch):
    """As after a fault of the card: no error of ours, so another start may help."""
    replace_main(
        monkeypatch,
        """
        import sys
        from pathlib import Path
        from dflash_offline.cli import main
        first = Path(sys.argv[1]) / "started"
        if first.exists():
            sys.exit(0)
        first.touch()
        main.cli.main = lambda **_: 1 / 0
        main.main([])
        """,
    )
    with Ranks([str(tmp_path)], size=1, logs=tmp_path / "logs") as ranks:
        ranks.wait(lambda: None)
        assert "ZeroDivisionError" in ranks.log_path(0).read_text()


def test_logs_of_a_live_command_are_not_taken(tmp_path, monkeypatch):
    replace_main(monkeypatch, "import time; time.sleep(60)")
    taken = pytest.raises(ValueError, match="another command's processes write their logs to")
    with Ranks([], size=1, logs=tmp_path), taken:
        Ranks([], size=1, logs=tmp_path)
    with Ranks([], size=1, logs=tmp_path):
        pass


def test_a_second_signal_does_not_break_into_putting_things_away(tmp_path):
    """A writer behind is busy when SIGINT and then SIGTERM come, as launchers send them."""
    program = """
        import sys, time
        from dflash_offline.cli import main
        from dflash_offline.behind import Behind

        def work(**_):
            try:
                with Behind(depth=2) as behind:
                    behind.call(lambda: (time.sleep(2), print("written", flush=True)))
                    print("working", flush=True)
                    time.sleep(60)
            finally:
                print("put away", flush=True)

        main.cli.main = work
        main.main([])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"working\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert out.splitlines() == [b"written", b"put away"]
    assert process.returncode == 130
    assert b"stopped on request" in err


def test_tasks_of_srun_do_not_each_start_processes(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "2")
    with pytest.raises(ValueError, match="srun started this as task 2"):
        extract(config(tiny_llama, tmp_path / "data.jsonl", tmp_path / "out", gpus=2))


def test_a_rank_that_dies_again_and_again_ends_the_run(tmp_path, monkeypatch):
    replace_main(
        monkeypatch,
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            print("loading", flush=True)
            os._exit(77)
        time.sleep(60)
        """,
    )
    with Ranks([], size=2, logs=tmp_path) as ranks:
        with pytest.raises(ValueError, match=r"rank 0 died 4 times.*code 77; .*loading"):
            ranks.wait(lambda: None)
        sleeping = ranks._processes[1]
    assert sleeping.returncode == -signal.SIGTERM


def test_an_error_of_one_rank_is_told_and_stops_all(tmp_path, tiny_llama):
    data = tmp_path / "data.jsonl"
    write_rows(data)
    knobs = {"gpus": 2, "max_codec_error": 1e-4}
    with pytest.raises(ValueError, match=r"^rank 0 failed: codec int8 .*above 0.0%"):
        extract(config(tiny_llama, data, tmp_path / "shards", **knobs))


def test_processes_end_with_their_parent(tmp_path):
    program = """
        import sys, time
        from pathlib import Path
        from dflash_offline import launch
        launch._MAIN = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
        with launch.Ranks([], size=2, logs=Path(sys.argv[1])) as ranks:
            ranks.wait(lambda: None)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command) as parent:
        pids = [pid_in(tmp_path / f"rank-0{rank}.log") for rank in (0, 1)]
        parent.kill()
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def pid_in(log):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.exists() and log.read_text().endswith("\n"):
            return int(log.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{log} stays empty")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rpartition(")")[2].split()[0] != "Z"  # a zombie has ended


def test_more_processes_than_gpus_are_refused(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = config(tiny_llama, tmp_path / "data.jsonl", tmp_path / "out", gpus=3, device="auto")
    with pytest.raises(ValueError, match="--gpus is 3, but torch sees 2"):
        extract(settings)
    assert processes_of_host(None, "auto") == 2
    monkeypatch.setenv("RANK", "0")
    assert processes_of_host(3, "auto") == 1


def test_ranks_import_what_their_parent_does_and_not_from_where_they_run(
    tmp_path, tiny_llama, monkeypatch
):
    """A folder with a file zarr.py is a fine place to work in."""
    (tmp_path / "zarr.py").write_text("raise RuntimeError('not the package')")
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.jsonl"
    write_rows(data)
    summary = extract(config(tiny_llama, data, tmp_path / "two", gpus=2, shard_tokens=60))
    assert summary["documents"] == len(LENGTHS)
    assert summary["shards_written_now"] == summary["shards"]


def test_beats_of_an_earlier_run_are_not_taken_for_this_ones(tmp_path, tiny_llama):
    data, output = tmp_path / "data.jsonl", tmp_path / "two"
    write_rows(data)
    logs = tmp_path / "two.logs"
    logs.mkdir()
    old = {"epoch": time.time() - 3600, "pid": 1, "phase": "extracting", "last_progress": 0.0}
    beat = {**old, "outcome": None, "tokens": 10**9, "tokens_per_second": 1e6}
    for name in ("heartbeat.json", "rank-00.heartbeat.json", "rank-07.heartbeat.json"):
        (logs / name).write_text(json.dumps(beat))
    extract(config(tiny_llama, data, output, gpus=2, shard_tokens=60))
    left = {path.name: read_heartbeat(path) for path in logs.glob("*heartbeat.json")}
    assert sorted(left) == ["heartbeat.json", "rank-00.heartbeat.json", "rank-01.heartbeat.json"]
    assert all(found["outcome"] == "finished" for found in left.values())


def test_a_config_is_the_command_line_that_it_names(tmp_path, monkeypatch):
    made = ExtractConfig(
        target=tmp_path / "t", data=(tmp_path / "a b.jsonl", tmp_path / "-c"), output=tmp_path,
        target_layer_ids=(1, 4, 9), codec="raw", max_codec_error=0.25, eager=True, gpus=7,
        dtype="fp8", trust_remote_code=True, max_length=123,
    )  # fmt: skip
    seen = []
    monkeypatch.setattr(cli_extract, "build", lambda kind, knobs: seen.append(kind(**knobs)))
    monkeypatch.setattr(stage, "extract", lambda config: {})
    result = CliRunner().invoke(cli_extract.extract, arguments_of(made))
    assert result.exit_code == 0, result.output
    assert seen == [made]
