"""Rows from the store to the device: every state at its token, whatever codecs it comes in."""

import pickle

import pytest
import torch
from drafters import small_spec
from stores import make_store
from torch._dynamo.testing import CompileCounter

from dflash_offline.batch import RowDecoder, RowShape, load_batch, read_row, row_bytes
from dflash_offline.shard_set import ShardIndex, ShardSet

CPU = torch.device("cpu")
LENGTHS = (9, 14, 11, 6)
SPEC = small_spec(hidden_size=64, vocab_size=512, target_layer_ids=(1, 2, 3), mask_token_id=3)
SHAPE = RowShape(row_tokens=48, anchors=12, gamma=3.0)


@pytest.fixture(scope="module")
def stores(tmp_path_factory, tiny_llama):
    """A data set of a codec and a seed, made once."""
    folder = tmp_path_factory.mktemp("batch")

    def store(codec, *, seed=0, final=None):
        path = folder / f"{codec}-{seed}-{final}"
        if not path.exists():
            g = torch.Generator().manual_seed(seed)
            documents = [
                (torch.randint(5, 200, (n,), generator=g), torch.arange(n) >= 3) for n in LENGTHS
            ]
            make_store(path, tiny_llama, documents, seed=seed, codec=codec, final=final)
        return path

    return store


def assert_same(one, other):
    assert one.blocks.__dict__.keys() == other.blocks.__dict__.keys()
    for name in one.blocks.__dict__:
        assert torch.equal(getattr(one.blocks, name), getattr(other.blocks, name)), name
    for name in ("taps_SM", "document_ids_S", "position_ids_S", "rows"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.weight, one.supervised_slots) == (other.weight, other.supervised_slots)


def assert_states(states_SM, expected):
    """Each document's states in turn, then zeros."""
    start = 0
    for document in expected:
        assert torch.equal(states_SM[start : start + len(document)], document)
        start += len(document)
    assert states_SM[start:].count_nonzero() == 0
    assert states_SM.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "codecs",
    [("raw",), ("lossless",), ("int8",), ("int8", "int8"), ("raw", "int8"), ("lossless", "raw")],
    ids="-".join,
)
def test_states_are_those_of_the_shards_whatever_codecs_they_come_in(stores, codecs):
    """Data sets of one codec differ in their scales."""
    data = ShardSet([stores(codec, seed=place) for place, codec in enumerate(codecs)])
    order = [2, len(data) - 1, 0, len(data) - 3]
    batch = load_batch(data, order, spec=SPEC, shape=SHAPE, seed=0, device=CPU)
    assert_states(batch.taps_SM, [data.taps(i).flatten(1) for i in order])


def test_data_sets_of_one_codec_have_scales_of_their_own(stores):
    """Or else the test above would prove less than it says."""
    one, other = (ShardSet([stores("int8", seed=seed)]).codecs[0] for seed in (0, 1))
    assert not torch.equal(one.channel_scale_LD, other.channel_scale_LD)


def test_a_document_longer_than_the_row_is_cut(stores):
    data = ShardSet([stores("int8")])
    shape = RowShape(row_tokens=10, anchors=4, gamma=3.0)
    batch = load_batch(data, [1], spec=SPEC, shape=shape, seed=0, device=CPU)
    assert_states(batch.taps_SM, [data.taps(1).flatten(1)[:10]])


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_final_states_come_beside_the_taps(stores, codec):
    data = ShardSet([stores(codec, seed=seed, final="after-norm") for seed in (0, 1)])
    order = [5, 0]
    knobs = {"spec": SPEC, "shape": SHAPE, "seed": 0, "device": CPU}
    batch = load_batch(data, order, **knobs, final_hidden=True)
    assert batch.final_SD.shape == (48, 64)
    assert_states(batch.final_SD, [data.final_hidden(i) for i in order])
    assert_states(batch.taps_SM, [data.taps(i).flatten(1) for i in order])
    assert load_batch(data, order, **knobs).final_SD is None


@pytest.mark.parametrize(
    ("second", "message"),
    [(None, "extract with --final-hidden"), ("before-norm", "the same --final-hidden")],
)
def test_final_states_that_are_not_there_or_not_alike_are_refused(stores, second, message):
    paths = [stores("raw", final="after-norm"), stores("raw", seed=1, final=second)]
    assert ShardSet(paths[:1]).final_norm() == "after-norm"
    data = ShardSet(paths)
    with pytest.raises(ValueError, match=message) as refused:
        read_row(data, [0], spec=SPEC, shape=SHAPE, seed=0, final_hidden=True)
    assert str(paths[1]) in str(refused.value)


def test_rows_are_the_slots_with_a_weight(stores):
    data = ShardSet([stores("raw")])
    batch = load_batch(data, [1, 3, 0], spec=SPEC, shape=SHAPE, seed=4, device=CPU)
    slots = [(a, j) for a in range(12) for j in range(4) if batch.blocks.weights_AK[a, j] > 0]
    assert batch.rows.tolist() == [a * 4 + j for a, j in slots]
    assert batch.supervised_slots == len(slots) > 12
    assert batch.weight == pytest.approx(sum(float(batch.blocks.weights_AK[s]) for s in slots))


@pytest.mark.parametrize("codecs", [("int8",), ("raw", "int8")], ids="-".join)
def test_a_row_in_memory_that_was_used_before_is_the_same(stores, codecs):
    data = ShardSet([stores(codec, seed=place) for place, codec in enumerate(codecs)])
    memory = torch.full((row_bytes(data, spec=SPEC, shape=SHAPE),), 0xFF, dtype=torch.uint8)
    decoder = RowDecoder(data, CPU)
    for order in ([1, 2, 3], [len(data) - 1], [0, len(data) - 2]):
        row = read_row(data, order, spec=SPEC, shape=SHAPE, seed=7, memory=memory)
        expected = load_batch(data, order, spec=SPEC, shape=SHAPE, seed=7, device=CPU)
        assert row.slab.memory.data_ptr() == memory.data_ptr()
        assert_same(decoder.decode(row), expected)


def test_a_batch_does_not_change_when_the_memory_of_its_row_is_used_again(stores):
    data = ShardSet([stores("int8")])
    memory = torch.zeros(row_bytes(data, spec=SPEC, shape=SHAPE), dtype=torch.uint8)
    row = read_row(data, [1, 2], spec=SPEC, shape=SHAPE, seed=7, memory=memory)
    batch = RowDecoder(data, CPU).decode(row)
    memory.fill_(0xFF)
    assert_same(batch, load_batch(data, [1, 2], spec=SPEC, shape=SHAPE, seed=7, device=CPU))


def test_decoding_is_compiled_once_for_all_rows(stores, monkeypatch):
    data = ShardSet([stores("int8")])
    counter = CompileCounter()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **knobs: compile_(f, backend=counter, fullgraph=True, **knobs)
    )
    decoder = RowDecoder(data, CPU, compiled=True)
    for seed, order in enumerate([[1, 2], [3], [0, 3, 2], [2, 1, 0]]):
        row = read_row(data, order, spec=SPEC, shape=SHAPE, seed=seed)
        expected = load_batch(data, order, spec=SPEC, shape=SHAPE, seed=seed, device=CPU)
        with torch.set_grad_enabled(seed % 2 == 0):  # training and evaluating
            assert_same(decoder.decode(row), expected)
    assert counter.frame_count == 1


def test_a_pickled_shard_set_reads_the_same_without_an_index_of_its_own(stores, monkeypatch):
    data = ShardSet([stores("int8"), stores("raw", seed=1)])
    data.taps(0)  # opens what does not pickle
    monkeypatch.setattr(ShardIndex, "read", None)
    copy = pickle.loads(pickle.dumps(data))
    assert copy.identity() == data.identity()
    for i in range(len(data)):
        assert torch.equal(copy.taps(i), data.taps(i))
        assert torch.equal(copy.tokens(i)[0], data.tokens(i)[0])
