"""One command on several ranks: ends, deaths, errors and signals, with real processes."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file
from stores import make_store, random_documents
from test_launch import is_alive
from test_train import SHAPE, as_flags

from dflash_offline import elastic
from dflash_offline.cli import train as cli_train
from dflash_offline.config import TrainConfig, arguments_of
from dflash_offline.elastic import is_restart, run_on_all

# What each rank runs: its starts stand in a file, `work` is done in a process group.
RANK = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from dflash_offline.cli import main as program
from dflash_offline.elastic import as_rank, is_restart, last_words_in_log

def command(args, **_):
    folder, rank = Path(args[0]), int(os.environ["RANK"])
    starts = folder / f"starts-{rank}"
    with starts.open("a") as file:
        print(*args[1:], file=file)
    with last_words_in_log(folder / "logs"):
        dist.init_process_group("gloo")
        work(folder, rank, len(starts.read_text().splitlines()))
        dist.destroy_process_group()

program.cli.main = command
"""


def rank_program(work):
    return RANK + textwrap.dedent(work) + "as_rank(program.main)\n"


def run(monkeypatch, folder, work, *arguments, max_restarts=2):
    monkeypatch.setattr(elastic, "_MAIN", rank_program(work))
    run_on_all(
        [str(folder), *arguments], processes=2, max_restarts=max_restarts, logs=folder / "logs"
    )


def starts(folder):
    return [(folder / f"starts-{rank}").read_text().splitlines() for rank in (0, 1)]


def test_ranks_reach_each_other_and_only_the_first_has_the_terminal(tmp_path, monkeypatch, capfd):
    work = """
    def work(folder, rank, is_first):
        total = torch.ones(3) * (rank + 1)
        dist.all_reduce(total)
        print("sum", total.tolist(), "of rank", rank)
        print("said by rank", rank, file=sys.stderr)
    """
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run(monkeypatch, tmp_path, work, "a $PATH ${local_rank} $$", "")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    out, err = capfd.readouterr()
    assert out == "sum [3.0, 3.0, 3.0] of rank 0\n"
    assert err == "said by rank 0\n"
    log = (tmp_path / "logs" / "rank-01.log").read_text()
    assert "sum [3.0, 3.0, 3.0] of rank 1\n" in log
    assert "said by rank 1\n" in log
    assert starts(tmp_path) == [["a $PATH ${local_rank} $$ "]] * 2


def test_when_a_rank_is_killed_all_start_again_and_resume(tmp_path, monkeypatch, capfd):
    work = """
    def work(folder, rank, start):
        if start == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))  # rank 0 waits for the killed one at first
        print("restart", is_restart())
    """
    run(monkeypatch, tmp_path, work, "x")
    assert starts(tmp_path) == [["x", "x --resume"]] * 2
    out, err = capfd.readouterr()
    assert out == "restart True\n"
    log = tmp_path / "logs" / "rank-01.log"
    assert err == (
        "warning: rank 1 died of signal SIGKILL; all 2 ranks start again from the newest "
        f"checkpoint, 1 of 2 times ({log})\n"
    )


def test_an_error_of_one_rank_is_told_once_and_not_tried_again(tmp_path, monkeypatch, capfd):
    work = """
    def work(folder, rank, start):
        if rank == 1:
            raise ValueError("--lr is wrong")
        dist.all_reduce(torch.ones(1))
    """
    with pytest.raises(ValueError, match=r"^rank 1 failed: --lr is wrong$"):
        run(monkeypatch, tmp_path, work)
    assert starts(tmp_path) == [[""], [""]]
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_dies_more_often_than_allowed_ends_the_run(tmp_path, monkeypatch, capfd):
    """By a traceback, after which the rank that waited for it has one of its own."""
    work = """
    def work(folder, rank, start):
        if rank == 0:
            raise RuntimeError("no luck")
        dist.all_reduce(torch.ones(1))
    """
    words = r"^rank 0 died of code 3, after 0 starts anew \(--max-restarts\); .*rank-00\.log ends"
    with pytest.raises(ValueError, match=words + r" in: .*RuntimeError: no luck$"):
        run(monkeypatch, tmp_path, work, max_restarts=0)
    assert capfd.readouterr() == ("", "")


def test_ranks_that_agree_to_stop_end_in_their_own_time_without_a_restart(tmp_path, monkeypatch):
    """As when one was asked to: rank 0 still saves when the other is gone."""
    work = """
    def work(folder, rank, start):
        dist.barrier()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            time.sleep(2 * (rank == 0))
            (folder / f"saved-{rank}").touch()
    """
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path, work)
    assert starts(tmp_path) == [[""], [""]]
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))


def test_a_restart_is_known_by_what_torchrun_says_too(monkeypatch):
    for count, expected in (("0", False), ("2", True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert is_restart() is expected
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert not is_restart()


def test_a_train_config_is_the_command_line_that_it_names(tmp_path, monkeypatch):
    made = TrainConfig(
        shards=(tmp_path / "a b", tmp_path / "c"), eval_shards=(tmp_path / "-d",),
        target=tmp_path / "t", output=tmp_path, mask_token_id=7, optimizer="muon",
        shard_optimizer=True, schedule="wsd", decay=0.3, lr_floor=0.1, objective="kl",
        weighting="dpace", dpace_alpha=0.4, feature_noise=0.05, noise_until=0.5,
        warm_start=tmp_path / "warm start", precision="fp8", gpus=2, reader_processes=0,
        track="wandb", max_bad_steps=4, max_restarts=0, resume=True,
    )  # fmt: skip
    seen = []
    monkeypatch.setattr(cli_train, "build", lambda kind, knobs: seen.append(kind(**knobs)))
    monkeypatch.setattr("dflash_offline.stages.train.train", lambda config: {})
    result = CliRunner().invoke(cli_train.train, arguments_of(made))
    assert result.exit_code == 0, result.output
    assert seen == [made]


# Rank 0 ends as it is asked to, and saves; rank 1 is as stuck as in a collective.
STUCK = """
def work(folder, rank, start):
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    try:
        while True:
            time.sleep(60)
    except KeyboardInterrupt:
        (folder / f"saved-{rank}").touch()
        if rank == 1:
            time.sleep(600)
        raise
"""
PARENT = """
import sys
from pathlib import Path
from dflash_offline import elastic
from dflash_offline.cli import train as cli_train
from dflash_offline.config import TrainConfig, arguments_of
from dflash_offline.cli import main as program
elastic._MAIN = sys.argv[2]
folder = Path(sys.argv[1])

def train(args, **_):
    elastic.run_on_all(
        [str(folder)], processes=2, max_restarts=2, logs=folder / "logs", seconds_to_stop=2
    )

program.cli.main = train
program.main(["train"])
"""


def start_stuck(folder):
    """The command, and the process ids of its ranks."""
    command = [sys.executable, "-c", PARENT, str(folder), rank_program(STUCK)]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: all((folder / f"pid-{rank}").exists() for rank in (0, 1)))
    time.sleep(0.5)  # between the file's appearance and its content
    return parent, [int((folder / f"pid-{rank}").read_text()) for rank in (0, 1)]


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stop_reaches_all_ranks_and_ends_the_stuck_ones_too(tmp_path):
    parent, pids = start_stuck(tmp_path)
    with parent:
        parent.send_signal(signal.SIGINT)
        time.sleep(0.3)
        parent.send_signal(signal.SIGTERM)  # as launchers do, and no second request
        _, err = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert err == (
        "stopped on request; the same command with --resume goes on from the newest checkpoint\n"
    )
    assert not any(map(is_alive, pids))
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))
    assert starts(tmp_path) == [[""], [""]]


def test_ranks_end_with_their_parent_even_when_stuck(tmp_path):
    parent, pids = start_stuck(tmp_path)
    with parent:
        parent.kill()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert (tmp_path / "saved-0").exists()


KILLED_ONCE = """
import os, signal
import torch
from dflash_offline.cli.main import main
from dflash_offline.elastic import as_rank, is_restart

calls, step = 0, torch.optim.AdamW.step

def killed(self, *given):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 5 and not is_restart():
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *given)

torch.optim.AdamW.step = killed
as_rank(main)
"""


def test_a_training_with_a_killed_rank_ends_as_one_without_bit_for_bit(
    tmp_path, tiny_llama, monkeypatch, capfd
):
    store = make_store(tmp_path / "store", tiny_llama, random_documents(24))
    data = {"shards": store, "eval_shards": store, "target": tiny_llama}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("whole", "killed"):
        if name == "killed":
            monkeypatch.setattr(elastic, "_MAIN", KILLED_ONCE)
        output = tmp_path / name
        knobs = {**SHAPE, **data, "output": output, "steps": 8, "save_every": 3}
        knobs["optimizer"] = "muon"  # whose state is spread over the ranks
        arguments = ["train", *as_flags(knobs)]
        run_on_all(arguments, processes=2, max_restarts=1, logs=tmp_path / f"{name}.logs")
    err = capfd.readouterr().err
    assert "rank 1 died of signal SIGKILL; all 2 ranks start again" in err
    assert "resumed step-00000003" in err
    whole, killed = (
        load_file(tmp_path / name / "checkpoints" / "step-00000008" / "drafter.safetensors")
        for name in ("whole", "killed")
    )
    for name, value in whole.items():
        assert (killed[name] == value).all(), name
