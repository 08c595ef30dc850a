"""On a CUDA device: flex_attention against the dense path, and compilation that happens once."""

import pytest
import torch
from torch.nn import functional as F

from dflash_offline.anchors import make_blocks
from dflash_offline.drafter import Drafter
from dflash_offline.head import Head
from dflash_offline.loss import Objective, block_loss
from dflash_offline.mask import attention_mask, block_mask_mod, dense_mask
from dflash_offline.packing import pack_row
from dflash_offline.spec import DrafterSpec

pytestmark = [
    pytest.mark.gpu,
    # torch's tracer instantiates what it warns of instantiating; as an error that ends the trace.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
S, A, K = 1024, 96, 8


def spec_of(width=256):
    return DrafterSpec(
        target_layer_ids=(1, 2, 3), mask_token_id=5, block_size=K, num_target_layers=6,
        hidden_size=width, vocab_size=1003, mlp_width=512, heads=4, kv_heads=2, head_dim=64,
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        sliding_window=100, rope_theta=1e6, rms_norm_eps=1e-6, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip


def random_case(seed):
    """Three documents and padding; fewer valid anchors than slots."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(100, 330, (3,), generator=g).tolist()
    documents = [
        (torch.randint(10, 1003, (n,), generator=g, dtype=torch.int32), torch.arange(n) > 20)
        for n in lengths
    ]
    row = pack_row(documents, S)
    allowed = row.loss_mask_S.nonzero().flatten()
    anchors = allowed[torch.randperm(len(allowed), generator=g)[: A - 7]].sort().values
    blocks = make_blocks(row, anchors, slots=A, block_size=K, mask_token_id=5, gamma=4.0)
    return row, blocks.to("cuda"), torch.randn(S, 768, generator=g).cuda()


def loss_and_gradients(drafter, row, blocks, taps, table, *, dense, dtype):
    documents = row.document_ids_S.cuda()
    masks = {}
    for kind in set(drafter.spec.layer_types):
        sees = block_mask_mod(
            blocks.anchors_A, blocks.valid_A, documents, block_size=K,
            window=100 if kind == "sliding_attention" else None,
        )  # fmt: skip
        make = dense_mask if dense else attention_mask
        masks[kind] = make(sees, A * K, S + A * K, taps.device)
    hidden = drafter(
        taps[None].to(dtype),
        F.embedding(blocks.input_ids_AK.flatten(), table)[None].to(dtype),
        context_positions_BS=row.position_ids_S.cuda()[None],
        block_positions_BQ=blocks.position_ids_AK.flatten()[None],
        masks=masks,
    )
    rows = blocks.weights_AK.flatten().nonzero().flatten()
    sums = block_loss(hidden[0], Head(table.to(dtype)), blocks, rows, Objective())
    loss = sums.loss / sums.weight
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in drafter.named_parameters()}
    drafter.zero_grad()
    return loss.detach(), gradients


@pytest.fixture
def drafter():
    made = Drafter(spec_of())
    made.init_weights(0, torch.randn(1003, 256))
    return made.cuda()


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_flex_equals_the_dense_path_in_loss_and_gradients(drafter):
    row, blocks, taps = random_case(0)
    table = torch.randn(1003, 256, device="cuda") * 0.05
    exact = loss_and_gradients(drafter, row, blocks, taps, table, dense=True, dtype=torch.float32)
    rounded = loss_and_gradients(
        drafter, row, blocks, taps, table, dense=True, dtype=torch.bfloat16
    )
    drafter.compile_layers()
    flex = loss_and_gradients(drafter, row, blocks, taps, table, dense=False, dtype=torch.bfloat16)
    print(f"loss: exact {exact[0]:.6f}, dense bf16 {rounded[0]:.6f}, flex bf16 {flex[0]:.6f}")
    assert abs(flex[0] - exact[0]) < 5e-3
    for name, gradient in exact[1].items():
        ours, theirs = relative(flex[1][name], gradient), relative(rounded[1][name], gradient)
        # As far from the exact gradient as bf16 itself puts the dense path, give or take.
        assert ours < 2 * theirs + 1e-2, (name, ours, theirs)


def test_rows_of_any_content_compile_once(drafter):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    drafter.compile_layers()
    table = torch.randn(1003, 256, device="cuda") * 0.05
    for seed in range(6):
        row, blocks, taps = random_case(seed)
        loss_and_gradients(drafter, row, blocks, taps, table, dense=False, dtype=torch.bfloat16)
        if seed == 1:
            after_two = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == after_two
    # Layers: the first one, whose input needs no gradient; sliding; full. And two mask rules.
    assert after_two <= 5
