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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dflash_offline.codec import Codec, make_codec, measure, needs_calibration
from dflash_offline.config import ExtractConfig, arguments_of
from dflash_offline.conversations import Corpus, read_documents
from dflash_offline.dataset import Dataset
from dflash_offline.encoding import Encoded, keep_sound, make_encoder
from dflash_offline.facts import read_json
from dflash_offline.files import naming_full_disk, write_json
from dflash_offline.launch import Ranks
from dflash_offline.metrics import ProgressBar, progress, say
from dflash_offline.planning import Plan, Row, draw_sample, pack_rows, plan_shards, row_length
from dflash_offline.prefetch import Behind
from dflash_offline.shards import ShardReader, ShardWriter
from dflash_offline.sizing import ShardFormat, check_room
from dflash_offline.spec import LAYER_CONVENTION, TargetSpec, default_layer_ids
from dflash_offline.target import TappedTarget
from dflash_offline.world import World, current_world, refuse_unset_rank

LOSS_MASK_RULE = "after the generation prompt, through the end-of-turn token if produced"
TRUNCATION_RULE = "the first max_length tokens of a document"

_WAIT_SECONDS = 1800.0
_LOOK_SECONDS = 5.0


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


def extract(config: ExtractConfig) -> dict[str, Any]:
    """Write the shards that are missing, on all GPUs of this host; return the summary of all.

    A process that a launcher started (torchrun, or this function) writes its rank's share alone.
    """
    size = processes(config)
    return extract_share(config) if size == 1 else extract_on_all(config, size)


def processes(config: ExtractConfig) -> int:
    """How many to start here. ValueError if --gpus asks for more than there are."""
    if "RANK" in os.environ:
        return 1
    refuse_unset_rank()
    available = torch.cuda.device_count() if config.device != "cpu" else 0
    if available and config.gpus and config.gpus > available:
        raise ValueError(f"--gpus is {config.gpus}, but torch sees {available}")
    return config.gpus or max(available, 1)


def extract_on_all(config: ExtractConfig, size: int) -> dict[str, Any]:
    """One process per GPU; shows what all of them have committed."""
    started = time.monotonic()
    logs = logs_path(config.output)
    say(f"{size} processes, each with a log in {logs}")
    with (
        progress("extracting", total=None, unit="tok") as bar,
        Ranks(["extract", *arguments_of(config)], size=size, logs=logs) as ranks,
    ):
        ranks.wait(Committed(config.output, bar).show)
    shares = [read_json(logs / f"rank-{rank:02}.json") for rank in range(size)]
    return {**total_summary(config.output, shares), "seconds": time.monotonic() - started}


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
    setup = prepare(config)
    refuse_full_disk(setup)
    with naming_full_disk(config.output):
        dataset = open_dataset(setup)
        missing = resume(setup, dataset)
        writing = write_shards(setup, dataset, missing) if missing else 0.0
    summary = summarize(setup, dataset, missing, writing)
    if setup.world.size > 1:
        write_json(logs_path(config.output) / f"rank-{setup.world.rank:02}.json", summary)
    return {**summary, "seconds": time.monotonic() - started}


def prepare(config: ExtractConfig) -> Setup:
    """Read the target's facts and the corpus, and plan. What a user can get wrong fails here."""
    world = current_world(config.device)
    saved_config = config_path(config.output).resolve()
    if any(path.resolve() == saved_config for path in config.data):
        raise ValueError(
            f"--data {saved_config} is where the configuration of --output {config.output} goes; "
            "choose another name for one of them"
        )
    spec = TargetSpec.read(config.target)
    layer_ids = spec.check_layer_ids(config.target_layer_ids or default_layer_ids(spec.num_layers))
    max_length = min(config.max_length, spec.max_position_embeddings)
    size = sum(path.stat().st_size for path in config.data if path.is_file())
    with progress("reading conversations", total=size, unit="B") as bar:
        corpus = read_documents(
            config.data,
            target=config.target,
            spec=spec,
            max_length=max_length,
            trust_remote_code=config.trust_remote_code,
            on_bytes=bar.advance,
        )
    plan = plan_shards(
        corpus.documents, shard_tokens=config.shard_tokens, row_tokens=row_tokens(config)
    )
    say(
        f"{spec.name}: layers {list(layer_ids)} of {spec.num_layers}; {len(corpus.documents):,} "
        f"documents of at most {max_length:,} tokens, {corpus.tokens:,} in all, in {len(plan):,} "
        f"shards; rank {world.rank} of {world.size}"
    )
    return Setup(config, world, spec, layer_ids, max_length, corpus, plan)


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
    target = TappedTarget.load(
        config.target,
        target_layer_ids=setup.layer_ids,
        device=setup.world.device,
        dtype=torch.bfloat16 if config.dtype == "fp8" else getattr(torch, config.dtype),
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
        wait_for_first_rank(path)
        return Dataset.open(path, contract=contract)
    if not Dataset.exists(path):  # kernels are known by loading the target, which now has to be
        contract["kernels"] = describe_kernels(setup)
        contract["self_test"] = setup.target.self_test
    dataset = Dataset.create_or_resume(
        path,
        contract=contract,
        make_codecs=lambda: fit_codecs(setup),
        provenance=_provenance(setup),
    )
    # Beside the data set: the store holds nothing that its checksums do not cover.
    resolved = {**asdict(setup.config), "target_layer_ids": setup.layer_ids}
    write_json(config_path(path), resolved)
    return dataset


def logs_path(output: Path) -> Path:
    """Beside the data set, as the configuration: what each process of several says."""
    return output.resolve().with_name(f"{output.resolve().name}.logs")


def config_path(output: Path) -> Path:
    return output.resolve().with_name(f"{output.resolve().name}.extract.json")


def make_contract(setup: Setup) -> dict[str, Any]:
    """All that gives the stored content its meaning: a rerun must agree in every word."""
    config, corpus = setup.config, setup.corpus
    calibration = {"tokens": config.calibration_tokens, "seed": config.seed}
    return {
        "target": setup.spec.to_dict(),
        "target_layer_ids": list(setup.layer_ids),
        "layer_convention": LAYER_CONVENTION,
        "dtype": config.dtype,
        "loss_mask_rule": LOSS_MASK_RULE,
        "max_length": setup.max_length,
        "truncation_rule": TRUNCATION_RULE,
        "final_hidden": None if config.final_hidden == "none" else config.final_hidden,
        "codec": config.codec,
        "final_codec": None if config.final_hidden == "none" else config.final_codec,
        "codec_calibration": calibration if needs_sample(config) else None,
        "data_sha256": list(corpus.sha256.values()),
        "documents": len(corpus.documents),
        "tokens": corpus.tokens,
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


def fit_codecs(setup: Setup) -> tuple[Codec, Codec | None]:
    """The codec of the taps and that of the final hidden state, if this is to be stored."""
    config, layers = setup.config, len(setup.layer_ids)
    sample_NLD = run_sample(setup) if needs_sample(config) else None

    def fit(name: str, part: slice, what: str) -> Codec:
        own_NLD = None if sample_NLD is None else sample_NLD[:, part]
        sizes = {"layers": part.stop - part.start, "width": setup.spec.hidden_size}
        codec = make_codec(name, **sizes, calibration=own_NLD)
        if own_NLD is not None:
            refuse_error(codec, own_NLD, config.max_codec_error, what)
        return codec

    final = slice(layers, layers + 1)
    return fit(config.codec, slice(0, layers), "the tapped layers"), (
        fit(config.final_codec, final, "the final hidden state")
        if config.final_hidden != "none"
        else None
    )


def needs_sample(config: ExtractConfig) -> bool:
    """Whether a codec is fitted to hidden states."""
    names = [config.codec, *([config.final_codec] if config.final_hidden != "none" else [])]
    return any(map(needs_calibration, names))


def run_sample(setup: Setup) -> Tensor:
    """States bf16 [N, L, D] of documents drawn from the whole corpus, to calibrate codecs on.

    They stay on the target's device: medians of 16,384 tokens take 10 s on one CPU core.
    """
    config = setup.config
    sample = draw_sample(setup.corpus.documents, config.calibration_tokens, config.seed)
    parts: list[Tensor] = []
    with progress("calibrating the codec", total=sum(map(len, sample)), unit="tok") as bar:
        for row in pack_rows(sample, row_tokens(config)):
            taps_NLD = run_target(setup.target, row)
            parts.append(taps_NLD[taps_NLD.isfinite().flatten(1).all(1)])
            bar.advance(row_length(row))
    sample_NLD = torch.cat(parts)
    if not len(sample_NLD):
        raise ValueError(_all_broken(len(sample)))
    return sample_NLD


def refuse_error(codec: Codec, sample_NLD: Tensor, limit: float, what: str) -> None:
    """ValueError if the codec is too coarse for its own sample: hours before a shard says so."""
    errors_NL = torch.cat(
        [measure(part, codec.decode(codec.encode(part)))[..., 3] for part in sample_NLD.split(512)]
    )
    worst = float(errors_NL.double().quantile(0.99, dim=0).max())
    if worst > limit:
        raise ValueError(
            f"codec {codec.name} stores {what} of the calibration sample with a relative error of "
            f"{worst:.1%} (p99 over tokens), above {limit:.1%}; use lossless (--codec, "
            "--final-codec), or raise --max-codec-error"
        )


def _all_broken(documents: int) -> str:
    return (
        f"all of {documents:,} documents have hidden states that are inf, NaN or zero; check the "
        "target's weights, or run it in another precision (--dtype float32)"
    )


def run_target(target: TappedTarget, row: Row) -> Tensor:
    """bf16 [N, L, D] on the target's device: the states of all tokens of the row in order."""
    return target.taps([document.input_ids for document in row])


def resume(setup: Setup, dataset: Dataset) -> list[str]:
    """This rank's shards that are still to be written; says what an earlier run left."""
    own = setup.own_shards
    found = dataset.resume(own, rank=setup.world.rank, size=setup.world.size)
    if len(found.missing) < len(own):
        say(f"{len(own) - len(found.missing):,} of {len(own):,} shards are there already")
    if found.adopted or found.removed:
        say(f"of a run that was killed: {found.adopted} shards kept, {found.removed} removed")
    if not found.missing:
        say("nothing left to extract")
    return found.missing


def write_shards(setup: Setup, dataset: Dataset, names: Sequence[str]) -> float:
    """Run the target over the shards' documents, encode on its device, write and commit.

    Copying to the CPU and writing happen a row or two behind the target. Returns the seconds it
    took, the loading of the target left out.
    """
    dataset.refuse_other_kernels(describe_kernels(setup))
    encode = make_encoder(dataset, setup.world.device)
    started = time.monotonic()
    tokens = sum(row_length(row) for name in names for row in setup.plan[name])
    with (
        progress("extracting", total=tokens, unit="tok") as bar,
        ShardStore(setup, dataset) as store,
        Behind(depth=2) as behind,
    ):
        for name in names:
            behind.call(store.begin, name)
            for row in setup.plan[name]:
                behind.call(store.add, row, encode(run_target(setup.target, row)))
                bar.advance(row_length(row))
            behind.call(store.commit)
    return time.monotonic() - started


class ShardStore:
    """The shard that is being written; `begin`, `add` and `commit` run behind the target."""

    def __init__(self, setup: Setup, dataset: Dataset) -> None:
        self._dataset, self._rank = dataset, setup.world.rank
        self._largest_error = setup.config.max_codec_error
        self._open: ShardWriter | None = None

    def begin(self, name: str) -> None:
        self._open = ShardWriter(
            self._dataset, name, rank=self._rank, largest_error=self._largest_error
        )

    def add(self, row: Row, encoded: Encoded) -> None:
        assert self._open
        encoded.wait()
        documents, planes, facts_NL4 = keep_sound(row, encoded.planes, encoded.facts_NL4)
        if documents:
            self._open.append(documents, planes, facts_NL4)

    def commit(self) -> None:
        assert self._open
        self._open.commit()
        self._close()

    def _close(self) -> None:
        """What was not committed is gone."""
        if self._open:
            self._open.__exit__()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def summarize(
    setup: Setup, dataset: Dataset, written: Sequence[str], seconds: float
) -> dict[str, Any]:
    """What became of the conversations, and what stands on the disk of this rank's shards."""
    records = dataset.committed()
    own = [records[name] for name in setup.own_shards]
    planned = sum(len(row) for record in own for row in setup.plan[record.name])
    documents = sum(record.documents for record in own)
    if planned and not documents and setup.world.size == 1:
        raise ValueError(_all_broken(planned))
    tokens_now = sum(record.tokens for record in own if record.name in written)
    world = setup.world
    return {
        **(_corpus_facts(setup.corpus) if world.is_first else {}),
        **({"shards of rank": f"{world.rank} of {world.size}"} if world.size > 1 else {}),
        "shards": len(own),
        "shards_written_now": len(written),
        "documents": documents,
        "broken_documents": planned - documents,
        **_disk_facts([ShardReader(dataset, record) for record in own]),
        "tokens_per_second": tokens_now / max(seconds, 1e-9),
        "written to": str(setup.config.output),
    }


def _corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """Counts over all files, whatever the number of ranks."""
    counts = {name: value for name, value in vars(corpus.counts).items() if name != "dropped"}
    dropped = corpus.counts.dropped
    return {**counts, **{f"dropped ({why})": n for why, n in sorted(dropped.items())}}


def _disk_facts(readers: Sequence[ShardReader]) -> dict[str, Any]:
    tokens = sum(reader.record.tokens for reader in readers)
    size = sum(reader.bytes for reader in readers)
    bf16_size = sum(reader.bf16_bytes for reader in readers)
    errors = [tap["relative_l2_p99"] for reader in readers for tap in reader.statistics]
    return {
        "tokens": tokens,
        "supervised_tokens": sum(reader.record.supervised for reader in readers),
        "bytes_per_token": size / max(tokens, 1),
        "ratio_to_bf16": bf16_size / max(size, 1),
        "relative_error_p99": max(errors, default=0.0),
    }


def total_summary(output: Path, shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of all ranks: of the corpus as rank 0 has it, sums, and what is on the disk."""
    dataset = Dataset.open(output)
    records = dataset.committed().values()
    if not any(record.documents for record in records):
        raise ValueError(_all_broken(dataset.contract["documents"]))
    first = shares[0]
    own = {"shards of rank", "shards", "documents", "seconds"}
    summed = ("shards_written_now", "broken_documents", "tokens_per_second")
    return {
        **{name: value for name, value in first.items() if name not in own},
        "shards": len(records),
        "documents": sum(record.documents for record in records),
        **{name: sum(share[name] for share in shares) for name in summed},
        **_disk_facts([ShardReader(dataset, record) for record in records]),
    }
