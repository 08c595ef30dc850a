"""The DFlash drafter: a small block-diffusion transformer over the target's hidden states.

What is unusual about it (DFlash, arXiv:2602.06036):
  - it has no embedding and no head of its own; both are the target's, frozen (FrozenEnds);
  - the taps of the target, concatenated and projected once (`fc`, `hidden_norm`), are the
    context: each layer makes keys and values of them with the same matrices as of its block
    tokens, but they never pass through a layer, so they can be cached as they arrive;
  - a block is the anchor token and K - 1 mask tokens, drafted in one forward pass; slot j predicts
    the token at its own position;
  - sliding layers are causal inside a block, full layers look both ways (dflash_offline/mask.py).

Parameter names are z-lab's. Parameters are fp32 masters; the input's dtype is the precision of
the matmuls. Norms and RoPE compute in fp32 whatever the input; inverse frequencies stay fp32.

Letters: B rows, S context, Q = A * K block tokens, M = taps * D, D hidden, H heads, E head width.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_offline.fp8 import fp8_linear, fp8_pays
from dflash_offline.mask import Mask
from dflash_offline.spec import DrafterSpec

KeysValues = tuple[Tensor, Tensor]
"""[B, kv heads, S, E] each, keys with RoPE applied."""
Rope = tuple[Tensor, Tensor]
"""cos and sin, fp32 [B, 1, T, E]."""


class Linear(nn.Linear):
    """No bias; computes in the precision of its input, whatever the master weight's, or in fp8."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return fp8_linear(x, weight) if self.fp8 else F.linear(x, weight)


class RMSNorm(nn.Module):
    """Qwen3's: the plain gain, not the `1 + weight` of the Qwen3.5/3.6 targets."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rope_tables(position_ids_BT: Tensor, head_dim: int, theta: float) -> Rope:
    """cos and sin of plain one-dimensional RoPE (rotate-half form) over the whole head."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids_BT.device).float() / head_dim
    angles = position_ids_BT[:, None, :, None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = Linear(spec.hidden_size, spec.heads * spec.head_dim)
        self.k_proj = Linear(spec.hidden_size, spec.kv_heads * spec.head_dim)
        self.v_proj = Linear(spec.hidden_size, spec.kv_heads * spec.head_dim)
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden_size)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x_BTD: Tensor, rope: Rope) -> KeysValues:
        keys = self.k_norm(self._heads(self.k_proj(x_BTD))).transpose(1, 2)
        return _rotate(keys, rope), self._heads(self.v_proj(x_BTD)).transpose(1, 2)

    def forward(self, x_BQD: Tensor, rope: Rope, context: KeysValues, mask: Mask) -> Tensor:
        queries = self.q_norm(self._heads(self.q_proj(x_BQD))).transpose(1, 2)
        keys, values = self.keys_values(x_BQD, rope)
        keys = torch.cat((context[0], keys), dim=2)
        values = torch.cat((context[1], values), dim=2)
        out_BHQE = _attend(_rotate(queries, rope), keys, values, mask)
        return self.o_proj(out_BHQE.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner)
        self.up_proj = Linear(width, inner)
        self.down_proj = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec.hidden_size, spec.mlp_width)

    def forward(self, x_BQD: Tensor, rope: Rope, context: KeysValues, mask: Mask) -> Tensor:
        x = x_BQD + self.self_attn(self.input_layernorm(x_BQD), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def _train_layer(
    layer: DecoderLayer, x: Tensor, features: Tensor, ropes: tuple[Rope, Rope], mask: Mask
) -> Tensor:
    """One layer over context and blocks; the region that is compiled, once per kind of layer."""
    context_rope, block_rope = ropes
    return layer(x, block_rope, layer.self_attn.keys_values(features, context_rope), mask)


class Drafter(nn.Module):
    """Hidden states of the context and embedded blocks in, normed hidden states of the blocks out.

    The caller embeds with the target's embedding and multiplies with the target's lm_head. The
    dtype of `embedded` decides the precision.
    """

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = Linear(len(spec.target_layer_ids) * spec.hidden_size, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self._layer = _train_layer

    def _typed_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    def init_weights(self, seed: int, lm_head_VD: Tensor) -> None:
        """N(0, 0.02^2) for matrices, 1 for norms; the same on every device and rank.

        The last norm's gain is one over the mean norm of the head's rows, so that the first logits
        have unit variance: targets with large rows (SmolLM2) would start at a loss of 86.
        """
        generator = torch.Generator().manual_seed(seed)
        row_norm = lm_head_VD.float().norm(dim=1).mean()
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    drawn = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
                    parameter.copy_(drawn)
            self.norm.weight.fill_(1.0 / float(row_norm))

    def multiply_in_fp8(self) -> int:
        """Have the large matrices multiply in fp8 from here on; how many there are."""
        large = [m for m in self.modules() if isinstance(m, Linear) and fp8_pays(m)]
        for linear in large:
            linear.fp8 = True
        return len(large)

    def needed_flop(self, context_tokens: int, blocks: int) -> float:
        """Of a row's forward and backward pass, attention scores left out.

        6 for each weight and token that meets it; 4 for the frozen head, which has no gradient of
        its own and is asked for all slots but the anchors'.
        """
        spec = self.spec
        layers = sum(weight.numel() for weight in self.layers.parameters())
        context = self.fc.weight.numel() + sum(
            linear.weight.numel()
            for layer in self._typed_layers()
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        slots, head = blocks * (spec.block_size - 1), spec.hidden_size * spec.vocab_size
        return (
            6 * (blocks * spec.block_size * layers + context_tokens * context) + 4 * slots * head
        )

    def compile_layers(self) -> None:
        """Compile the layers for fixed shapes: one graph for sliding layers, one for full ones."""
        self._layer = torch.compile(_train_layer, dynamic=False)

    def _rope(self, position_ids: Tensor) -> Rope:
        return rope_tables(position_ids, self.spec.head_dim, self.spec.rope_theta)

    def features(self, taps_BSM: Tensor) -> Tensor:
        """[B, S, D]: what every layer's context keys and values are made of."""
        return self.hidden_norm(self.fc(taps_BSM))

    def forward(
        self,
        taps_BSM: Tensor,
        embedded_BQD: Tensor,
        *,
        context_positions_BS: Tensor,
        block_positions_BQ: Tensor,
        masks: Mapping[str, Mask],
    ) -> Tensor:
        """Training: all blocks of a row at once. `masks` by layer type."""
        features = self.features(taps_BSM.to(embedded_BQD.dtype))
        ropes = self._rope(context_positions_BS), self._rope(block_positions_BQ)
        x = embedded_BQD
        for kind, layer in zip(self.spec.layer_types, self._typed_layers(), strict=True):
            x = self._layer(layer, x, features, ropes, masks[kind])
        return self.norm(x)

    def context_cache(self, taps_BSM: Tensor, position_ids_BS: Tensor) -> list[KeysValues]:
        """Keys and values of context tokens, per layer; concatenate on the S axis to extend."""
        features, rope = self.features(taps_BSM), self._rope(position_ids_BS)
        return [layer.self_attn.keys_values(features, rope) for layer in self._typed_layers()]

    def draft(
        self,
        embedded_BQD: Tensor,
        *,
        block_positions_BQ: Tensor,
        cache: list[KeysValues],
        masks: Mapping[str, Mask],
    ) -> Tensor:
        """Inference: blocks against a context cache. `masks` cover the cache, then the blocks."""
        rope = self._rope(block_positions_BQ)
        x = embedded_BQD
        for kind, layer, context in zip(
            self.spec.layer_types, self._typed_layers(), cache, strict=True
        ):
            x = layer(x, rope, context, masks[kind])
        return self.norm(x)
