"""Tiny random targets with real configs, key names, tokenizers and chat templates. No download.

Kinds: `llama` (ChatML, no reasoning), `qwen3` (the model writes its own think block) and the
Qwen3.5/3.6 family: `qwen3_5_text`, `qwen3_5_multimodal` (hybrid layers, the prompt opens the think
block, the text tower sits inside a vision wrapper).

The byte-level BPE has one merge chain per word in WORDS, so a rendered chat can be written down by
hand: each word, with or without a space before it, is one token, and so is an empty line.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_KERNELS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
KINDS = ("llama", "qwen3", "qwen3_5_text", "qwen3_5_multimodal")
VOCAB = 512  # as in the real family, the embedding has more rows than the tokenizer has ids
# fmt: off
WORDS = (
    "system", "user", "assistant", "tool", "how", "many", "count", "one", "two", "three", "four",
    "list", "yes", "no", "then", "so",
)
# Order as in the real tokenizer; the markers below are added tokens that are not "special" there.
SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_start|>",
)
# fmt: on
NOT_SPECIAL = {s for s in SPECIALS if not s.startswith("<|")}

_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# The shape of both Qwen3 (nothing opened in the prompt) and Qwen3.5 (`<think>` opened): only the
# turns after the last user turn keep their think block, or all of them with preserve_thinking.
_QWEN = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if ns.last_user < 0 -%}{{- raise_exception('No user query found in messages.') -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set think = m.reasoning_content if m.reasoning_content is string else '' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}
{%- if (preserve_thinking is defined and preserve_thinking) or loop.index0 > ns.last_user -%}
{{- '<think>\\n' + think + '\\n</think>\\n\\n' + m.content + '<|im_end|>' -}}
{%- else -%}
{{- m.content + '<|im_end|>' -}}
{%- endif -%}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- else -%}
{{- 'OPENED' -}}
{%- endif -%}
{%- endif -%}
"""
TEMPLATES = {
    "llama": CHATML,
    "qwen3": _QWEN.replace("OPENED", ""),
    "qwen3_5_text": _QWEN.replace("OPENED", "<think>\\n"),
    "qwen3_5_multimodal": _QWEN.replace("OPENED", "<think>\\n"),
}


def build_tokenizer(template: str) -> PreTrainedTokenizerFast:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u010a", "\u010a")]  # an empty line is one token, as in Qwen's vocabulary
    for word in WORDS:
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
    merges += [("\u0120", word) for word in WORDS]
    merges = list(dict.fromkeys(merges))
    pieces += dict.fromkeys(left + right for left, right in merges)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(s, special=s not in NOT_SPECIAL, normalized=False) for s in SPECIALS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
    )
    fast.chat_template = template
    return fast


def _dense_config(layers: int, hidden: int) -> dict:
    return dict(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
    )


def _hybrid_config(layers: int, hidden: int) -> dict:
    """Ratios of Qwen3.6-27B: 3 value heads per key head, 6 query heads per kv head, RoPE on a
    quarter of the head, M-RoPE sections that add up to half of that."""
    return dict(
        attn_output_gate=True,
        full_attention_interval=4,
        head_dim=32,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        layer_types=[
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
        ],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_value_head_dim=16,
        max_position_embeddings=4096,
        num_attention_heads=6,
        num_hidden_layers=layers,
        num_key_value_heads=1,
        partial_rotary_factor=0.25,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=10_000_000,
            partial_rotary_factor=0.25,
            mrope_interleaved=True,
            mrope_section=[2, 1, 1],
        ),
        tie_word_embeddings=False,
        vocab_size=VOCAB,
    )


def _vision_config(hidden: int) -> dict:
    return dict(
        depth=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        in_channels=3,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=hidden,
        num_position_embeddings=16,
        deepstack_visual_indexes=[],
    )


def _model(kind: str, layers: int, hidden: int, tied: bool) -> PreTrainedModel:
    if kind == "llama":
        config = LlamaConfig(**_dense_config(layers, hidden), tie_word_embeddings=tied)
        return LlamaForCausalLM(config)
    if kind == "qwen3":
        config = Qwen3Config(
            **_dense_config(layers, hidden), head_dim=32, tie_word_embeddings=tied
        )
        return Qwen3ForCausalLM(config)
    text = _hybrid_config(layers, hidden)
    if kind == "qwen3_5_text":
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    config = Qwen3_5Config(
        text_config=text, vision_config=_vision_config(hidden), tie_word_embeddings=False
    )
    return Qwen3_5ForConditionalGeneration(config)


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights of scale 1/sqrt(fan in) and slow decay. Hugging Face's own init (std 0.02) makes a
    layer nearly the identity, which would hide a wrong mask, order or leaked state."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                weight.copy_(torch.rand(weight.shape, generator=generator).mul(8).add(0.05).log())
            elif name.endswith("dt_bias"):
                weight.copy_(noise - 2.0)
            elif weight.ndim == 1:
                weight.add_(0.1 * noise)
            else:
                weight.copy_(noise / weight[0].numel() ** 0.5)


def build_tiny_target(
    folder: Path,
    kind: str = "qwen3_5_multimodal",
    *,
    layers: int = 8,
    hidden: int = 64,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shard_size: str = "1GB",
    seed: int = 0,
) -> Path:
    """Write a whole target folder: config, weights, tokenizer, template. `tied`: not Qwen3.5."""
    tokenizer = build_tokenizer(TEMPLATES[kind])
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model = _model(kind, layers, hidden, tied)
    _randomize(model, seed)
    model = model.to(dtype).eval()
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = ends[1]
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    _name_tokens(folder / "config.json", bos=ends[1], eos=ends[1])
    return folder


def reference_states(folder: Path, ids: torch.Tensor, dtype: torch.dtype) -> tuple:
    """Hugging Face's own hidden_states, with the whole model that gave them.

    transformers calls the kernels of an installed fla even on a CPU, where they cannot run.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    module = sys.modules[type(model).__module__]
    plain = {n: f.__wrapped__ for n, f in vars(module).items() if n in _KERNELS}
    with torch.inference_mode(), patch.dict(vars(module), plain):
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    return output.hidden_states, model


def _name_tokens(path: Path, *, bos: int, eos: int) -> None:
    config = json.loads(path.read_text())
    config.get("text_config", config).update(bos_token_id=bos, eos_token_id=eos)
    path.write_text(json.dumps(config, indent=2))
