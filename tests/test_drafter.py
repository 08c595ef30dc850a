"""The drafter against z-lab's client, and what a block may and may not depend on."""

import pytest
import torch
from drafters import FULL, SLIDING, blocks_of, random_row, small_drafter, small_spec
from torch.nn import functional as F

from dflash_offline.drafter import Drafter, rope_tables
from dflash_offline.mask import block_mask_mod, dense_mask

EMBEDDING = torch.randn(64, 32, generator=torch.Generator().manual_seed(9))


def hidden_of(drafter, row, taps, blocks, embedded=None):
    """Training forward of one row, [A, K, D]."""
    spec = drafter.spec
    slots, k = blocks.input_ids_AK.shape
    queries, context = slots * k, len(taps)
    masks = {}
    for kind in set(spec.layer_types):
        sees = block_mask_mod(
            blocks.anchors_A,
            blocks.valid_A,
            row.document_ids_S,
            block_size=k,
            window=spec.sliding_window if kind == SLIDING else None,
        )
        masks[kind] = dense_mask(sees, queries, context + queries, taps.device)
    if embedded is None:
        embedded = F.embedding(blocks.input_ids_AK.flatten(), EMBEDDING)
    out = drafter(
        taps[None],
        embedded[None],
        context_positions_BS=row.position_ids_S[None],
        block_positions_BQ=blocks.position_ids_AK.flatten()[None],
        masks=masks,
    )
    return out[0].view(slots, k, -1)


def zlab_model(drafter):
    """z-lab's reference model with the same weights, loaded strictly."""
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    config = Qwen3Config(**drafter.spec.to_config())
    config._attn_implementation = "sdpa"
    model = DFlashDraftModel(config)
    missing, unexpected = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not missing
    assert not unexpected
    return model.float().eval()


@pytest.mark.parametrize("kinds", [(FULL, FULL), (SLIDING, FULL), (SLIDING, SLIDING)])
@pytest.mark.parametrize("anchor", [1, 5, 17])  # 17 is beyond the window of 6
@torch.no_grad()
def test_training_forward_equals_zlabs_inference(kinds, anchor):
    drafter = small_drafter(small_spec(kinds))
    row, taps = random_row([24], 24)
    blocks = blocks_of(row, [anchor], drafter.spec)
    got = hidden_of(drafter, row, taps, blocks)[0]
    expected = zlab_model(drafter)(
        position_ids=torch.arange(anchor + 4)[None],
        noise_embedding=F.embedding(blocks.input_ids_AK[0], EMBEDDING)[None],
        target_hidden=taps[None, :anchor],
    )[0]
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kinds", [(FULL,), (SLIDING, FULL)])
@torch.no_grad()
def test_training_forward_equals_the_cached_path_fed_piece_by_piece(kinds):
    drafter = small_drafter(small_spec(kinds))
    row, taps = random_row([30], 30)
    anchors = [3, 4, 9, 21]
    blocks = blocks_of(row, anchors, drafter.spec)
    trained = hidden_of(drafter, row, taps, blocks)

    cache, done = None, 0
    for i, anchor in enumerate(anchors):  # decoding: new context arrives with every cycle
        new = drafter.context_cache(taps[None, done:anchor], torch.arange(done, anchor)[None])
        if cache is None:
            cache = new
        else:
            cache = [
                tuple(torch.cat(pair, 2) for pair in zip(old, fresh, strict=True))
                for old, fresh in zip(cache, new, strict=True)
            ]
        done = anchor
        query = torch.arange(anchor, anchor + 4)[:, None]
        key = torch.arange(anchor + 4)[None]
        sliding = (key <= query) & (query - key < 6)
        out = drafter.draft(
            F.embedding(blocks.input_ids_AK[i], EMBEDDING)[None],
            block_positions_BQ=query.T,
            cache=cache,
            masks={FULL: torch.ones(4, anchor + 4, dtype=torch.bool), SLIDING: sliding},
        )
        torch.testing.assert_close(out[0], trained[i], atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_a_block_depends_on_no_hidden_state_at_or_after_its_anchor_and_on_no_later_token():
    drafter = small_drafter(small_spec())
    row, taps = random_row([20], 20)
    blocks = blocks_of(row, [7], drafter.spec)
    before = hidden_of(drafter, row, taps, blocks)

    changed = taps.clone()
    changed[7:] += torch.randn(13, 96)
    assert torch.equal(hidden_of(drafter, row, changed, blocks), before)
    row.input_ids_S[8:] = 1
    assert torch.equal(hidden_of(drafter, row, taps, blocks_of(row, [7], drafter.spec)), before)
    changed = taps.clone()
    changed[6] += 1  # the last state that the block may see
    assert not torch.equal(hidden_of(drafter, row, changed, blocks), before)


@torch.no_grad()
def test_a_block_depends_on_no_other_document_and_no_other_block():
    drafter = small_drafter(small_spec((FULL, FULL)))
    row, taps = random_row([9, 11], 24)
    before = hidden_of(drafter, row, taps, blocks_of(row, [5, 14], drafter.spec))
    changed = taps.clone()
    changed[:9] = 0
    changed[20:] = 7
    after = hidden_of(drafter, row, changed, blocks_of(row, [3, 14], drafter.spec))
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize(("kind", "expected"), [(FULL, True), (SLIDING, False)])
@torch.no_grad()
def test_the_last_slot_reaches_slot_one_in_full_layers_only(kind, expected):
    drafter = small_drafter(small_spec((kind,)))
    row, taps = random_row([20], 20)
    blocks = blocks_of(row, [7], drafter.spec)
    embedded = F.embedding(blocks.input_ids_AK.flatten(), EMBEDDING)
    before = hidden_of(drafter, row, taps, blocks, embedded)
    embedded[-1] += 1
    after = hidden_of(drafter, row, taps, blocks, embedded)
    assert (not torch.equal(after[0, 1], before[0, 1])) == expected


@torch.no_grad()
def test_documents_packed_and_apart_give_the_same_blocks():
    drafter = small_drafter(small_spec())
    row, taps = random_row([9, 11], 24)
    packed = hidden_of(drafter, row, taps, blocks_of(row, [3, 14], drafter.spec, slots=3))
    first, _ = random_row([9], 9)
    first.input_ids_S[:] = row.input_ids_S[:9]
    second, _ = random_row([11], 11)
    second.input_ids_S[:] = row.input_ids_S[9:20]
    apart = [
        hidden_of(drafter, first, taps[:9], blocks_of(first, [3], drafter.spec))[0],
        hidden_of(drafter, second, taps[9:20], blocks_of(second, [5], drafter.spec))[0],
    ]
    torch.testing.assert_close(packed[:2], torch.stack(apart), atol=2e-5, rtol=2e-5)


def test_rope_equals_transformers_and_is_fp32_whatever_the_positions():
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(**small_spec(rope_theta=1e7).to_config())
    positions = torch.tensor([[0, 1, 7, 4095, 30000]])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)
    ours = rope_tables(positions, 16, 1e7)
    torch.testing.assert_close(ours[0][:, 0], cos, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours[1][:, 0], sin, atol=1e-6, rtol=1e-6)
    assert ours[0].dtype == torch.float32


def test_parameters_are_zlabs_names_and_no_more():
    names = set(small_drafter(small_spec()).state_dict())
    assert len(names) == 11 * 2 + 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < names
    assert "layers.1.self_attn.q_norm.weight" in names


def test_initial_weights_depend_on_the_seed_alone():
    first, second, other = (small_drafter(small_spec(), seed=i) for i in range(3))
    first.init_weights(5, EMBEDDING)
    second.init_weights(5, EMBEDDING)
    other.init_weights(6, EMBEDDING)
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert 0.015 < first.fc.weight.std() < 0.025


@torch.no_grad()
def test_the_first_logits_have_unit_variance_whatever_the_heads_scale():
    for scale in (0.01, 1.0, 30.0):
        head = EMBEDDING * scale
        drafter = small_drafter(small_spec())
        drafter.init_weights(0, head)
        row, taps = random_row([24], 24)
        hidden = hidden_of(drafter, row, taps, blocks_of(row, [3, 9, 15], drafter.spec))
        assert 0.7 < (hidden @ head.T).std() < 1.4


def test_needed_flop_of_the_real_drafter_are_those_counted_by_hand():
    """122 TFLOP a row of 4,096 tokens with 512 blocks of 16, Qwen3.6-27B's drafter."""
    with torch.device("meta"):
        drafter = Drafter(
            small_spec(
                hidden_size=5120, vocab_size=248_320, mlp_width=17_408, heads=32, kv_heads=8,
                head_dim=128, block_size=16, target_layer_ids=(1, 16, 31, 46, 61),
                layer_types=("sliding_attention",) * 4 + ("full_attention",), sliding_window=2048,
            )
        )  # fmt: skip
    layer = 5120 * 4096 * 2 + 2 * 5120 * 1024 + 3 * 5120 * 17_408
    by_hand = 6 * 8192 * 5 * layer + 4 * 7680 * 5120 * 248_320
    by_hand += 6 * 4096 * (5 * 5120 * 5120 + 5 * 2 * 5120 * 1024)
    assert drafter.needed_flop(4096, 512) == pytest.approx(by_hand, rel=1e-3)
    assert by_hand == pytest.approx(122e12, rel=0.01)
