"""Speed of the row feed: a real int8 store, read by no, one and two processes.

    python tests/bench/feed.py [--tokens 32768] [--layers 5] [--width 5120] [--rows 32]
                               [--workers 0 1 2] [--folder DIR]

Prints one JSON line. The store has documents of 1,000 tokens in shards of 4,096, and is in the
page cache; rows are of 4,096 tokens with 512 anchors. GB are those of coded rows. By number of
processes: seconds to the first row (with processes, their start), and the rate after it, of the
faster of two turns.

On a GPU rows are decoded there (`device_ms`, alone and compiled). On a CPU they are not, and each
is copied once into fresh memory instead of pinned. `read_row` is one thread, one buffer.
"""

import argparse
import json
import shutil
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from store import encode_pieces, interleaved, make_dataset, states, write

from dflash_offline.batch import RowDecoder, RowShape, read_row, row_bytes
from dflash_offline.codec import make_codec
from dflash_offline.feed import RowFeed
from dflash_offline.shard_set import ShardSet
from dflash_offline.spec import DrafterSpec
from dflash_offline.world import World

SHAPE = RowShape(row_tokens=4096, anchors=512, gamma=7.0)
TURNS = 2


def make_store(folder, tokens, layers, width):
    """Shards that differ in their names alone."""
    taps = states(SHAPE.row_tokens, layers, width)
    codec = make_codec("int8", layers=layers, width=width, calibration=taps[:1024])
    dataset = make_dataset(folder, layers, width, codec)
    for name in ("manifest", "shards"):
        (folder / name).mkdir(exist_ok=True)
    pieces = list(encode_pieces(codec, taps, torch.device("cpu")))
    for number in range(tokens // SHAPE.row_tokens):
        write(dataset, f"shard-{number}", pieces)
    return ShardSet([folder])


def drafter_spec(shards):
    return DrafterSpec(
        target_layer_ids=shards.target_layer_ids, mask_token_id=1, block_size=16,
        num_target_layers=64, hidden_size=shards.target.hidden_size, vocab_size=2, mlp_width=64,
        heads=1, kv_heads=1, head_dim=64, layer_types=("full_attention",), sliding_window=None,
        rope_theta=1e7, rms_norm_eps=1e-6, max_position_embeddings=1 << 20,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def rate(shards, spec, workers, rows, device):
    """Seconds to the first row, and seconds a row after it."""
    started = time.perf_counter()
    with RowFeed(
        shards, spec=spec, shape=SHAPE, seed=0, first_row=0, rows_per_step=1,
        world=World(0, 1, device), device=device, workers=workers,
        compiled=device.type == "cuda",
    ) as feed:  # fmt: skip
        if device.type == "cpu":
            feed._decoder.decode = lambda row: row
        batches = (batch for step in feed for batch in step.batches)
        next(batches)
        first = time.perf_counter()
        for _ in islice(batches, rows):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize()
        return first - started, (time.perf_counter() - first) / rows


def bench_decoding(shards, spec, device):
    row = read_row(shards, [0, 1, 2, 3], spec=spec, shape=SHAPE, seed=0).to(device)
    whole = {name: RowDecoder(shards, device, compiled=name == "compiled")
             for name in ("alone", "compiled")}  # fmt: skip
    works = {name: (lambda d=decoder: d.decode(row)) for name, decoder in whole.items()}
    return {name: round(1e3 * s, 2) for name, s in interleaved(works, device).items()}


def bench(shards, workers, rows, device):
    spec = drafter_spec(shards)
    size = row_bytes(shards, spec=spec, shape=SHAPE)
    memory = torch.empty(size, dtype=torch.uint8)
    documents = [4, 9, 14, 19, 0] if len(shards) > 19 else [0, 1, 2, 3]
    read = {"read_row": lambda: read_row(shards, documents, spec=spec, shape=SHAPE, seed=0,
                                         memory=memory)}  # fmt: skip
    alone = interleaved(read, torch.device("cpu"))["read_row"]
    found = {}
    for count in workers:
        turns = [rate(shards, spec, count, rows, device) for _ in range(TURNS)]
        first, per_row = min(first for first, _ in turns), min(per_row for _, per_row in turns)
        found[count] = {
            "first_row_s": round(first, 2),
            "rows_per_s": round(1 / per_row, 2),
            "GBps": round(size / per_row / 1e9, 2),
        }
    facts = {"row_MB": round(size / 1e6, 1), "read_row_GBps": round(size / alone / 1e9, 2)}
    if device.type == "cuda":
        facts["device_ms"] = bench_decoding(shards, spec, device)
    return {**facts, "workers": found}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--rows", type=int, default=32, help="after the first one")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: /tmp")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        shards = make_store(folder, options.tokens, options.layers, options.width)
        found = bench(shards, options.workers, options.rows, device)
    finally:
        shutil.rmtree(folder)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    shape = [options.tokens, options.layers, options.width]
    print(json.dumps({"bench": "feed", "device": where, "store": shape, **found}))


if __name__ == "__main__":
    main()
