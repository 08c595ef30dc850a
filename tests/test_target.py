"""Taps against Hugging Face's own hidden states; frozen ends against the loaded target."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import VOCAB, build_tiny_target, reference_states
from transformers import AutoModelForCausalLM

from dflash_offline.target import FrozenEnds, TappedTarget

LAYER_IDS = (0, 2, 5)


def load(folder, layer_ids=LAYER_IDS, dtype=torch.bfloat16):
    return TappedTarget.load(folder, target_layer_ids=layer_ids, device="cpu", dtype=dtype)


def random_ids(*shape, seed=0):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_taps_are_hugging_face_hidden_states_after_each_layer(tiny_target, dtype):
    ids = random_ids(2, 37)
    taps = load(tiny_target, dtype=dtype).taps(ids)
    states, _ = reference_states(tiny_target, ids, dtype)
    assert taps.shape == (2, 37, 3, 64)
    assert taps.dtype == torch.bfloat16
    for place, layer in enumerate(LAYER_IDS):
        # The stack goes on above the deepest tap, so no final norm is mixed into these.
        assert torch.equal(taps[:, :, place], states[layer + 1].bfloat16())


def test_last_layer_is_tapped_before_the_final_norm(tiny_target):
    target = load(tiny_target, (7,))
    ids = random_ids(1, 21)
    (taps,) = target.taps(ids).unbind(2)
    states, model = reference_states(tiny_target, ids, torch.bfloat16)
    assert torch.equal(model.model.norm(taps), states[-1])
    assert not torch.equal(taps, states[-1])


def test_only_what_lies_below_the_deepest_tap_is_kept(tiny_qwen35):
    names = [name for name, _ in load(tiny_qwen35, (1, 4))._tower.named_parameters()]
    assert not any("visual" in name or "lm_head" in name for name in names)
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == set("01234")


def padded(documents, padding):
    return torch.nn.utils.rnn.pad_sequence(
        documents, batch_first=True, padding_value=padding, padding_side="right"
    )


def test_padding_on_the_right_reaches_no_token(tiny_target):
    target = load(tiny_target, dtype=torch.float32)
    documents = [random_ids(n, seed=n) for n in (7, 30, 129)]
    together = target.taps(padded(documents, 0))
    other_padding = target.taps(padded(documents, 11))
    for row, ids in enumerate(documents):
        alone = target.taps(ids[None])[0]
        ours = together[row, : len(ids)]
        torch.testing.assert_close(ours, alone, rtol=2e-2, atol=1e-3)
        assert torch.equal(ours, other_padding[row, : len(ids)])


def test_a_token_changes_no_state_before_it(tiny_target):
    target = load(tiny_target)
    ids = random_ids(1, 50)
    changed = ids.clone()
    changed[0, 31] = (changed[0, 31] + 1) % VOCAB
    before, after = target.taps(ids)[0], target.taps(changed)[0]
    assert torch.equal(before[:31], after[:31])
    assert not torch.equal(before[31], after[31])


def test_kernels_are_named(tiny_qwen35, tiny_llama):
    assert load(tiny_llama).describe_kernels() == {"attention": "sdpa"}
    kernels = load(tiny_qwen35).describe_kernels()
    assert kernels == {"attention": "sdpa", "delta rule": "torch", "convolution": "torch"}


def test_kernel_package_on_a_cpu_is_passed_by_and_named_elsewhere(tiny_qwen35, monkeypatch):
    """transformers binds fla at import whatever the device; its kernels cannot run on a CPU."""
    target = load(tiny_qwen35)
    module = sys.modules[type(target._tower).__module__]
    plain = module.torch_chunk_gated_delta_rule.__wrapped__

    def kernel(*_args, **_kwargs):
        raise RuntimeError("0 active drivers")

    def wrapped(*args, **kwargs):
        return kernel(*args, **kwargs)

    kernel.__module__ = "fla.ops.gated_delta_rule"
    wrapped.__wrapped__ = plain
    expected = target.taps(random_ids(1, 19))
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", wrapped)
    target = load(tiny_qwen35)
    assert torch.equal(target.taps(random_ids(1, 19)), expected)
    assert module.torch_chunk_gated_delta_rule is wrapped
    assert target.describe_kernels()["delta rule"] == "torch"
    target._bypass = {}  # as on a GPU
    assert target.describe_kernels()["delta rule"] == "fla"
    with pytest.raises(RuntimeError, match="0 active drivers"):
        target.taps(random_ids(1, 19))


def test_slow_path_is_a_warning_on_a_gpu_only(tiny_qwen35, tiny_llama):
    hybrid, dense = load(tiny_qwen35), load(tiny_llama)
    assert hybrid.slow_path() is None
    hybrid.device = dense.device = torch.device("cuda")
    assert "pip install '.[gpu]'" in hybrid.slow_path()
    assert dense.slow_path() is None


def test_incomplete_target_is_refused(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights .* layers\.2\.mlp\.up_proj\.weight"):
        load(folder)


def test_frozen_ends_are_the_targets_own(tiny_target):
    ends = FrozenEnds.load(tiny_target, device="cpu", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.bfloat16)
    assert torch.equal(ends.embedding, model.get_input_embeddings().weight)
    assert torch.equal(ends.lm_head, model.get_output_embeddings().weight)
    assert not ends.embedding.requires_grad
    assert not ends.lm_head.requires_grad


def test_tied_ends_are_one_tensor(tiny_qwen3, tiny_llama):
    tied = FrozenEnds.load(tiny_qwen3, device="cpu", dtype=torch.float32)
    assert tied.lm_head is tied.embedding
    untied = FrozenEnds.load(tiny_llama, device="cpu", dtype=torch.float32)
    assert not torch.equal(untied.lm_head, untied.embedding)
    assert untied.lm_head.dtype == torch.float32


def test_frozen_ends_of_a_sharded_target(tmp_path):
    whole = build_tiny_target(tmp_path / "whole", "llama")
    parts = build_tiny_target(tmp_path / "parts", "llama", shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    expected = FrozenEnds.load(whole, device="cpu", dtype=torch.bfloat16)
    found = FrozenEnds.load(parts, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(found.embedding, expected.embedding)
    assert torch.equal(found.lm_head, expected.lm_head)


def copy_with(folder, tmp_path, weights, **config):
    copy = tmp_path / "target"
    copy.mkdir()
    facts = json.loads((folder / "config.json").read_text()) | config
    facts = {key: value for key, value in facts.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(facts))
    save_file(weights, copy / "model.safetensors")
    return copy


def test_missing_end_is_named_with_its_folder(tiny_llama, tmp_path):
    weights = load_file(tiny_llama / "model.safetensors")
    del weights["lm_head.weight"]
    folder = copy_with(tiny_llama, tmp_path, weights, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=rf"{folder} has none of the weights lm_head\.weight"):
        FrozenEnds.load(folder, device="cpu", dtype=torch.bfloat16)


def test_config_that_says_nothing_is_tied_if_it_has_no_head(tiny_llama, tmp_path):
    weights = load_file(tiny_llama / "model.safetensors")
    del weights["lm_head.weight"]
    folder = copy_with(tiny_llama, tmp_path, weights, tie_word_embeddings=None)
    ends = FrozenEnds.load(folder, device="cpu", dtype=torch.bfloat16)
    assert ends.lm_head is ends.embedding


def test_head_of_another_shape_is_refused(tiny_llama, tmp_path):
    weights = load_file(tiny_llama / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()
    folder = copy_with(tiny_llama, tmp_path, weights, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lm_head is \(511, 64\), the embedding \(512, 64\)"):
        FrozenEnds.load(folder, device="cpu", dtype=torch.bfloat16)


def test_cut_weights_and_empty_folder_are_refused(tiny_llama, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file"):
        FrozenEnds.load(tmp_path, device="cpu", dtype=torch.bfloat16)
    (tmp_path / "model.safetensors").write_bytes(
        (tiny_llama / "model.safetensors").read_bytes()[:999]
    )
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        FrozenEnds.load(tmp_path, device="cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        [],
        {},
        {"lm_head.weight": 3},
        *[
            {"lm_head.weight": name}
            for name in ("", ".", "..", "../x.safetensors", "/x.safetensors", "other.bin")
        ],
    ],
)
def test_an_index_of_no_files_of_that_folder_is_refused(tmp_path, weight_map):
    parts = build_tiny_target(tmp_path / "parts", "llama", shard_size="100KB")
    index = parts / "model.safetensors.index.json"
    (parts / "other.bin").symlink_to(next(parts.glob("*.safetensors")))
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json(: weight_map is| names) .*"):
        FrozenEnds.load(parts, device="cpu", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"index\.json(: weight_map is| names) .*"):
        load(parts)


def test_one_whole_file_goes_before_an_index_as_in_transformers(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "both")
    save_file({"lm_head.weight": torch.zeros(512, 64)}, folder / "other.safetensors")
    index = {"weight_map": {"lm_head.weight": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ends = FrozenEnds.load(folder, device="cpu", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(ends.lm_head, model.get_output_embeddings().weight)


def test_weights_that_are_a_folder_are_named(tiny_llama, tmp_path):
    folder = copy_with(tiny_llama, tmp_path, {"lm_head.weight": torch.zeros(2, 2)})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        FrozenEnds.load(folder, device="cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": 100},
        {"vocab_size": 600},
        {"hidden_size": 32},
        {"num_attention_heads": None},
        {"num_key_value_heads": None},
        {"num_attention_heads": 3},
        {"hidden_act": "unknown"},
        {"rope_parameters": "x"},
        {"rope_parameters": {"rope_type": "unknown", "rope_theta": 1e4}},
        {"model_type": "unknown"},
        {"eos_token_id": "x"},
        {"num_hidden_layers": "8"},
    ],
)
def test_a_config_that_its_weights_do_not_fit_is_one_sentence(tiny_llama, tmp_path, config):
    weights = load_file(tiny_llama / "model.safetensors")
    folder = copy_with(tiny_llama, tmp_path, weights, **config)
    sentence = rf"{folder}(: \d+ weights do not fit| cannot be loaded as a target: \w+: )"
    with pytest.raises(ValueError, match=sentence) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(folder)) + 300


def test_a_weight_of_another_shape_is_named_with_both_shapes(tiny_llama, tmp_path):
    weights = load_file(tiny_llama / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 64)
    folder = copy_with(tiny_llama, tmp_path, weights)
    message = (
        r"1 weights do not fit .*layers\.1\.mlp\.up_proj\.weight is \(3, 64\), .* \(\d+, 64\)"
    )
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_a_weight_file_cut_to_half_is_named(tmp_path, shard_size):
    folder = build_tiny_target(tmp_path / "cut", "llama", shard_size=shard_size)
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"{path} is not a whole safetensors file"):
        load(folder)


def test_full_memory_is_not_blamed_on_the_target(tiny_llama, monkeypatch):
    def fill(*_args, **_kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("dflash_offline.target.AutoModel.from_pretrained", fill)
    with pytest.raises(torch.OutOfMemoryError):
        load(tiny_llama)
