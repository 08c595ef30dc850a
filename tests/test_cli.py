"""What a user sees: help at once, one sentence for a mistake, exit code 2 for usage and 1 else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stores import make_store, random_documents

from dflash_offline.cli import main as cli_main
from dflash_offline.cli.main import COMMANDS, StopOnSignal, main

PROGRAM = Path(sys.executable).parent / "dflash-offline"
CHAT = {"messages": [{"role": "user", "content": "how many"},
                     {"role": "assistant", "content": "the answer is three"}]}  # fmt: skip


def outcome(args, capsys):
    """Exit code, stdout and stderr of a command line."""
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in args])
    seen = capsys.readouterr()
    assert "Traceback" not in seen.err
    return ended.value.code, seen.out, seen.err


def data_file(folder, *lines):
    path = folder / "data.jsonl"
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return path


def extract_args(target, data, folder, *more):
    return ["extract", "--target", target, "--data", data, "--output", folder / "out",
            "--device", "cpu", *more]  # fmt: skip


def test_help_answers_at_once_and_names_every_command():
    subprocess.run([PROGRAM, "--help"], capture_output=True, check=True)  # fills the disk cache
    took = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=True)
        took.append(time.monotonic() - started)
    assert all(name in done.stdout for name in COMMANDS)
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", PROGRAM, "--help"],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    assert "torch" not in loaded
    print(f"--help took {min(took):.2f} s")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    code, out, _ = outcome([command, "--help"], capsys)
    assert code == 0
    assert "Usage: dflash-offline " + command in out


def test_unknown_command_and_missing_option_are_usage_errors(capsys):
    assert outcome(["fly"], capsys)[0] == 2
    code, _, err = outcome(["train", "--shards", "x"], capsys)
    assert code == 2
    assert "--eval-shards" in err


def test_values_out_of_range_are_usage_errors_that_name_the_option(capsys):
    base = ["train", "--shards", "a", "--eval-shards", "b", "--target", "c", "--output", "d"]
    for more, words in [
        (["--block-size", "1"], "--block-size is 1; it must be at least 2"),
        (["--lr", "nan"], "--lr is nan; it must be a finite number"),
        (["--weight-decay", "inf"], "--weight-decay is inf"),
        (["--row-tokens", "99999999999999999999999"], "--row-tokens is 9999"),
        (["--mlp-width", "1000000000000"], "--mlp-width is 1000000000000"),
        (["--heads", "6", "--kv-heads", "4"], "--heads 6 is no multiple of --kv-heads 4"),
        (["--optimizer", "sgd"], "sgd"),
    ]:
        code, _, err = outcome(base + more, capsys)
        assert (code, words in err) == (2, True), err


def test_a_wrong_path_is_one_sentence(tiny_llama, tmp_path, capsys):
    data = data_file(tmp_path, CHAT)
    code, _, err = outcome(extract_args(tmp_path / "nowhere", data, tmp_path), capsys)
    assert code == 1
    assert f"target folder {tmp_path / 'nowhere'} does not exist" in err
    code, _, err = outcome(extract_args(tiny_llama, tmp_path / "no.jsonl", tmp_path), capsys)
    assert code == 1
    assert "no.jsonl does not exist" in err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "is empty"),
        ([CHAT, "{oops\n"], "line 2: not JSON"),
        ([CHAT, CHAT, {"messages": CHAT["messages"][:1]}], "line 3: has no assistant turn"),
        ([{"text": "x"}], "line 1: has the keys ['text']"),
        ([{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}], "no document is left"),
        ([{"input_ids": [5, 9999], "loss_mask": [0, 1]}], "line 1: input_ids holds 9999"),
    ],
)
def test_bad_data_is_one_sentence_that_names_the_line(lines, words, tiny_llama, tmp_path, capsys):
    data = data_file(tmp_path, *lines)
    code, _, err = outcome(extract_args(tiny_llama, data, tmp_path), capsys)
    assert code == 1
    assert words in err
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_taps_out_of_range_are_one_sentence(tiny_llama, tmp_path, capsys):
    data = data_file(tmp_path, CHAT)
    more = ["--target-layer-ids", "1,8"]
    code, _, err = outcome(extract_args(tiny_llama, data, tmp_path, *more), capsys)
    assert code == 1
    assert "--target-layer-ids [1, 8]" in err
    assert "layers 0 to 7" in err
    more = ["--target-layer-ids", "one"]
    assert outcome(extract_args(tiny_llama, data, tmp_path, *more), capsys)[0] == 2


def test_a_full_gpu_is_one_sentence_and_a_bug_is_a_traceback(monkeypatch, capsys):
    import torch

    from dflash_offline.cli import main as module

    def raising(error):
        def fail(**_):
            raise error

        return fail

    def raises(error):
        monkeypatch.setattr(module.cli, "main", raising(error))
        return outcome(["train"], capsys)

    code, _, err = raises(torch.OutOfMemoryError("Tried to allocate 9 GiB. GPU 0 ..."))
    assert code == 1
    assert "Tried to allocate 9 GiB" in err
    assert "--anchors" in err
    assert raises(MemoryError())[0] == 1
    on_cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 TB. Error 12")
    assert "can't allocate memory" in raises(on_cpu)[2]
    assert raises(BrokenPipeError())[0] == 1
    for bug in (RuntimeError("a bug"), KeyError("a bug")):
        monkeypatch.setattr(module.cli, "main", raising(bug))
        with pytest.raises(SystemExit) as stopped:
            module.main(["train"])
        assert stopped.value.code == 3
        err = capsys.readouterr().err
        assert "Traceback" in err and "a bug" in err


@pytest.mark.parametrize(
    ("command", "last_line"),
    [
        ("extract", "stopped on request; finished shards are kept; "
                    "the same command goes on with the rest"),
        ("train", "stopped on request; "
                  "the same command with --resume goes on from the newest checkpoint"),
        ("verify", "stopped on request"),
    ],
)  # fmt: skip
def test_a_stop_ends_in_how_to_go_on(command, last_line, monkeypatch, capsys):
    from dflash_offline.cli import main as module

    def stop(**_):
        raise KeyboardInterrupt

    def fail_while_stopping(**_):
        try:
            stop()
        finally:
            raise RuntimeError("ranks\nare gone")

    monkeypatch.setattr(module.cli, "main", stop)
    assert outcome([command], capsys) == (130, "", last_line + "\n")
    monkeypatch.setattr(module.cli, "main", fail_while_stopping)
    code, _, err = outcome([command], capsys)
    assert (code, err) == (130, f"while stopping: ranks are gone\n{last_line}\n")


def test_a_stop_within_a_stage_ends_in_how_to_go_on(tiny_llama, tmp_path, monkeypatch, capsys):
    def stage(config):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("dflash_offline.stages.extract.extract", stage)
    code, _, err = outcome(extract_args(tiny_llama, data_file(tmp_path, CHAT), tmp_path), capsys)
    assert code == 130
    assert err.endswith("the same command goes on with the rest\n")


def test_several_files_after_one_option(tiny_llama, tmp_path, capsys):
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(data_file(tmp_path / name, CHAT))
    for name, spelling in (
        ("out", ["--data", *files]),
        ("equals", [f"--data={files[0]}", files[1]]),
    ):
        args = ["extract", *spelling, "--target", tiny_llama, "--output", tmp_path / name,
                "--device", "cpu", "--codec", "raw"]  # fmt: skip
        code, out, err = outcome(args, capsys)
        assert code == 0, err
        assert "documents" in out
        found = json.loads((tmp_path / name / "dataset.json").read_text())
        assert found["contract"]["documents"] == 2


def test_a_whole_small_run_through_the_commands(tiny_llama, tmp_path, capsys):
    store = make_store(tmp_path / "store", tiny_llama, random_documents(8))
    run = tmp_path / "run"
    train = ["train", "--shards", store, "--eval-shards", store, "--target", tiny_llama,
             "--output", run, "--mask-token-id", 3, "--heads", 2, "--kv-heads", 1, "--head-dim",
             16, "--layers", 1, "--block-size", 4, "--row-tokens", 64, "--anchors", 8,
             "--rows-per-step", 1, "--steps", 2, "--device", "cpu"]  # fmt: skip
    code, out, err = outcome(train, capsys)
    assert code == 0, err
    assert "heldout streak" in out
    report = tmp_path / "evaluation.json"
    evaluate = ["evaluate", "--drafter", run / "drafter", "--target", tiny_llama, "--shards",
                store, "--output", report, "--device", "cpu"]  # fmt: skip
    code, out, err = outcome(evaluate, capsys)
    assert code == 0, err
    assert "acceptance_length" in out
    found = json.loads(report.read_text())
    assert set(found) >= {"acceptance_length", "acceptance_length_pooled", "heldout_tokens",
                          "ngram_acceptance_length", "ngram_acceptance_length_pooled",
                          "block_size", "slots", "documents"}  # fmt: skip

    code, out, err = outcome(["inspect-shard", store, "--json"], capsys)
    assert code == 0, err
    json.loads(out)
    code, _, err = outcome(["inspect-shard", tmp_path / "nothing"], capsys)
    assert code in (1, 2)
    assert "nothing" in err


def test_a_hybrid_target_in_a_multimodal_wrapper_goes_through_every_command(
    tiny_qwen35, tmp_path, capsys
):
    """The architecture of Qwen3.6-27B, from chats with and without reasoning to a report."""

    def run(*args):
        code, out, err = outcome([*args, "--device", "cpu"], capsys)
        assert code == 0, err
        return out

    thinking = {
        "role": "assistant",
        "content": "the list is long",
        "reasoning_content": "step one",
    }
    chats = [CHAT, {"messages": [CHAT["messages"][0], thinking]}] * 4
    data, shards = data_file(tmp_path, *chats), tmp_path / "shards"
    assert "thinking_turns" in run(
        "extract", "--target", tiny_qwen35, "--data", data, "--output", shards
    )
    spec = json.loads((shards / "dataset.json").read_text())["contract"]
    assert spec["target_layer_ids"] == [1, 2, 3, 4, 5]
    other = tmp_path / "heldout"
    run("extract", "--target", tiny_qwen35, "--data", data, "--output", other, "--codec", "raw")
    common = ["--target", tiny_qwen35]
    run("train", *common, "--shards", shards, "--eval-shards", other, "--output", tmp_path / "run",
        "--mask-token-id", 9, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--head-dim", 16,
        "--block-size", 4, "--row-tokens", 128, "--anchors", 16, "--rows-per-step", 1,
        "--steps", 3)  # fmt: skip
    exported = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert exported["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}
    assert (exported["vocab_size"], exported["hidden_size"]) == (512, 64)
    run("evaluate", *common, "--drafter", tmp_path / "run" / "drafter", "--shards", other,
        "--output", tmp_path / "evaluation.json")  # fmt: skip
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert len(report["documents"]) == 8
    assert report["acceptance_length"] >= 1


def test_evaluate_overwrites_nothing_but_an_earlier_evaluation(tiny_llama, tmp_path, capsys):
    store = make_store(tmp_path / "store", tiny_llama, random_documents(2))
    for output, words in (
        (store / "dataset.json", "is no evaluation"),
        (tiny_llama / "config.json", "is no evaluation"),
        (tmp_path, "is a folder"),
    ):
        before = output.read_bytes() if output.is_file() else None
        args = ["evaluate", "--drafter", tmp_path / "none", "--target", tiny_llama, "--shards",
                store, "--output", output, "--device", "cpu"]  # fmt: skip
        code, _, err = outcome(args, capsys)
        assert code == 1
        assert words in err
        assert before is None or output.read_bytes() == before


def test_extract_does_not_write_its_configuration_over_its_data(tiny_llama, tmp_path, capsys):
    data = data_file(tmp_path, CHAT).rename(tmp_path / "zz.extract.json")
    before = data.read_bytes()
    args = ["extract", "--target", tiny_llama, "--data", data, "--output", tmp_path / "zz"]
    code, _, err = outcome(args, capsys)
    assert (code, "choose another name" in err) == (1, True)
    assert data.read_bytes() == before


def test_evaluate_refuses_what_does_not_belong_together(tiny_llama, tmp_path, capsys):
    store = make_store(tmp_path / "store", tiny_llama, random_documents(2))
    args = ["evaluate", "--drafter", tmp_path / "none", "--target", tiny_llama, "--shards", store,
            "--output", tmp_path / "e.json", "--device", "cpu"]  # fmt: skip
    code, _, err = outcome(args, capsys)
    assert code == 1
    assert "config.json does not exist" in err
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text("{}")
    code, _, err = outcome(args, capsys)
    assert code == 1
    assert "lacks the key" in err


def test_a_stop_that_is_lost_where_an_object_is_deleted_comes_again(monkeypatch):
    stop = StopOnSignal()
    monkeypatch.setattr(sys, "unraisablehook", stop.swallowed)

    class Deleted:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            Deleted()
            time.sleep(20)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.asked


def test_an_error_that_a_stop_was_turned_into_is_no_crash(monkeypatch, capsys):
    """As a library does whose import is interrupted."""

    def interrupted(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise ModuleNotFoundError("Could not import module 'X'") from None

    monkeypatch.setattr(cli_main.cli, "main", interrupted)
    with pytest.raises(SystemExit) as end:
        cli_main.main(["extract"])
    said = capsys.readouterr().err
    assert end.value.code == 130
    assert "while stopping: Could not import module 'X'" in said
    assert "stopped on request" in said
