"""Small drafters and random rows for tests."""

import torch

from dflash_offline.anchors import make_blocks
from dflash_offline.drafter import Drafter
from dflash_offline.packing import pack_row
from dflash_offline.spec import DrafterSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def small_spec(layer_types=(SLIDING, FULL), window=6, block_size=4, **changes):
    facts = {
        "target_layer_ids": (1, 3, 4),
        "mask_token_id": 50,
        "block_size": block_size,
        "num_target_layers": 8,
        "hidden_size": 32,
        "vocab_size": 64,
        "mlp_width": 48,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "layer_types": tuple(layer_types),
        "sliding_window": window if SLIDING in layer_types else None,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    return DrafterSpec(**{**facts, **changes})


def small_drafter(spec, seed=0):
    """Weights large enough that a wrong mask or position shows in the output."""
    drafter = Drafter(spec)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in drafter.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(1 + 0.1 * noise if p.ndim == 1 else noise / p.shape[1] ** 0.5)
    return drafter


def random_row(lengths, row_tokens, seed=0, prompt=2, vocab=50):
    """Documents whose first `prompt` tokens are not supervised; and their taps [S, M]."""
    g = torch.Generator().manual_seed(seed)
    documents = []
    for n in lengths:
        ids = torch.randint(0, vocab, (n,), generator=g, dtype=torch.int32)
        documents.append((ids, torch.arange(n) >= prompt))
    return pack_row(documents, row_tokens), torch.randn(row_tokens, 96, generator=g)


def blocks_of(row, anchors, spec, slots=None, gamma=4.0):
    return make_blocks(
        row,
        torch.tensor(anchors),
        slots=slots or len(anchors),
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        gamma=gamma,
    )
