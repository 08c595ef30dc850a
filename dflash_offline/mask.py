"""Who sees whom: which context and which block tokens each drafted token may attend to.

Queries: A blocks of K slots. Keys: S context positions of a packed row, then the same A blocks.
A query at slot j of the block anchored at row position a sees
  1. context of its own document strictly before a: when the block is drafted, the anchor token is
     known but the target has not run on it yet; in a sliding layer only (a + j) - key < window;
  2. its own block: both ways in a full layer, only slots j' <= j in a sliding one;
  3. nothing else. An invalid block sees only itself, so no softmax is over an empty set.

One rule, two forms: flex_attention (CUDA) takes it as it is; on the CPU, where flex_attention has
no backward, scaled_dot_product_attention takes it spelled out. Anchors are sorted, so that the
context tiles flex must visit are dense.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = BlockMask | Tensor


def block_mask_mod(
    anchors_A: Tensor,
    valid_A: Tensor,
    document_ids_S: Tensor,
    *,
    block_size: int,
    window: int | None,
) -> MaskMod:
    """The rule above for one row. `window` None: a full layer; else a sliding, causal one."""
    context_size = document_ids_S.shape[0]

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        anchor = anchors_A[block]
        position = key.clamp(max=context_size - 1)  # keeps the lookup of block keys in range
        in_context = (
            (key < context_size)
            & (position < anchor)
            & (document_ids_S[position] == document_ids_S[anchor])
            & valid_A[block]
        )
        block_key = key - context_size
        key_slot = block_key % block_size
        in_block = (key >= context_size) & (block_key // block_size == block)
        if window is not None:
            in_context = in_context & (anchor + slot - position < window)
            in_block = in_block & (key_slot <= slot) & (slot - key_slot < window)
        return in_context | in_block

    return sees


def dense_mask(sees: MaskMod, queries: int, keys: int, device: torch.device) -> Tensor:
    """`sees` spelled out, bool [queries, keys]; true = may attend."""
    query = torch.arange(queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    nothing = torch.zeros((), dtype=torch.long, device=device)
    return sees(nothing, nothing, query, key)


@cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    # Uncompiled, the builder materialises every pair: 10 x slower and gigabytes at full size.
    return torch.compile(create_block_mask, dynamic=False)


def attention_mask(sees: MaskMod, queries: int, keys: int, device: torch.device) -> Mask:
    """The form that this device's attention takes: tiles for flex on CUDA, dense elsewhere."""
    if device.type != "cuda":
        return dense_mask(sees, queries, keys, device)
    return _compiled_create_block_mask()(sees, None, None, queries, keys, device=device)
