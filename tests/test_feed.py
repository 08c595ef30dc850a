"""The feed: the same rows for everyone, errors where they are used, and no process left behind."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from drafters import small_spec
from stores import make_store, random_documents

from dflash_offline.batch import RowShape, load_batch, read_row
from dflash_offline.feed import RowFeed
from dflash_offline.packing import RowStream
from dflash_offline.shard_set import ShardSet
from dflash_offline.world import World

CPU = torch.device("cpu")
HERE = Path(__file__).parent
SPEC = small_spec(hidden_size=64, vocab_size=512, target_layer_ids=(1, 2, 3), mask_token_id=3)
SHAPE = RowShape(row_tokens=64, anchors=12, gamma=3.0, sampling_rate=0.4)
SEED = 5
# torch warns where there are fewer cores than processes.
few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory, tiny_llama):
    documents = random_documents(12)
    return make_store(
        tmp_path_factory.mktemp("feed") / "store", tiny_llama, documents, codec="int8"
    )


def open_feed(path, *, workers=0, first_row=0, rank=0, ranks=1, rows_per_step=4, **knobs):
    settings = {"spec": SPEC, "shape": SHAPE, "seed": SEED, "device": CPU, **knobs}
    return RowFeed(
        ShardSet([path]),
        first_row=first_row,
        rows_per_step=rows_per_step,
        world=World(rank, ranks, CPU),
        workers=workers,
        **settings,
    )


def facts(batch):
    """All that makes a row this row and no other."""
    tensors = {**batch.blocks.__dict__, "taps": batch.taps_SM, "documents": batch.document_ids_S}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def rows_of(feed, steps):
    with feed:
        return [facts(batch) for step in islice(feed, steps) for batch in step.batches]


@pytest.fixture(scope="module")
def expected(store):
    """Rows 0 to 15, over three epochs, read one by one."""
    data = ShardSet([store])
    stream = RowStream(data.lengths.tolist(), SHAPE.row_tokens, seed=SEED)
    assert 2 < stream.epoch(16) < 4
    rows = []
    for n in range(16):
        seed = SEED * 1_000_000_007 + n
        batch = load_batch(data, stream[n], spec=SPEC, shape=SHAPE, seed=seed, device=CPU)
        rows.append(facts(batch))
    return rows


@few_cores
@pytest.mark.parametrize("workers", [0, 3])
def test_rows_are_the_same_whoever_reads_them(store, expected, workers):
    assert rows_of(open_feed(store, workers=workers), 4) == expected
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_rows_of_each_step(store, expected, ranks):
    shares = [rows_of(open_feed(store, rank=rank, ranks=ranks), 4) for rank in range(ranks)]
    assert [row for rows in zip(*shares, strict=True) for row in rows] == expected


def test_a_feed_that_begins_later_goes_on_with_the_same_rows(store, expected):
    assert rows_of(open_feed(store, first_row=6, rows_per_step=2), 5) == expected[6:]


def test_each_step_says_how_many_epochs_are_done_after_it(store):
    per_epoch = RowStream([10] * 40, 100, seed=0).rows_per_epoch
    assert per_epoch == 4
    stream = RowStream(ShardSet([store]).lengths.tolist(), SHAPE.row_tokens, seed=SEED)
    found = []
    with open_feed(store, rank=1, ranks=2, first_row=3) as feed:
        for step in islice(feed, 4):
            found.append(step.epoch)
            assert len(list(step.batches)) == 2
    assert found == [stream.epoch(n) for n in (7, 11, 15, 19)]


def test_the_next_step_is_not_begun_before_the_last_one_is_taken(store):
    with open_feed(store) as feed:
        step = next(feed)
        next(step.batches)
        with pytest.raises(AssertionError, match="all rows of a step"):
            next(feed)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_batch_stays_as_it_is_while_later_rows_are_read(tmp_path, tiny_llama, codec):
    path = make_store(tmp_path / "store", tiny_llama, random_documents(12), codec=codec)
    with open_feed(path, rows_per_step=6) as feed:
        held = list(next(feed).batches)
    assert [facts(batch) for batch in held] == rows_of(open_feed(path, rows_per_step=6), 1)


def test_randomness_of_others_is_left_alone(store):
    before = torch.get_rng_state()
    rows_of(open_feed(store), 2)
    assert torch.equal(torch.get_rng_state(), before)


def damaged(store, folder):
    """A copy with a flipped byte in the middle of the codes."""
    path = shutil.copytree(store, folder / "damaged")
    (file,) = (path / "shards/shard-000000/codes/c").rglob("0/0/0")
    content = bytearray(file.read_bytes())
    content[len(content) // 4] ^= 1
    file.write_bytes(content)
    return path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_is_told_of_in_its_own_words(store, tmp_path, workers):
    path = damaged(store, tmp_path)
    with pytest.raises(ValueError) as told:
        rows_of(open_feed(path, workers=workers), 20)
    assert str(told.value).startswith(f"shard shard-000000: {path}/shards/shard-000000/codes is")
    assert "verify --repair" in str(told.value)
    assert "Traceback" not in str(told.value)
    assert not multiprocessing.active_children()


def test_an_error_comes_again_to_whoever_asks_again(store, tmp_path):
    with open_feed(damaged(store, tmp_path)) as feed:
        for _ in range(2):
            with pytest.raises(ValueError, match="shard-000000"):
                rows = (batch for step in feed for batch in step.batches)
                list(islice(rows, 80))
            feed._untaken = 0


def test_a_reader_that_is_killed_is_told_of_in_one_sentence(store):
    with open_feed(store, workers=1) as feed:
        list(next(feed).batches)
        (reader,) = multiprocessing.active_children()
        reader.kill()
        with pytest.raises(ChildProcessError, match="one of 1 reader processes was killed"):
            for step in feed:
                list(step.batches)


def test_too_little_shared_memory_is_told_of_before_anything_is_read(store):
    shape = RowShape(row_tokens=10**11, anchors=12, gamma=3.0)
    with pytest.raises(ValueError, match=r"--reader-processes 2 need .* TB of shared memory"):
        open_feed(store, workers=2, shape=shape)


def test_final_states_that_are_not_there_are_told_of_before_anything_is_read(store):
    with pytest.raises(ValueError, match="extract with --final-hidden"):
        open_feed(store, final_hidden=True)


def test_final_states_come_with_the_rows(tmp_path, tiny_llama):
    path = make_store(tmp_path / "store", tiny_llama, random_documents(3), final="before-norm")
    data = ShardSet([path])
    with open_feed(path, final_hidden=True) as feed:
        batch = next(next(feed).batches)
    documents = RowStream(data.lengths.tolist(), SHAPE.row_tokens, seed=SEED)[0]
    found = torch.cat([data.final_hidden(i) for i in documents])
    assert torch.equal(batch.final_SD[: len(found)], found)


def test_only_time_until_a_row_is_there_counts_as_waiting(store, monkeypatch):
    monkeypatch.setattr("dflash_offline.feed.read_row", slowly)
    with open_feed(store, rows_per_step=1) as feed:
        list(next(feed).batches)
        waited = feed.waited
        assert waited >= 0.3
        time.sleep(0.3)
        while not feed._ahead.done():
            time.sleep(0.01)
        list(next(feed).batches)
        assert feed.waited - waited < 0.3


def slowly(*arguments, **knobs):
    time.sleep(0.3)
    return read_row(*arguments, **knobs)


PROGRAM = """
    import multiprocessing, os, signal, sys
    from itertools import islice
    from test_feed import open_feed

    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    if __name__ == "__main__":
        try:
            with open_feed(sys.argv[1], workers=2) as feed:
                if sys.argv[2] == "start":
                    while len(multiprocessing.active_children()) < 2:
                        pass
                else:
                    list(next(feed).batches)
                print(*(child.pid for child in multiprocessing.active_children()), flush=True)
                if sys.argv[2] == "go-on":
                    os.killpg(0, signal.SIGTERM)
                    for step in islice(feed, 5):
                        list(step.batches)
                    print("went on", len(asked), flush=True)
                else:
                    for step in feed:
                        list(step.batches)
        except KeyboardInterrupt:
            sys.exit(130)
"""


def program(store, folder, what):
    script = folder / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore::UserWarning", script, store, what],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )


def pids_of(running):
    return [int(pid) for pid in running.stdout.readline().split()]


def end_of(pids):
    from test_launch import is_alive

    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_readers_end_with_a_parent_that_is_killed(store, tmp_path):
    with program(store, tmp_path, "wait") as running:
        pids = pids_of(running)
        running.kill()
    assert len(pids) == 2
    assert end_of(pids)


@pytest.mark.parametrize("when", ["start", "wait"])
def test_ctrl_c_ends_all_without_a_word(store, tmp_path, when):
    """A terminal sends it to all processes of the command, some of which still import."""
    with program(store, tmp_path, when) as running:
        pids = pids_of(running)
        os.killpg(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, b"")
    assert end_of(pids)


def test_readers_go_on_when_a_launcher_asks_the_whole_rank_to_end(store, tmp_path):
    """The step that is under way is finished and saved first."""
    with program(store, tmp_path, "go-on") as running:
        pids = pids_of(running)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (0, b"went on 1\n", b"")
    assert end_of(pids)
