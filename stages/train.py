"""Stage two: shards -> drafter.

The page follows time: resolve what to train, feed rows, step, and once in a while log, evaluate
and save. Every rank runs the same page; rank 0 alone speaks and writes.
"""

import math
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_offline.acceptance import Request, find_requests, replay
from dflash_offline.anchors import default_gamma, sampling_rate
from dflash_offline.batch import Batch, RowShape, load_batch
from dflash_offline.beside import logs_path
from dflash_offline.checkpoint import (
    TrainState,
    export_drafter,
    forget_best,
    list_checkpoints,
    load_warm_start,
    resume_newest,
    save_best,
    save_checkpoint,
)
from dflash_offline.config import TrainConfig, arguments_of
from dflash_offline.contract import check_mask_token, check_same_target, doubts
from dflash_offline.drafter import Drafter
from dflash_offline.elastic import is_restart, last_words_in_log, run_on_all
from dflash_offline.feed import RowFeed
from dflash_offline.files import write_json
from dflash_offline.head import Head
from dflash_offline.loss import BlockLoss, Objective
from dflash_offline.matmul_rate import measure_matmul_rate
from dflash_offline.metrics import Log, Pace, bytes_text, duration, phase, progress, say
from dflash_offline.optim import make_optimizers, noise_share, rate
from dflash_offline.packing import RowStream
from dflash_offline.shard_set import ShardIndex, ShardSet
from dflash_offline.spec import DrafterSpec, TargetSpec
from dflash_offline.step import Noise, StepResult, Task, row_loss, train_step
from dflash_offline.stopping import StopRequest
from dflash_offline.target import FrozenEnds, load_final_norm
from dflash_offline.tracker import Tracker
from dflash_offline.world import World, current_world, join, leave, processes_of_host

_NOISE_STRIDE = 1_000_003  # keeps the noise of different seeds apart
_SECONDS_TO_SAVE = 300.0
_READERS = 4


@dataclass(frozen=True)
class Setup:
    """What a run trains with; made once, the same on every rank."""

    config: TrainConfig
    world: World
    spec: DrafterSpec
    shards: ShardSet
    heldout: ShardSet
    ends: FrozenEnds
    task: Task
    shape: RowShape
    replayed: list[Request]
    """Turns of held-out documents, for the acceptance length while training."""


def train(config: TrainConfig) -> dict[str, Any]:
    """Train, evaluate, save and export, on all GPUs of this host.

    Returns the summary where it trains as rank 0, and {} elsewhere: a process that a launcher
    started (torchrun, or this function) trains as its rank.
    """
    logs = logs_path(config.output)
    size = processes_of_host(config.gpus, config.device)
    if size > 1:
        check_rows(config, size)
        run_on_all(
            ["train", *arguments_of(config)],
            processes=size,
            max_restarts=config.max_restarts,
            logs=logs,
            seconds_to_stop=_SECONDS_TO_SAVE,
        )
        return {}
    world = current_world(config.device)
    with last_words_in_log(logs):
        join(world)
        try:
            setup = prepare(replace(config, resume=config.resume or is_restart()), world)
            return run(setup, start_or_resume(setup))
        finally:
            leave(world)


def prepare(config: TrainConfig, world: World) -> Setup:
    """Open the shards and the target's ends, and check that they belong together."""
    check_rows(config, world.size)
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
    ends = FrozenEnds.load(config.target, device=world.device, dtype=dtype_of(config))
    spec = drafter_spec(config, target, shards.target_layer_ids, mask_token, tied=ends.tied)
    setup = Setup(
        config,
        world,
        spec,
        shards,
        heldout,
        ends,
        make_task(config, world, spec, shards, ends),
        row_shape(config, shards),
        replayed_requests(heldout, config.eval_documents),
    )
    if world.is_first:
        describe(setup, in_prompts)
    return setup


def check_rows(config: TrainConfig, ranks: int) -> None:
    """ValueError if ranks would have to take unlike numbers of rows."""
    if config.rows_per_step % ranks:
        raise ValueError(
            f"--rows-per-step {config.rows_per_step} is no multiple of the {ranks} ranks; change "
            "it, or how many take part (--gpus)"
        )


def dtype_of(config: TrainConfig) -> torch.dtype:
    """What is not multiplied in fp8 is bfloat16."""
    return torch.float32 if config.precision == "fp32" else torch.bfloat16


def make_task(
    config: TrainConfig, world: World, spec: DrafterSpec, shards: ShardSet, ends: FrozenEnds
) -> Task:
    """The objective, and what it needs of the target."""
    distils = config.objective == "kl"
    norm = None
    if distils and shards.final_norm() == "before-norm":
        norm = load_final_norm(config.target, device=world.device, dtype=dtype_of(config))
    return Task(
        spec,
        ends.embedding,
        Head(ends.lm_head, compiled=world.device.type == "cuda", fp8=config.precision == "fp8"),
        Objective(distils, config.dpace_alpha if config.weighting == "dpace" else None),
        norm,
    )


def row_shape(config: TrainConfig, shards: ShardSet) -> RowShape:
    """Slots are filled on average; which tokens become anchors does not depend on neighbours."""
    share = sampling_rate(shards.lengths, shards.supervised, config.row_tokens, config.anchors)
    gamma = config.gamma or default_gamma(config.block_size)
    return RowShape(config.row_tokens, config.anchors, gamma, share)


def replayed_requests(heldout: ShardSet, documents: int) -> list[Request]:
    """The turns of that many documents, spread evenly over the held-out ones."""
    chosen = range(0, len(heldout), max(1, len(heldout) // documents)) if documents else []
    return [r for i in chosen[:documents] for r in find_requests(i, heldout.tokens(i)[1])]


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
    """Fresh weights from the seed or of another drafter, or the newest good checkpoint."""
    config, world = setup.config, setup.world
    drafter = Drafter(setup.spec)
    drafter.init_weights(config.seed, setup.ends.lm_head)
    drafter.to(world.device)
    state = TrainState(drafter, make_optimizers(drafter, config, world))
    resumed = config.resume and resume_newest(config.output, state, resumable_facts(setup))
    if not resumed:
        if config.warm_start:
            load_warm_start(config.warm_start, drafter)
        if world.is_first:
            forget_best(config.output)
            if config.resume:
                say(f"warning: --resume, but {config.output} holds no checkpoint; starting anew")
    if config.precision == "fp8":
        count = drafter.multiply_in_fp8()
        if world.is_first:
            say(f"{count} matrices of the drafter and the head's logits multiply in fp8")
    if world.device.type == "cuda":
        drafter.compile_layers()
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
    "eval_documents",
    "warm_start",  # only a beginning uses it
    "gpus",
    "reader_processes",
    "track",
    "max_bad_steps",
    "max_restarts",
    "shard_optimizer",
}


def resumable_facts(setup: Setup) -> dict[str, Any]:
    """What a checkpoint must agree with, besides the tensors' shapes."""
    knobs = {k: v for k, v in asdict(setup.config).items() if k not in _FREE_KNOBS}
    # A run of before rows were planned and anchors drawn as now would go on with other rows.
    return {**knobs, "content of --shards": setup.shards.identity(), "plan of rows": "best fit"}


@torch.no_grad()
def evaluate_heldout(setup: Setup, state: TrainState) -> BlockLoss:
    """Cross-entropy sums over the first held-out rows, the same rows and anchors every time."""
    config, world = setup.config, setup.world
    stream = RowStream(setup.heldout.lengths.tolist(), config.row_tokens, seed=config.seed)
    rows = range(world.rank, min(config.eval_rows, stream.rows_per_epoch), world.size)
    total = torch.zeros(BlockLoss.packed_size(setup.spec.block_size), device=world.device)
    task = replace(setup.task, objective=Objective())
    with progress("evaluating held-out", total=len(rows), unit="rows") as bar:
        for n in rows:
            batch = heldout_batch(setup, stream[n], n)
            total += row_loss(state.drafter, task, batch).packed()
            bar.advance()
    sums = BlockLoss.unpacked(world.sum_(total), setup.spec.block_size)
    if sums.weight == 0:
        raise ValueError(
            "the held-out rows hold no token to learn; raise --row-tokens or --eval-rows, or look "
            "at --eval-shards with inspect-shard"
        )
    return sums


def heldout_batch(setup: Setup, documents: list[int], seed: int) -> Batch:
    """As many anchors as there are slots, wherever they may be."""
    return load_batch(
        setup.heldout,
        documents,
        spec=setup.spec,
        shape=replace(setup.shape, sampling_rate=1.0),
        seed=seed,
        device=setup.world.device,
    )


def replay_heldout(setup: Setup, state: TrainState) -> float | None:
    """Acceptance length (mean over requests) on the replayed turns; None if there are none."""
    if not setup.replayed:
        return None
    world = setup.world
    own = setup.replayed[world.rank :: world.size]
    total = sum(r.stop - r.start for r in own)
    with progress("replaying held-out", total=total, unit="tok") as bar:
        outcomes, _ = replay(
            state.drafter,
            setup.ends,
            setup.heldout,
            own,
            block_size=setup.spec.block_size,
            batch_tokens=setup.config.row_tokens,
            advance=bar.advance,
        )
    gained = torch.tensor(
        [sum(o.acceptance_length for o in outcomes), float(len(outcomes))], dtype=torch.float64
    )
    sums = world.sum_(gained.to(world.device))
    return float(sums[0] / sums[1])


class SkippedSteps:
    """Steps that changed nothing; too many in a row end the run."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.total = self._in_a_row = 0

    def count(self, result: StepResult, step: int, rows: range) -> None:
        self.total += bool(result.skipped)
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        if self._in_a_row >= self._most:
            raise ValueError(
                f"{self._in_a_row} steps in a row changed nothing (to step {step}, the last: "
                f"{result.skipped}, rows {rows.start} to {rows.stop - 1}); lower --lr, raise "
                "--row-tokens, or look at the shards with inspect-shard"
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
        write_json(config.output / "config.json", resolved_config(setup))
    replica = world.replicate(state.drafter)
    speaker = Speaker(setup, state)
    skipped, first_step = SkippedSteps(config.max_bad_steps), state.step + 1
    with (
        speaker,
        StopRequest("this step is finished and saved") as stop,
        open_feed(setup, state) as feed,
    ):
        while state.step < config.steps:
            rows = range(state.rows, state.rows + config.rows_per_step)
            result, epoch = take_step(setup, state, replica, feed)
            skipped.count(result, state.step, rows)
            last = state.step == config.steps
            stopping = world.any(stop.asked)
            if state.step % config.log_every == 0 or state.step == first_step or last:
                speaker.tell_step(result, skipped.total, epoch, feed.waited)
            if state.step % config.save_every == 0 or last or stopping:
                save(setup, state)
            if stopping and not last:
                world.barrier()  # a rank that leaves earlier is taken for one that died
                raise KeyboardInterrupt
            if state.step % config.eval_every == 0 or last:
                speaker.tell_heldout(evaluate_heldout(setup, state), replay_heldout(setup, state))
    skipped.refuse_all(state.step - first_step + 1)
    world.barrier()  # the others must not leave while rank 0 still saves
    return finish(setup, state, speaker, skipped.total)


def open_feed(setup: Setup, state: TrainState) -> RowFeed:
    config, world = setup.config, setup.world
    return RowFeed(
        setup.shards,
        spec=setup.spec,
        shape=setup.shape,
        seed=config.seed,
        first_row=state.rows,
        rows_per_step=config.rows_per_step,
        world=world,
        device=world.device,
        workers=reader_processes(config, world),
        compiled=world.device.type == "cuda",
        final_hidden=setup.task.objective.distils,
    )


def reader_processes(config: TrainConfig, world: World) -> int:
    """One reads and decodes a row in a third of the time that a GPU takes for it."""
    if config.reader_processes is not None:
        return config.reader_processes
    if world.device.type == "cpu":
        return 0  # all cores are at work already
    return min(_READERS, (os.cpu_count() or 1) // torch.cuda.device_count())


def take_step(
    setup: Setup, state: TrainState, replica: nn.Module, feed: RowFeed
) -> tuple[StepResult, float]:
    """One step over the next rows; how many epochs are done after it."""
    config = setup.config
    rows = next(feed)
    share = config.feature_noise * noise_share(state.step, config.steps, config.noise_until)
    result = train_step(
        state,
        replica,
        rows.batches,
        rows=config.rows_per_step // setup.world.size,
        task=setup.task,
        world=setup.world,
        rate=learning_rate(config, state.step),
        clip=config.clip,
        noise=Noise(share, config.seed * _NOISE_STRIDE + state.rows),
    )
    state.rows += config.rows_per_step
    return result, rows.epoch


def learning_rate(config: TrainConfig, step: int) -> float:
    """Share of the peak rate."""
    return rate(step, config.steps, config.warmup, config.schedule, config.decay, config.lr_floor)


def save(setup: Setup, state: TrainState) -> None:
    config = setup.config
    with phase("saving a checkpoint"):
        save_checkpoint(config.output, state, resumable_facts(setup), keep=config.keep_checkpoints)


class Speaker:
    """What a run says, now and then: a line and an entry in the log. Rank 0's alone."""

    def __init__(self, setup: Setup, state: TrainState) -> None:
        config, world = setup.config, setup.world
        self._setup, self._state = setup, state
        self.quality: dict[str, float] = {}
        self.started = time.monotonic()
        self._pace = Pace(state.step)
        self._waited = 0.0
        is_first = world.is_first
        self._log = Log(config.output / "log.jsonl" if is_first else None)
        self._tracker = Tracker(
            config.track if is_first else "none", config.output, asdict(config)
        )
        self._flop = state.drafter.needed_flop(config.row_tokens, config.anchors) / world.size
        self._matmul_rate = math.inf
        if is_first:
            fp8 = config.precision == "fp8"
            self._matmul_rate = measure_matmul_rate(world.device, dtype_of(config), fp8=fp8)
        if is_first and world.device.type == "cuda":
            say("compiling for fixed shapes in the first step: minutes, unless it is cached")

    def tell_step(self, result: StepResult, skipped: int, epoch: float, waited: float) -> None:
        setup, state = self._setup, self._state
        config, world = setup.config, setup.world
        seconds_waited, self._waited = waited - self._waited, waited
        tokens = config.rows_per_step * config.row_tokens
        pace = self._pace.facts(state.step, config.steps, tokens, seconds_waited)
        share = learning_rate(config, state.step - 1)
        facts: dict[str, Any] = {
            "step": state.step,
            "loss": result.loss,
            **result.sums.ratios(),
            "gradient_norm": float(result.gradient_norm),
            "rate": share,
            "noise": config.feature_noise
            * noise_share(state.step - 1, config.steps, config.noise_until),
            "skipped_steps": skipped,
            "epoch": epoch,
            **pace,
            "anchors_per_second": float(result.sums.blocks) / pace["seconds_per_step"],
            "coverage": result.coverage.share,
            "matmul_share": self._flop
            * config.rows_per_step
            / (self._matmul_rate * pace["seconds_per_step"]),
            "memory": memory_of(world.device),
        }
        self._write(facts, step_line(facts, config.steps))

    def tell_heldout(self, sums: BlockLoss, acceptance: float | None) -> None:
        """And keep the drafter if it is the best so far: by replay, or by the streak."""
        setup, state = self._setup, self._state
        loss = float(sums.loss) / max(float(sums.weight), 1e-6)
        facts = {"heldout_loss": loss, **sums.ratios("heldout_")}
        line = (
            f"held-out at step {state.step:,}: loss {loss:.3f}  "
            f"acc {facts['heldout_accuracy']:.3f}  streak {facts['heldout_streak']:.2f}"
        )
        measure = "heldout_streak"
        if acceptance is not None:
            measure = "heldout_acceptance_length"
            facts[measure] = acceptance
            line += f"  acceptance length {acceptance:.2f}"
        self.quality = facts
        if setup.world.is_first and save_best(
            setup.config.output, state, facts[measure], measure=measure
        ):
            line += ", the best so far"
        self._write({"step": state.step, **facts}, line)

    def _write(self, facts: dict[str, Any], line: str) -> None:
        self._log.write(facts, line)
        self._tracker.write(self._state.step, facts)

    def __enter__(self) -> "Speaker":
        return self

    def __exit__(self, *given: object) -> None:
        self._log.__exit__(*given)
        self._tracker.__exit__(*given)


def memory_of(device: torch.device) -> int:
    """Bytes of the device that this process has held at most; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def step_line(facts: dict[str, Any], steps: int) -> str:
    """The entry of a step as one line for the eye."""
    parts = [
        f"{duration(facts['elapsed']):>8}",
        f"step {facts['step']:,}/{steps:,}",
        f"loss {facts['loss']:.3f}",
        f"acc {facts['accuracy']:.3f}",
        f"streak {facts['streak']:.2f}",
        f"coverage {facts['coverage']:.0%}",
        f"lr x{facts['rate']:.3f}",
        *([f"noise {facts['noise']:.3f}"] if facts["noise"] else []),
        f"grad {facts['gradient_norm']:.2f}",
        f"{facts['tokens_per_second'] / 1e3:.1f} Ktok/s",
        f"{facts['anchors_per_second']:,.0f} anchors/s",
        f"matmul {facts['matmul_share']:.0%}",
        f"wait {facts['data_wait']:.0%}",
        *([f"mem {bytes_text(facts['memory'])}"] if facts["memory"] else []),
        f"epoch {facts['epoch']:.2f}",
        f"eta {duration(facts['eta'])}",
        *([f"skipped {facts['skipped_steps']}"] if facts["skipped_steps"] else []),
    ]
    return "  ".join(parts)


def finish(setup: Setup, state: TrainState, speaker: Speaker, skipped: int) -> dict[str, Any]:
    if not setup.world.is_first:
        return {}
    folder: Path = setup.config.output / "drafter"
    export_drafter(state.drafter, folder)
    return {
        "steps": state.step,
        "rows": state.rows,
        "parameters": sum(p.numel() for p in state.drafter.parameters()),
        "skipped steps": skipped,
        **{name.replace("_", " "): value for name, value in speaker.quality.items()},
        "seconds": time.monotonic() - speaker.started,
        "drafter": str(folder),
    }
