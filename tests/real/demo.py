"""The main job on a real language model, from conversations to an acceptance length.

    python tests/real/demo.py [--train-flags "--steps 600"]

Runs the product's own commands, one after another, as a user would type them; writes everything
below demo/ and ends with one line. With a GPU it trains for more steps.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = ROOT / "demo"
MASK_TOKEN = 16  # one of SmolLM2's 17 special tokens, which it was never trained to use

# A small drafter for a small target and narrow texts. Muon learns them far faster than AdamW does
# (acceptance length 5.5 against 3.5 after 1,000 steps).
DRAFTER = "--block-size 8 --layers 3 --heads 8 --kv-heads 4 --head-dim 64 --mlp-width 1536"
ROWS = "--sliding-layers 0 --rows-per-step 1 --row-tokens 1024 --anchors 96 --optimizer muon"
CPU_STEPS, GPU_STEPS = 300, 1000


def split_data() -> None:
    """demo/data/{train,heldout}.jsonl from the repository's one file."""
    folder = DEMO / "data"
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "heldout": []}
    for line in (Path(__file__).parent / "conversations.jsonl").read_text().splitlines():
        lines[json.loads(line)["split"]].append(line)
    for split, kept in lines.items():
        (folder / f"{split}.jsonl").write_text("\n".join(kept) + "\n")


def dflash(command: str) -> float:
    """Run one dflash-offline command; seconds it took. Ends the demo if the command fails."""
    print(f"\n$ dflash-offline {command}", flush=True)
    started = time.monotonic()
    program = Path(sys.executable).parent / "dflash-offline"
    done = subprocess.run([program, *shlex.split(command)], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"dflash-offline {command.split()[0]} failed with code {done.returncode}")
    return time.monotonic() - started


def seconds_of_matmul(dtype: torch.dtype) -> float:
    matrix = torch.ones(768, 768, dtype=dtype)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - started)
    return min(times)


def bf16_pays() -> bool:
    """False on processors without bf16 instructions, where it is emulated and slow."""
    if torch.cuda.is_available():
        return True
    return seconds_of_matmul(torch.bfloat16) < seconds_of_matmul(torch.float32)


def chosen_dtype() -> str:
    """As shards from an earlier demo have it; else the faster one."""
    earlier = DEMO / "shards" / "train.extract.json"
    if earlier.is_file():
        return str(json.loads(earlier.read_text())["dtype"])
    if bf16_pays():
        return "bfloat16"
    print("this processor multiplies float32 faster than bfloat16: using float32")
    return "float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train-flags", default="", help="more flags for train, at its end")
    options = parser.parse_args()
    steps = GPU_STEPS if torch.cuda.is_available() else CPU_STEPS
    dtype = chosen_dtype()
    precision = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    split_data()
    for leftover in ("run", "drafter"):
        shutil.rmtree(DEMO / leftover, ignore_errors=True)
    seconds = {}
    for split in ("train", "heldout"):
        seconds[f"extract {split}"] = dflash(
            f"extract --target demo/target --data demo/data/{split}.jsonl "
            f"--output demo/shards/{split} --dtype {dtype}"
        )
    dflash("inspect-shard demo/shards/heldout --target demo/target")
    seconds["train"] = dflash(
        "train --shards demo/shards/train --eval-shards demo/shards/heldout --target demo/target "
        f"--output demo/run --mask-token-id {MASK_TOKEN} --precision {precision} {DRAFTER} {ROWS} "
        f"--steps {steps} --gpus 1 {options.train_flags}"
    )
    shutil.copytree(DEMO / "run" / "drafter", DEMO / "drafter")
    seconds["evaluate"] = dflash(
        "evaluate --drafter demo/drafter --target demo/target --shards demo/shards/heldout "
        f"--output demo/evaluation.json --dtype {dtype}"
    )
    report = json.loads((DEMO / "evaluation.json").read_text())
    print("\n" + ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()))
    print(
        f"acceptance length {report['acceptance_length']:.2f} "
        f"(n-gram floor {report['ngram_acceptance_length']:.2f}) "
        f"on {report['heldout_tokens']} held-out tokens"
    )


if __name__ == "__main__":
    main()
