"""What acceptance length does a drafter earn on held-out documents?"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_offline.acceptance import (
    Outcome,
    find_requests,
    mean_acceptance,
    ngram_outcome,
    replay,
)
from dflash_offline.checkpoint import load_drafter
from dflash_offline.config import EvaluateConfig
from dflash_offline.contract import (
    check_drafter,
    check_mask_token,
    check_same_target,
    doubts,
)
from dflash_offline.facts import read_json
from dflash_offline.files import write_json
from dflash_offline.loss import TOP
from dflash_offline.metrics import progress, say
from dflash_offline.shard_set import ShardSet
from dflash_offline.spec import TargetSpec
from dflash_offline.target import FrozenEnds
from dflash_offline.world import current_world


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Write `config.output` (evaluation.json) and return the headline facts."""
    started = time.monotonic()
    world = current_world(config.device)
    if world.size > 1:
        raise ValueError("evaluate runs in one process; start it without torchrun")
    device = world.device
    dtype = getattr(torch, config.dtype)
    check_report_path(config.output)
    shards = ShardSet(config.shards)
    for warning in doubts(shards):
        say(warning)
    drafter = load_drafter(config.drafter, device=device, dtype=dtype)
    target = TargetSpec.read(config.target)
    check_same_target(shards, target)
    check_drafter(drafter.spec, shards)
    check_mask_token(shards, drafter.spec.mask_token_id, world)
    ends = FrozenEnds.load(config.target, device=device, dtype=dtype)
    block_size = config.block_size or drafter.spec.block_size

    requests = [r for i in range(len(shards)) for r in find_requests(i, shards.tokens(i)[1])]
    if not requests:
        raise ValueError("the data sets hold no turn of two tokens or more; nothing to replay")
    total = sum(r.stop - r.start for r in requests)
    with progress("replaying", total=total, unit="tok") as bar:
        outcomes, sums = replay(
            drafter, ends, shards, requests,
            block_size=block_size, batch_tokens=config.batch_tokens, advance=bar.advance,
        )  # fmt: skip
    floor = []
    with progress("looking up n-grams", total=total, unit="tok") as bar:
        for request in requests:
            ids = shards.tokens(request.document)[0].tolist()
            floor.append(ngram_outcome(request, ids, block_size))
            bar.advance(request.stop - request.start)

    report = build_report(shards, outcomes, floor, sums, block_size)
    write_json(config.output, report)
    resolved = {**asdict(config), "block_size": block_size}
    write_json(config.output.with_suffix(".config.json"), resolved)
    facts = {name: value for name, value in report.items() if name not in ("slots", "documents")}
    return {**facts, "seconds": time.monotonic() - started, "written to": str(config.output)}


def check_report_path(path: Path) -> None:
    """ValueError if writing to `path` would destroy anything but an earlier report."""
    if path.is_dir() or not path.name:
        raise ValueError(f"--output {path} is a folder; name a JSON file")
    if path.exists() and "acceptance_length" not in read_json(path):
        raise ValueError(f"--output {path} exists and is no evaluation; choose another name")


def build_report(
    shards: ShardSet,
    outcomes: list[Outcome],
    floor: list[Outcome],
    sums: dict[str, Tensor],
    block_size: int,
) -> dict[str, Any]:
    """evaluation.json, as README describes it."""
    mean, pooled = mean_acceptance(outcomes)
    floor_mean, floor_pooled = mean_acceptance(floor)
    slots = [
        {
            "slot": j,
            "count": int(sums["slots_K"][j]),
            "reached": int(sums["reached_K"][j]),
            "hits_given_all_before": int(sums["reached_hits_K"][j]),
            **{f"top{k}_hits": int(sums["top_hits_3K"][i, j]) for i, k in enumerate(TOP)},
        }
        for j in range(1, block_size)
    ]
    return {
        "acceptance_length": mean,
        "acceptance_length_pooled": pooled,
        "ngram_acceptance_length": floor_mean,
        "ngram_acceptance_length_pooled": floor_pooled,
        "heldout_tokens": int(sum(o.request.stop - o.request.start for o in outcomes)),
        "block_size": block_size,
        "requests": len(outcomes),
        "slots": slots,
        "documents": _by_document(shards, outcomes),
    }


def _by_document(shards: ShardSet, outcomes: list[Outcome]) -> list[dict[str, Any]]:
    groups: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.request.document, []).append(outcome)
    documents = [
        {
            "id": shards.document_index(document),
            "shards": str(shards.data_set(document)),
            "acceptance_length": mean_acceptance(group)[0],
            "cycles": sum(o.cycles for o in group),
            "tokens": sum(o.tokens for o in group),
        }
        for document, group in groups.items()
    ]
    return sorted(documents, key=lambda d: (d["shards"], d["id"]))
