"""Stage one end to end on tiny targets: what is stored where, resumption, ranks, refusals."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from drafters import small_spec
from tiny_target import WORDS, build_tiny_target, reference_states
from torch import nn
from transformers import AutoModelForCausalLM

from dflash_offline import calibration
from dflash_offline import corpus as corpus_module
from dflash_offline.batch import RowShape, load_batch
from dflash_offline.cli.extract import extract as command
from dflash_offline.config import ExtractConfig, InspectConfig, VerifyConfig
from dflash_offline.dataset import Dataset
from dflash_offline.documents import Document
from dflash_offline.halving import Halving
from dflash_offline.heartbeat import read_heartbeat
from dflash_offline.planning import draw_sample, pack_rows, plan_shards, row_length
from dflash_offline.shard_set import ShardSet
from dflash_offline.spec import TargetSpec
from dflash_offline.stages import extract as stage
from dflash_offline.stages.extract import extract
from dflash_offline.stages.inspect import inspect
from dflash_offline.stages.verify import verify
from dflash_offline.summary import total_summary
from dflash_offline.world import World

LENGTHS = (7, 30, 129, 12, 64, 5, 33)


def write_rows(path, lengths=LENGTHS, seed=0):
    """Pre-tokenised lines: random ids, a prompt of two tokens, then the target's."""
    rng = random.Random(seed)
    rows = [
        {"input_ids": rng.choices(range(400), k=n), "loss_mask": [0, 0] + [1] * (n - 2)}
        for n in lengths
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_chats(path, count=11):
    rng = random.Random(1)
    text = [" ".join(rng.choices(WORDS, k=rng.randint(3, 40))) for _ in range(2 * count)]
    chats = [{"prompt": q, "response": a} for q, a in zip(text[::2], text[1::2], strict=True)]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def config(target, data, output, **knobs):
    settings = {"target": target, "data": (data,), "output": output, "device": "cpu", **knobs}
    return ExtractConfig(**settings)


def documents_of(output):
    """Number of the document -> ids, loss mask and hidden states, as read back."""
    shards = ShardSet([output])
    return {
        shards.document_index(i): (*shards.tokens(i), shards.taps(i)) for i in range(len(shards))
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for index, parts in expected.items():
        assert all(map(torch.equal, found[index], parts))


class IdentityTarget:
    """Hidden state of position t is t + layer / 8, exact in bf16 for t below 32."""

    self_test = {}  # noqa: RUF012 (never changed)
    flop_per_token = 1.0

    def __init__(self, layer_ids, width):
        self.offsets_L1 = torch.tensor(layer_ids)[:, None] / 8
        self.width = width

    def describe_kernels(self):
        return {"attention": "none"}

    def padded(self, tokens):
        return tokens

    def taps(self, documents):
        positions_N11 = torch.cat([torch.arange(len(ids)) for ids in documents])[:, None, None]
        return (positions_N11 + self.offsets_L1).expand(-1, -1, self.width).bfloat16()


def test_token_state_and_mask_share_one_index(tmp_path, tiny_llama, monkeypatch):
    """Identity probe: h[t] = t goes through batching, encoding, shards and back."""
    monkeypatch.setattr(stage, "load_target", lambda setup: IdentityTarget((1, 3), 64))
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    lengths = (7, 30, 19, 12, 5, 23, 2, 31)
    rows = write_rows(data, lengths)
    rows[6]["loss_mask"] = [1, 1]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = {"codec": "raw", "target_layer_ids": (1, 3), "shard_tokens": 50, "batch_tokens": 61}
    summary = extract(config(tiny_llama, data, output, **knobs))
    assert summary["shards"] > 2
    found = documents_of(output)
    assert list(sorted(found)) == list(range(len(lengths)))
    for index, row in enumerate(rows):
        ids, mask, taps_TLD = found[index]
        assert ids.tolist() == row["input_ids"]
        assert mask.tolist() == [bool(value) for value in row["loss_mask"]]
        assert taps_TLD.shape == (len(ids), 2, 64)
        for t in range(len(ids)):
            assert taps_TLD[t, 0].unique().tolist() == [t + 1 / 8]
            assert taps_TLD[t, 1].unique().tolist() == [t + 3 / 8]
    assert_batch_shares_one_index(output, rows)


def assert_batch_shares_one_index(output, rows):
    """The same probe at the trainer's end: a packed row of all documents, last to first."""
    shards = ShardSet([output])
    order = list(range(len(shards)))[::-1]
    spec = small_spec(hidden_size=64, target_layer_ids=(1, 3))
    shape = RowShape(row_tokens=140, anchors=200, gamma=4.0)
    batch = load_batch(shards, order, spec=spec, shape=shape, seed=0, device=torch.device("cpu"))
    ids = [token for i in order for token in rows[shards.document_index(i)]["input_ids"]]
    real = len(ids)
    assert torch.equal(batch.taps_SM[:real, 0].float(), batch.position_ids_S[:real] + 1 / 8)
    assert torch.equal(batch.taps_SM[:real, -1].float(), batch.position_ids_S[:real] + 3 / 8)
    blocks = batch.blocks
    for anchor, block, labels in zip(
        blocks.anchors_A[blocks.valid_A].tolist(), blocks.input_ids_AK, blocks.labels_AK,
        strict=False,
    ):  # fmt: skip
        assert block[0] == ids[anchor]
        assert labels.tolist()[: real - anchor] == ids[anchor : anchor + 4]


class AddsLayerNumber(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden, **_):
        return hidden + self.layer


def test_tap_is_the_output_of_the_documented_layer(tmp_path, tiny_llama, monkeypatch):
    """A target whose layer i adds i: after layer i the sum is 0 + 1 + ... + i."""
    load = stage.TappedTarget.load

    def load_and_replace(folder, **how):
        target = load(folder, **how)
        for i, layer in enumerate(target._tower.layers):
            layer.forward = AddsLayerNumber(i).forward  # hooks run around it
        target._tower.embed_tokens.weight.zero_()
        return target

    monkeypatch.setattr(stage.TappedTarget, "load", load_and_replace)
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data, (9, 4))
    extract(config(tiny_llama, data, output, codec="raw", target_layer_ids=(1, 4, 6)))
    contract = ShardSet([output]).contract
    assert contract["target_layer_ids"] == [1, 4, 6]
    assert "hidden_states[i+1]" in contract["layer_convention"]
    for _, _, taps_TLD in documents_of(output).values():
        assert taps_TLD[:, 0].unique().tolist() == [0 + 1]
        assert taps_TLD[:, 1].unique().tolist() == [0 + 1 + 2 + 3 + 4]
        assert taps_TLD[:, 2].unique().tolist() == [0 + 1 + 2 + 3 + 4 + 5 + 6]


def test_raw_shards_hold_hugging_face_states_bit_for_bit(tmp_path, tiny_target):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    # Each document is a batch of its own, so both sides run the same shapes.
    extract(config(tiny_target, data, output, codec="raw", batch_tokens=1))
    found = documents_of(output)
    assert sorted(len(ids) for ids, _, _ in found.values()) == sorted(LENGTHS)
    for ids, _, taps_TLD in found.values():
        states, _ = reference_states(tiny_target, ids[None].long(), torch.bfloat16)
        # Eight layers, five taps by z-lab's rule: 1 to 5.
        assert torch.equal(taps_TLD, torch.stack([states[i + 1][0] for i in range(1, 6)], 1))


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("norm", ["before-norm", "after-norm"])
def test_final_hidden_state_is_stored_beside_the_taps(tmp_path, tiny_target, norm, codec):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    rows = write_rows(data)
    knobs = {"codec": "raw", "final_hidden": norm, "final_codec": codec, "dtype": "float32"}
    extract(config(tiny_target, data, output, batch_tokens=1, **knobs))
    shards = ShardSet([output])
    assert shards.contract["final_hidden"] == norm
    for i in range(len(shards)):
        ids = torch.tensor(rows[shards.document_index(i)]["input_ids"])[None]
        taps, last, normed = final_states(tiny_target, ids, shards.target_layer_ids)
        expected = (last if norm == "before-norm" else normed).bfloat16()
        if codec == "raw":
            assert torch.equal(shards.final_hidden(i), expected)
        else:
            error = (shards.final_hidden(i).float() - expected.float()).norm(dim=-1)
            assert (error <= 0.02 * expected.float().norm(dim=-1)).all()
        assert torch.equal(shards.taps(i), taps.bfloat16())
    assert verify(output, VerifyConfig()).bad == {}
    found = inspect(output, InspectConfig())
    assert found.tap_names[-1] == f"final, {norm}"
    assert len(found.taps) == len(found.histogram.counts) == len(shards.target_layer_ids) + 1


def final_states(folder, ids_1T, layer_ids):
    """Hugging Face's states [T, L, D] after the layers, and the last one before and after norm."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = []
    tower = model.get_decoder()
    tower = getattr(tower, "language_model", tower)
    tower.norm.register_forward_hook(lambda norm, inputs, output: before.append(inputs[0]))
    with torch.inference_mode():
        states = tower(ids_1T, output_hidden_states=True, use_cache=False).hidden_states
    tapped = [before[0] if i + 1 == len(states) - 1 else states[i + 1] for i in layer_ids]
    return torch.stack(tapped, 2)[0], before[0][0], states[-1][0]


def test_data_set_without_final_hidden_states_says_how_to_get_them(tmp_path, tiny_llama):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    extract(config(tiny_llama, data, output, codec="raw"))
    with pytest.raises(ValueError, match="no final hidden states; extract with --final-hidden"):
        ShardSet([output]).final_hidden(0)
    knobs = {"final_hidden": "after-norm", "final_codec": "raw"}
    with pytest.raises(ValueError, match="final_codec = None, but now it is 'raw'"):
        extract(config(tiny_llama, data, output, codec="raw", **knobs))


def test_codec_that_is_too_coarse_stops_before_anything_is_written(tmp_path, tiny_llama):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    with pytest.raises(ValueError, match=r"codec int8 .* tapped layers .*above 0.1%; use"):
        extract(config(tiny_llama, data, output, max_codec_error=1e-3))
    assert not (output / "dataset.json").exists()


def test_shard_with_too_large_an_error_is_not_committed(tmp_path, tiny_llama, monkeypatch):
    """The sample was good, and the corpus has worse."""
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    monkeypatch.setattr(calibration, "_refuse_error", lambda *_: None)
    with pytest.raises(ValueError, match=r"shard-000000: its codec stores layer .*above 0.1%"):
        extract(config(tiny_llama, data, output, max_codec_error=1e-3))
    assert list((output / "shards").iterdir()) == []
    assert ["shard-000000" in path.read_text() for path in output.glob("manifest/*.jsonl")] == []


def test_slow_kernels_are_a_warning_or_by_choice_an_error(
    tmp_path, tiny_llama, monkeypatch, capsys
):
    data = tmp_path / "data.jsonl"
    write_rows(data)
    monkeypatch.setattr(stage.TappedTarget, "slow_path", lambda self: "the delta rule is slow")
    strict = config(tiny_llama, data, tmp_path / "strict", require_fast_kernels=True)
    with pytest.raises(ValueError, match="--require-fast-kernels: the delta rule is slow"):
        extract(strict)
    assert not (tmp_path / "strict/dataset.json").exists()
    capsys.readouterr()
    extract(config(tiny_llama, data, tmp_path / "mild"))
    assert "warning: the delta rule is slow" in capsys.readouterr().err


def test_shards_of_other_kernels_are_not_mixed(tmp_path, tiny_llama, monkeypatch):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    knobs = {"codec": "raw", "shard_tokens": 64}
    extract(config(tiny_llama, data, output, **knobs))
    contract = ShardSet([output]).contract
    by = {"device": "cpu", "layers": "as they are", "attention": "sdpa by document"}
    assert contract["kernels"] == by
    assert contract["truncation_rule"] == "the first max_length tokens of a document"
    Dataset.open(output).set_aside("shard-000001")
    monkeypatch.setattr(
        stage.TappedTarget, "describe_kernels", lambda self: {"attention": "flash_attention_2"}
    )
    with pytest.raises(
        ValueError, match=r"kernels.attention = 'sdpa by .*', but now it is 'flash_att"
    ):
        extract(config(tiny_llama, data, output, **knobs))


def test_rows_of_several_documents_store_what_single_documents_do(tmp_path, tiny_target):
    data = tmp_path / "data.jsonl"
    write_rows(data)
    knobs = {"codec": "raw", "dtype": "float32"}
    extract(config(tiny_target, data, tmp_path / "alone", batch_tokens=1, **knobs))
    extract(config(tiny_target, data, tmp_path / "together", batch_tokens=1000, **knobs))
    alone, together = documents_of(tmp_path / "alone"), documents_of(tmp_path / "together")
    assert alone.keys() == together.keys()
    for index, (ids, mask, taps_TLD) in alone.items():
        other_ids, other_mask, other_TLD = together[index]
        assert torch.equal(ids, other_ids)
        assert torch.equal(mask, other_mask)
        torch.testing.assert_close(other_TLD, taps_TLD, rtol=1e-2, atol=1e-3)


def test_int8_shards_stay_close_and_say_how_close(tmp_path, tiny_qwen35):
    data = tmp_path / "data.jsonl"
    write_chats(data)
    raw = extract(config(tiny_qwen35, data, tmp_path / "raw", codec="raw"))
    extract(config(tiny_qwen35, data, tmp_path / "lossless", codec="lossless"))
    assert_same(documents_of(tmp_path / "lossless"), documents_of(tmp_path / "raw"))
    coded = extract(config(tiny_qwen35, data, tmp_path / "int8", calibration_tokens=90))
    exact, near = documents_of(tmp_path / "raw"), documents_of(tmp_path / "int8")
    for index, (_, _, exact_TLD) in exact.items():
        error = (near[index][2].float() - exact_TLD.float()).norm(dim=-1)
        assert (error / exact_TLD.float().norm(dim=-1)).max() < 0.02
    assert 0 < coded["relative_error_p99"] < 0.02
    assert raw["relative_error_p99"] == 0
    assert coded["bytes_per_token"] < raw["bytes_per_token"]
    assert coded["tokens"] == raw["tokens"] == sum(len(ids) for ids, _, _ in exact.values())
    assert coded["supervised_tokens"] == sum(int(mask.sum()) for _, mask, _ in exact.values())


def documents_of_lengths(lengths):
    return [Document(i, torch.zeros(n), torch.ones(n)) for i, n in enumerate(lengths)]


def numbers(rows):
    return [[document.index for document in row] for row in rows]


def test_documents_go_into_rows_longest_first_each_where_it_fits_best():
    rows = pack_rows(documents_of_lengths([3, 9, 4, 25, 5, 1, 6, 10]), 10)
    assert numbers(rows) == [
        [3],  # 25: longer than a row
        [7],  # 10
        [1, 5],  # 9 + 1
        [6, 2],  # 6 + 4
        [4, 0],  # 5 + 3
    ]


def test_plan_is_rows_in_order_up_to_the_size_of_a_shard():
    documents = documents_of_lengths([5, 3, 8, 3, 20, 2])
    plan = plan_shards(documents, shard_tokens=14, row_tokens=9)
    assert {name: numbers(rows) for name, rows in plan.items()} == {
        "shard-000000": [[4]],  # longer than a shard
        "shard-000001": [[2]],  # 8, and the next row of 8 is too much
        "shard-000002": [[0, 1], [3, 5]],  # 5 + 3, 3 + 2
    }


def test_rows_of_a_realistic_mix_are_nearly_full():
    """Log-normal lengths, median 1,200, up to 8,192: rows lack at most 3 % of their tokens."""
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randn(4000, generator=g) * 0.9).exp().mul(1200).clamp(16, 8192).int().tolist()
    plan = plan_shards(documents_of_lengths(lengths), shard_tokens=65_536, row_tokens=16_384)
    rows = [row for shard in plan.values() for row in shard]
    assert sorted(d.index for row in rows for d in row) == list(range(4000))
    assert max(sum(map(len, row)) for row in rows) <= 16_384
    assert sum(lengths) >= 0.97 * 16_384 * len(rows)


def test_windows_keep_far_documents_apart(monkeypatch):
    monkeypatch.setattr("dflash_offline.planning.WINDOW_TOKENS", 10)
    documents = documents_of_lengths([6, 4, 3, 2])
    (rows,) = plan_shards(documents, shard_tokens=100, row_tokens=20).values()
    assert numbers(rows) == [[0, 1], [2, 3]]


def test_calibration_sample_is_drawn_from_the_whole_corpus_by_seed():
    documents = [Document(i, torch.zeros(10), torch.ones(10)) for i in range(1000)]
    sample = [d.index for d in draw_sample(documents, 205, seed=3)]
    assert len(sample) == 21
    assert min(sample) < 200
    assert max(sample) > 800
    assert sample == [d.index for d in draw_sample(documents, 205, seed=3)]
    assert sample != [d.index for d in draw_sample(documents, 205, seed=4)]
    assert len(draw_sample(documents, 10**9, seed=0)) == 1000


def test_rerun_finds_nothing_to_do_and_loads_no_target(tmp_path, tiny_llama, monkeypatch, capsys):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    first = extract(config(tiny_llama, data, output, shard_tokens=60))
    monkeypatch.setattr(stage, "load_target", lambda setup: pytest.fail("loaded"))
    capsys.readouterr()
    second = extract(config(tiny_llama, data, output, shard_tokens=60))
    assert "nothing left to extract" in capsys.readouterr().err
    assert first["shards_written_now"] == first["shards"] > 2
    assert second["shards_written_now"] == 0
    changing = {"seconds", "tokens_per_second", "shards_written_now"}
    assert {k: v for k, v in second.items() if k not in changing} == {
        k: v for k, v in first.items() if k not in changing
    }


def test_failed_run_goes_on_where_it_stopped(tmp_path, tiny_llama, monkeypatch):
    data = tmp_path / "data.jsonl"
    write_rows(data)
    knobs = {"shard_tokens": 60, "batch_tokens": 64, "codec": "raw"}
    whole = extract(config(tiny_llama, data, tmp_path / "whole", **knobs))
    real, calls = Halving.states, []

    def fails_third(self, row):
        calls.append(len(row))
        if len(calls) == 3:
            raise RuntimeError("power cut")
        return real(self, row)

    monkeypatch.setattr(Halving, "states", fails_third)
    with pytest.raises(RuntimeError, match="power cut"):
        extract(config(tiny_llama, data, tmp_path / "parts", **knobs))
    rest = extract(config(tiny_llama, data, tmp_path / "parts", **knobs))
    assert 0 < rest["shards_written_now"] < whole["shards"]
    assert_same(documents_of(tmp_path / "parts"), documents_of(tmp_path / "whole"))


START = "import sys; from dflash_offline.cli.main import main; main(sys.argv[1:])"


def start(target, data, output, *more, **environment):
    """`dflash-offline extract` in a process of its own, as torchrun would start it."""
    paths = ["--target", target, "--data", data, "--output", output, "--device", "cpu"]
    arguments = [sys.executable, "-c", START, "extract", *paths, "--shard-tokens", 60, *more]
    return subprocess.Popen(
        [str(argument) for argument in arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_ranks_store_what_one_does(tmp_path, tiny_qwen35):
    data = tmp_path / "data.jsonl"
    write_chats(data)
    one = extract(config(tiny_qwen35, data, tmp_path / "one", shard_tokens=60))
    ranks = [
        start(tiny_qwen35, data, tmp_path / "two", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
        for rank in "10"
    ]
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "supervised_tokens" in out
    manifests = {p.name: p.read_text() for p in (tmp_path / "two" / "manifest").glob("*.jsonl")}
    assert sorted(manifests) == ["rank-00.jsonl", "rank-01.jsonl"]
    assert sum(text.count("\n") for text in manifests.values()) == one["shards"]
    assert_same(documents_of(tmp_path / "two"), documents_of(tmp_path / "one"))


def test_killed_run_is_resumed_on_another_number_of_ranks(tmp_path, tiny_llama, monkeypatch):
    data, output = tmp_path / "data.jsonl", tmp_path / "killed"
    write_rows(data, [random.Random(0).randint(31, 60) for _ in range(24)])
    whole = extract(config(tiny_llama, data, tmp_path / "whole", shard_tokens=60, batch_tokens=1))
    process = start(tiny_llama, data, output, "--batch-tokens", 1)
    manifest = output / "manifest" / "rank-00.jsonl"
    while not (manifest.exists() and manifest.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = manifest.read_text().count("\n")
    assert done < whole["shards"]
    resumed = config(tiny_llama, data, output, shard_tokens=60, batch_tokens=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    written = 0
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        written += extract(resumed)["shards_written_now"]
    assert whole["shards"] - done - 1 <= written <= whole["shards"] - done
    assert_same(documents_of(output), documents_of(tmp_path / "whole"))


def test_rank_that_waits_in_vain_says_for_whom(tmp_path, tiny_llama, monkeypatch):
    data = tmp_path / "data.jsonl"
    write_rows(data)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(stage, "_WAIT_SECONDS", -1.0)
    monkeypatch.setattr(stage, "_TOKENISING_SECONDS", -1.0)
    with pytest.raises(ValueError, match=r"rank 0 made no .*corpus\.safetensors"):
        extract(config(tiny_llama, data, tmp_path / "shards"))
    corpus_of = partial(stage.read_corpus, spec=TargetSpec.read(tiny_llama), max_length=4096)
    first = World(0, 2, torch.device("cpu"))
    corpus_of(config(tiny_llama, data, tmp_path / "shards"), first)
    with pytest.raises(ValueError, match=r"rank 0 made no .*dataset\.json"):
        extract(config(tiny_llama, data, tmp_path / "shards"))


@pytest.mark.parametrize("name", ["extract.json", "corpus.safetensors"])
def test_data_in_the_way_of_a_file_of_ours_is_refused(tmp_path, tiny_llama, name):
    data = tmp_path / f"shards.{name}"
    write_rows(data)
    content = data.read_bytes()
    with pytest.raises(ValueError, match=rf"--data .*{name} is where the .* goes"):
        extract(config(tiny_llama, data, tmp_path / "shards"))
    assert data.read_bytes() == content


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_document_with_broken_states_is_left_out_and_counted(
    tmp_path, tiny_llama, monkeypatch, capsys, value
):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    rows = write_rows(data)
    real = Halving.states

    def breaks_one(self, row):
        taps_NLD = real(self, row).clone()
        start = 0
        for document in row:
            if document.index == 3:
                taps_NLD[start + 5, 2] = value
            start += len(document)
        return taps_NLD

    monkeypatch.setattr(Halving, "states", breaks_one)
    summary = extract(config(tiny_llama, data, output, codec="raw", max_bad_fraction=0.5))
    assert "document 3 set aside: broken states of 1 tokens" in capsys.readouterr().err
    assert quarantined(output) == [{"document": 3, "broken_tokens": 1, "shard": "shard-000000"}]
    assert summary["broken_documents"] == 1
    assert summary["documents"] == len(LENGTHS) - 1
    found = documents_of(output)
    assert sorted(found) == [0, 1, 2, 4, 5, 6]
    assert all(found[i][0].tolist() == rows[i]["input_ids"] for i in found)
    monkeypatch.undo()
    reference = extract(config(tiny_llama, data, tmp_path / "sound", codec="raw"))
    assert reference["broken_documents"] == 0
    sound = documents_of(tmp_path / "sound")
    assert_same(found, {i: parts for i, parts in sound.items() if i != 3})


def test_a_shard_of_broken_documents_alone_is_no_dead_end(tmp_path, tiny_llama, monkeypatch):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data, (70, 30, 12))
    real = Halving.states

    def breaks_the_long_one(self, row):
        return real(self, row) * (float("nan") if len(row[0]) == 70 else 1.0)

    monkeypatch.setattr(Halving, "states", breaks_the_long_one)
    knobs = {"codec": "raw", "shard_tokens": 60, "max_bad_fraction": 0.5}
    summary = extract(config(tiny_llama, data, output, **knobs))
    assert (summary["documents"], summary["broken_documents"]) == (2, 1)
    again = extract(config(tiny_llama, data, output, **knobs))
    assert (again["documents"], again["shards_written_now"]) == (2, 0)
    assert inspect(output, InspectConfig()).documents == 2
    assert verify(output, VerifyConfig()).bad == {}


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_target_that_gives_only_nan_is_an_error(tmp_path, tiny_llama, monkeypatch, codec):
    data = tmp_path / "data.jsonl"
    write_rows(data)
    real = Halving.states
    monkeypatch.setattr(Halving, "states", lambda *given: real(*given) * float("nan"))
    knobs = {"codec": codec, "max_bad_fraction": 1.0}
    with pytest.raises(ValueError, match=r"all of 7 documents have hidden states that are inf"):
        extract(config(tiny_llama, data, tmp_path / "shards", **knobs))


def breaks_documents(monkeypatch, indices):
    """The first state of these documents is NaN from here on."""
    real = Halving.states

    def states(self, row):
        taps_NLD = real(self, row).clone()
        start = 0
        for document in row:
            taps_NLD[start] *= float("nan") if document.index in indices else 1.0
            start += len(document)
        return taps_NLD

    monkeypatch.setattr(Halving, "states", states)


def quarantined(output):
    path = output.with_name(f"{output.name}.logs") / "rank-00.quarantine.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_too_large_a_share_of_broken_documents_ends_the_run(tmp_path, tiny_llama, monkeypatch):
    """Two of seven are 29 %: allowed at 0.3, too many at 0.28, at once or over two runs."""
    data = tmp_path / "data.jsonl"
    write_rows(data)
    knobs = {"codec": "raw", "shard_tokens": 60}
    breaks_documents(monkeypatch, {1, 4})
    summary = extract(config(tiny_llama, data, tmp_path / "most", max_bad_fraction=0.3, **knobs))
    assert (summary["documents"], summary["broken_documents"]) == (5, 2)
    few = config(tiny_llama, data, tmp_path / "few", max_bad_fraction=0.28, **knobs)
    for _ in range(2):  # what an earlier run set aside counts as well
        with pytest.raises(
            ValueError, match=r"2 of 7 documents .* --max-bad-fraction 0\.28 allows"
        ):
            extract(few)
    assert {entry["document"] for entry in quarantined(tmp_path / "few")} == {1, 4}
    assert len(Dataset.open(tmp_path / "few").committed()) == summary["shards"] - 1


def test_the_share_of_broken_documents_is_that_of_all_ranks(tmp_path, tiny_llama, monkeypatch):
    """One of seven is 14 %, however few documents the rank has that meets it."""
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    breaks_documents(monkeypatch, {1})
    knobs = {"codec": "raw", "shard_tokens": 60}
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        extract(config(tiny_llama, data, output, max_bad_fraction=0.15, **knobs))
    assert sorted(documents_of(output)) == [0, 2, 3, 4, 5, 6]
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match=r"1 of 7 documents .* --max-bad-fraction 0\.1 allows"):
        extract(config(tiny_llama, data, output, max_bad_fraction=0.1, **knobs))


def test_documents_are_quarantined_once_however_often_their_shard_is_written(
    tmp_path, tiny_llama, monkeypatch
):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    breaks_documents(monkeypatch, {1})
    for _ in range(2):
        extract(config(tiny_llama, data, output, codec="raw", max_bad_fraction=0.5))
        shutil.rmtree(output)
    assert [entry["document"] for entry in quarantined(output)] == [1]


def test_a_refused_rerun_leaves_the_tokenised_corpus_and_a_strange_folder_as_they_are(
    tmp_path, tiny_llama
):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    extract(config(tiny_llama, data, output))
    corpus = tmp_path / "shards.corpus.safetensors"
    before = corpus.stat().st_mtime_ns
    with pytest.raises(ValueError, match="was made with max_length = 4096, but now it is 50"):
        extract(config(tiny_llama, data, output, max_length=50))
    assert corpus.stat().st_mtime_ns == before
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "diary.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files and no data set"):
        extract(config(tiny_llama, data, strange))
    assert not (tmp_path / "strange.corpus.safetensors").exists()


class OutOfMemoryAbove:
    """States of real rows of at most so many tokens; longer ones do not fit."""

    def __init__(self, monkeypatch, tokens):
        self.lengths = []
        real = Halving.states

        def states(halving, row):
            self.lengths.append(row_length(row))
            if self.lengths[-1] > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0")
            return real(halving, row)

        monkeypatch.setattr(Halving, "states", states)


def test_out_of_memory_halves_the_rows_once(tmp_path, tiny_llama, monkeypatch, capsys):
    """fp32 on a CPU: a document's states do not depend on its row."""
    data = tmp_path / "data.jsonl"
    write_rows(data, (30, 25, 20, 10, 10, 8))
    knobs = {"codec": "raw", "batch_tokens": 64, "dtype": "float32"}
    extract(config(tiny_llama, data, tmp_path / "whole", **knobs))
    memory = OutOfMemoryAbove(monkeypatch, 40)
    capsys.readouterr()
    extract(config(tiny_llama, data, tmp_path / "halved", **knobs))
    said = capsys.readouterr().err
    assert said.count("warning: out of memory (CUDA out of memory); rows of at most 32 tok") == 1
    assert [length > 32 for length in memory.lengths] == [True] + [False] * (
        len(memory.lengths) - 1
    )
    assert_same(documents_of(tmp_path / "halved"), documents_of(tmp_path / "whole"))


def test_a_second_lack_of_memory_ends_the_run(tmp_path, tiny_llama, monkeypatch):
    data = tmp_path / "data.jsonl"
    write_rows(data, (30, 25, 20, 10, 10, 8))
    OutOfMemoryAbove(monkeypatch, 20)
    knobs = {"codec": "raw", "batch_tokens": 64}
    with pytest.raises(torch.OutOfMemoryError):
        extract(config(tiny_llama, data, tmp_path / "shards", **knobs))


def test_contract_of_another_run_is_refused(tmp_path, tiny_llama):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    extract(config(tiny_llama, data, output))
    for knobs, field in [
        ({"target_layer_ids": (1, 2)}, "target_layer_ids"),
        ({"codec": "raw"}, "codec"),
        ({"shard_tokens": 60}, "shard_tokens"),
        ({"dtype": "float32"}, "dtype"),
        ({"max_length": 50}, "max_length"),
        ({"seed": 1}, "codec_calibration"),
    ]:
        with pytest.raises(ValueError, match=f"was made with {field}"):
            extract(config(tiny_llama, data, output, **knobs))
    write_rows(data, seed=1)
    with pytest.raises(ValueError, match="was made with data_sha256"):
        extract(config(tiny_llama, data, output))


def test_documents_are_cut_to_the_context_of_the_target(tmp_path):
    target = build_tiny_target(tmp_path / "target", "llama")
    facts = json.loads((target / "config.json").read_text())
    facts["max_position_embeddings"] = 50
    (target / "config.json").write_text(json.dumps(facts))
    data = tmp_path / "data.jsonl"
    write_rows(data)
    summary = extract(config(target, data, tmp_path / "shards"))
    assert summary["truncated"] == 2
    assert max(len(ids) for ids, _, _ in documents_of(tmp_path / "shards").values()) == 50


def invoke(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=True)


def test_command_prints_a_summary_and_saves_its_config(tmp_path, tiny_llama):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_chats(data, 5)
    result = invoke("--target", tiny_llama, "--data", data, "--output", output, "--codec", "raw")
    assert result.exit_code == 0, result.output
    assert "supervised_tokens" in result.stdout
    saved = json.loads((tmp_path / "shards.extract.json").read_text())
    assert saved["target_layer_ids"] == [1, 2, 3, 4, 5]
    assert saved["codec"] == "raw"
    assert saved["data"] == [str(data)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-layer-ids", "1,8"], "has layers 0 to 7"),
        (["--target-layer-ids", "3,1"], "must rise"),
        (["--data", "missing.jsonl"], "data file missing.jsonl does not exist"),
        (["--target", "missing"], "target folder missing does not exist"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path, tiny_llama, arguments, message):
    data = tmp_path / "data.jsonl"
    write_rows(data)
    output = tmp_path / "shards"
    given = ["--target", tiny_llama, "--data", data, "--output", output, *arguments]
    result = invoke(*given)
    assert isinstance(result.exception, ValueError | FileNotFoundError)
    assert message in str(result.exception)
    assert not output.exists()


def test_value_out_of_range_is_wrong_usage(tmp_path):
    given = ["--target", tmp_path, "--data", tmp_path, "--output", tmp_path, "--max-length", 1]
    result = invoke(*given)
    assert result.exit_code == 2
    assert "--max-length is 1" in result.output


def test_summary_counts_each_kind_of_dropped_conversation(tmp_path, tiny_llama):
    data = tmp_path / "data.jsonl"
    long_prompt = {"input_ids": [5] * 50, "loss_mask": [0] * 40 + [1] * 10}
    silent = {"input_ids": [5] * 9, "loss_mask": [0] * 9}
    good = {"input_ids": [5] * 9, "loss_mask": [0] * 4 + [1] * 5}
    rows = [good, silent, long_prompt, silent, silent, good, long_prompt]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = extract(config(tiny_llama, data, tmp_path / "shards", max_length=30))
    dropped = {name: count for name, count in summary.items() if name.startswith("dropped")}
    assert dropped == {
        "dropped (cut by --max-length before the answer)": 2,
        "dropped (fewer than two supervised tokens in a row)": 3,
    }
    assert summary["conversations"] == 7
    assert summary["documents"] == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_documents_read_are_those_kept_and_those_dropped_for_each_reason(
    tmp_path, tiny_llama, monkeypatch, ranks
):
    """Two are silent, two too long, one is answered too late and one has a broken state."""
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    good = [{"input_ids": [5] * n, "loss_mask": [0] * 4 + [1] * (n - 4)} for n in range(6, 26)]
    silent = {"input_ids": [5] * 9, "loss_mask": [0] * 9}
    long = {"input_ids": [5] * 31, "loss_mask": [1] * 31}
    rows = [silent, long, *good, silent, long]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    breaks_documents(monkeypatch, {7})
    knobs = {"max_length": 30, "over_long": "drop", "max_bad_fraction": 0.1, "shard_tokens": 100}
    if ranks == 1:
        summary = extract(config(tiny_llama, data, output, **knobs))
    else:
        monkeypatch.setenv("WORLD_SIZE", "2")
        shares = []
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            shares.append(extract(config(tiny_llama, data, output, **knobs)))
        summary = total_summary(output, shares)
    dropped = {name: count for name, count in summary.items() if name.startswith("dropped")}
    assert dropped == {
        "dropped (longer than --max-length)": 2,
        "dropped (fewer than two supervised tokens in a row)": 2,
    }
    assert summary["documents_read"] == len(rows) == 24
    assert summary["documents"] == len(documents_of(output)) == 19
    assert summary["broken_documents"] == 1


def test_another_rule_for_long_documents_is_another_data_set(tmp_path, tiny_llama):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    extract(config(tiny_llama, data, output))
    with pytest.raises(ValueError, match="was made with truncation_rule"):
        extract(config(tiny_llama, data, output, over_long="drop"))


def test_a_rerun_and_the_other_ranks_do_not_tokenise_again(tmp_path, tiny_llama, monkeypatch):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    extract(config(tiny_llama, data, output, shard_tokens=80))
    monkeypatch.setattr(corpus_module, "read_documents", None)  # whoever calls it fails
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        extract(config(tiny_llama, data, output, shard_tokens=80))
    assert sorted(documents_of(output)) == list(range(len(LENGTHS)))


def test_a_corpus_that_cannot_be_kept_ends_a_run_of_several_ranks(
    tmp_path, tiny_llama, monkeypatch
):
    """The others would wait for it in vain; a run of one goes on without."""
    data = tmp_path / "data.jsonl"
    write_rows(data)
    (tmp_path / "shards.corpus.safetensors").mkdir()
    extract(config(tiny_llama, data, tmp_path / "shards"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "more.corpus.safetensors").mkdir()
    with pytest.raises(OSError, match=r"cannot be kept in .*more\.corpus\.safetensors"):
        extract(config(tiny_llama, data, tmp_path / "more"))


def test_the_heartbeat_tells_what_was_run_and_how_it_ended(tmp_path, tiny_llama):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    extract(config(tiny_llama, data, output))
    beat = read_heartbeat(tmp_path / "shards.logs" / "heartbeat.json")
    assert beat["outcome"] == "finished"
    assert beat["tokens"] == sum(LENGTHS)
    assert 0 <= beat["filler_share"] < 1
    assert beat["queued"] == 0
    assert beat["matmul_share"] > 0
    data.write_text("nonsense\n")
    with pytest.raises(ValueError, match="not JSON"):
        extract(config(tiny_llama, data, tmp_path / "more"))
    beat = read_heartbeat(tmp_path / "more.logs" / "heartbeat.json")
    assert beat["outcome"].startswith("failed: ")
    assert "not JSON" in beat["outcome"]


def test_ranks_sum_up_their_own_shards_and_the_first_one_the_corpus(
    tmp_path, tiny_llama, monkeypatch
):
    data, output = tmp_path / "data.jsonl", tmp_path / "shards"
    write_rows(data)
    summaries = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        summaries.append(extract(config(tiny_llama, data, output, shard_tokens=80)))
    first, second = summaries
    assert first["shards of rank"] == "0 of 2"
    assert first["conversations"] == len(LENGTHS)
    assert "conversations" not in second
    assert first["tokens"] + second["tokens"] == sum(LENGTHS)
