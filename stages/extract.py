"""Stage one: conversations -> hidden-state shards.

Every rank reads the whole corpus and makes the same plan of shards from it; rank r of R writes
shards r, r + R, r + 2 R, ... and talks to nobody. Only the codec is settled once: rank 0 fits it
to a seeded sample of the whole corpus, and the others wait for dataset.json. A run that was killed
goes on with the shards that are missing, on any number of ranks.

Letters: N tokens of a row, L tapped layers (and the final hidden
state after them, if it is stored), D hidden.
"""

import functools
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dflash_offline.behind import Behind
from dflash_offline.beside import (
    config_path,
    corpus_path,
    heartbeat_path,
    logs_path,
    quarantine_path,
)
from dflash_offline.calibration import fit_codecs, needs_sample, run_sample
from dflash_offline.codec import Codec
from dflash_offline.config import ExtractConfig, arguments_of
from dflash_offline.corpus import corpus_of, tokenising_processes, wait_for_corpus
from dflash_offline.dataset import Dataset
from dflash_offline.documents import Corpus
from dflash_offline.encoding import make_encoder
from dflash_offline.facts import read_json
from dflash_offline.files import naming_full_disk, write_json
from dflash_offline.halving import Halving
from dflash_offline.heartbeat import Heartbeat, read_heartbeat
from dflash_offline.launch import Ranks
from dflash_offline.matmul_rate import measure_matmul_rate
from dflash_offline.meter import Meter, add_up, tell
from dflash_offline.metrics import ProgressBar, phase, progress, say
from dflash_offline.planning import Plan, plan_shards, row_length
from dflash_offline.quarantine import Quarantine, all_broken
from dflash_offline.shard_store import ShardStore
from dflash_offline.shards import ShardReader
from dflash_offline.sizing import ShardFormat, check_room
from dflash_offline.spec import LAYER_CONVENTION, TargetSpec, default_layer_ids
from dflash_offline.summary import corpus_facts, disk_facts, total_summary
from dflash_offline.target import TappedTarget
from dflash_offline.world import World, current_world, processes_of_host

LOSS_MASK_RULE = "after the generation prompt, through the end-of-turn token if produced"
TRUNCATION_RULES = {
    "truncate": "the first max_length tokens of a document",
    "drop": "no document of more than max_length tokens",
}

_WAIT_SECONDS = 1800.0
_TOKENISING_SECONDS = 12 * 3600.0  # 1 MB/s and core; a rank 0 that dies ends the others sooner
_LOOK_SECONDS = 5.0
_FRESH_SECONDS = 30.0  # of a heartbeat
# A commit waits for the disk as long as a row or three take the target. Each row that waits holds
# 0.4 GB of pinned memory (5 x 5120 in int8).
_CALLS_BEHIND = 6


@dataclass(frozen=True)
class Setup:
    """What is to be extracted; the same on every rank but for `world`."""

    config: ExtractConfig
    world: World
    spec: TargetSpec
    layer_ids: tuple[int, ...]
    max_length: int
    corpus: Corpus
    plan: Plan

    @property
    def own_shards(self) -> list[str]:
        return list(self.plan)[self.world.rank :: self.world.size]

    @functools.cached_property
    def target(self) -> TappedTarget:
        """Loaded when it is first asked for: a rerun with nothing left to do needs none."""
        return load_target(self)

    @functools.cached_property
    def runner(self) -> Halving:
        return Halving(self.target, row_tokens(self.config))

    @functools.cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of this device in the run's precision; asked for while its memory is free."""
        precision = self.config.dtype
        rate = measure_matmul_rate(
            self.world.device, torch_dtype(precision), fp8=precision == "fp8"
        )
        say(f"matmul rate of {self.world.device} in {precision}: {rate / 1e12:,.3g} TFLOP/s")
        return rate


def extract(config: ExtractConfig) -> dict[str, Any]:
    """Write the shards that are missing, on all GPUs of this host; return the summary of all.

    A process that a launcher started (torchrun, or this function) writes its rank's share alone.
    """
    size = processes_of_host(config.gpus, config.device)
    return extract_share(config) if size == 1 else extract_on_all(config, size)


def extract_on_all(config: ExtractConfig, size: int) -> dict[str, Any]:
    """One process per GPU; shows what all of them have committed."""
    started = time.monotonic()
    logs = logs_path(config.output)
    forget_heartbeats(config.output)
    say(f"{size} processes, each with a log in {logs}")
    before = len(Dataset.open(config.output).committed()) if Dataset.exists(config.output) else 0

    def beats() -> list[dict[str, Any]]:
        found = [read_heartbeat(heartbeat_path(config.output, rank)) for rank in range(size)]
        return [beat for beat in found if beat]

    def facts() -> dict[str, Any]:
        return add_up(beats())

    def details() -> str:
        return tell(facts()) or ", ".join(phases(beats()))

    with (
        Ranks(["extract", *arguments_of(config)], size=size, logs=logs) as ranks,
        Heartbeat(logs / "heartbeat.json", facts=facts),
        progress("extracting", total=None, unit="tok", details=details) as bar,
    ):
        ranks.wait(Committed(config.output, bar).show)
    shares = [read_json(logs / f"rank-{rank:02}.json") for rank in range(size)]
    written = len(Dataset.open(config.output).committed()) - before
    return {
        **total_summary(config.output, shares),
        "shards_written_now": written,
        "seconds": time.monotonic() - started,
    }


def forget_heartbeats(output: Path) -> None:
    """Those of an earlier run would be taken for this one's; fresh ones are of a run beside it."""
    for path in logs_path(output).glob("*heartbeat.json"):
        beat = read_heartbeat(path)
        if beat is None or beat["outcome"] or time.time() - beat["epoch"] > _FRESH_SECONDS:
            path.unlink(missing_ok=True)


def phases(beats: Sequence[Mapping[str, Any]]) -> list[str]:
    """What ranks are at that have not run a row yet, and how many are at it."""
    at = Counter(beat["phase"] or "starting" for beat in beats)
    return [f"{phase} ({count} of {len(beats)} ranks)" for phase, count in at.items()]


class Committed:
    """Moves a bar to what the manifests name, now and then."""

    def __init__(self, output: Path, bar: ProgressBar) -> None:
        self._output, self._bar = output, bar
        self._dataset: Dataset | None = None
        self._looked = -_LOOK_SECONDS

    def show(self) -> None:
        if time.monotonic() - self._looked < _LOOK_SECONDS or not Dataset.exists(self._output):
            return
        self._looked = time.monotonic()
        with suppress(OSError):  # a file system that stutters ends no extraction for a bar
            if self._dataset is None:
                self._dataset = Dataset.open(self._output)
                self._bar.set_total(self._dataset.contract["tokens"])
                self._bar.skip(self._tokens(self._dataset))
            self._bar.advance(self._tokens(self._dataset) - self._bar.done)

    @staticmethod
    def _tokens(dataset: Dataset) -> int:
        return sum(record.tokens for record in dataset.committed().values())


def extract_share(config: ExtractConfig) -> dict[str, Any]:
    """Write those of this rank's shards that are missing; return the summary of all its shards."""
    started = time.monotonic()
    meter = Meter(config.output)
    world = current_world(config.device)
    if world.size == 1:
        forget_heartbeats(config.output)
    with Heartbeat(own_heartbeat(config.output, world), facts=meter.facts):
        setup = prepare(config)
        refuse_full_disk(setup)
        with naming_full_disk(config.output):
            dataset = open_dataset(setup)
            open_quarantine(setup, dataset).check()
            missing = resume(setup, dataset)
            writing = write_shards(setup, dataset, missing, meter) if missing else 0.0
    summary = summarize(setup, dataset, missing, writing)
    if setup.world.size > 1:
        write_json(logs_path(config.output) / f"rank-{setup.world.rank:02}.json", summary)
    return {**summary, "seconds": time.monotonic() - started}


def own_heartbeat(output: Path, world: World) -> Path:
    """A run of one process has the name that the parent of several has."""
    alone = logs_path(output) / "heartbeat.json"
    return alone if world.size == 1 else heartbeat_path(output, world.rank)


def prepare(config: ExtractConfig) -> Setup:
    """Read the target's facts and the corpus, and plan. What a user can get wrong fails here."""
    world = current_world(config.device)
    refuse_own_files(config)
    spec = TargetSpec.read(config.target)
    layer_ids = spec.check_layer_ids(config.target_layer_ids or default_layer_ids(spec.num_layers))
    max_length = min(config.max_length, spec.max_position_embeddings)
    Dataset.refuse_in_advance(config.output, rules(config, spec, layer_ids, max_length))
    corpus = read_corpus(config, world, spec, max_length)
    plan = plan_shards(
        corpus.documents, shard_tokens=config.shard_tokens, row_tokens=row_tokens(config)
    )
    say(
        f"{spec.name}: layers {list(layer_ids)} of {spec.num_layers}; {len(corpus.documents):,} "
        f"documents of at most {max_length:,} tokens, {corpus.tokens:,} in all, in {len(plan):,} "
        f"shards; rank {world.rank} of {world.size}"
    )
    return Setup(config, world, spec, layer_ids, max_length, corpus, plan)


def refuse_own_files(config: ExtractConfig) -> None:
    """ValueError if a data file is in the way of one that is going to be written."""
    written = {
        config_path(config.output): "the configuration",
        corpus_path(config.output): "the tokenised corpus",
    }
    for data in config.data:
        if what := written.get(Path(os.path.realpath(data))):
            raise ValueError(
                f"--data {data} is where {what} of --output {config.output} goes; choose another "
                "name for one of them"
            )


def read_corpus(config: ExtractConfig, world: World, spec: TargetSpec, max_length: int) -> Corpus:
    """Rank 0 tokenises, or finds what an earlier run has; the other ranks wait for its file."""
    path, size = corpus_path(config.output), size_of(config.data)
    how: dict[str, Any] = {
        "target": config.target,
        "spec": spec,
        "max_length": max_length,
        "over_long": config.over_long,
        "trust_remote_code": config.trust_remote_code,
    }
    if not world.is_first:
        return wait_for_corpus(path, config.data, seconds=_TOKENISING_SECONDS, **how)
    processes = config.tokenizer_processes or tokenising_processes(size)
    with progress("reading conversations", total=size, unit="B") as bar:
        return corpus_of(
            path,
            config.data,
            processes=processes,
            must_keep=world.size > 1,
            on_bytes=bar.advance,
            **how,
        )


def size_of(files: Sequence[Path]) -> int:
    """Bytes; what is no file is refused later, by name."""
    return sum(path.stat().st_size for path in files if path.is_file())


def refuse_full_disk(setup: Setup) -> None:
    """ValueError if what all ranks together have still to write does not fit on the disk."""
    config = setup.config
    there = Dataset.open(config.output).committed() if Dataset.exists(config.output) else {}
    missing = [rows for name, rows in setup.plan.items() if name not in there]
    sizes = [(sum(map(len, rows)), sum(map(row_length, rows))) for rows in missing]
    final_codec = None if config.final_hidden == "none" else config.final_codec
    form = ShardFormat(config.codec, len(setup.layer_ids), setup.spec.hidden_size, final_codec)
    check_room(config, form, sizes)


def load_target(setup: Setup) -> TappedTarget:
    config = setup.config
    _ = setup.matmul_rate
    target = TappedTarget.load(
        config.target,
        target_layer_ids=setup.layer_ids,
        device=setup.world.device,
        dtype=torch_dtype(config.dtype),
        fp8=config.dtype == "fp8",
        final_hidden=config.final_hidden,
        compiled_row=row_tokens(config) if compiles(setup) else None,
        trust_remote_code=config.trust_remote_code,
    )
    kernels = ", ".join(f"{name}: {by}" for name, by in target.describe_kernels().items())
    found = ", ".join(f"{name} {value:.2%}" for name, value in target.self_test.items())
    how = "compiled" if compiles(setup) else "not compiled"
    say(f"target runs on {setup.world.device} in {config.dtype}, {how}; {kernels}")
    say(f"self-test passed, states differ by: {found}")
    if slow := target.slow_path():
        if config.require_fast_kernels:
            raise ValueError(f"--require-fast-kernels: {slow}")
        say(f"warning: {slow}")
    return target


def torch_dtype(precision: str) -> torch.dtype:
    """What is not multiplied in fp8 is bfloat16."""
    dtype: torch.dtype = torch.bfloat16 if precision == "fp8" else getattr(torch, precision)
    return dtype


def row_tokens(config: ExtractConfig) -> int:
    """No row is longer than a shard."""
    return min(config.batch_tokens, config.shard_tokens)


def compiles(setup: Setup) -> bool:
    """Whether layers are compiled: on a CPU it takes longer than it saves."""
    return setup.world.device.type == "cuda" and not setup.config.eager


def open_dataset(setup: Setup) -> Dataset:
    """The data set to write into; if there is none, rank 0 makes it, with a fitted codec."""
    path, contract = setup.config.output, make_contract(setup)
    if not setup.world.is_first:
        if not Dataset.exists(path):
            _ = setup.target  # while rank 0 loads and fits: the files are read once for all
        wait_for_first_rank(path)
        return Dataset.open(path, contract=contract)
    if not Dataset.exists(path):  # kernels are known by loading the target, which now has to be
        contract["kernels"] = describe_kernels(setup)
        contract["self_test"] = setup.target.self_test
    dataset = Dataset.create_or_resume(
        path,
        contract=contract,
        make_codecs=lambda: make_codecs(setup),
        provenance=_provenance(setup),
    )
    # Beside the data set: the store holds nothing that its checksums do not cover.
    resolved = {**asdict(setup.config), "target_layer_ids": setup.layer_ids}
    write_json(config_path(path), resolved)
    return dataset


def make_codecs(setup: Setup) -> tuple[Codec, Codec | None]:
    config = setup.config
    sample_NLD = None
    if needs_sample(config):
        sample_NLD = run_sample(setup.runner, setup.corpus.documents, config)
    return fit_codecs(config, len(setup.layer_ids), setup.spec.hidden_size, sample_NLD)


def make_contract(setup: Setup) -> dict[str, Any]:
    """All that gives the stored content its meaning: a rerun must agree in every word."""
    corpus = setup.corpus
    return {
        **rules(setup.config, setup.spec, setup.layer_ids, setup.max_length),
        "data_sha256": list(corpus.sha256.values()),
        "documents": len(corpus.documents),
        "tokens": corpus.tokens,
    }


def rules(
    config: ExtractConfig, spec: TargetSpec, layer_ids: Sequence[int], max_length: int
) -> dict[str, Any]:
    """What of the contract is known before the data is read."""
    calibration = {"tokens": config.calibration_tokens, "seed": config.seed}
    return {
        "target": spec.to_dict(),
        "target_layer_ids": list(layer_ids),
        "layer_convention": LAYER_CONVENTION,
        "dtype": config.dtype,
        "loss_mask_rule": LOSS_MASK_RULE,
        "max_length": max_length,
        "truncation_rule": TRUNCATION_RULES[config.over_long],
        "final_hidden": None if config.final_hidden == "none" else config.final_hidden,
        "codec": config.codec,
        "final_codec": None if config.final_hidden == "none" else config.final_codec,
        "codec_calibration": calibration if needs_sample(config) else None,
        "shard_tokens": config.shard_tokens,
        "batch_tokens": config.batch_tokens,
    }


def describe_kernels(setup: Setup) -> dict[str, str]:
    """The device and what computes on it: other ones round differently."""
    layers = "compiled" if compiles(setup) else "as they are"
    return {
        "device": setup.world.device.type,
        "layers": layers,
        **setup.target.describe_kernels(),
    }


def _provenance(setup: Setup) -> dict[str, Any]:
    packages = ("dflash-offline", "torch", "transformers", "zarr")
    return {
        "versions": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def wait_for_first_rank(path: Path) -> None:
    """Until rank 0 has made the data set. ValueError if it takes half an hour."""
    deadline = time.monotonic() + _WAIT_SECONDS
    with progress("waiting for rank 0 to fit the codec", total=None, unit="s") as bar:
        while not Dataset.exists(path):
            if time.monotonic() > deadline:
                raise ValueError(
                    f"rank 0 made no {path / 'dataset.json'} in {_WAIT_SECONDS:.0f} s; its own "
                    "output says why"
                )
            time.sleep(1.0)
            bar.advance(1.0)


def resume(setup: Setup, dataset: Dataset) -> list[str]:
    """This rank's shards that are still to be written; says what an earlier run left."""
    own = setup.own_shards
    found = dataset.resume(own, rank=setup.world.rank, size=setup.world.size)
    if len(found.missing) < len(own):
        say(f"{len(own) - len(found.missing):,} of {len(own):,} shards are there already")
    if found.adopted or found.removed:
        say(
            f"of a run that was killed: {found.adopted} finished shards kept, {found.removed} "
            "unfinished ones removed"
        )
    if not found.missing:
        say("nothing left to extract")
    return found.missing


def write_shards(setup: Setup, dataset: Dataset, names: Sequence[str], meter: Meter) -> float:
    """Run the target over the shards' documents, encode on its device, write and commit.

    Copying to the CPU and writing happen some rows behind the target. Returns the seconds it
    took, the loading of the target left out.
    """
    dataset.refuse_other_kernels(describe_kernels(setup))
    encode = make_encoder(dataset, setup.world.device, compiled=compiles(setup))
    tokens = sum(row_length(row) for name in names for row in setup.plan[name])
    started = time.monotonic()
    with (
        open_store(setup, dataset, meter) as store,
        Behind(_CALLS_BEHIND) as behind,
        progress(
            "extracting", total=tokens, unit="tok", details=lambda: tell(meter.facts())
        ) as bar,
    ):
        meter.begin(
            flop_per_token=setup.target.flop_per_token,
            matmul_rate=setup.matmul_rate,
            queued=behind.waiting,
        )
        for name in names:
            behind.call(store.begin, name)
            for row in setup.plan[name]:
                for part, encoded in setup.runner.run(row, encode):
                    behind.call(store.add, part, encoded)
                    meter.ran(row_length(part), setup.target.padded(row_length(part)))
                    bar.advance(row_length(part))
            behind.call(store.commit)
        with phase("writing the last shard"):
            behind.finish()
    return time.monotonic() - started


def open_store(setup: Setup, dataset: Dataset, meter: Meter) -> ShardStore:
    config, rank = setup.config, setup.world.rank
    return ShardStore(
        dataset,
        rank=rank,
        largest_error=config.max_codec_error,
        quarantine=open_quarantine(setup, dataset),
        meter=meter,
    )


def open_quarantine(setup: Setup, dataset: Dataset) -> Quarantine:
    """That of this rank; broken documents of all ranks' shards count."""

    def broken() -> int:
        records = dataset.committed().values()
        return sum(len(row) for record in records for row in setup.plan[record.name]) - sum(
            record.documents for record in records
        )

    return Quarantine(
        quarantine_path(setup.config.output, setup.world.rank),
        documents=len(setup.corpus.documents),
        committed=broken,
        largest_share=setup.config.max_bad_fraction,
    )


def own_documents(setup: Setup, dataset: Dataset) -> tuple[int, int]:
    """Documents that went into this rank's committed shards by the plan, and those in them."""
    records = dataset.committed()
    own = [records[name] for name in setup.own_shards if name in records]
    planned = sum(len(row) for record in own for row in setup.plan[record.name])
    return planned, sum(record.documents for record in own)


def summarize(
    setup: Setup, dataset: Dataset, written: Sequence[str], seconds: float
) -> dict[str, Any]:
    """What became of the conversations, and what stands on the disk of this rank's shards."""
    records = dataset.committed()
    own = [records[name] for name in setup.own_shards]
    planned, documents = own_documents(setup, dataset)
    if planned and not documents and setup.world.size == 1:
        raise ValueError(all_broken(planned))
    tokens_now = sum(record.tokens for record in own if record.name in written)
    world = setup.world
    return {
        **(corpus_facts(setup.corpus) if world.is_first else {}),
        **({"shards of rank": f"{world.rank} of {world.size}"} if world.size > 1 else {}),
        "shards": len(own),
        "shards_written_now": len(written),
        "documents": documents,
        "broken_documents": planned - documents,
        **disk_facts([ShardReader(dataset, record) for record in own]),
        "tokens_per_second": tokens_now / max(seconds, 1e-9),
        "written to": str(setup.config.output),
    }
