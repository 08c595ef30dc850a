"""Speed of the store on this machine: codecs, writing, zarr's reader against the direct one.

    python tests/bench/store.py [--tokens 16384] [--layers 5] [--width 5120] [--folder DIR]

Prints one JSON line. Rates are GB of bf16 a second, whatever the codec makes of them: medians of
interleaved rounds with the page cache warm, on one thread; without a GPU the codecs have one core.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from dflash_offline.codec import make_codec, measure
from dflash_offline.conversations import Document
from dflash_offline.dataset import Dataset
from dflash_offline.shards import ShardReader, ShardWriter
from dflash_offline.spec import TargetSpec

ROUNDS = 5
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


def write(folder, name, taps):
    """One shard of one document; its reader, and the seconds of encoding and writing it."""
    tokens, layers, width = taps.shape
    codec = make_codec(name, layers=layers, width=width, calibration=taps[:2048])
    target = TargetSpec(
        name="bench", content_hash="", model_type="", num_layers=layers, hidden_size=width,
        mlp_width=None, vocab_size=2, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=tokens, bos_token_id=None, pad_token_id=None, eos_token_ids=(),
        tokenizer_hash="", template_hash="",
    )  # fmt: skip
    contract = {
        "target": target.to_dict(),
        "target_layer_ids": list(range(layers)),
        "layer_convention": "",
    }
    dataset = Dataset.create_or_resume(
        folder, contract=contract, make_codec=lambda: codec, provenance={}
    )
    mask = torch.ones(tokens, dtype=torch.bool)
    document = Document(0, torch.zeros(tokens, dtype=torch.int32), mask)
    started = time.perf_counter()
    with ShardWriter(dataset, "shard-000000") as writer:
        planes = codec.encode(taps)
        writer.append([document], planes, measure(taps, codec.decode(planes)))
        record = writer.commit()
    return ShardReader(dataset, record), time.perf_counter() - started


def bench_codec(name, taps, folder, device):
    tokens, size = len(taps), taps.numel() * 2 / 1e9
    reader, writing = write(folder / name, name, taps)
    some = taps[:1024].to(device)
    codec = reader.codec.to(device)
    planes = codec.encode(some)
    coding = interleaved(
        {"encode": lambda: codec.encode(some), "decode": lambda: codec.decode(planes)}, device
    )
    direct = reader._direct

    def read(paths):
        reader._direct = paths
        reader.planes(0, tokens)

    ways = {"direct": lambda: read(direct), "zarr": lambda: read({})}
    reading = interleaved(ways, torch.device("cpu"))
    return {
        "bytes_per_token": round(reader.bytes / tokens, 1),
        "encode_measure_write_GBps": round(size / writing, 2),
        **{f"{k}_GBps": round(size * len(some) / tokens / s, 2) for k, s in coding.items()},
        **{f"read_{k}_GBps": round(size / s, 2) for k, s in reading.items()},
        "direct_over_zarr": round(reading["zarr"] / reading["direct"], 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: /tmp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        taps = states(options.tokens, options.layers, options.width)
        found = {name: bench_codec(name, taps, folder, device) for name in CODECS}
    finally:
        shutil.rmtree(folder)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core"
    shape = [options.tokens, options.layers, options.width]
    print(json.dumps({"bench": "store", "codecs_on": where, "shape": shape, "codecs": found}))


if __name__ == "__main__":
    main()
