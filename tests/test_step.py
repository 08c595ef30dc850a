"""One row from the store to its loss: what shares an index, and what packing must not change."""

import dataclasses

import pytest
import torch
from stores import make_store
from test_drafter import small_drafter, small_spec

from dflash_offline.batch import RowShape, load_batch
from dflash_offline.head import Head
from dflash_offline.loss import Objective
from dflash_offline.shard_set import ShardSet
from dflash_offline.step import Noise, Task, row_loss, shaken, teacher_states
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


def task_of(spec, ends, objective=None, **more):
    return Task(spec, ends.embedding, Head(ends.lm_head), objective or Objective(), **more)


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
    task = task_of(spec, ends)
    together = row_loss(drafter, task, batch_of(shards, spec, [0, 1, 2]))
    apart = [row_loss(drafter, task, batch_of(shards, spec, [d])) for d in (0, 1, 2)]
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
    task = task_of(spec, ends)
    sums = row_loss(drafter, task, batch_of(shards, spec, [0], row_tokens=16, slots=4))
    sums.loss.backward()
    assert sums.weight == 0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() == 0, name


def test_noise_is_uniform_relative_and_of_the_rows_own_seed(spec):
    g = torch.Generator().manual_seed(0)
    size = torch.tensor([0.5, 40.0, 3.0]).repeat_interleave(64)
    taps = torch.randn(400, 3 * 64, generator=g) * size
    shaken_once = shaken(taps, spec, Noise(0.1, seed=5), row=2)
    assert torch.equal(shaken_once, shaken(taps, spec, Noise(0.1, seed=7), row=0))
    assert not torch.equal(shaken_once, shaken(taps, spec, Noise(0.1, seed=5), row=3))
    assert shaken(taps, spec, Noise(0.0, seed=5), row=2) is taps
    rms = taps.unflatten(1, (3, 64)).square().mean(2, keepdim=True).sqrt()
    share = (shaken_once - taps).unflatten(1, (3, 64)) / rms
    assert share.abs().max() <= 0.1001
    # Of a uniform distribution on (-0.1, 0.1).
    assert share.mean().abs() < 0.001
    assert share.std() == pytest.approx(0.1 / 3**0.5, rel=0.02)


def test_the_teacher_of_a_slot_is_the_state_before_its_token(shards, spec, ends):
    """The state at position p here holds p, so slot j of anchor a must be taught by a + j - 1."""
    batch = batch_of(shards, spec, [0, 1, 2])
    positions = torch.arange(48.0)[:, None].expand(48, 64).bfloat16()
    batch = dataclasses.replace(batch, final_SD=positions)
    taught = teacher_states(task_of(spec, ends, Objective(distils=True)), batch)[:, 0]
    places = batch.rows
    expected = [
        float(batch.blocks.anchors_A[r // spec.block_size] + r % spec.block_size - 1)
        for r in places.tolist()
    ]
    assert taught.tolist() == expected
    doubled = task_of(spec, ends, Objective(distils=True), final_norm=lambda x: 2 * x)
    assert torch.equal(teacher_states(doubled, batch)[:, 0], 2 * taught)
