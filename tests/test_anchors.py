"""Anchors, labels and weights against hand-made tables of a few tokens."""

import math

import torch

from dflash_offline.anchors import (
    default_gamma,
    eligible_positions,
    make_blocks,
    sample_anchors,
    slot_weights,
)
from dflash_offline.packing import pack_row

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


def test_sampling_is_without_replacement_sorted_and_repeatable():
    eligible = torch.zeros(50, dtype=torch.bool)
    eligible[3:40:2] = True
    draws = [
        sample_anchors(eligible, 7, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert draws[0].tolist() == sorted(set(draws[0].tolist()))
    assert eligible[draws[0]].all()


def test_fewer_candidates_than_slots_are_all_taken():
    eligible = torch.tensor([False, True, True, False])
    assert sample_anchors(eligible, 9, torch.Generator().manual_seed(0)).tolist() == [1, 2]


def test_every_candidate_is_drawn_equally_often():
    eligible = torch.tensor([True] * 10)
    counts = torch.zeros(10)
    for seed in range(2000):
        counts[sample_anchors(eligible, 3, torch.Generator().manual_seed(seed))] += 1
    # 600 expected; 5 standard deviations of a binomial(2000, 0.3) are 102
    assert (counts - 600).abs().max() < 102


def test_weights_decay_as_in_the_paper():
    assert [default_gamma(k) for k in (16, 10, 8)] == [7.0, 5.0, 4.0]
    weights = slot_weights(4, 4.0)
    assert slot_weights(4, 1e-3).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert weights.tolist() == [0.0, 1.0, *torch.exp(torch.tensor([-0.25, -0.5])).tolist()]
