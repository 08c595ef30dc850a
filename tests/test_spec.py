"""Facts of targets and drafters: layer rule, identity, mask tokens, z-lab's config.json."""

import json
import os
import shutil

import pytest
from drafters import FULL, SLIDING, small_spec

from dflash_offline.facts import failing_as, shown
from dflash_offline.spec import DrafterSpec, TargetSpec, default_layer_ids


@pytest.mark.parametrize("layers", [8, 24, 28, 30, 32, 36, 64])
def test_default_layers_are_zlabs(layers):
    from dflash.model import build_target_layer_ids

    assert default_layer_ids(layers) == tuple(build_target_layer_ids(layers, 5))


def test_default_layers_of_published_drafters():
    # Qwen3-8B, Qwen3.5-4B, Qwen3.6-27B as published; SmolLM2 by the rule
    assert default_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(32) == (1, 8, 15, 22, 29)
    assert default_layer_ids(64) == (1, 16, 31, 46, 61)
    assert default_layer_ids(30) == (1, 8, 14, 20, 27)


def test_a_shallow_target_needs_its_layers_named():
    with pytest.raises(ValueError, match="--target-layer-ids"):
        default_layer_ids(6)


@pytest.mark.parametrize("ids", [(), (3, 1), (1, 1), (-1, 2), (1, 8)])
def test_layer_ids_must_rise_and_exist(tiny_llama, ids):
    with pytest.raises(ValueError, match="--target-layer-ids"):
        TargetSpec.read(tiny_llama).check_layer_ids(ids)


def test_facts_of_a_multimodal_wrapper_come_from_its_text_tower(tiny_qwen35):
    spec = TargetSpec.read(tiny_qwen35)
    text = json.loads((tiny_qwen35 / "config.json").read_text())["text_config"]
    assert spec.hidden_size == text["hidden_size"]
    assert spec.vocab_size == text["vocab_size"]
    assert spec.rope_theta == 1e7
    assert spec.model_type == "qwen3_5_text"
    assert TargetSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_identity_is_of_content_and_not_of_place(tiny_llama, tmp_path):
    original = TargetSpec.read(tiny_llama)
    copy = tmp_path / "moved"
    shutil.copytree(tiny_llama, copy)
    assert TargetSpec.read(copy).content_hash == original.content_hash
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert TargetSpec.read(copy).content_hash != original.content_hash


def test_weights_that_differ_in_the_middle_alone_are_another_target(tiny_llama, tmp_path):
    copy = tmp_path / "tuned"
    shutil.copytree(tiny_llama, copy)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    weights.write_bytes(content + bytes(5 << 20))  # longer than the two ends that are read whole
    padded = TargetSpec.read(copy).content_hash
    middle = len(content) + (2 << 20)
    content = content + bytes(5 << 20)
    content[middle : middle + (1 << 20)] = b"\1" * (1 << 20)
    weights.write_bytes(content)
    assert TargetSpec.read(copy).content_hash != padded


def test_a_mixture_of_experts_has_no_dense_width_and_rope_may_be_per_kind(tiny_llama, tmp_path):
    copy = tmp_path / "moe"
    shutil.copytree(tiny_llama, copy)
    config = json.loads((copy / "config.json").read_text())
    del config["intermediate_size"]
    config["rope_parameters"] = {
        "full_attention": {"rope_theta": 5e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    (copy / "config.json").write_text(json.dumps(config))
    spec = TargetSpec.read(copy)
    assert spec.mlp_width is None
    assert spec.rope_theta == 5e6


def test_the_chat_template_is_part_of_the_identity(tiny_llama, tmp_path):
    copy = tmp_path / "retold"
    shutil.copytree(tiny_llama, copy)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    changed, original = TargetSpec.read(copy), TargetSpec.read(tiny_llama)
    assert changed.content_hash != original.content_hash
    assert changed.template_hash != original.template_hash
    assert changed.tokenizer_hash == original.tokenizer_hash


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 40])
def test_a_cut_weight_file_is_named(tiny_llama, tmp_path, content):
    copy = tmp_path / "cut"
    shutil.copytree(tiny_llama, copy)
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        TargetSpec.read(copy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "is not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "lacks the key"),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_config_is_named(tiny_llama, tmp_path, text, message):
    copy = tmp_path / "bad"
    shutil.copytree(tiny_llama, copy)
    (copy / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        TargetSpec.read(copy)


def copy_with(folder, tmp_path, name, **changes):
    copy = shutil.copytree(folder, tmp_path / "changed")
    facts = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(facts | changes))
    return copy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "512"),
        ("vocab_size", None),
        ("vocab_size", -1),
        ("vocab_size", True),
        ("hidden_size", None),
        ("hidden_size", 64.0),
        ("num_hidden_layers", "8"),
        ("num_hidden_layers", 0),
        ("intermediate_size", []),
        ("max_position_embeddings", None),
        ("model_type", 3),
        ("text_config", "x"),
        ("rope_parameters", "x"),
        ("rms_norm_eps", None),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "1e-6"),
        ("bos_token_id", "x"),
        ("pad_token_id", 1.5),
        ("eos_token_id", "x"),
        ("eos_token_id", 512),
    ],
)
def test_a_config_value_of_wrong_type_or_range_is_named(tiny_llama, tmp_path, key, value):
    copy = copy_with(tiny_llama, tmp_path, "config.json", **{key: value})
    with pytest.raises(ValueError, match=rf"config\.json: {key} is .*; it must be"):
        TargetSpec.read(copy)


@pytest.mark.parametrize("theta", [0, -1.0, float("inf"), 10**400, "x", [1]])
def test_a_wrong_rope_base_is_named(tiny_llama, tmp_path, theta):
    rope = {"rope_type": "default", "rope_theta": theta}
    copy = copy_with(tiny_llama, tmp_path, "config.json", rope_parameters=rope)
    with pytest.raises(ValueError, match=r"config\.json: rope_theta is .*; it must be"):
        TargetSpec.read(copy)


@pytest.mark.parametrize("value", [1.5, [[1]], "x", {"a": 1}, [-1], [True]])
def test_a_wrong_end_token_is_named_with_its_file(tiny_llama, tmp_path, value):
    copy = copy_with(tiny_llama, tmp_path, "generation_config.json", eos_token_id=value)
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is"):
        TargetSpec.read(copy)


def test_null_is_no_value_where_transformers_takes_it_for_none(tiny_llama, tmp_path):
    nothing = {"text_config": None, "rope_parameters": None, "eos_token_id": None}
    spec = TargetSpec.read(copy_with(tiny_llama, tmp_path, "config.json", **nothing))
    assert spec.rope_theta == 10_000.0
    assert spec.hidden_size == TargetSpec.read(tiny_llama).hidden_size


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_named_and_not_waited_for(tiny_llama, tmp_path, name, make):
    copy = shutil.copytree(tiny_llama, tmp_path / "odd")
    (copy / name).unlink()
    make(copy / name)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        TargetSpec.read(copy)


def test_the_index_of_the_weights_is_part_of_the_identity(tiny_llama, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "sharded")
    hashes = {TargetSpec.read(copy).content_hash}
    for weight_map in ({"a": "model.safetensors"}, {"b": "model.safetensors"}):
        index = {"weight_map": weight_map}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        hashes.add(TargetSpec.read(copy).content_hash)
    assert len(hashes) == 3


def test_a_value_in_a_message_is_short():
    assert shown("ab") == "'ab'"
    for value in ("x" * 100_000, ["x" * 100] * 50, {"x" * 100: 1}, 10**300):
        assert len(shown(value)) <= 80


def test_a_library_error_of_any_kind_is_one_sentence_and_full_memory_is_not():
    class OutOfMemoryError(RuntimeError):  # torch's has this name and this base
        pass

    sentence = r"^it fails: RuntimeError: a b$"
    with pytest.raises(ValueError, match=sentence) as caught, failing_as("it fails"):
        raise RuntimeError("a\n  b")
    assert isinstance(caught.value.__cause__, RuntimeError)
    for full in (MemoryError, OutOfMemoryError):
        with pytest.raises(full), failing_as("it fails"):
            raise full("no room")


def known_family(tiny, model_type, rows):
    facts = {**TargetSpec.read(tiny).to_dict(), "model_type": model_type, "vocab_size": rows}
    return TargetSpec.from_dict(facts)


def test_mask_tokens_of_known_families_need_not_be_named(tiny_llama):
    assert known_family(tiny_llama, "qwen3", 151936).resolve_mask_token(None) == 151669
    assert known_family(tiny_llama, "qwen3_5_text", 248320).resolve_mask_token(None) == 248070
    assert known_family(tiny_llama, "qwen3", 151936).resolve_mask_token(7) == 7


def test_exported_config_says_block_size_and_rope_where_loaders_look():
    config = small_spec(rope_theta=1e7).to_config()
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e7
    assert config["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    assert config["dflash_config"]["mask_token_id"] == 50
    assert config["layer_types"] == [SLIDING, FULL]
    assert config["sliding_window"] == 6
    assert "is_causal" not in config
    assert "mrope_section" not in json.dumps(config)
    assert "partial_rotary_factor" not in json.dumps(config)


def test_config_and_spec_are_each_others_inverse():
    for kinds in [(FULL,), (SLIDING, FULL), (SLIDING, SLIDING)]:
        spec = small_spec(kinds)
        assert DrafterSpec.from_config(json.loads(json.dumps(spec.to_config()))) == spec


def test_a_published_config_with_block_size_inside_alone_is_read():
    config = small_spec((FULL,)).to_config()
    for name in ("block_size", "layer_types", "rope_parameters"):
        del config[name]
    assert DrafterSpec.from_config(config) == small_spec((FULL,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("mask_token_id", value) for value in (-1, 64, "50", True, None)],
        *[("block_size", value) for value in (1, 65, 4.0, "4")],
        ("target_layer_ids", []),
        ("target_layer_ids", 3),
        ("target_layer_ids", [3, 1]),
        ("target_layer_ids", [1, 1]),
        ("target_layer_ids", [1, 8]),
        ("target_layer_ids", [-1, 2]),
        ("target_layer_ids", [True, 2]),
        ("target_layer_ids", ["1"]),
        ("dflash_config", 7),
        *[("hidden_size", value) for value in (0, -32, "32", True, None, 10**30)],
        ("intermediate_size", 0),
        ("vocab_size", 1.5),
        ("num_target_layers", None),
        ("num_hidden_layers", "2"),
        ("max_position_embeddings", 0),
        ("num_key_value_heads", 0),
        ("num_attention_heads", 3),
        ("head_dim", 15),
        ("layer_types", "full_attention"),
        ("layer_types", []),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", [["full_attention"], "full_attention"]),
        *[("sliding_window", value) for value in (None, 0, 6.0)],
        *[("rms_norm_eps", value) for value in (0, float("nan"), "x", True)],
        *[("rope_theta", value) for value in (-1, float("inf"), "x", [])],
        ("rope_parameters", []),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "x"),
        ("bos_token_id", 1.5),
    ],
)
def test_a_drafter_config_that_makes_no_sense_is_refused_by_key_and_value(key, value):
    config = small_spec().to_config()
    for part in (config, config["dflash_config"], config["rope_parameters"]):
        if key in part:
            part[key] = value
    with pytest.raises(ValueError, match=rf"drafter's config\.json: {key} is .*; it must be"):
        DrafterSpec.from_config(config)
