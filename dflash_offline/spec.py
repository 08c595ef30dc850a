"""What a target and a drafter are: the contract that every stage shares. No torch import.

A TargetSpec is read from a model folder's own files; a DrafterSpec is what z-lab's config.json
says. Both are compared at each hand-over: shards of one target are never used with another.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_offline.facts import REQUIRED, Facts, check_file

LAYER_CONVENTION = "output of 0-based decoder layer i, before any final norm (hidden_states[i+1])"

# Rows of the target's own embedding that text never uses, as the published drafters chose them:
# (model type of the text tower, embedding rows) -> token id.
MASK_TOKEN_IDS = {
    ("qwen3", 151_936): 151_669,
    ("qwen3_moe", 151_936): 151_669,
    ("qwen3_5_text", 248_320): 248_070,
    ("qwen3_5_moe_text", 248_320): 248_070,
}

_EDGE_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_CONFIG_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """z-lab's rule: five layers spread evenly from layer 1 to the third from last."""
    if num_layers < 8:
        raise ValueError(
            f"{num_layers} layers are too few to spread five taps by z-lab's rule; "
            "name them with --target-layer-ids"
        )
    return tuple(round(1 + i * (num_layers - 4) / 4) for i in range(5))


def _hash_files(folder: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _weight_digest_parts(path: Path) -> Iterator[bytes]:
    """Header, size, both ends and evenly spread samples: tells models apart without reading them.

    A fine-tune that leaves both ends alone still moves the weights between. A second for 50 GB.
    """
    check_file(path)
    size = path.stat().st_size
    yield path.name.encode() + struct.pack("<Q", size)
    with path.open("rb") as file:
        prefix = file.read(8)
        header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < header_size <= size - 8:
            raise ValueError(f"{path} is not a safetensors file: its header is cut or missing")
        yield prefix + file.read(header_size) + file.read(_EDGE_BYTES)
        for i in range(_SAMPLES):
            file.seek(size * i // _SAMPLES)
            yield file.read(_SAMPLE_BYTES)
        file.seek(max(size - _EDGE_BYTES, 0))
        yield file.read(_EDGE_BYTES)


def _content_hash(folder: Path) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"{folder} holds no .safetensors file; convert the model first")
    digest = hashlib.sha256(_hash_files(folder, _CONFIG_FILES).encode())
    digest.update(_hash_files(folder, _TOKENIZER_FILES + _TEMPLATE_FILES).encode())
    for path in weights:
        for part in _weight_digest_parts(path):
            digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class TargetSpec:
    """The facts of a target that give stored hidden states and a drafter their meaning."""

    name: str
    content_hash: str
    model_type: str
    num_layers: int
    hidden_size: int
    mlp_width: int | None
    """None where no layer has a dense MLP (mixtures of experts)."""
    vocab_size: int
    """Rows of the embedding, which may exceed the tokenizer's ids."""
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tokenizer_hash: str
    template_hash: str

    @classmethod
    def read(cls, folder: Path) -> "TargetSpec":
        """From the folder's own files. FileNotFoundError or ValueError names the one at fault."""
        if not folder.is_dir():
            raise FileNotFoundError(f"target folder {folder} does not exist")
        config = Facts.read(folder / "config.json")
        # Multimodal wrappers (Qwen3.5/3.6) keep the language model's facts one level down.
        text = config.inner("text_config") if config.has("text_config") else config
        rope = text.inner("rope_parameters")
        if rope.has("full_attention"):  # some families have one for each kind of layer
            rope = rope.inner("full_attention")
        rope = rope if rope.has("rope_theta") else text
        rows = text.whole("vocab_size")
        generation_path = folder / "generation_config.json"
        generation = Facts.read(generation_path) if generation_path.exists() else text
        stops = [part.token_ids("eos_token_id", rows) for part in (generation, text)]
        return cls(
            name=folder.resolve().name,
            content_hash=_content_hash(folder),
            model_type=text.text("model_type"),
            num_layers=text.whole("num_hidden_layers"),
            hidden_size=text.whole("hidden_size"),
            mlp_width=text.whole("intermediate_size", default=None),
            vocab_size=rows,
            rms_norm_eps=text.number("rms_norm_eps", 1e-6),
            rope_theta=rope.number("rope_theta", 10_000.0),
            max_position_embeddings=text.whole("max_position_embeddings"),
            bos_token_id=text.whole("bos_token_id", least=-1, default=None),
            pad_token_id=text.whole("pad_token_id", least=-1, default=None),
            eos_token_ids=tuple(dict.fromkeys(stops[0] + stops[1])),
            tokenizer_hash=_hash_files(folder, _TOKENIZER_FILES),
            template_hash=_hash_files(folder, _TEMPLATE_FILES),
        )

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "TargetSpec":
        return cls(**{**facts, "eos_token_ids": tuple(facts["eos_token_ids"])})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "eos_token_ids": list(self.eos_token_ids)}

    def check_layer_ids(self, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
        """`layer_ids` if they rise and exist in the target; ValueError otherwise."""
        if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
            raise ValueError(f"--target-layer-ids {list(layer_ids)} must rise without repeats")
        if layer_ids[0] < 0 or layer_ids[-1] >= self.num_layers:
            raise ValueError(
                f"--target-layer-ids {list(layer_ids)}: {self.name} has layers 0 to "
                f"{self.num_layers - 1}"
            )
        return layer_ids

    def resolve_mask_token(self, chosen: int | None) -> int:
        """The mask token's id: as chosen, or known for this family. Never eos, pad or no row."""
        token = (
            MASK_TOKEN_IDS.get((self.model_type, self.vocab_size)) if chosen is None else chosen
        )
        if token is None:
            raise ValueError(
                f"no mask token is known for {self.name} ({self.model_type}, {self.vocab_size} "
                "rows); name an unused token with --mask-token-id"
            )
        if not 0 <= token < self.vocab_size:
            raise ValueError(
                f"--mask-token-id {token} is outside the embedding's {self.vocab_size} rows"
            )
        if token in self.eos_token_ids or token == self.pad_token_id:
            raise ValueError(
                f"--mask-token-id {token} ends or pads text in {self.name}; choose an unused token"
            )
        return token


@dataclass(frozen=True)
class DrafterSpec:
    """The shape of a drafter and what it was made for; becomes z-lab's config.json."""

    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    num_target_layers: int
    hidden_size: int
    vocab_size: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def to_config(self) -> dict[str, Any]:
        """z-lab's config.json. Block size and RoPE stand in both places that loaders look at.

        No M-RoPE, partial rotary or is_causal: the default rule (sliding layers are causal inside
        a block, full ones are not) is what vLLM, SGLang and z-lab's client apply by themselves.
        """
        has_sliding = "sliding_attention" in self.layer_types
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "layer_types": list(self.layer_types),
            "use_sliding_window": has_sliding,
            "sliding_window": self.sliding_window if has_sliding else None,
            "max_window_layers": self.layers,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DrafterSpec":
        """From z-lab's config.json, ours or a published one. ValueError names key and value."""
        facts = Facts("the drafter's config.json", config)
        dflash, rope = facts.inner("dflash_config"), facts.inner("rope_parameters")
        rows, target_layers = facts.whole("vocab_size"), facts.whole("num_target_layers")
        kv_heads = facts.whole("num_key_value_heads")
        kinds = facts.layer_types(facts.whole("num_hidden_layers"))
        window = REQUIRED if "sliding_attention" in kinds else None
        sized = dflash if dflash.has("block_size") else facts
        return cls(
            target_layer_ids=dflash.rising("target_layer_ids", below=target_layers),
            mask_token_id=dflash.whole("mask_token_id", least=0, most=rows - 1),
            block_size=sized.whole("block_size", least=2, most=64, default=16),
            num_target_layers=target_layers,
            hidden_size=facts.whole("hidden_size"),
            vocab_size=rows,
            mlp_width=facts.whole("intermediate_size"),
            heads=facts.whole("num_attention_heads", multiple_of=kv_heads),
            kv_heads=kv_heads,
            head_dim=facts.whole("head_dim", multiple_of=2),
            layer_types=kinds,
            sliding_window=facts.whole("sliding_window", default=window),
            rope_theta=(rope if rope.has("rope_theta") else facts).number("rope_theta"),
            rms_norm_eps=facts.number("rms_norm_eps"),
            max_position_embeddings=facts.whole("max_position_embeddings"),
            tie_word_embeddings=facts.flag("tie_word_embeddings", False),
            bos_token_id=facts.whole("bos_token_id", least=-1, default=None),
            eos_token_id=next(iter(facts.token_ids("eos_token_id", rows)), None),
            pad_token_id=facts.whole("pad_token_id", least=-1, default=None),
        )
