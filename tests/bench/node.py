"""`dflash-offline extract` as a user types it, at the real size, on the GPUs of one host.

    python tests/bench/node.py --folder DIR [--gpus 2,1] [--rows 24] [--dtype bfloat16]

Writes random weights of Qwen3.6-27B's text tower up to its deepest tap (50 GB in bf16, a file per
layer, under the names of the multimodal wrapper) and, for each number of GPUs, as many documents
as keep each GPU busy for --rows rows of 16,384 tokens: lengths log-normal (median 1,200, up to
4,096 tokens), random ids. Then runs the command, the kernel's page cache emptied before, and
prints one JSON line: per number of GPUs the tokens a second (sum of the ranks', the shards' way to
the disk included), the GB/s at which each rank read its weights, seconds from start to first row
and to the end, and the largest memory of a rank.

Needs root to empty the page cache (without it, that is said), 50 GB of disk for the weights and
0.43 GB for each row and GPU.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from extract import TEXT, say
from safetensors.torch import save_file
from transformers import AutoConfig

from dflash_offline.heartbeat import read_heartbeat
from dflash_offline.skeleton import build_skeleton

LAYERS, DEPTH, VOCAB, LONGEST, ROW = 64, 62, 248_320, 4096, 16_384
PREFIX = "model.language_model."
START = "from dflash_offline.cli.main import main; main()"


def write_target(folder):
    """Config and weights, a file for each layer; the vision tower and the head are left out."""
    folder.mkdir(parents=True)
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4)
    text = {**TEXT, "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "layer_types": kinds}
    AutoConfig.for_model("qwen3_5", text_config=text).save_pretrained(folder)
    tower = build_skeleton(folder, depth=DEPTH, dtype=torch.bfloat16, trust_remote_code=False)
    parts = {}
    for name, shape in ((name, tensor.shape) for name, tensor in tower.state_dict().items()):
        part = name.split(".")[1] if name.startswith("layers.") else "ends"
        parts.setdefault(part, {})[name] = shape
    with ThreadPoolExecutor(4) as pool:
        writing = [
            pool.submit(write_part, folder / f"model-{i:05}.safetensors", shapes)
            for i, shapes in enumerate(parts.values())
        ]
        return sum(done.result() for done in writing)


def write_part(path, shapes):
    tensors = {PREFIX + name: random_weight(name, shape) for name, shape in shapes.items()}
    save_file(tensors, path)
    return path.stat().st_size


def random_weight(name, shape):
    """As a model is initialised: matrices by their width, norms near what leaves a state as is."""
    if len(shape) == 1:  # most norms multiply by 1 + weight, the gated one by its weight
        return torch.full(shape, float(name.endswith("linear_attn.norm.weight"))).bfloat16()
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return (values * shape[-1] ** -0.5).cpu()


def write_data(path, rows):
    """Documents of so many rows. All of their tokens count as answers."""
    g = torch.Generator().manual_seed(0)
    left = 0.98 * rows * ROW  # what packing leaves empty is less than that
    with path.open("w") as file:
        while left > 0:
            n = int((torch.randn((), generator=g) * 0.9).exp().mul(1200).clamp(16, LONGEST))
            ids = torch.randint(0, VOCAB, (n,), generator=g).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * n}) + "\n")
            left -= n


def empty_page_cache():
    try:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        say(f"page cache not emptied: {error}")


def extract(target, data, output, gpus, dtype):
    """Run the command; what it took, by its own output."""
    empty_page_cache()
    flags = ["--target", target, "--data", data, "--output", output, "--gpus", gpus]
    command = [sys.executable, "-c", START, "extract", *flags, "--dtype", dtype]
    started, first_row = time.monotonic(), None
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        threads = ThreadPoolExecutor(2)
        out, err = (threads.submit(read) for read in (process.stdout.read, process.stderr.read))
        while process.poll() is None:
            time.sleep(0.5)
            if first_row is None and beats(output, gpus):
                first_row = time.monotonic() - started
    said = err.result() + "".join(p.read_text() for p in logs(output).glob("rank-*.log"))
    say(said)
    if process.returncode:
        sys.exit(process.returncode)
    seconds = time.monotonic() - started
    rate = re.search(r"tokens_per_second\W+([\d.,e+]+)", out.result())[1]
    return {
        "tokens_per_second": round(float(rate.replace(",", ""))),
        "weights_gb_per_second": [float(x) for x in re.findall(r" s, ([\d.]+) GB/s", said)],
        "seconds_to_first_row": round(first_row or 0),
        "seconds": round(seconds),
        "rank_resident_gb": max(beat["resident_bytes"] for beat in all_beats(output, gpus)) / 1e9,
        "matmul_share": [
            round(beat.get("matmul_share", 0), 3) for beat in all_beats(output, gpus)
        ],
    }


def logs(output):
    return output.with_name(f"{output.name}.logs")


def all_beats(output, gpus):
    paths = [logs(output) / f"rank-{rank:02}.heartbeat.json" for rank in range(gpus)]
    return [beat for path in paths if (beat := read_heartbeat(path))]


def beats(output, gpus):
    """Whether every rank has run a row."""
    return sum("tokens" in beat for beat in all_beats(output, gpus)) == gpus


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gpus", default=",".join(map(str, {torch.cuda.device_count(), 1})))
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    target, started = options.folder / "target", time.monotonic()
    if not target.exists():
        size = write_target(target)
        say(f"wrote {size / 1e9:.1f} GB in {time.monotonic() - started:.0f} s")
    found = {}
    for gpus in map(int, options.gpus.split(",")):
        data, output = options.folder / f"{gpus}.jsonl", options.folder / f"shards-{gpus}"
        write_data(data, options.rows * gpus)
        found[gpus] = extract(target, data, output, gpus, options.dtype)
        say(json.dumps(found[gpus]))
        shutil.rmtree(output)
    line = {"bench": "node", "gpu": torch.cuda.get_device_name(), "dtype": options.dtype}
    if 1 in found:
        one = found[1]["tokens_per_second"]
        line["times_one"] = {n: round(f["tokens_per_second"] / one, 3) for n, f in found.items()}
    print(json.dumps({**line, "gpus": found}))


if __name__ == "__main__":
    main()
