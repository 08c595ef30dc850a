"""The attention rule against a dense loop written from its definition, not from the code."""

import pytest
import torch

from dflash_offline.mask import block_mask_mod, dense_mask

# Two documents of 5 and 6 tokens and two positions of padding; blocks of 3; one invalid block.
DOCUMENTS = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, -1, -1]
ANCHORS = [1, 4, 7, 10, 0]
VALID = [True, True, True, True, False]


def dense_loop(documents, anchors, valid, block_size, window):
    """Who may see whom, one pair at a time."""
    context, blocks = len(documents), len(anchors)
    sees = torch.zeros(blocks * block_size, context + blocks * block_size, dtype=torch.bool)
    for block, anchor in enumerate(anchors):
        for slot in range(block_size):
            query = block * block_size + slot
            for key in range(context):
                if not valid[block] or documents[key] != documents[anchor] or key >= anchor:
                    continue
                sees[query, key] = window is None or anchor + slot - key < window
            for other in range(block_size):
                key = context + block * block_size + other
                if window is None:
                    sees[query, key] = True
                else:
                    sees[query, key] = other <= slot and slot - other < window
    return sees


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("block_size", [3, 5])
def test_mask_equals_the_rule_written_as_a_loop(window, block_size):
    sees = block_mask_mod(
        torch.tensor(ANCHORS),
        torch.tensor(VALID),
        torch.tensor(DOCUMENTS),
        block_size=block_size,
        window=window,
    )
    queries = len(ANCHORS) * block_size
    got = dense_mask(sees, queries, len(DOCUMENTS) + queries, torch.device("cpu"))
    assert torch.equal(got, dense_loop(DOCUMENTS, ANCHORS, VALID, block_size, window))


def test_no_query_is_left_without_a_key():
    sees = block_mask_mod(
        torch.tensor(ANCHORS),
        torch.tensor(VALID),
        torch.tensor(DOCUMENTS),
        block_size=4,
        window=1,
    )
    mask = dense_mask(sees, 20, len(DOCUMENTS) + 20, torch.device("cpu"))
    assert mask.any(1).all()
