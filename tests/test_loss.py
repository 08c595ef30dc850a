"""The fused loss against torch's own losses on full logits."""

import pytest
import torch
from torch.nn import functional as F

from dflash_offline import head as head_module
from dflash_offline.anchors import Blocks
from dflash_offline.head import Head, label_ranks
from dflash_offline.loss import BlockLoss, Objective, block_loss, dpace_weights, hit_sums

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


def rows_of(blocks):
    return blocks.weights_AK.flatten().nonzero().flatten()


def loss_of(hidden, head, blocks, objective=None, teacher=None):
    given = None if teacher is None else teacher[rows_of(blocks)]
    objective = objective or Objective()
    return block_loss(hidden, Head(head), blocks, rows_of(blocks), objective, teacher_RD=given)


def plain_losses(hidden, head, blocks):
    """Cross-entropy of every slot by torch."""
    labels = blocks.labels_AK.flatten()
    return F.cross_entropy(hidden @ head.T, labels, reduction="none").view(A, K)


def assert_same_with_gradients(got, hidden, expected, plain):
    got.loss.backward()
    expected.backward()
    torch.testing.assert_close(got.loss, expected)
    torch.testing.assert_close(hidden.grad, plain.grad)


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_loss_and_gradient_equal_plain_cross_entropy_whatever_the_chunk(chunk, monkeypatch):
    monkeypatch.setitem(head_module._CHUNK_LOGITS, "cpu", chunk * V)
    hidden, head = random_case()
    blocks = random_blocks()
    got = loss_of(hidden, head, blocks)
    plain = hidden.detach().clone().requires_grad_()
    expected = (plain_losses(plain, head, blocks) * blocks.weights_AK).sum()
    assert_same_with_gradients(got, hidden, expected, plain)
    torch.testing.assert_close(got.weight, blocks.weights_AK.sum())


@pytest.mark.parametrize("chunk", [3, 1000])
def test_distilling_equals_torchs_kl_divergence(chunk, monkeypatch):
    monkeypatch.setitem(head_module._CHUNK_LOGITS, "cpu", chunk * V)
    hidden, head = random_case()
    teacher = random_case(7)[0].detach()
    blocks = random_blocks()
    got = loss_of(hidden, head, blocks, Objective(distils=True), teacher)
    plain = hidden.detach().clone().requires_grad_()
    student = (plain @ head.T).log_softmax(1)
    each = F.kl_div(student, (teacher @ head.T).log_softmax(1), log_target=True, reduction="none")
    expected = (each.sum(1).view(A, K) * blocks.weights_AK).sum()
    assert_same_with_gradients(got, hidden, expected, plain)
    own = loss_of(teacher, head, blocks, Objective(distils=True), teacher)
    assert own.loss.abs() < 1e-5  # nothing is left to learn


def dpace_by_the_paper(probabilities, supervised, alpha):
    """arXiv:2605.18810 as SpecForge's documentation states it, slot by slot."""
    weights = torch.zeros(A, K)
    for a in range(A):
        for j in range(K):
            total = 0.0
            for m in range(j, K):
                reach = 1.0
                for i in range(m + 1):
                    q = float(probabilities[a, i])
                    reach *= (1 - alpha) * q + alpha if supervised[a, i] else 1.0
                total += reach * bool(supervised[a, m])
            weights[a, j] = total * bool(supervised[a, j])
    return weights


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weighs_a_slot_by_the_draft_that_it_makes_possible(alpha):
    hidden, head = random_case()
    hidden = (hidden.detach() * 3).requires_grad_()
    blocks = random_blocks()
    supervised = blocks.weights_AK > 0
    got = loss_of(hidden, head, blocks, Objective(dpace_alpha=alpha))
    plain = hidden.detach().clone().requires_grad_()
    each = plain_losses(plain, head, blocks)
    weights = dpace_by_the_paper((-each).exp().detach(), supervised, alpha)
    assert_same_with_gradients(got, hidden, (each * weights).sum(), plain)
    assert got.weight == supervised.sum()


def test_a_head_in_fp8_gives_nearly_the_same_loss_and_gradient():
    """Sides of 16 at least, as the products want them."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(A * K, 64, generator=g).bfloat16().requires_grad_()
    table = torch.randn(V + 11, 64, generator=g).bfloat16() / 8
    blocks = random_blocks()
    rows = rows_of(blocks)
    results = []
    for fp8 in (False, True):
        sums = block_loss(hidden, Head(table, fp8=fp8), blocks, rows, Objective())
        sums.loss.backward()
        results.append((float(sums.loss.detach()), hidden.grad.float()))
        hidden.grad = None
    (exact, exact_gradient), (ours, gradient) = results
    assert ours == pytest.approx(exact, rel=0.01)
    assert ours != exact
    assert (gradient - exact_gradient).norm() < 0.1 * exact_gradient.norm()


def test_dpace_weights_of_a_block_by_hand():
    q = torch.tensor([[9.0, 0.5, 0.25, 0.5]])
    supervised = torch.tensor([[False, True, True, True]])
    # alpha 0: reach 0.5, 0.125, 0.0625
    expected = [[0.0, 0.6875, 0.1875, 0.0625]]
    assert dpace_weights(q, supervised, 0.0).tolist() == expected
    all_but_one = torch.tensor([[False, True, False, True]])
    assert dpace_weights(q, all_but_one, 0.0).tolist() == [[0.0, 0.75, 0.0, 0.25]]


def test_gradient_passes_the_numerical_check():
    hidden, head = random_case()
    hidden = hidden.detach().double().requires_grad_()
    blocks = random_blocks()

    def f(h):
        return loss_of(h, head.double(), blocks).loss

    assert torch.autograd.gradcheck(f, (hidden,), eps=1e-3, atol=2e-3)


@pytest.mark.parametrize("objective", [Objective(), Objective(dpace_alpha=0.5)])
def test_a_row_without_valid_blocks_gives_zero_gradient_and_no_nan(objective):
    hidden, head = random_case()
    result = loss_of(hidden, head, random_blocks(weights=torch.zeros(A, K)), objective)
    result.loss.backward()
    assert result.loss == result.weight == 0
    assert hidden.grad.abs().sum() == 0


def test_a_compiled_pass_of_fixed_size_gives_the_same():
    """Its last chunk is filled up. Traced here without a compiler behind it."""
    hidden, head = random_case()
    blocks = random_blocks()
    plain = loss_of(hidden, head, blocks)
    fixed = Head(head)
    fixed._chunk_rows, fixed._is_fixed = 4, True
    fixed._pass = torch.compile(head_module._chunk, dynamic=False, backend="aot_eager")
    teacher = random_case(7)[0].detach()[rows_of(blocks)]
    for objective in (Objective(), Objective(distils=True)):
        plain = loss_of(hidden, head, blocks, objective, random_case(7)[0].detach())
        other = hidden.detach().clone().requires_grad_()
        got = block_loss(other, fixed, blocks, rows_of(blocks), objective, teacher_RD=teacher)
        assert_same_with_gradients(got, other, plain.loss, hidden)
        assert torch.equal(got.top_hits_3K, plain.top_hits_3K)
        hidden.grad = None


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
        sums = loss_of(*broken, blocks)
        assert sums.top_hits_3K.sum() == 0
        assert sums.run == 0
    one = head.clone()
    one[5] = float("nan")  # argmax would choose the NaN
    sums = loss_of(hidden.detach(), one, blocks)
    assert sums.top_hits_3K[0].sum() == 0


def test_top_k_hits_equal_torch_topk():
    hidden, head = random_case(3)
    blocks = random_blocks(3)
    got = loss_of(hidden, head, blocks)
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
    sums = loss_of(hidden, head, random_blocks())
    again = BlockLoss.unpacked(sums.packed(), K)
    for name, value in vars(sums).items():
        assert torch.equal(getattr(again, name), value.detach().float()), name
