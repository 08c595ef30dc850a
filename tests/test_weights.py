"""Loaded towers against transformers' own loader; fp8 against a loop over the blocks."""

import json
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_target import VOCAB, build_tiny_target
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaModel,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dflash_offline.skeleton import build_skeleton
from dflash_offline.spec import TargetSpec
from dflash_offline.target import FrozenEnds, TappedTarget
from dflash_offline.weights import Weights, dequantise

DTYPES = (torch.bfloat16, torch.float32)


def load(folder, dtype=torch.bfloat16, depth=None, trust_remote_code=False):
    weights = Weights(folder, "cpu")
    tower = build_skeleton(folder, depth=depth, dtype=dtype, trust_remote_code=trust_remote_code)
    weights.fill(tower)
    return tower


def tensors(tower):
    return dict(tower.named_parameters()) | dict(tower.named_buffers())


def by_transformers(folder, dtype=torch.bfloat16):
    config = AutoConfig.from_pretrained(folder).get_text_config()
    return AutoModel.from_pretrained(folder, config=config, dtype=dtype)


def check_equal(ours, theirs):
    """Names, dtypes and values of weights and buffers."""
    ours, theirs = tensors(ours), tensors(theirs)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def taps(folder, layer_ids=(0, 1)):
    target = TappedTarget.load(
        folder, target_layer_ids=layer_ids, device="cpu", dtype=torch.bfloat16
    )
    ids = torch.randint(0, VOCAB, (29,), generator=torch.Generator().manual_seed(0))
    return target.taps([ids])


def write(folder, weights, like, **config):
    """A folder with these weights in one file and the config of another target."""
    folder.mkdir()
    facts = json.loads((like / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def reads(monkeypatch):
    """Name -> bytes of each tensor taken from a file, and what the progress bar was told."""
    seen = SimpleNamespace(bytes={}, total=None, advanced=0)

    class Recorded:
        def __init__(self, path, **how):
            self.file = safe_open(path, **how)

        def get_tensor(self, name):
            tensor = self.file.get_tensor(name)
            seen.bytes[name] = tensor.nbytes
            return tensor

    @contextmanager
    def progress(_label, *, total, unit):
        def advance(n):
            seen.advanced += n

        assert unit == "B"
        seen.total = total
        yield SimpleNamespace(advance=advance)

    monkeypatch.setattr("dflash_offline.weights.safe_open", Recorded)
    monkeypatch.setattr("dflash_offline.weights.progress", progress)
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tower_is_what_transformers_loads(tiny_target, dtype):
    ours = load(tiny_target, dtype)
    check_equal(ours, by_transformers(tiny_target, dtype))
    assert not ours.training
    assert not any(weight.requires_grad for weight in ours.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_stored_in_float32_are_rounded_as_by_transformers(tmp_path, dtype):
    """A_log and the delta rule's norm too, which Qwen3.5 stores so."""
    folder = build_tiny_target(tmp_path / "wide", dtype=torch.float32)
    check_equal(load(folder, dtype), by_transformers(folder, dtype))


def test_what_a_class_keeps_in_float32_stays_so(tiny_llama, monkeypatch):
    """Routers of some mixtures of experts, by the version of transformers."""
    monkeypatch.setattr(LlamaModel, "_keep_in_fp32_modules_strict", ["o_proj", "layers.3.mlp"])
    ours = load(tiny_llama)
    check_equal(ours, by_transformers(tiny_llama))
    kept = [w for w in ours.parameters() if w.dtype == torch.float32]
    assert len(kept) == 8 + 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe", "glm4_moe"])
def test_experts_stored_one_by_one_are_put_together(tmp_path, kind, dtype):
    folder = build_experts(tmp_path / kind, kind)
    assert any(".experts.3." in name for name in load_file(folder / "model.safetensors"))
    ours, theirs = load(folder, dtype), by_transformers(folder, dtype)
    check_equal(ours, theirs)
    if kind != "qwen3_5_moe":  # an installed fla would be called, and cannot run on a CPU
        ids = torch.arange(20)[None]
        assert torch.equal(ours(ids).last_hidden_state, theirs(ids).last_hidden_state)


def build_experts(folder, kind):
    sizes = dict(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
    )  # fmt: skip
    if kind == "glm4_moe":
        config = Glm4MoeConfig(
            **sizes, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1
        )
        model = Glm4MoeForCausalLM(config)
    elif kind == "qwen3_moe":
        config = Qwen3MoeConfig(**sizes, head_dim=16, num_experts=4, num_experts_per_tok=2)
        model = Qwen3MoeForCausalLM(config)
    else:
        text = sizes | dict(
            head_dim=32, num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=24,
            linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
            linear_value_head_dim=16,
        )  # fmt: skip
        vision = dict(
            depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64,
            num_position_embeddings=16,
        )  # fmt: skip
        config = Qwen3_5MoeConfig(text_config=text, vision_config=vision)
        model = Qwen3_5MoeForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_missing_expert_is_named(tmp_path):
    whole = build_experts(tmp_path / "whole", "qwen3_moe")
    weights = load_file(whole / "model.safetensors")
    del weights["model.layers.2.mlp.experts.3.up_proj.weight"]
    folder = write(tmp_path / "target", weights, like=whole)
    with pytest.raises(ValueError, match=r"lacks 1 .*, layers\.2\.mlp\.experts\.3\.up_proj\.wei"):
        load(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_multimodal"])
def test_shards_with_an_index_are_one_target(tmp_path, kind):
    whole = build_tiny_target(tmp_path / "whole", kind)
    parts = build_tiny_target(tmp_path / "parts", kind, shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    check_equal(load(parts), by_transformers(whole))
    assert torch.equal(taps(parts), taps(whole))


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_nothing_above_the_deepest_tap_is_read(tmp_path, reads, shard_size):
    folder = build_tiny_target(tmp_path / "target", shard_size=shard_size)
    expected = taps(folder, (0, 4))
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            if not name.startswith("model.language_model.") or "layers.5" in name:
                weight.fill_(torch.nan)
        save_file(weights, path, metadata={"format": "pt"})
    reads.bytes.clear()
    reads.advanced = 0
    assert torch.equal(taps(folder, (0, 4)), expected)
    tower = "model.language_model."
    wanted = ("embed_tokens.", "norm.", *(f"layers.{i}." for i in range(5)))
    assert all(name.startswith(tuple(tower + part for part in wanted)) for name in reads.bytes)
    assert sum(reads.bytes.values()) == reads.total == reads.advanced > 0


def test_layers_above_the_deepest_tap_may_be_absent(tiny_llama, tmp_path):
    weights = load_file(tiny_llama / "model.safetensors")
    weights = {name: w for name, w in weights.items() if not name.startswith("model.layers.7.")}
    folder = write(tmp_path / "target", weights, like=tiny_llama)
    assert torch.equal(taps(folder, (1, 6)), taps(tiny_llama, (1, 6)))
    with pytest.raises(ValueError, match=r"lacks 9 weights .*layers\.7\."):
        taps(folder, (1, 7))


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model.", "a.b."])
def test_the_towers_place_in_a_wrapper_is_found(tiny_llama, tmp_path, prefix):
    weights = load_file(tiny_llama / "model.safetensors")
    # A next-token module and a second tower, both of fewer layers, as some wrappers have.
    moved = {n.replace("model.", prefix, 1): w for n, w in weights.items()}
    for other in ("mtp.", "talker.model."):
        moved |= {
            n.replace("model.", other, 1): torch.zeros_like(w)
            for n, w in weights.items()
            if "layers.0" in n or "norm" in n
        }
    folder = write(tmp_path / "target", moved, like=tiny_llama)
    check_equal(load(folder), by_transformers(tiny_llama))


def test_two_towers_in_one_folder_are_refused(tiny_llama, tmp_path):
    weights = load_file(tiny_llama / "model.safetensors")
    weights |= {f"talker.{name}": weight.clone() for name, weight in weights.items()}
    folder = write(tmp_path / "target", weights, like=tiny_llama)
    with pytest.raises(ValueError, match=r"under 'model\.' as under 'talker\.model\.'"):
        load(folder)


def test_weights_of_another_model_are_all_lacking(tiny_llama, tmp_path):
    folder = write(tmp_path / "target", {"wte.weight": torch.zeros(3, 3)}, like=tiny_llama)
    with pytest.raises(ValueError, match="lacks 74 weights of its text tower, embed_tokens"):
        load(folder)


def test_loaded_weights_are_memory_of_their_own(tiny_llama, tmp_path):
    """A file that is overwritten in place would otherwise change a tower that maps it."""
    folder = shutil.copytree(tiny_llama, tmp_path / "target")
    tower = load(folder)
    ends = FrozenEnds.load(folder, device="cpu", dtype=torch.bfloat16)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\0" * (path.stat().st_size // 2))
    check_equal(tower, by_transformers(tiny_llama))
    whole = FrozenEnds.load(tiny_llama, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(ends.embedding, whole.embedding)
    assert torch.equal(ends.lm_head, whole.lm_head)


def test_what_was_read_is_said_in_a_line(tiny_llama, capsys):
    load(tiny_llama)
    assert "read 0.0 GB in " in capsys.readouterr().err


def test_a_skeleton_has_buffers_but_no_weights(tiny_target):
    tower = build_skeleton(tiny_target, depth=3, dtype=torch.bfloat16, trust_remote_code=False)
    assert all(weight.is_meta for weight in tower.parameters())
    assert not any(buffer.is_meta for buffer in tower.buffers())
    assert not nn.Linear(2, 2).weight.is_meta  # modules built later are as ever


# --- fp8 -----------------------------------------------------------------------------------------


def quantised(weight, block):
    """Codes, scales and, block by block in float64, the values that they mean."""
    rows, columns = (-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    values = torch.empty(weight.shape, dtype=torch.float64)
    for r in range(rows):
        for c in range(columns):
            place = (
                slice(r * block[0], (r + 1) * block[0]),
                slice(c * block[1], (c + 1) * block[1]),
            )
            # Of a few bits, so that a product with a code is exact in float32.
            scales[r, c] = (weight[place].abs().max() / 448).to(torch.bfloat16)
            codes[place] = (weight[place].float() / scales[r, c]).to(torch.float8_e4m3fn)
            values[place] = codes[place].double() * scales[r, c].double()
    return codes, scales, values


def is_quantised(name, weight):
    return weight.ndim == 2 and "language_model.layers" in name and "in_proj_a" not in name


def build_fp8(tmp_path, block=(128, 128), scale_dtype=torch.bfloat16):
    """A target in fp8 and one in float32 of the very values that it means. 160 = 128 + 32."""
    like = build_tiny_target(tmp_path / "like", layers=4, hidden=160)
    plain = load_file(like / "model.safetensors")
    stored = dict(plain)
    for name, weight in plain.items():
        if is_quantised(name, weight):
            codes, scales, values = quantised(weight, block)
            stored |= {name: codes, f"{name}_scale_inv": scales.to(scale_dtype)}
            plain[name] = values.float()
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    fp8 = write(tmp_path / "fp8", stored, like, quantization_config=said)
    return fp8, write(tmp_path / "plain", plain, like)


def test_blocks_are_cut_at_the_edges():
    weight = torch.randn(300, 133, generator=torch.Generator().manual_seed(0)) * 40
    codes, scales, values = quantised(weight, (128, 64))
    assert torch.equal(dequantise(codes, scales, (128, 64)).double(), values)
    both = dequantise(torch.stack([codes, codes]), torch.stack([scales, 2 * scales]), (128, 64))
    assert torch.equal(both.double(), torch.stack([values, 2 * values]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("block", [(128, 128), (64, 96)])
def test_an_fp8_target_is_the_target_of_its_values(
    tmp_path, block, scale_dtype, dtype, capsys, reads
):
    fp8, plain = build_fp8(tmp_path, block, scale_dtype)
    expected = by_transformers(plain, dtype)
    capsys.readouterr()
    check_equal(load(fp8, dtype), expected)
    codes = [name for name in load_file(fp8 / "model.safetensors") if name.endswith("_scale_inv")]
    assert len(codes) > 20
    assert f"dequantised {len(codes)} fp8 weights" in capsys.readouterr().err
    assert sum(reads.bytes.values()) == reads.total == reads.advanced
    assert any(name.endswith("_scale_inv") for name in reads.bytes)
    assert torch.equal(taps(fp8), taps(plain))


def test_blocks_are_of_128_where_nothing_is_said(tmp_path):
    fp8, plain = build_fp8(tmp_path)
    config = json.loads((fp8 / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (fp8 / "config.json").write_text(json.dumps(config))
    check_equal(load(fp8), by_transformers(plain))


def test_scales_may_lie_in_another_file_than_their_codes(tmp_path):
    fp8, plain = build_fp8(tmp_path)
    weights = load_file(fp8 / "model.safetensors")
    (fp8 / "model.safetensors").unlink()
    for name, is_scale in (("a.safetensors", True), ("b.safetensors", False)):
        kept = {n: w for n, w in weights.items() if n.endswith("_scale_inv") == is_scale}
        save_file(kept, fp8 / name)
    check_equal(load(fp8), by_transformers(plain))


def test_experts_in_fp8_are_dequantised_one_by_one(tmp_path):
    like = build_experts(tmp_path / "like", "qwen3_moe")
    plain = load_file(like / "model.safetensors")
    stored = dict(plain)
    for name, weight in plain.items():
        if ".experts." in name:
            codes, scales, values = quantised(weight, (16, 16))
            stored |= {name: codes, f"{name}_scale_inv": scales}
            plain[name] = values.float()
    said = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    fp8 = write(tmp_path / "fp8", stored, like, quantization_config=said)
    check_equal(load(fp8), by_transformers(write(tmp_path / "plain", plain, like)))


def test_the_ends_of_an_fp8_target(tmp_path):
    fp8, _ = build_fp8(tmp_path)
    weights = load_file(fp8 / "model.safetensors")
    ends = FrozenEnds.load(fp8, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(ends.lm_head, weights["lm_head.weight"])
    codes, scales, values = quantised(weights["lm_head.weight"], (128, 128))
    weights |= {"lm_head.weight": codes, "lm_head.weight_scale_inv": scales}
    save_file(weights, fp8 / "model.safetensors")
    ends = FrozenEnds.load(fp8, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(ends.lm_head, values.to(torch.bfloat16))
    assert not torch.equal(ends.lm_head, ends.embedding)


def test_an_fp8_target_is_identified_like_any_other(tmp_path):
    fp8, plain = build_fp8(tmp_path)
    ours, theirs = TargetSpec.read(fp8), TargetSpec.read(plain)
    assert ours.content_hash != theirs.content_hash
    assert (ours.num_layers, ours.vocab_size) == (theirs.num_layers, theirs.vocab_size) == (4, 512)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": "128"},
    ],
)
@pytest.mark.parametrize("where", ["top", "text"])
def test_weights_quantised_otherwise_are_refused(tiny_qwen35, tmp_path, said, where):
    facts = json.loads((tiny_qwen35 / "config.json").read_text())
    text = {"text_config": facts["text_config"] | {"quantization_config": said}}
    config = {"quantization_config": said} if where == "top" else text
    folder = write(tmp_path / "target", {"x": torch.zeros(1)}, tiny_qwen35, **config)
    message = rf"{folder}/config\.json: weights quantised by '{said['quant_method']}', .* cannot"
    with pytest.raises(ValueError, match=message):
        taps(folder)
    with pytest.raises(ValueError, match=message):
        FrozenEnds.load(folder, device="cpu", dtype=torch.bfloat16)


def change(name):
    """What makes an fp8 target unreadable: changed weights, changed config."""
    weight = "model.language_model.layers.0.mlp.up_proj.weight"
    scale = f"{weight}_scale_inv"
    return {
        "no config": ({}, {"quantization_config": None}, r"model\.language_model\..*"),
        "no scale": ({scale: None}, {}, weight),
        "short scale": ({scale: torch.ones(2, 2)}, {}, scale),
        "integer scale": ({scale: torch.ones(3, 2, dtype=torch.uint8)}, {}, weight),
        "integer codes": ({weight: torch.ones(320, 160, dtype=torch.int8)}, {}, weight),
        "one row": ({weight: torch.ones(160).to(torch.float8_e4m3fn)}, {}, weight),
    }[name]


@pytest.mark.parametrize(
    "what",
    ["no config", "no scale", "short scale", "integer scale", "integer codes", "one row"],
)
def test_codes_that_cannot_be_multiplied_out_are_refused(tmp_path, what):
    fp8, _ = build_fp8(tmp_path)
    weights, config, named = change(what)
    weights = load_file(fp8 / "model.safetensors") | weights
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    folder = write(tmp_path / "target", weights, fp8, **config)
    with pytest.raises(ValueError, match=rf"{folder}/model\.safetensors: {named} is ") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


# --- code of the target's own --------------------------------------------------------------------

_MODEL = """
import torch
from transformers import LlamaModel

class OwnModel(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        {more}
"""


def with_own_code(folder, tmp_path, monkeypatch, more="pass"):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    own = shutil.copytree(folder, tmp_path / "own")
    (own / "modeling_own.py").write_text(_MODEL.format(more=more))
    config = json.loads((own / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_own.OwnModel"}
    (own / "config.json").write_text(json.dumps(config))
    return own


def test_code_of_the_targets_own_runs_if_it_is_trusted(tiny_llama, tmp_path, monkeypatch):
    folder = with_own_code(tiny_llama, tmp_path, monkeypatch)
    tower = load(folder, trust_remote_code=True)
    assert type(tower).__name__ == "OwnModel"
    check_equal(tower, by_transformers(tiny_llama))
    assert type(load(folder)).__name__ == "LlamaModel"


@pytest.mark.parametrize(
    "more",
    [
        "self.largest = self.embed_tokens.weight.abs().max().item()",
        "self.register_buffer('table', self.embed_tokens.weight.detach().exp(), persistent=False)",
        "self.table = torch.zeros(512, 64).copy_(self.embed_tokens.weight.detach())",
    ],
)
def test_a_class_that_needs_its_weights_to_be_built_is_refused(
    tiny_llama, tmp_path, monkeypatch, more
):
    folder = with_own_code(tiny_llama, tmp_path, monkeypatch, more)
    with pytest.raises(ValueError, match=r"the class of llama computes with its weights") as found:
        load(folder, trust_remote_code=True)
    assert str(found.value).startswith(f"{folder} cannot be loaded as a target: ")
    assert "\n" not in str(found.value)
