"""The fused loss against torch's own cross-entropy on full logits."""

import pytest
import torch
from torch.nn import functional as F

from dflash_offline import loss as loss_module
from dflash_offline.anchors import Blocks
from dflash_offline.loss import BlockLoss, block_loss, hit_sums, label_ranks

A, K, D, V = 5, 4, 12, 37


def random_blocks(seed=0, weights=None):
    g = torch.Generator().manual_seed(seed)
    if weights is None:
        weights = torch.rand(A, K, generator=g) * (torch.rand(A, K, generator=g) > 0.3)
        weights[:, 0] = 0
    return Blocks(
        anchors_A=torch.arange(A),
        valid_A=torch.ones(A, dtype=torch.bool),
        input_ids_AK=torch.zeros(A, K, dtype=torch.long),
        position_ids_AK=torch.zeros(A, K, dtype=torch.long),
        labels_AK=torch.randint(0, V, (A, K), generator=g),
        weights_AK=weights,
    )


def random_case(seed=0):
    g = torch.Generator().manual_seed(100 + seed)
    hidden = torch.randn(A * K, D, generator=g, requires_grad=True)
    return hidden, torch.randn(V, D, generator=g)


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_loss_and_gradient_equal_plain_cross_entropy_whatever_the_chunk(chunk, monkeypatch):
    monkeypatch.setitem(loss_module._CHUNK_LOGITS, "cpu", chunk * V)
    hidden, head = random_case()
    blocks = random_blocks()
    got = block_loss(hidden, head, blocks, 0.25)
    got.loss.backward()

    plain = hidden.detach().clone().requires_grad_()
    each = F.cross_entropy(plain @ head.T, blocks.labels_AK.flatten(), reduction="none")
    expected = 0.25 * (each * blocks.weights_AK.flatten()).sum()
    expected.backward()
    torch.testing.assert_close(got.loss, expected)
    torch.testing.assert_close(hidden.grad, plain.grad)
    torch.testing.assert_close(got.weight, blocks.weights_AK.sum())


def test_gradient_passes_the_numerical_check():
    hidden, head = random_case()
    hidden = hidden.detach().double().requires_grad_()
    blocks = random_blocks()

    def f(h):
        return block_loss(h, head.double(), blocks, 1.0).loss

    assert torch.autograd.gradcheck(f, (hidden,), eps=1e-3, atol=2e-3)


def test_a_row_without_valid_blocks_gives_zero_gradient_and_no_nan():
    hidden, head = random_case()
    result = block_loss(hidden, head, random_blocks(weights=torch.zeros(A, K)), 1.0)
    result.loss.backward()
    assert result.loss == 0
    assert hidden.grad.abs().sum() == 0


def test_rank_is_the_place_in_the_sorted_logits_and_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 5.0, 3.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    ranks = [
        label_ranks(logits, torch.full((2, 1), i), logits[:, i : i + 1]).tolist() for i in range(4)
    ]
    # row 0 sorted: ids 1, 3 (tie), 2, 0; row 1: all tie, ids in order
    assert ranks == [[3, 0], [0, 1], [2, 2], [1, 3]]
    assert logits.argmax(1).tolist() == [1, 0]  # torch breaks ties the same way


def test_logits_that_are_nan_are_never_hits():
    hidden, head = random_case()
    blocks = random_blocks()
    for place in (0, 1):
        broken = (hidden.detach().clone(), head.clone())
        broken[place][...] = float("nan")
        sums = block_loss(*broken, blocks, 1.0)
        assert sums.top_hits_3K.sum() == 0
        assert sums.run == 0
    one = head.clone()
    one[5] = float("nan")  # argmax would choose the NaN
    sums = block_loss(hidden.detach(), one, blocks, 1.0)
    assert sums.top_hits_3K[0].sum() == 0


def test_top_k_hits_equal_torch_topk():
    hidden, head = random_case(3)
    blocks = random_blocks(3)
    got = block_loss(hidden, head, blocks, 1.0)
    top8 = (hidden @ head.T).topk(8).indices.view(A, K, 8)
    found = top8 == blocks.labels_AK[..., None]
    supervised = blocks.weights_AK > 0
    for i, k in enumerate((1, 4, 8)):
        expected = (found[..., :k].any(-1) & supervised).sum(0)
        assert torch.equal(got.top_hits_3K[i], expected)


def test_runs_stop_at_the_first_miss_and_at_the_first_unsupervised_slot():
    ranks = torch.tensor(
        [
            [0, 0, 0, 0],  # all right
            [0, 0, 2, 0],  # miss in slot 2
            [0, 0, 0, 0],  # slot 2 not supervised
            [0, 5, 0, 0],  # first draft wrong
            [0, 0, 0, 0],  # an invalid block
        ]
    )
    supervised = torch.tensor(
        [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]]
    ).bool()
    sums = hit_sums(ranks, supervised)
    assert sums["run"] == 3 + 1 + 1 + 0
    assert sums["blocks"] == 4
    assert sums["slots_K"].tolist() == [0, 4, 3, 4]
    assert sums["reached_K"].tolist() == [0, 4, 2, 1]
    assert sums["reached_hits_K"].tolist() == [0, 3, 1, 1]
    assert sums["top_hits_3K"][0].tolist() == [0, 3, 2, 4]
    assert sums["top_hits_3K"][1].tolist() == [0, 3, 3, 4]


def test_packing_sums_into_one_tensor_loses_nothing():
    hidden, head = random_case()
    sums = block_loss(hidden, head, random_blocks(), 1.0)
    again = BlockLoss.unpacked(sums.packed(), K)
    for name, value in vars(sums).items():
        assert torch.equal(getattr(again, name), value.detach().float()), name
