"""Taps against Hugging Face's own hidden states; frozen ends against the loaded target."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import VOCAB, build_tiny_target, reference_states
from transformers import AutoModelForCausalLM

from dflash_offline.packed import PackedTower
from dflash_offline.target import FrozenEnds, TappedTarget, load_final_norm

LAYER_IDS = (0, 2, 5)


def load(folder, layer_ids=LAYER_IDS, dtype=torch.bfloat16, **knobs):
    knobs |= {"target_layer_ids": layer_ids, "device": "cpu", "dtype": dtype}
    return TappedTarget.load(folder, **knobs)


def random_ids(*shape, seed=0):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_taps_are_hugging_face_hidden_states_after_each_layer(tiny_target, dtype):
    ids = random_ids(37)
    taps = load(tiny_target, dtype=dtype).taps([ids])
    states, _ = reference_states(tiny_target, ids[None], dtype)
    assert taps.shape == (37, 3, 64)
    assert taps.dtype == torch.bfloat16
    for place, layer in enumerate(LAYER_IDS):
        # The stack goes on above the deepest tap, so no final norm is mixed into these.
        assert torch.equal(taps[:, place], states[layer + 1][0].bfloat16())


def test_last_layer_is_tapped_before_the_final_norm(tiny_target):
    target = load(tiny_target, (7,))
    ids = random_ids(21)
    taps = target.taps([ids])[:, 0]
    states, model = reference_states(tiny_target, ids[None], torch.bfloat16)
    assert torch.equal(model.model.norm(taps), states[-1][0])
    assert not torch.equal(taps, states[-1][0])


def test_only_what_lies_below_the_deepest_tap_is_kept(tiny_qwen35):
    names = [name for name, _ in load(tiny_qwen35, (1, 4))._tower.named_parameters()]
    assert not any("visual" in name or "lm_head" in name for name in names)
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == set("01234")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_documents_of_a_row_do_not_see_each_other(tiny_target, dtype):
    """Around the delta rule's chunk of 64, one token, and long ones; filled up like on a GPU."""
    target = load(tiny_target, dtype=dtype)
    documents = [random_ids(n, seed=n) for n in (1, 5, 63, 64, 65, 700)]
    for row in (documents, documents[::-1]):
        together = target.taps(row).split([len(ids) for ids in row])
        target._compiled_row = 1024  # nothing is compiled here; the row is filled up
        filled = target.taps(row).split([len(ids) for ids in row])
        target._compiled_row = None
        for ids, ours, ours_filled in zip(row, together, filled, strict=True):
            states, _ = reference_states(tiny_target, ids[None], dtype)
            theirs = torch.stack([states[i + 1][0] for i in LAYER_IDS], 1).float()
            for found in (ours, ours_filled):
                error = (found.float() - theirs).norm() / theirs.norm()
                assert error < 3 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("multiple", [16, 128])
def test_attention_over_lengths_of_few_kinds_changes_nothing(tiny_target, multiple):
    """As on a GPU: each document is filled up to the next multiple."""
    target = load(tiny_target, dtype=torch.float32)
    row = [random_ids(n, seed=n) for n in (1, 16, 17, 100, 33)]
    plain = target.taps(row)
    target._packed._stretch = multiple
    assert torch.allclose(target.taps(row).float(), plain.float(), rtol=1e-2, atol=1e-3)


def test_a_broken_document_leaves_the_one_before_it_whole(tiny_qwen3):
    """On a GPU a document is attended at a longer length: not into its neighbour's NaN."""
    target = load(tiny_qwen3, dtype=torch.float32)
    target._packed._stretch = 128
    broken = 77
    embedding = target._tower.get_input_embeddings().weight
    embedding.data[broken] = float("nan")
    sound, bad = torch.full((40,), 9), torch.full((30,), broken)
    before, after = target.taps([sound, bad]).split([40, 30])
    assert torch.equal(before, target.taps([sound]))
    assert before.isfinite().all()
    assert after.isnan().all()


def test_a_document_of_4096_tokens_beside_others(tiny_qwen35):
    target = load(tiny_qwen35)
    documents = [random_ids(65), random_ids(4096, seed=1), random_ids(5)]
    ours = target.taps(documents).split([65, 4096, 5])[1].float()
    states, _ = reference_states(tiny_qwen35, documents[1][None], torch.bfloat16)
    theirs = torch.stack([states[i + 1][0] for i in LAYER_IDS], 1).float()
    assert (ours - theirs).norm() / theirs.norm() < 3 * torch.finfo(torch.bfloat16).eps


def test_layers_that_leak_are_refused(tiny_qwen35, monkeypatch):
    """A delta rule that runs over the borders, as transformers' own does in a packed row."""

    def leaking(self):
        functions = honest(self)
        reference = self._plain["torch_chunk_gated_delta_rule"]

        def over_borders(*args, cu_seqlens=None, **kwargs):
            return reference(*args, **kwargs)

        return functions | {"torch_chunk_gated_delta_rule": over_borders}

    honest = PackedTower._hybrid_functions
    monkeypatch.setattr(PackedTower, "_hybrid_functions", leaking)
    with pytest.raises(ValueError, match="fails the self-test of rows: states differ by"):
        load(tiny_qwen35)


def test_attention_of_an_unknown_kind_is_refused(tiny_llama, monkeypatch):
    attend = PackedTower._attend

    def sharper(self, *args, scaling, **kwargs):
        return attend(self, *args, scaling=2 * scaling, **kwargs)

    monkeypatch.setattr(PackedTower, "_attend", sharper)
    with pytest.raises(ValueError, match="self-test of kernels: states differ by"):
        load(tiny_llama)


def test_flop_of_a_token_are_twice_the_weights_it_meets(tiny_qwen35):
    """Counted by hand from the file: every matrix of the first six layers, none of the ends."""
    weights = load_file(tiny_qwen35 / "model.safetensors")
    met = [
        weight.numel()
        for name, weight in weights.items()
        if weight.ndim > 1 and any(f".language_model.layers.{i}." in name for i in range(6))
    ]
    assert load(tiny_qwen35).flop_per_token == 2 * sum(met)


def test_fp8_products_that_are_wrong_are_refused(tiny_llama, monkeypatch):
    """A device whose products are garbage: rows and kernels agree with each other all the same."""

    def garbage(layers):
        for layer in layers:
            layer.mlp.down_proj.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        return 8

    monkeypatch.setattr("dflash_offline.target.quantise_linears", garbage)
    with pytest.raises(ValueError, match=r"self-test of fp8: .*use --dtype bfloat16"):
        load(tiny_llama, fp8=True)


def test_a_token_changes_no_state_before_it(tiny_target):
    target = load(tiny_target)
    ids = random_ids(50)
    changed = ids.clone()
    changed[31] = (changed[31] + 1) % VOCAB
    before, after = target.taps([ids]), target.taps([changed])
    assert torch.equal(before[:31], after[:31])
    assert not torch.equal(before[31], after[31])


def test_kernels_are_named(tiny_qwen35, tiny_llama):
    assert load(tiny_llama).describe_kernels() == {"attention": "sdpa by document"}
    kernels = load(tiny_qwen35).describe_kernels()
    by = "sdpa by document"
    assert kernels == {"attention": by, "delta rule": "torch", "convolution": "torch"}


def test_kernel_package_on_a_cpu_is_passed_by(tiny_qwen35, monkeypatch):
    """transformers binds fla at import whatever the device; its kernels cannot run on a CPU."""
    expected = load(tiny_qwen35).taps([random_ids(19)])
    module = sys.modules[type(load(tiny_qwen35)._tower).__module__]
    plain = module.torch_chunk_gated_delta_rule.__wrapped__

    def wrapped(*args, **kwargs):
        raise RuntimeError("0 active drivers")

    wrapped.__wrapped__ = plain
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", wrapped)
    target = load(tiny_qwen35)
    assert torch.equal(target.taps([random_ids(19)]), expected)
    assert module.torch_chunk_gated_delta_rule is wrapped
    assert target.describe_kernels()["delta rule"] == "torch"


def test_slow_path_is_told_of_on_a_gpu_only(tiny_qwen35, tiny_llama):
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


def test_the_final_norm_is_the_targets_own(tiny_target):
    """With gains that are not the initial ones, by which `weight` and `1 + weight` differ."""
    norm = load_final_norm(tiny_target, device="cpu", dtype=torch.float32)
    ids = random_ids(1, 20)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    states = []
    layers = model.get_decoder().layers
    layers[-1].register_forward_hook(lambda *given: states.append(given[2]))
    with torch.no_grad():
        expected = model.get_decoder()(input_ids=ids).last_hidden_state
    before = states[0][0] if isinstance(states[0], tuple) else states[0]
    torch.testing.assert_close(norm(before), expected, rtol=1e-5, atol=1e-5)


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

    monkeypatch.setattr("dflash_offline.skeleton.AutoModel.from_config", fill)
    with pytest.raises(torch.OutOfMemoryError):
        load(tiny_llama)
