"""Speed of the store on this machine: codecs, writing, zarr's reader against the direct one.

    python tests/bench/store.py [--tokens 65536] [--layers 5] [--width 5120] [--folder DIR]
                                [--shards 10000]

Prints one JSON line. Rates are GB of bf16 a second, whatever the codec makes of them: medians of
interleaved rounds with the page cache warm, on one thread; without a GPU the codecs have one core.
Writing is the writer's part, states already encoded, until all is on the disk and committed;
`write_cores` is the processor time it takes over the time it takes. `open` is the time to open a
data set of --shards shards, copies of a small one.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from dflash_offline.codec import make_codec, measure
from dflash_offline.commit import manifest_line
from dflash_offline.dataset import Dataset
from dflash_offline.documents import Document
from dflash_offline.shard_set import ShardSet
from dflash_offline.shards import ShardReader, ShardWriter
from dflash_offline.spec import TargetSpec

ROUNDS, WRITES = 5, 3
CODECS = ("raw", "lossless", "int8")


def interleaved(works, device):
    """Median seconds of each work, measured in turns after one round to warm up."""
    times = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def states(tokens, layers, width):
    """Random states with loud channels and a sink token, in bf16."""
    g = torch.Generator().manual_seed(0)
    taps = torch.randn(tokens, layers, width, generator=g)
    taps *= torch.rand(layers, width, generator=g).mul(4).exp()
    taps[0] *= 100
    return taps.bfloat16()


def make_dataset(path, layers, width, codec):
    target = TargetSpec(
        name="bench", content_hash="", model_type="", num_layers=layers, hidden_size=width,
        mlp_width=None, vocab_size=2, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=1 << 20, bos_token_id=None, pad_token_id=None, eos_token_ids=(),
        tokenizer_hash="", template_hash="",
    )  # fmt: skip
    contract = {
        "target": target.to_dict(),
        "target_layer_ids": list(range(layers)),
        "layer_convention": "",
    }
    return Dataset.create_or_resume(
        path, contract=contract, make_codecs=lambda: (codec, None), provenance={}
    )


def write(dataset, name, pieces):
    """One shard of `pieces`: (document, planes, facts). Its record, seconds, processor seconds."""
    started, cpu = time.perf_counter(), time.process_time()
    with ShardWriter(dataset, name) as writer:
        for document, planes, facts in pieces:
            writer.append([document], planes, facts)
        record = writer.commit()
    return record, time.perf_counter() - started, time.process_time() - cpu


def bench_codec(name, taps, folder, device):
    tokens, layers, width = taps.shape
    size = taps.numel() * 2 / 1e9
    codec = make_codec(name, layers=layers, width=width, calibration=taps[:2048]).to(device)
    some = taps[: 4096 if device.type == "cuda" else 512].to(device)
    coded = codec.encode(some)
    coding = interleaved(
        {"encode": lambda: codec.encode(some), "decode": lambda: codec.decode(coded)}, device
    )
    dataset = make_dataset(folder / name, layers, width, codec.to("cpu"))
    pieces = list(encode_pieces(codec, taps, device))
    written = [write(dataset, f"shard-{turn}", pieces) for turn in range(WRITES)]
    reader = ShardReader(dataset, written[-1][0])
    rows = min(tokens, 16_384)
    ways = {
        "direct": lambda: reader.planes(0, rows),
        "zarr": lambda: [reader._arrays[plane][:rows] for plane in reader.codec.arrays()],
    }
    reading = interleaved(ways, torch.device("cpu"))
    read_size = size * rows / tokens
    writing = statistics.median(seconds for _, seconds, _ in written)
    return {
        "bytes_per_token": round(reader.bytes / tokens, 1),
        "write_GBps": round(size / writing, 2),
        "write_cores": round(sum(cpu for *_, cpu in written) / sum(s for _, s, _ in written), 2),
        **{f"{k}_GBps": round(size * len(some) / tokens / s, 2) for k, s in coding.items()},
        **{f"read_{k}_GBps": round(read_size / s, 2) for k, s in reading.items()},
        "direct_over_zarr": round(reading["zarr"] / reading["direct"], 2),
    }


def encode_pieces(codec, taps, device):
    """Documents of 1,000 tokens, as a writer is given them."""
    for index, part in enumerate(taps.split(1000)):
        part = part.to(device)
        planes = codec.encode(part)
        facts = measure(part, codec.decode(planes)).cpu()
        ids, mask = torch.zeros(len(part), dtype=torch.int32), torch.ones(len(part)).bool()
        cpu = {name: plane.cpu() for name, plane in planes.items()}
        yield Document(index, ids, mask), cpu, facts


def bench_opening(folder, shards):
    """Seconds to open a data set of many shards: hard links to the files of one."""
    taps = states(200, 1, 64)
    codec = make_codec("raw", layers=1, width=64)
    dataset = make_dataset(folder, 1, 64, codec)
    record, *_ = write(dataset, "shard-0", encode_pieces(codec, taps, torch.device("cpu")))
    (folder / "manifest").mkdir(exist_ok=True)
    lines = [manifest_line(record)]
    for number in range(1, shards):
        name = f"shard-{number}"
        shutil.copytree(
            dataset.shard_path("shard-0"), dataset.shard_path(name), copy_function=os.link
        )
        lines.append(manifest_line(dataclasses.replace(record, name=name)))
    (folder / "manifest/rank-00.jsonl").write_bytes(b"".join(lines))
    started = time.perf_counter()
    opened = ShardSet([folder])
    seconds = time.perf_counter() - started
    assert len(opened) == shards
    return {"shards": shards, "seconds": round(seconds, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--shards", type=int, default=10_000, help="to open at once")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: /tmp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        taps = states(options.tokens, options.layers, options.width)
        found = {name: bench_codec(name, taps, folder, device) for name in CODECS}
        opening = bench_opening(folder / "many", options.shards)
    finally:
        shutil.rmtree(folder)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core"
    shape = [options.tokens, options.layers, options.width]
    facts = {"bench": "store", "codecs_on": where, "shape": shape}
    print(json.dumps({**facts, "codecs": found, "open": opening}))


if __name__ == "__main__":
    main()
