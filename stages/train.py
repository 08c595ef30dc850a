"""Stage two: shards -> drafter.

The page follows time: resolve what to train, feed rows, step, and once in a while log, evaluate
and save. Every rank runs the same page; rank 0 alone writes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_offline.anchors import (
    Blocks,
    default_gamma,
    eligible_positions,
    make_blocks,
    sample_anchors,
)
from dflash_offline.checkpoint import (
    TrainState,
    export_drafter,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from dflash_offline.config import TrainConfig
from dflash_offline.contract import check_mask_token, check_same_target
from dflash_offline.drafter import Drafter
from dflash_offline.loss import BlockLoss, block_loss
from dflash_offline.mask import Mask, attention_mask, block_mask_mod
from dflash_offline.metrics import Log, duration, say, write_json
from dflash_offline.optim import make_optimizers, rate, set_rate
from dflash_offline.packing import RowStream, load_row, load_taps
from dflash_offline.prefetch import prefetch
from dflash_offline.shards import ShardSet
from dflash_offline.spec import DrafterSpec, TargetSpec
from dflash_offline.target import FrozenEnds
from dflash_offline.world import World, current_world, join, leave

_EVAL_SEED_OFFSET = 1_000_003  # anchors of held-out rows: fixed for the whole run
_MAX_SKIPPED_STEPS = 10


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One row on the device, with its blocks."""

    taps_SM: Tensor
    document_ids_S: Tensor
    position_ids_S: Tensor
    blocks: Blocks
    weight: float
    """Sum of the block weights, known before the data reaches the device."""


@dataclass(frozen=True)
class Setup:
    """What a run trains with; made once, the same on every rank."""

    config: TrainConfig
    world: World
    spec: DrafterSpec
    shards: ShardSet
    heldout: ShardSet
    ends: FrozenEnds
    gamma: float

    @property
    def rows_per_rank(self) -> int:
        return self.config.rows_per_step // self.world.size


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
    if config.output.exists() and list_checkpoints(config.output) and not config.resume:
        raise ValueError(
            f"{config.output} already holds a run; go on with --resume or choose another --output"
        )
    target = TargetSpec.read(config.target)
    shards, heldout = ShardSet(config.shards), ShardSet(config.eval_shards)
    for data in (shards, heldout):
        check_same_target(data, target)
    if heldout.target_layer_ids != shards.target_layer_ids:
        raise ValueError(
            f"--eval-shards hold layers {list(heldout.target_layer_ids)}, --shards "
            f"{list(shards.target_layer_ids)}; extract both with the same --target-layer-ids"
        )
    spec = drafter_spec(config, target, shards)
    in_prompts = check_mask_token(shards, spec.mask_token_id)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    ends = FrozenEnds.load(config.target, device=world.device, dtype=dtype)
    setup = Setup(
        config, world, spec, shards, heldout, ends, config.gamma or default_gamma(spec.block_size)
    )
    if world.is_first:
        describe(setup, in_prompts)
    return setup


def drafter_spec(config: TrainConfig, target: TargetSpec, shards: ShardSet) -> DrafterSpec:
    """The drafter's shape. Its RoPE is plain even where the target's is partial or M-RoPE."""
    sliding = config.layers - 1 if config.sliding_layers is None else config.sliding_layers
    kinds = ["sliding_attention"] * sliding + ["full_attention"] * (config.layers - sliding)
    return DrafterSpec(
        target_layer_ids=shards.target_layer_ids,
        mask_token_id=target.resolve_mask_token(config.mask_token_id),
        block_size=config.block_size,
        num_target_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        mlp_width=config.mlp_width or target.mlp_width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layer_types=tuple(kinds),
        sliding_window=config.sliding_window if sliding else None,
        rope_theta=config.rope_theta or target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=target.tie_word_embeddings,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_ids[0] if target.eos_token_ids else None,
        pad_token_id=target.pad_token_id,
    )


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
    if mask_tokens_in_prompts:
        say(f"warning: the mask token stands {mask_tokens_in_prompts:,} times in prompts")


def start_or_resume(setup: Setup) -> TrainState:
    """Fresh weights from the seed, or the newest checkpoint."""
    config, world = setup.config, setup.world
    drafter = Drafter(setup.spec)
    drafter.init_weights(config.seed)
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
    return state


# Knobs that may change between a run and its continuation without changing what is learnt.
_FREE_KNOBS = {"shards", "eval_shards", "target", "output", "resume", "device"} | {
    *("log_every", "save_every", "keep_checkpoints", "eval_every", "eval_rows")
}


def resumable_facts(setup: Setup) -> dict[str, Any]:
    """What a checkpoint must agree with, besides the tensors' shapes."""
    knobs = {k: v for k, v in asdict(setup.config).items() if k not in _FREE_KNOBS}
    shards = setup.shards
    data = {"documents": len(shards), "tokens": int(shards.lengths.sum())}
    return {**knobs, "target": shards.target.content_hash, "data": data}


def make_micro_batch(
    setup: Setup, data: ShardSet, documents: Sequence[int], seed: int
) -> MicroBatch:
    """One row with anchors drawn from `seed` alone, whatever rank asks for it."""
    config, spec, device = setup.config, setup.spec, setup.world.device
    row = load_row(data, documents, config.row_tokens)
    generator = torch.Generator().manual_seed(seed)
    blocks = make_blocks(
        row,
        sample_anchors(eligible_positions(row), config.anchors, generator),
        slots=config.anchors,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        gamma=setup.gamma,
    )
    return MicroBatch(
        taps_SM=load_taps(data, documents, config.row_tokens, device),
        document_ids_S=row.document_ids_S.to(device),
        position_ids_S=row.position_ids_S.to(device),
        blocks=blocks.to(device),
        weight=float(blocks.weights_AK.sum()),
    )


def feed(setup: Setup, first_row: int, stream: RowStream) -> Iterator[list[MicroBatch]]:
    """This rank's rows of each step, from `first_row` on. Row n is the same whoever takes it."""
    config, world = setup.config, setup.world
    while True:
        rows = range(first_row + world.rank, first_row + config.rows_per_step, world.size)
        yield [
            make_micro_batch(setup, setup.shards, stream[n], config.seed * 1_000_000_007 + n)
            for n in rows
        ]
        first_row += config.rows_per_step


def masks_of(batch: MicroBatch, spec: DrafterSpec) -> dict[str, Mask]:
    """The attention mask of each kind of layer that the drafter has."""
    blocks, context = batch.blocks, len(batch.document_ids_S)
    queries = blocks.input_ids_AK.numel()
    masks = {}
    for kind in dict.fromkeys(spec.layer_types):
        window = spec.sliding_window if kind == "sliding_attention" else None
        sees = block_mask_mod(
            blocks.anchors_A, blocks.valid_A, batch.document_ids_S,
            block_size=spec.block_size, window=window,
        )  # fmt: skip
        masks[kind] = attention_mask(sees, queries, context + queries, batch.taps_SM.device)
    return masks


def row_loss(drafter: Drafter, ends: FrozenEnds, batch: MicroBatch, scale: float) -> BlockLoss:
    """Forward pass and loss of one row; `scale` is one over the global sum of weights."""
    blocks = batch.blocks
    hidden = drafter(
        batch.taps_SM[None],
        F.embedding(blocks.input_ids_AK.flatten(), ends.embedding)[None],
        context_positions_BS=batch.position_ids_S[None],
        block_positions_BQ=blocks.position_ids_AK.flatten()[None],
        masks=masks_of(batch, drafter.spec),
    )
    return block_loss(hidden[0], ends.lm_head, blocks, scale)


@dataclass(frozen=True, eq=False)
class StepResult:
    sums: BlockLoss
    gradient_norm: float
    skipped: bool


def train_step(setup: Setup, state: TrainState, batches: list[MicroBatch]) -> StepResult:
    """One optimizer step over the rows of all ranks: sums of gradients over one global weight."""
    config, world = setup.config, setup.world
    weight = torch.tensor(sum(b.weight for b in batches), dtype=torch.float64).to(world.device)
    scale = 1.0 / max(float(world.sum_(weight)), 1e-6)
    total = None
    for batch in batches:
        loss = row_loss(state.drafter, setup.ends, batch, scale)
        loss.loss.backward()  # type: ignore[no-untyped-call]
        packed = loss.packed()
        total = packed if total is None else total + packed
    assert total is not None
    world.sum_gradients(state.drafter.parameters())
    sums = BlockLoss.unpacked(world.sum_(total), setup.spec.block_size)

    norm = torch.nn.utils.clip_grad_norm_(state.drafter.parameters(), config.clip)
    finite = bool(torch.isfinite(norm))
    set_rate(state.optimizers, rate(state.step, config.steps, config.warmup))
    for optimizer in state.optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.rows += config.rows_per_step
    return StepResult(sums, float(norm), skipped=not finite)


@torch.no_grad()
def evaluate_heldout(setup: Setup, state: TrainState) -> BlockLoss:
    """Sums over the first held-out rows, the same rows and anchors every time."""
    config, world = setup.config, setup.world
    stream = RowStream(setup.heldout.lengths.tolist(), config.row_tokens, seed=config.seed)
    rows = range(world.rank, min(config.eval_rows, stream.rows_per_epoch), world.size)
    total = torch.zeros(4 + 6 * setup.spec.block_size, device=world.device)
    for n in rows:
        seed = config.seed + _EVAL_SEED_OFFSET + n
        batch = make_micro_batch(setup, setup.heldout, stream[n], seed)
        total += row_loss(state.drafter, setup.ends, batch, 1.0).packed()
    return BlockLoss.unpacked(world.sum_(total), setup.spec.block_size)


def quality(sums: BlockLoss, prefix: str = "") -> dict[str, float]:
    """Readable ratios of the sums. `streak` counts the target's own token: 1 = no draft was right.

    `sums.loss` is already divided by the global weight in training, not in evaluation.
    """
    slots = max(float(sums.slots_K.sum()), 1.0)
    top1, top4, top8 = (float(hits) / slots for hits in sums.top_hits_3K.sum(1))
    streak = 1.0 + float(sums.run) / max(float(sums.blocks), 1.0)
    return {
        f"{prefix}accuracy": top1,
        f"{prefix}top4": top4,
        f"{prefix}top8": top8,
        f"{prefix}streak": streak,
    }


class Pace:
    """Time since the last log line: what it was spent on, and what is left."""

    def __init__(self, first_step: int) -> None:
        self.started = self.since = time.monotonic()
        self.waited, self.first_step, self.last_step = 0.0, first_step, first_step

    def facts(self, state: TrainState, config: TrainConfig) -> dict[str, float]:
        now = time.monotonic()
        seconds, steps = max(now - self.since, 1e-9), state.step - self.last_step
        overall = (now - self.started) / max(state.step - self.first_step, 1)
        facts = {
            "elapsed": now - self.started,
            "tokens_per_second": steps * config.rows_per_step * config.row_tokens / seconds,
            "seconds_per_step": seconds / max(steps, 1),
            "data_wait": self.waited / seconds,
            "eta": overall * (config.steps - state.step),
        }
        self.since, self.waited, self.last_step = now, 0.0, state.step
        return facts


def log_line(state: TrainState, facts: dict[str, Any], steps: int) -> str:
    return (
        f"{duration(facts['elapsed']):>8}  step {state.step:,}/{steps:,}  "
        f"loss {facts['loss']:.3f}  acc {facts['accuracy']:.3f}  streak {facts['streak']:.2f}  "
        f"lr x{facts['rate']:.3f}  grad {facts['gradient_norm']:.2f}  "
        f"{facts['tokens_per_second'] / 1e3:.1f} Ktok/s  wait {facts['data_wait']:.0%}  "
        f"epoch {facts['epoch']:.2f}  eta {duration(facts['eta'])}"
    )


def run(setup: Setup, state: TrainState) -> dict[str, Any]:
    """The loop, from `state.step` to the last step; then the export."""
    config, world = setup.config, setup.world
    if world.is_first:
        config.output.mkdir(parents=True, exist_ok=True)
        write_json(config.output / "config.json", asdict(config))
    log = Log(config.output / "log.jsonl" if world.is_first else None)
    stream = RowStream(setup.shards.lengths.tolist(), config.row_tokens, seed=config.seed)
    pace = Pace(state.step)
    skipped = skipped_in_a_row = 0
    heldout: dict[str, float] = {}
    with prefetch(feed(setup, state.rows, stream)) as batches:
        while state.step < config.steps:
            waiting = time.monotonic()
            batch = next(batches)
            pace.waited += time.monotonic() - waiting
            result = train_step(setup, state, batch)

            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            skipped += result.skipped
            if skipped_in_a_row > _MAX_SKIPPED_STEPS:
                raise ValueError(
                    f"the gradient was not finite {skipped_in_a_row} steps in a row (step "
                    f"{state.step}); lower --lr or look at the shards with inspect-shard"
                )
            last = state.step == config.steps
            if state.step % config.log_every == 0 or state.step == 1 or last:
                facts: dict[str, Any] = {
                    "step": state.step,
                    "loss": float(result.sums.loss),
                    **quality(result.sums),
                    "rate": rate(state.step - 1, config.steps, config.warmup),
                    "gradient_norm": result.gradient_norm,
                    "skipped_steps": skipped,
                    "epoch": stream.epoch(state.rows),
                    **pace.facts(state, config),
                }
                log.write(facts, log_line(state, facts, config.steps))
            if state.step % config.eval_every == 0 or last:
                heldout = log_heldout(log, state, evaluate_heldout(setup, state))
            if world.is_first and (state.step % config.save_every == 0 or last):
                save_checkpoint(
                    config.output, state, resumable_facts(setup), keep=config.keep_checkpoints
                )
    log.close()
    world.barrier()
    return finish(setup, state, heldout, skipped, time.monotonic() - pace.started)


def log_heldout(log: Log, state: TrainState, sums: BlockLoss) -> dict[str, float]:
    loss = float(sums.loss) / max(float(sums.weight), 1e-6)
    facts = {"heldout_loss": loss, **quality(sums, "heldout_")}
    log.write(
        {"step": state.step, **facts},
        f"held-out at step {state.step:,}: loss {loss:.3f}  acc {facts['heldout_accuracy']:.3f}  "
        f"streak {facts['heldout_streak']:.2f}",
    )
    return facts


def finish(
    setup: Setup, state: TrainState, heldout: dict[str, float], skipped: int, seconds: float
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
        **{name.replace("_", " "): value for name, value in heldout.items()},
        "seconds": seconds,
        "drafter": str(folder),
    }
