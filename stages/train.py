"""Stage two: shards -> drafter.

The page follows time: resolve what to train, feed rows, step, and once in a while log, evaluate
and save. Every rank runs the same page; rank 0 alone writes.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_offline.anchors import default_gamma
from dflash_offline.batch import Batch, RowShape, load_batch
from dflash_offline.checkpoint import (
    TrainState,
    export_drafter,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from dflash_offline.config import TrainConfig
from dflash_offline.contract import check_mask_token, check_same_target, doubts
from dflash_offline.drafter import Drafter
from dflash_offline.files import write_json
from dflash_offline.loss import BlockLoss
from dflash_offline.metrics import Log, Pace, duration, progress, say
from dflash_offline.optim import make_optimizers, rate
from dflash_offline.packing import RowStream
from dflash_offline.prefetch import prefetch
from dflash_offline.shard_set import ShardIndex, ShardSet
from dflash_offline.spec import DrafterSpec, TargetSpec
from dflash_offline.step import StepResult, row_loss, train_step
from dflash_offline.target import FrozenEnds
from dflash_offline.world import World, current_world, join, leave

_SEED_STRIDE = 1_000_000_007  # keeps the anchors of different seeds apart
_MAX_SKIPPED_STEPS = 10


@dataclass(frozen=True)
class Setup:
    """What a run trains with; made once, the same on every rank."""

    config: TrainConfig
    world: World
    spec: DrafterSpec
    shards: ShardSet
    heldout: ShardSet
    ends: FrozenEnds
    shape: RowShape

    def batch(self, data: ShardSet, documents: list[int], seed: int) -> Batch:
        device = self.world.device
        return load_batch(
            data, documents, spec=self.spec, shape=self.shape, seed=seed, device=device
        )


def train(config: TrainConfig) -> dict[str, Any]:
    """Train, evaluate, save and export. Returns the summary on rank 0 and {} elsewhere."""
    world = current_world(config.device)
    join(world)
    try:
        setup = prepare(config, world)
        state = start_or_resume(setup)
        return run(setup, state)
    finally:
        leave(world)


def prepare(config: TrainConfig, world: World) -> Setup:
    """Open the shards and the target's ends, and check that they belong together."""
    if config.rows_per_step % world.size:
        raise ValueError(
            f"--rows-per-step {config.rows_per_step} is no multiple of the {world.size} ranks"
        )
    if world.is_first:
        check_run_folder(config)
    target = TargetSpec.read(config.target)
    shards, heldout = (open_shards(paths, world) for paths in (config.shards, config.eval_shards))
    for data in (shards, heldout):
        check_same_target(data, target)
    if heldout.target_layer_ids != shards.target_layer_ids:
        raise ValueError(
            f"--eval-shards hold layers {list(heldout.target_layer_ids)}, --shards "
            f"{list(shards.target_layer_ids)}; extract both with the same --target-layer-ids"
        )
    mask_token = target.resolve_mask_token(config.mask_token_id)
    in_prompts = sum(check_mask_token(data, mask_token, world) for data in (shards, heldout))
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    ends = FrozenEnds.load(config.target, device=world.device, dtype=dtype)
    spec = drafter_spec(config, target, shards.target_layer_ids, mask_token, tied=ends.tied)
    gamma = config.gamma or default_gamma(config.block_size)
    shape = RowShape(config.row_tokens, config.anchors, gamma)
    setup = Setup(config, world, spec, shards, heldout, ends, shape)
    if world.is_first:
        describe(setup, in_prompts)
    return setup


def open_shards(paths: tuple[Path, ...], world: World) -> ShardSet:
    """The data sets, their shards looked at by rank 0 alone."""
    return ShardSet(paths, index=world.from_first(lambda: ShardIndex.read(paths)))


def check_run_folder(config: TrainConfig) -> None:
    """ValueError if a run in --output would destroy what is there: another run, or other files."""
    output = config.output
    if list_checkpoints(output) and not config.resume:
        raise ValueError(
            f"{output} already holds a run; go on with --resume or choose another --output"
        )
    is_run = (output / "log.jsonl").is_file() or (output / "checkpoints").is_dir()
    if output.exists() and not is_run and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} is no run and not empty; choose another folder")


def drafter_spec(
    config: TrainConfig,
    target: TargetSpec,
    layer_ids: tuple[int, ...],
    mask_token_id: int,
    *,
    tied: bool,
) -> DrafterSpec:
    """The drafter's shape. Its RoPE is plain even where the target's is partial or M-RoPE."""
    mlp_width = config.mlp_width or target.mlp_width
    if mlp_width is None:
        raise ValueError(f"{target.name} has no dense MLP to copy the width of; name --mlp-width")
    sliding = config.layers - 1 if config.sliding_layers is None else config.sliding_layers
    kinds = ["sliding_attention"] * sliding + ["full_attention"] * (config.layers - sliding)
    return DrafterSpec(
        target_layer_ids=layer_ids,
        mask_token_id=mask_token_id,
        block_size=config.block_size,
        num_target_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        mlp_width=mlp_width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layer_types=tuple(kinds),
        sliding_window=config.sliding_window if sliding else None,
        rope_theta=config.rope_theta or target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=tied,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_ids[0] if target.eos_token_ids else None,
        pad_token_id=target.pad_token_id,
    )


def resolved_config(setup: Setup) -> dict[str, Any]:
    """Every knob as it is used: what the defaults became for this target and these shards."""
    spec = setup.spec
    return {
        **asdict(setup.config),
        "mask_token_id": spec.mask_token_id,
        "mlp_width": spec.mlp_width,
        "sliding_layers": spec.layer_types.count("sliding_attention"),
        "rope_theta": spec.rope_theta,
        "gamma": setup.shape.gamma,
        "target_layer_ids": spec.target_layer_ids,
        "world_size": setup.world.size,
    }


def describe(setup: Setup, mask_tokens_in_prompts: int) -> None:
    """Say what is about to happen, and whatever a user would not expect."""
    config, shards, world = setup.config, setup.shards, setup.world
    kernels = "flex_attention, compiled" if world.device.type == "cuda" else "SDPA, dense mask"
    say(
        f"training on {len(shards):,} documents ({int(shards.lengths.sum()):,} tokens, "
        f"{int(shards.supervised.sum()):,} supervised), {world.size} x {world.device.type}, "
        f"attention: {kernels}, precision: {config.precision}"
    )
    cut = int((shards.lengths > config.row_tokens).sum())
    if cut:
        say(f"warning: {cut:,} documents are longer than --row-tokens and are cut to it")
    for warning in doubts(shards) + doubts(setup.heldout, shards):
        say(warning)
    same_folder = {p.resolve() for p in config.shards} & {p.resolve() for p in config.eval_shards}
    if same_folder or shards.data_hashes() & setup.heldout.data_hashes():
        say("warning: held-out data is also trained on, so held-out figures mean nothing")
    if mask_tokens_in_prompts:
        say(f"warning: the mask token stands {mask_tokens_in_prompts:,} times in prompts")


def start_or_resume(setup: Setup) -> TrainState:
    """Fresh weights from the seed, or the newest checkpoint."""
    config, world = setup.config, setup.world
    drafter = Drafter(setup.spec)
    drafter.init_weights(config.seed, setup.ends.lm_head)
    drafter.to(world.device)
    state = TrainState(drafter, make_optimizers(drafter, config))
    checkpoints = list_checkpoints(config.output)
    if config.resume and checkpoints:
        load_checkpoint(checkpoints[-1], state, resumable_facts(setup))
        if world.is_first:
            say(f"resumed {checkpoints[-1].name}: step {state.step:,}, {state.rows:,} rows")
    elif config.resume and world.is_first:
        say(f"warning: --resume, but {config.output} holds no checkpoint; starting from scratch")
    if world.device.type == "cuda":
        drafter.compile_layers()
        if world.is_first:
            say("compiling for fixed shapes in the first step: minutes, unless it is cached")
    return state


# Knobs that may change between a run and its continuation without changing what is learnt.
_FREE_KNOBS = {
    "shards",
    "eval_shards",
    "target",
    "output",
    "resume",
    "device",
    "log_every",
    "save_every",
    "keep_checkpoints",
    "eval_every",
    "eval_rows",
}


def resumable_facts(setup: Setup) -> dict[str, Any]:
    """What a checkpoint must agree with, besides the tensors' shapes."""
    knobs = {k: v for k, v in asdict(setup.config).items() if k not in _FREE_KNOBS}
    return {**knobs, "content of --shards": setup.shards.identity()}


@dataclass(frozen=True, eq=False)
class StepRows:
    """This rank's rows of one step; `epoch`: how many epochs are done after it."""

    batches: list[Batch]
    epoch: float


def feed(setup: Setup, first_row: int) -> Iterator[StepRows]:
    """The rows of each step, from `first_row` on. Row n is the same whoever takes it."""
    config, world = setup.config, setup.world
    stream = RowStream(setup.shards.lengths.tolist(), config.row_tokens, seed=config.seed)
    while True:
        rows = range(first_row + world.rank, first_row + config.rows_per_step, world.size)
        batches = [
            setup.batch(setup.shards, stream[n], config.seed * _SEED_STRIDE + n) for n in rows
        ]
        first_row += config.rows_per_step
        yield StepRows(batches, stream.epoch(first_row))


@torch.no_grad()
def evaluate_heldout(setup: Setup, state: TrainState) -> BlockLoss:
    """Sums over the first held-out rows, the same rows and anchors every time."""
    config, world = setup.config, setup.world
    stream = RowStream(setup.heldout.lengths.tolist(), config.row_tokens, seed=config.seed)
    rows = range(world.rank, min(config.eval_rows, stream.rows_per_epoch), world.size)
    total = torch.zeros(BlockLoss.packed_size(setup.spec.block_size), device=world.device)
    with progress("evaluating held-out", total=len(rows), unit="rows") as bar:
        for n in rows:
            batch = setup.batch(setup.heldout, stream[n], seed=n)  # the same anchors every time
            total += row_loss(state.drafter, setup.ends, batch, 1.0).packed()
            bar.advance()
    sums = BlockLoss.unpacked(world.sum_(total), setup.spec.block_size)
    if sums.weight == 0:
        raise ValueError(
            "the held-out rows hold no token to learn; raise --row-tokens or --eval-rows, or look "
            "at --eval-shards with inspect-shard"
        )
    return sums


class SkippedSteps:
    """Steps that changed nothing; too many in a row end the run."""

    def __init__(self) -> None:
        self.total = self._in_a_row = 0

    def count(self, result: StepResult, step: int) -> None:
        self.total += bool(result.skipped)
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        if self._in_a_row >= _MAX_SKIPPED_STEPS:
            raise ValueError(
                f"{self._in_a_row} steps in a row changed nothing (to step {step}, the last: "
                f"{result.skipped}); lower --lr, raise --row-tokens, or look at the shards with "
                "inspect-shard"
            )

    def refuse_all(self, steps: int) -> None:
        """ValueError if none of this process's steps did anything."""
        if steps and self.total == steps:
            raise ValueError(
                f"none of {steps} steps changed anything; raise --row-tokens, or look at the "
                "shards with inspect-shard"
            )


def run(setup: Setup, state: TrainState) -> dict[str, Any]:
    """The loop, from `state.step` to the last step; then the export."""
    config, world = setup.config, setup.world
    if world.is_first:
        config.output.mkdir(parents=True, exist_ok=True)
        if state.step == config.steps:
            say("this run is finished already; exporting its drafter again")
    pace, skipped = Pace(state.step), SkippedSteps()
    first_step, resumable = state.step + 1, resumable_facts(setup)
    quality: dict[str, float] = {}
    log_path = config.output / "log.jsonl" if world.is_first else None
    with Log(log_path) as log, prefetch(feed(setup, state.rows)) as steps:
        if world.is_first:
            write_json(config.output / "config.json", resolved_config(setup))
        while state.step < config.steps:
            rows = pace.wait_for(steps)
            share = rate(state.step, config.steps, config.warmup)
            result = train_step(
                state, rows.batches, ends=setup.ends, world=world, rate=share, clip=config.clip
            )
            state.rows += config.rows_per_step
            skipped.count(result, state.step)

            last = state.step == config.steps
            if state.step % config.log_every == 0 or state.step == first_step or last:
                extra = {"rate": share, "skipped_steps": skipped.total, "epoch": rows.epoch}
                tokens = config.rows_per_step * config.row_tokens
                extra |= pace.facts(state.step, config.steps, tokens)
                log_step(log, state.step, config.steps, result, extra)
            if state.step % config.eval_every == 0 or last:
                quality = log_heldout(log, state, evaluate_heldout(setup, state))
            if world.is_first and (state.step % config.save_every == 0 or last):
                save_checkpoint(config.output, state, resumable, keep=config.keep_checkpoints)
    skipped.refuse_all(state.step - first_step + 1)
    world.barrier()  # the others must not leave while rank 0 still saves
    return finish(setup, state, quality, skipped.total, time.monotonic() - pace.started)


def log_step(log: Log, step: int, steps: int, result: StepResult, extra: dict[str, float]) -> None:
    facts: dict[str, Any] = {
        "step": step,
        "loss": float(result.sums.loss),
        **result.sums.ratios(),
        "gradient_norm": result.gradient_norm,
        **extra,
    }
    line = (
        f"{duration(facts['elapsed']):>8}  step {step:,}/{steps:,}  "
        f"loss {facts['loss']:.3f}  acc {facts['accuracy']:.3f}  streak {facts['streak']:.2f}  "
        f"lr x{facts['rate']:.3f}  grad {facts['gradient_norm']:.2f}  "
        f"{facts['tokens_per_second'] / 1e3:.1f} Ktok/s  wait {facts['data_wait']:.0%}  "
        f"epoch {facts['epoch']:.2f}  eta {duration(facts['eta'])}"
    )
    skipped = f"  skipped {facts['skipped_steps']}" if facts["skipped_steps"] else ""
    log.write(facts, line + skipped)


def log_heldout(log: Log, state: TrainState, sums: BlockLoss) -> dict[str, float]:
    loss = float(sums.loss) / max(float(sums.weight), 1e-6)
    facts = {"heldout_loss": loss, **sums.ratios("heldout_")}
    log.write(
        {"step": state.step, **facts},
        f"held-out at step {state.step:,}: loss {loss:.3f}  acc {facts['heldout_accuracy']:.3f}  "
        f"streak {facts['heldout_streak']:.2f}",
    )
    return facts


def finish(
    setup: Setup, state: TrainState, quality: dict[str, float], skipped: int, seconds: float
) -> dict[str, Any]:
    if not setup.world.is_first:
        return {}
    folder: Path = setup.config.output / "drafter"
    export_drafter(state.drafter, folder)
    return {
        "steps": state.step,
        "rows": state.rows,
        "parameters": sum(p.numel() for p in state.drafter.parameters()),
        "skipped steps": skipped,
        **{name.replace("_", " "): value for name, value in quality.items()},
        "seconds": seconds,
        "drafter": str(folder),
    }
