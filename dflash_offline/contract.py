"""Checks at each hand-over: shards, target and drafter belong together, or the run is refused."""

import torch

from dflash_offline.shard_set import ShardSet
from dflash_offline.spec import DrafterSpec, TargetSpec
from dflash_offline.world import World


def check_same_target(shards: ShardSet, target: TargetSpec) -> None:
    """Refuse shards of another target: their hidden states would mean nothing to this one."""
    stored = shards.target
    if stored.content_hash != target.content_hash:
        raise ValueError(
            f"the shards were extracted from {stored.name} (content {stored.content_hash[:12]}), "
            f"--target {target.name} has content {target.content_hash[:12]}; "
            "use the folder they came from, or extract again"
        )


def check_drafter(spec: DrafterSpec, shards: ShardSet) -> None:
    """Refuse a drafter that reads other layers, or of another width, than the shards hold."""
    if spec.target_layer_ids != shards.target_layer_ids:
        raise ValueError(
            f"the drafter reads layers {list(spec.target_layer_ids)}, the shards hold "
            f"{list(shards.target_layer_ids)}; extract the drafter's layers"
        )
    drafter = (spec.hidden_size, spec.vocab_size)
    stored = (shards.target.hidden_size, shards.target.vocab_size)
    if drafter != stored:
        raise ValueError(
            f"the drafter's width and vocabulary are {drafter}, the shards' target's {stored}"
        )


def doubts(shards: ShardSet, first: ShardSet | None = None) -> list[str]:
    """Warnings: data sets with fewer documents than were planned, or computed another way.

    They are held against the first data set of `first`, or of their own.
    """
    unfinished = [
        f"warning: {path} holds {stored:,} of {planned:,} documents; extract is unfinished, or "
        "left out broken ones"
        for path, stored, planned in shards.coverage()
        if planned is not None and stored < planned
    ]
    return unfinished + [
        f"warning: {path} was made with {field} = {value!r}, the first data set with {old!r}; "
        "their states round differently"
        for path, field, old, value in shards.other_rounding(first or shards)
    ]


def check_mask_token(shards: ShardSet, token: int, world: World) -> int:
    """How often `token` stands in prompts. Refused where the target produced it.

    A drafter that sees the mask token as a real token cannot tell an answer from a blank. Each
    rank reads the tokens of its share of the shards.
    """
    counts = torch.zeros(2, dtype=torch.int64)  # in all, and in what the target produced
    for ids, mask in shards.shard_tokens(world.rank, world.size):
        found = ids == token
        counts += torch.stack([found.sum(), (found & mask).sum()])
    in_all, produced = world.sum_(counts.to(world.device)).tolist()
    if produced:
        raise ValueError(
            f"mask token {token} is a token that the target produced, {produced:,} times in these "
            "shards; choose one that it never uses (--mask-token-id of train)"
        )
    return int(in_all)
