"""Anchors, labels and weights against hand-made tables of a few tokens; draws against formulas."""

import math

import pytest
import torch

from dflash_offline.anchors import (
    Coverage,
    default_gamma,
    eligible_positions,
    make_blocks,
    measure_coverage,
    sample_anchors,
    sampling_rate,
    slot_weights,
)
from dflash_offline.packing import pack_row, plan_rows

MASK = 99


def document(first_token, mask):
    ids = torch.arange(first_token, first_token + len(mask), dtype=torch.int32)
    return ids, torch.tensor(mask, dtype=torch.bool)


def row_of_two():
    # place:     0  1  2  3  4  5 |  6  7  8  9 | 10 11 padding
    # token:    10 11 12 13 14 15 | 20 21 22 23
    first = document(10, [0, 0, 1, 1, 0, 1])
    second = document(20, [1, 1, 1, 1])
    return pack_row([first, second], 12)


def blocks_at(row, anchors, **knobs):
    settings = {"slots": len(anchors) + 1, "block_size": 4, "mask_token_id": MASK, "gamma": 2.0}
    return make_blocks(row, torch.tensor(anchors), **{**settings, **knobs})


def test_an_anchor_is_supervised_and_so_is_its_successor_in_the_same_document():
    # 5 is supervised but ends its document; 9 ends the second one.
    assert eligible_positions(row_of_two()).nonzero().flatten().tolist() == [2, 6, 7, 8]


def test_the_last_position_of_a_full_row_is_no_anchor():
    row = pack_row([document(1, [1, 1, 1])], 3)
    assert eligible_positions(row).tolist() == [True, True, False]


def test_labels_stand_at_their_own_position_and_weights_stop_at_document_and_turn():
    blocks = blocks_at(row_of_two(), [2, 8])
    e = [0.0, 1.0, math.exp(-0.5), math.exp(-1.0)]
    assert blocks.labels_AK[0].tolist() == [12, 13, 14, 15]
    # slot 2 is position 4, which the target did not produce; slot 3 is position 5, which it did.
    assert torch.allclose(blocks.weights_AK[0], torch.tensor([0, e[1], 0, e[3]]))
    # the second block overruns its document after one slot
    assert blocks.labels_AK[1, :2].tolist() == [22, 23]
    assert torch.allclose(blocks.weights_AK[1], torch.tensor([0, e[1], 0, 0]))


def test_a_block_overrunning_into_the_next_document_is_not_supervised_there():
    row = pack_row([document(1, [1, 1]), document(5, [1, 1, 1])], 5)
    blocks = blocks_at(row, [0])
    assert (blocks.weights_AK[0] > 0).tolist() == [False, True, False, False]


def test_a_block_overrunning_the_row_is_not_supervised_there():
    row = pack_row([document(1, [1, 1, 1])], 3)
    blocks = blocks_at(row, [1])
    assert (blocks.weights_AK[0] > 0).tolist() == [False, True, False, False]


def test_block_inputs_are_the_anchor_token_and_mask_tokens_at_rising_positions():
    blocks = blocks_at(row_of_two(), [7])
    assert blocks.input_ids_AK[0].tolist() == [21, MASK, MASK, MASK]
    assert blocks.position_ids_AK[0].tolist() == [1, 2, 3, 4]  # positions restart per document


def test_filled_up_blocks_are_invalid_and_weigh_nothing():
    blocks = blocks_at(row_of_two(), [2], slots=3)
    assert blocks.valid_A.tolist() == [True, False, False]
    assert blocks.input_ids_AK[1:].unique().tolist() == [MASK]
    assert blocks.weights_AK[1:].abs().sum() == 0


def drawn(eligible, seed, *, slots=10**6, rate=1.0, documents=None):
    """Anchors and how many were dropped; one document unless said otherwise."""
    eligible = torch.tensor(eligible, dtype=torch.bool)
    documents = torch.zeros(len(eligible)) if documents is None else torch.tensor(documents)
    generator = torch.Generator().manual_seed(seed)
    anchors, dropped = sample_anchors(
        eligible, documents, slots=slots, rate=rate, generator=generator
    )
    return anchors.tolist(), dropped


def test_sampling_is_without_replacement_sorted_and_repeatable():
    eligible = [False] * 3 + [True, False] * 20
    first, again, other = (drawn(eligible, seed, slots=7)[0] for seed in (1, 1, 2))
    assert first == again != other
    assert first == sorted(set(first))
    assert all(eligible[place] for place in first)


def test_fewer_candidates_than_slots_are_all_taken():
    assert drawn([0, 1, 1, 0], seed=0, slots=9) == ([1, 2], 0)
    assert drawn([0, 0, 0], seed=0, rate=0.5) == ([], 0)


def test_every_candidate_is_drawn_equally_often():
    counts = torch.zeros(10)
    for seed in range(2000):
        anchors, dropped = drawn([1] * 10, seed, slots=3)
        counts[anchors] += 1
        assert dropped == 7
    # 600 expected; 5 standard deviations of a binomial(2000, 0.3) are 102
    assert (counts - 600).abs().max() < 102


DRAWS = 1000


def mean_anchors(sizes, rate, slots=10**6, first_seed=0):
    """Mean number of anchors in each document of a row, and in each of its positions."""
    documents = [d for d, size in enumerate(sizes) for _ in range(size)]
    counts = torch.zeros(len(documents))
    for seed in range(first_seed, first_seed + DRAWS):
        anchors, _ = drawn([1] * len(documents), seed, rate=rate, slots=slots, documents=documents)
        counts[anchors] += 1
    return [float(part.sum()) / DRAWS for part in counts.split(sizes)], counts / DRAWS


def rounding_error(size, rate):
    """5 standard deviations of the mean of rate x size, rounded up or down by chance."""
    fraction = rate * size % 1
    return 5 * math.sqrt(fraction * (1 - fraction) / DRAWS) + 1e-9


@pytest.mark.parametrize("rate", [0.13, 1.0])
def test_a_document_has_as_many_anchors_packed_as_apart(rate):
    sizes = [41, 9, 3]
    packed, positions = mean_anchors(sizes, rate)
    for place, size in enumerate(sizes):
        (apart,), _ = mean_anchors([size], rate, first_seed=10_000)
        assert abs(apart - rate * size) <= rounding_error(size, rate)
        assert abs(packed[place] - rate * size) <= rounding_error(size, rate)
    # Each position as well; the mean of a yes or no with probability `rate`.
    assert (positions - rate).abs().max() <= 5 * math.sqrt(rate * (1 - rate) / DRAWS) + 1e-6


def test_a_surplus_is_dropped_evenly_over_the_row():
    sizes, slots = [30, 10], 16
    counts, positions = mean_anchors(sizes, 0.9, slots=slots)
    assert sum(counts) == slots  # 27 + 9 are drawn each time
    # 16 of 40 candidates; drawn first by document, so the variance is below a binomial's
    assert (positions - 0.4).abs().max() < 5 * math.sqrt(0.4 * 0.6 / DRAWS)
    assert drawn([1] * 40, 0, rate=0.9, slots=slots)[1] == 20


def test_sampling_rate_fills_the_slots_of_a_full_row_on_average():
    # Of 100 + 200 tokens that are kept, 50 + 30 x 200 / 300 = 70 are supervised: 46.67 a row.
    lengths, supervised = torch.tensor([100, 300]), torch.tensor([50, 30])
    assert sampling_rate(lengths, supervised, 200, 10) == pytest.approx(10 / (70 / 300 * 200))
    assert sampling_rate(lengths, supervised, 200, 47) == 1.0
    assert sampling_rate(lengths, torch.zeros(2, dtype=torch.long), 200, 10) == 1.0


def test_rows_of_many_documents_use_their_slots():
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (3000,), generator=g)
    supervised = (lengths * torch.rand(3000, generator=g)).long()
    rate = sampling_rate(lengths, supervised, 1000, 64)
    wanted, slots = 0, 0
    for number, row in enumerate(plan_rows(lengths.tolist(), 1000, seed=0, epoch=0)):
        masks = [
            torch.arange(n) >= n - s for n, s in zip(lengths[row], supervised[row], strict=True)
        ]
        documents = [d for d, mask in enumerate(masks) for _ in mask]
        anchors, dropped = drawn(
            torch.cat(masks).tolist(), number, rate=rate, slots=64, documents=documents
        )
        wanted, slots = wanted + len(anchors) + dropped, slots + 64
    assert 0.97 < wanted / slots < 1.01  # rows are 97 to 99 % full


def test_coverage_counts_distinct_tokens_that_blocks_ask_for():
    row = row_of_two()
    # Blocks of 4 at 2, 6, 7, 8 could ask for 3, 5, 7, 8, 9.
    none = measure_coverage(row, torch.tensor([], dtype=torch.long), 4, dropped=0)
    one = measure_coverage(row, torch.tensor([2]), 4, dropped=1)  # asks for 3 and 5
    two = measure_coverage(row, torch.tensor([6, 7]), 4, dropped=0)  # both for 8 and 9
    assert none == Coverage(supervised=5, covered=0, anchors=0, dropped=0)
    assert one == Coverage(supervised=5, covered=2, anchors=1, dropped=1)
    assert two == Coverage(supervised=5, covered=3, anchors=2, dropped=0)
    assert one + two == Coverage(supervised=10, covered=5, anchors=3, dropped=1)
    assert (one + two).share == 0.5
    assert Coverage(0, 0, 0, 0).share == 0.0


def test_weights_decay_as_in_the_paper():
    assert [default_gamma(k) for k in (16, 10, 8)] == [7.0, 5.0, 4.0]
    weights = slot_weights(4, 4.0)
    assert slot_weights(4, 1e-3).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert weights.tolist() == [0.0, 1.0, *torch.exp(torch.tensor([-0.25, -0.5])).tolist()]
