"""One row from the store to its loss: what shares an index, and what packing must not change."""

import pytest
import torch
from stores import make_store
from test_drafter import small_drafter, small_spec

from dflash_offline.batch import RowShape, load_batch
from dflash_offline.shard_set import ShardSet
from dflash_offline.step import row_loss
from dflash_offline.target import FrozenEnds

CPU = torch.device("cpu")
LENGTHS = (9, 14, 11, 6)


@pytest.fixture(scope="module")
def store(tmp_path_factory, tiny_llama):
    """Token t of document d is 20 d + t + 5; the first three are not supervised."""
    documents = [
        (torch.arange(n) + 20 * d + 5, torch.arange(n) >= 3) for d, n in enumerate(LENGTHS)
    ]
    return make_store(tmp_path_factory.mktemp("step") / "store", tiny_llama, documents)


@pytest.fixture(scope="module")
def shards(store):
    return ShardSet((store,))


@pytest.fixture(scope="module")
def spec():
    return small_spec(hidden_size=64, vocab_size=512, target_layer_ids=(1, 2, 3), mask_token_id=3)


@pytest.fixture(scope="module")
def ends():
    g = torch.Generator().manual_seed(2)
    table = torch.randn(512, 64, generator=g) * 0.2
    return FrozenEnds(table, table)


def batch_of(shards, spec, documents, row_tokens=48, slots=40, seed=0):
    shape = RowShape(row_tokens, slots, gamma=3.0)
    return load_batch(shards, documents, spec=spec, shape=shape, seed=seed, device=CPU)


def test_token_state_position_and_label_share_one_index(shards, spec):
    order = [2, 0, 3]
    batch = batch_of(shards, spec, order)
    start = 0
    for number, d in enumerate(order):
        n = LENGTHS[d]
        here = slice(start, start + n)
        assert batch.document_ids_S[here].unique().tolist() == [number]
        assert batch.position_ids_S[here].tolist() == list(range(n))
        assert torch.equal(batch.taps_SM[here], shards.taps(d).flatten(1))
        start += n
    assert (batch.document_ids_S[start:] == -1).all()
    assert batch.taps_SM[start:].abs().sum() == 0

    blocks = batch.blocks
    for a in range(int(blocks.valid_A.sum())):
        place = int(blocks.anchors_A[a])
        d = order[int(batch.document_ids_S[place])]
        position = int(batch.position_ids_S[place])
        first = 20 * d + 5
        assert blocks.input_ids_AK[a, 0] == first + position
        for j in range(1, spec.block_size):
            inside = position + j < LENGTHS[d]
            assert bool(blocks.weights_AK[a, j] > 0) == inside
            if inside:
                assert blocks.labels_AK[a, j] == first + position + j


def test_documents_packed_and_apart_have_the_same_loss(shards, spec, ends):
    drafter = small_drafter(spec)
    # More slots than candidates: every candidate is an anchor, so the blocks are the same.
    together = row_loss(drafter, ends, batch_of(shards, spec, [0, 1, 2]), 1.0)
    apart = [row_loss(drafter, ends, batch_of(shards, spec, [d]), 1.0) for d in (0, 1, 2)]
    torch.testing.assert_close(together.weight, sum(s.weight for s in apart))
    torch.testing.assert_close(together.loss, sum(s.loss for s in apart), rtol=1e-5, atol=0)
    assert together.blocks == sum(s.blocks for s in apart)


def test_anchors_depend_on_the_seed_of_the_row_alone(shards, spec):
    first, again, other = (
        batch_of(shards, spec, [0, 1, 2], slots=5, seed=s).blocks.anchors_A for s in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_row_without_supervised_tokens_gives_zero_gradients(tmp_path, tiny_llama, spec, ends):
    silent = [(torch.arange(5, 17), torch.zeros(12, dtype=torch.bool))]
    shards = ShardSet((make_store(tmp_path / "silent", tiny_llama, silent),))
    drafter = small_drafter(spec)
    sums = row_loss(drafter, ends, batch_of(shards, spec, [0], row_tokens=16, slots=4), 1.0)
    sums.loss.backward()
    assert sums.weight == 0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() == 0, name
