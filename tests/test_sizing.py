"""Reckoned sizes against shards on a disk, figures written down elsewhere, and sums by hand."""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_offline import sizing
from dflash_offline.codec import make_codec, measure
from dflash_offline.config import ExtractConfig
from dflash_offline.dataset import Dataset
from dflash_offline.documents import Document
from dflash_offline.planning import plan_shards
from dflash_offline.shards import ShardWriter
from dflash_offline.sizing import (
    Need,
    Room,
    ShardFormat,
    check_room,
    codecs_for,
    count_shards,
    layer_weights,
)
from dflash_offline.spec import LAYER_CONVENTION, TargetSpec


def random_states(tokens, layers, width):
    """With loud channels, as real ones have them (tests/bench/store.py)."""
    g = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, layers, width, generator=g)
    return (states * torch.rand(layers, width, generator=g).mul(4).exp()).bfloat16()


def write_shard(path, target, *, codec, layers, width, lengths, final_codec=None):
    """A shard of random states as extract writes it; its folder."""
    taps, final = (random_states(sum(lengths), n, width) for n in (layers, 1))
    contract = {
        "target": {**TargetSpec.read(target).to_dict(), "hidden_size": width},
        "target_layer_ids": list(range(layers)),
        "layer_convention": LAYER_CONVENTION,
        "final_hidden": "before-norm" if final_codec else None,
    }
    chosen = make_codec(codec, layers=layers, width=width, calibration=taps[:100])
    last = final_codec and make_codec(final_codec, layers=1, width=width, calibration=final[:100])
    dataset = Dataset.create_or_resume(
        path, contract=contract, make_codecs=lambda: (chosen, last), provenance={}
    )
    planes = chosen.encode(taps)
    if last:
        planes |= {f"final_{name}": plane for name, plane in last.encode(final).items()}
        taps = torch.cat([taps, final], 1)
    documents = [
        Document(i, torch.full((n,), 7, dtype=torch.int32), torch.ones(n, dtype=torch.bool))
        for i, n in enumerate(lengths)
    ]
    with ShardWriter(dataset, "shard-000000") as writer:
        writer.append(documents, planes, measure(taps, taps))
        writer.commit()
    return dataset.shard_path("shard-000000")


@pytest.mark.parametrize(
    ("codec", "final_codec", "width", "lengths"),
    [
        ("int8", None, 256, (1000, 700, 300)),
        ("int8", None, 64, (16_000, 1)),
        ("int8", "int8", 96, (9_000,)),
        ("raw", None, 64, (16_384,)),
        ("raw", None, 64, (16_385, 2_000, 999)),
        ("raw", "lossless", 128, (3_000, 77)),
        ("lossless", None, 512, (3_000,)),
    ],
)
def test_a_shard_takes_what_was_reckoned(tmp_path, tiny_llama, codec, final_codec, width, lengths):
    folder = write_shard(
        tmp_path / "data", tiny_llama, codec=codec, final_codec=final_codec, layers=3,
        width=width, lengths=lengths,
    )  # fmt: skip
    entries = [folder, *folder.rglob("*")]
    on_disk = sum(entry.stat().st_size for entry in entries if entry.is_file())
    need = ShardFormat(codec, 3, width, final_codec).shard(len(lengths), sum(lengths))
    assert need.bytes == pytest.approx(on_disk, rel=0.01)
    assert need.inodes == len(entries)


def test_the_small_arrays_count_by_token_and_by_document(tmp_path, tiny_llama):
    """In a shard of 2,000 documents of one or two tokens they are a tenth of all bytes."""
    lengths = [1, 2] * 1_000
    folder = write_shard(
        tmp_path / "data", tiny_llama, codec="raw", layers=2, width=64, lengths=lengths
    )
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    need = ShardFormat("raw", 2, 64).shard(2_000, 3_000)
    assert need.bytes == pytest.approx(on_disk, rel=0.01)


def test_the_last_chunk_is_reckoned_whole():
    """codes 128 x 128 and scales 128 x 2, each + 4 and + an index of 128 x 16 + 4; 5 bytes a
    token, 20 a document, 8,000 of metadata. 2 x 6 inodes of planes, 5 x 4 of the rest, 3."""
    need = ShardFormat("int8", 1, 128).shard(2, 100)
    assert need == Need(16_384 + 256 + 2 * 4 + 2 * 2_052 + 5 * 100 + 20 * 2 + 8_000, 35)


@pytest.mark.parametrize(("codec", "measured"), [("int8", 26_007), ("lossless", 36_182),
                                                 ("raw", 51_206)])  # fmt: skip
def test_bytes_a_token_are_those_of_the_readme(codec, measured):
    """README's table: tests/bench/store.py, 5 layers of 5,120, one shard of 8,192 tokens."""
    need = ShardFormat(codec, 5, 5120).shard(8, 8_192)
    assert need.bytes / 8_192 == pytest.approx(measured, rel=2e-4)


def test_shards_add_up():
    form = ShardFormat("raw", 2, 64)
    one, other = form.shard(3, 1_000), form.shard(1, 70_000)
    both = form.shards([(3, 1_000), (1, 70_000)])
    assert both == Need(one.bytes + other.bytes, one.inodes + other.inodes)
    assert form.even_shards(6, 2_000, 2) == Need(2 * one.bytes, 2 * one.inodes)


def test_a_width_that_int8_cannot_store_is_refused():
    assert codecs_for(72) == ["lossless", "raw"]
    assert codecs_for(96) == ["int8", "lossless", "raw"]
    with pytest.raises(ValueError, match=r"int8 needs a width that 32 divides, .* is 72"):
        ShardFormat("int8", 1, 72).shard(1, 1)


@pytest.mark.parametrize(
    ("tokens", "shard_tokens", "batch_tokens", "shards"),
    [
        (1, 65_536, 16_384, 1),
        (65_536, 65_536, 16_384, 1),
        (65_537, 65_536, 16_384, 2),
        (80_000, 65_536, 40_000, 2),  # a second row of 40,000 has no place
        (80_001, 65_536, 40_000, 3),
        (100, 10, 16_384, 10),
    ],
)
def test_shards_hold_whole_rows(tokens, shard_tokens, batch_tokens, shards):
    found = count_shards(tokens, shard_tokens=shard_tokens, batch_tokens=batch_tokens)
    assert found == shards


def test_the_plan_has_about_as_many_shards():
    lengths = torch.randint(100, 4_096, (3_000,), generator=torch.Generator().manual_seed(0))
    documents = [Document(i, torch.empty(n), torch.empty(n)) for i, n in enumerate(lengths)]
    plan = plan_shards(documents, shard_tokens=65_536, row_tokens=16_384)
    reckoned = count_shards(int(lengths.sum()), shard_tokens=65_536, batch_tokens=16_384)
    assert len(plan) == pytest.approx(reckoned, rel=0.02)


def write_headers(folder, *files, config=None):
    """Safetensors files of these tensors (name -> shape) that end after their headers."""
    for number, shapes in enumerate(files):
        header = {
            n: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()
        }
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        path = folder / f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def qwen36_layer(layer):
    """Keys and shapes of a layer of Qwen3.6-27B."""
    mixers = {
        "linear_attn": {
            "in_proj_qkv.weight": [10_240, 5120], "in_proj_z.weight": [6144, 5120],
            "in_proj_a.weight": [48, 5120], "in_proj_b.weight": [48, 5120],
            "conv1d.weight": [10_240, 1, 4], "A_log": [48], "dt_bias": [48],
            "norm.weight": [128], "out_proj.weight": [5120, 6144],
        },
        "self_attn": {
            "q_proj.weight": [12_288, 5120], "k_proj.weight": [1024, 5120],
            "v_proj.weight": [1024, 5120], "o_proj.weight": [5120, 6144],
            "q_norm.weight": [256], "k_norm.weight": [256],
        },
    }  # fmt: skip
    mixer = "self_attn" if layer % 4 == 3 else "linear_attn"
    shapes = {f"{mixer}.{name}": shape for name, shape in mixers[mixer].items()}
    shapes |= {f"mlp.{name}_proj.weight": [17_408, 5120] for name in ("gate", "up")}
    shapes |= {"mlp.down_proj.weight": [5120, 17_408]}
    shapes |= {f"{name}_layernorm.weight": [5120] for name in ("input", "post_attention")}
    return {f"model.language_model.layers.{layer}.{name}": s for name, s in shapes.items()}


def test_weights_of_qwen36_27b_are_those_of_the_model(tmp_path):
    """As they were counted on transformers' own model, made on the meta device."""
    ends = {"model.language_model.embed_tokens.weight": [248_320, 5120],
            "lm_head.weight": [248_320, 5120], "model.visual.blocks.0.attn.qkv.weight": [3, 5],
            "mtp.layers.0.mlp.up_proj.weight": [17_408, 5120]}  # fmt: skip
    layers = [qwen36_layer(i) for i in range(64)]
    files = [
        {k: v for layer in layers[i : i + 16] for k, v in layer.items()} for i in (0, 16, 32, 48)
    ]
    write_headers(tmp_path, ends, *files, config={"text_config": {"num_hidden_layers": 64}})
    assert layer_weights(tmp_path, 62) == 23_597_668_128
    assert layer_weights(tmp_path, 64) == 24_353_196_544


@pytest.mark.parametrize("depth", [1, 6, 8])
def test_weights_of_a_target_are_those_of_its_layers(tiny_target, depth):
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    layers = model.model.layers[:depth]
    assert layer_weights(tiny_target, depth) == sum(p.numel() for p in layers.parameters())


def test_a_token_meets_only_its_experts(tmp_path):
    """Of 8 experts of 10 x 6 a token is sent to 2: 120 weights, and the 30 of all tokens."""
    shapes = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": [10, 6] for i in range(8)}
    shapes |= {"model.layers.0.mlp.gate.weight": [5, 6]}
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    assert layer_weights(write_headers(tmp_path, shapes, config=experts), 1) == 150


def test_one_whole_file_goes_before_several(tmp_path):
    write_headers(tmp_path, {"model.layers.0.w": [2, 3]}).joinpath(
        "model-00001-of-00001.safetensors"
    ).rename(tmp_path / "model.safetensors")
    write_headers(tmp_path, {"model.layers.0.w": [2, 3], "model.layers.0.v": [100]})
    assert layer_weights(tmp_path, 1) == 6


def test_a_missing_layer_and_a_damaged_header_are_named(tmp_path):
    write_headers(tmp_path, {"model.layers.0.w": [2]}, {"model.layers.2.w": [2]})
    with pytest.raises(ValueError, match="holds no weights of layer 1 in"):
        layer_weights(tmp_path, 3)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is not a whole"):
        layer_weights(tmp_path, 3)


def fake_disk(monkeypatch, *, blocks=1_000, files=1_000, free_files=500):
    """A file system with blocks of 4,096 bytes, of which root has 10 more than anyone else."""
    found = SimpleNamespace(f_frsize=4096, f_bsize=1 << 20, f_bavail=blocks, f_bfree=blocks + 10,
                            f_files=files, f_favail=free_files, f_ffree=free_files)  # fmt: skip
    monkeypatch.setattr(sizing.os, "statvfs", lambda path: found)


def test_room_is_what_is_free_for_this_user(monkeypatch, tmp_path):
    fake_disk(monkeypatch)
    assert Room.at(tmp_path) == Room(4_096_000, 500)
    fake_disk(monkeypatch, files=0, free_files=0)  # btrfs and some network disks count none
    assert Room.at(tmp_path) == Room(4_096_000, None)
    assert Room(100, None).holds(Need(100, 10**9))
    assert not Room(100, 5).holds(Need(100, 6))
    assert not Room(100, 5).holds(Need(101, 5))


def test_room_is_that_of_the_nearest_folder_that_is_there(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(sizing.os, "statvfs", lambda p: asked.append(p) or os.fstatvfs(0))
    Room.at(tmp_path / "not" / "yet")
    assert asked == [tmp_path.resolve()]


def config(tmp_path, **knobs):
    return ExtractConfig(target=tmp_path, data=(tmp_path,), output=tmp_path / "out", **knobs)


MISSING = [(10, 60_000), (10, 60_000)]
# 60,000 tokens are 469 chunks in 4 files: of a raw plane of 2 x 128 values 469 x (128 x 512 + 4)
# + 4 x 2,052, and 5 x 60,000 + 20 x 10 + 8,000 besides. In int8 there are planes of 256 and 4.
RAW_BYTES = 2 * (469 * 65_540 + 4 * 2_052 + 300_000 + 200 + 8_000)


@pytest.mark.parametrize(
    ("disk", "words"),
    [
        (
            {"blocks": RAW_BYTES // 4096},
            [
                "62.1 MB",
                "has 62.1 MB and 500 inodes left",
                "choose --codec int8 (31.9 MB), another",
            ],
        ),
        ({"blocks": 7_000}, ["has 28.7 MB and", "choose another"]),  # int8 has no room either
        (
            {"blocks": 10**6, "free_files": 75},
            ["76 inodes", "has 4.1 GB and 75 inodes left", "choose another"],
        ),
    ],
)
def test_a_disk_without_room_is_refused_with_numbers_and_remedies(
    monkeypatch, tmp_path, disk, words
):
    fake_disk(monkeypatch, **disk)
    with pytest.raises(ValueError) as refused:
        check_room(config(tmp_path, codec="raw"), ShardFormat("raw", 2, 128), MISSING)
    told = str(refused.value)
    for word in ("the 120,000 tokens still to be extracted", str(tmp_path / "out"),
                 "another disk for --output, or --allow-partial", *words):  # fmt: skip
        assert word in told, told


def test_a_disk_with_just_enough_room_is_taken(monkeypatch, tmp_path):
    assert math.ceil(RAW_BYTES / 4096) == 15_164
    fake_disk(monkeypatch, blocks=15_164, free_files=76)
    check_room(config(tmp_path, codec="raw"), ShardFormat("raw", 2, 128), MISSING)


def test_a_partial_extract_is_warned_of_and_goes_on(monkeypatch, tmp_path, capsys):
    fake_disk(monkeypatch, blocks=1)
    allowed = config(tmp_path, codec="lossless", allow_partial=True)
    check_room(allowed, ShardFormat("lossless", 2, 128), MISSING)
    told = capsys.readouterr().err
    assert told.startswith("warning: the 120,000 tokens still to be extracted take 44.")
    assert "reckoned at 0.71 of bf16" in told
    assert "4.1 KB" in told


def test_nothing_smaller_is_offered_where_there_is_nothing(monkeypatch, tmp_path):
    fake_disk(monkeypatch, blocks=1)
    for form in (ShardFormat("int8", 2, 128), ShardFormat("raw", 2, 72)):
        with pytest.raises(ValueError) as refused:
            check_room(config(tmp_path, codec=form.codec), form, MISSING)
        assert "choose another disk for --output" in str(refused.value)
        assert "--codec" not in str(refused.value)
