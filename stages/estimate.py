"""What an extract will take, before anything runs: tokens, bytes, inodes, hours.

Tokens come from a sample of the data's lines, bytes and arithmetic from the target's own files.
Hours are those of the target's layers at the stated rate; loading, compiling and fitting the codec
add minutes.
"""

from dataclasses import dataclass
from pathlib import Path

from dflash_offline.config import EstimateConfig
from dflash_offline.sampling import CorpusEstimate, estimate_corpus
from dflash_offline.sizing import Room, ShardFormat, codecs_for, count_shards, layer_weights
from dflash_offline.spec import TargetSpec, default_layer_ids

GPU_COUNTS = (1, 2, 4, 8)
# Reached by tests/bench/extract.py, to the last shard on the disk; float32 by its data sheet.
TFLOPS_OF_H200 = {"bfloat16": 565.0, "fp8": 775.0, "float32": 50.0}


@dataclass(frozen=True)
class Work:
    """Which layers run, and what they cost."""

    target: str
    target_layer_ids: tuple[int, ...]
    layers: int
    layers_run: int
    width: int
    weights: int
    """Of the layers that run."""
    flop_per_token: int


@dataclass(frozen=True)
class CodecSize:
    """The whole data set in one codec; the final hidden state keeps its own."""

    bytes_per_token: float
    bytes: int
    inodes: int
    fits: bool


@dataclass(frozen=True)
class Pace:
    gpus: int
    tokens_per_second: float
    hours: float
    gigabytes_per_second: float
    """Written in the chosen codec."""


@dataclass(frozen=True)
class Estimate:
    data: CorpusEstimate
    work: Work
    shards: int
    codec: str
    codecs: dict[str, CodecSize]
    final_codec: str | None
    output: Path
    room: Room
    tflops: float
    paces: tuple[Pace, ...]


def estimate(config: EstimateConfig) -> Estimate:
    """ValueError or FileNotFoundError names what extract could not use either."""
    spec = TargetSpec.read(config.target)
    work = describe_work(config, spec)
    final_codec = None if config.final_hidden == "none" else config.final_codec
    forms = {
        codec: ShardFormat(codec, len(work.target_layer_ids), work.width, final_codec)
        for codec in dict.fromkeys((*codecs_for(work.width), config.codec))
    }
    data = estimate_corpus(
        config.data,
        target=config.target,
        max_length=min(config.max_length, spec.max_position_embeddings),
        over_long=config.over_long,
        sample_lines=config.sample_lines,
        seed=config.seed,
    )
    shards = count_shards(
        data.tokens, shard_tokens=config.shard_tokens, batch_tokens=config.batch_tokens
    )
    room = Room.at(config.output)
    sizes = {codec: codec_size(form, data, shards, room) for codec, form in forms.items()}
    tflops = config.tflops or TFLOPS_OF_H200[config.dtype]
    paces = [
        pace(gpus, data.tokens, tflops * 1e12 / work.flop_per_token, sizes[config.codec])
        for gpus in ([config.gpus] if config.gpus else GPU_COUNTS)
    ]
    return Estimate(
        data=data,
        work=work,
        shards=shards,
        codec=config.codec,
        codecs=sizes,
        final_codec=final_codec,
        output=config.output,
        room=room,
        tflops=tflops,
        paces=tuple(paces),
    )


def describe_work(config: EstimateConfig, spec: TargetSpec) -> Work:
    layer_ids = spec.check_layer_ids(config.target_layer_ids or default_layer_ids(spec.num_layers))
    depth = layer_ids[-1] + 1 if config.final_hidden == "none" else spec.num_layers
    weights = layer_weights(config.target, depth)
    sizes = (spec.num_layers, depth, spec.hidden_size)
    return Work(spec.name, layer_ids, *sizes, weights, flop_per_token=2 * weights)


def codec_size(form: ShardFormat, data: CorpusEstimate, shards: int, room: Room) -> CodecSize:
    need = form.even_shards(data.documents, data.tokens, shards)
    return CodecSize(need.bytes / data.tokens, need.bytes, need.inodes, room.holds(need))


def pace(gpus: int, tokens: int, rate: float, size: CodecSize) -> Pace:
    """`rate` is in tokens a second and GPU; ranks share nothing, so it just adds up."""
    rate *= gpus
    return Pace(gpus, rate, tokens / rate / 3600, rate * size.bytes_per_token / 1e9)
