"""Every knob of every command, once: default, help text and range check.

The command line is made from these classes (cli/options.py), so a knob that is added here is an
option there, and its help has one home. Nothing here imports torch: `--help` must answer at once.
"""

import math
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any


def knob(
    default: Any = MISSING,
    help: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field that carries its help text and its legal range. No default: required."""
    rules = {"help": help, "minimum": minimum, "maximum": maximum, "choices": tuple(choices)}
    return field(metadata=rules) if default is MISSING else field(default=default, metadata=rules)


def same_knob(config: type["Config"], name: str) -> Any:
    """The knob of another command over again: default, help and range have one home."""
    rule = next(rule for rule in fields(config) if rule.name == name)
    return field(default=rule.default, metadata=rule.metadata)


def option_name(field_name: str) -> str:
    """The command-line spelling of a config field: `row_tokens` -> `--row-tokens`."""
    return "--" + field_name.replace("_", "-")


def _check_range(rule: Field[Any], value: Any) -> None:
    low, high, choices = (rule.metadata[k] for k in ("minimum", "maximum", "choices"))
    name = option_name(rule.name)
    for item in value if isinstance(value, tuple) else (value,):
        if item is None:
            continue
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{name} is {item}; it must be a finite number")
        if choices and item not in choices:
            raise ValueError(f"{name} is {item!r}; choose one of {', '.join(choices)}")
        if low is not None and item < low:
            raise ValueError(f"{name} is {item}; it must be at least {low}")
        if high is not None and item > high:
            raise ValueError(f"{name} is {item}; it must be at most {high}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A set of knobs, checked when it is made. Raises ValueError that names the option."""

    def __post_init__(self) -> None:
        for rule in fields(self):
            _check_range(rule, getattr(self, rule.name))


def arguments_of(config: Config) -> list[str]:
    """The command line that makes the same config."""
    arguments: list[str] = []
    for rule in fields(config):
        name, value = option_name(rule.name), getattr(config, rule.name)
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(name)
        elif isinstance(value, tuple) and isinstance(value[0], Path):
            arguments += [part for path in value for part in (name, str(path))]
        elif isinstance(value, tuple):
            arguments += [name, ",".join(map(str, value))]
        else:
            arguments += [name, str(value)]
    return arguments


DEVICES = ("auto", "cuda", "cpu")
LARGEST_SEED = 2**31 - 1
# Far above any use, low enough for a clear refusal where memory would run out first.
MOST_TOKENS = 2**24
WIDEST = 2**20
CODECS = ("int8", "lossless", "raw")
SCHEDULES = ("cosine", "wsd")
TRACKERS = ("none", "tensorboard", "wandb")
FINAL_HIDDEN = ("none", "before-norm", "after-norm")


@dataclass(frozen=True, kw_only=True)
class ExtractConfig(Config):
    """Stage one: conversations -> hidden-state shards."""

    target: Path = knob(help="Folder of the target LLM (config.json, safetensors, tokenizer).")
    data: tuple[Path, ...] = knob(help="Conversation files, JSON lines; read in this order.")
    output: Path = knob(help="Data set to create or to go on with.")
    target_layer_ids: tuple[int, ...] | None = knob(
        None, "Tapped layers, comma-separated, 0-based. Default: five by z-lab's rule.", minimum=0
    )
    codec: str = knob("int8", "How hidden states are stored.", choices=CODECS)
    max_codec_error: float = knob(
        0.05,
        "Stop if a tap's relative L2 error (p99 over a shard's tokens) is larger.",
        minimum=0,
    )
    final_hidden: str = knob(
        "none",
        "Store the last hidden state too, for distillation; the whole target runs for it.",
        choices=FINAL_HIDDEN,
    )
    final_codec: str = knob("int8", "How the last hidden state is stored.", choices=CODECS)
    max_length: int = knob(
        4096,
        "Longer documents are cut to this many tokens, or dropped (--over-long).",
        minimum=2,
        maximum=MOST_TOKENS,
    )
    over_long: str = knob(
        "truncate", "What becomes of documents that are longer.", choices=("truncate", "drop")
    )
    max_bad_fraction: float = knob(
        0.01,
        "Fail if more of the documents than this share have states that are inf, NaN or zero.",
        minimum=0,
        maximum=1,
    )
    tokenizer_processes: int | None = knob(
        None,
        "Processes that tokenise the data. Default: by its size and the CPUs.",
        minimum=1,
        maximum=1024,
    )
    shard_tokens: int = knob(65_536, "Most tokens in one shard.", minimum=1, maximum=2**31)
    batch_tokens: int = knob(
        16_384,
        "Tokens in one forward pass: a row of whole documents.",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    allow_partial: bool = knob(
        False, "Start even if the disk has no room for all of it; a warning says so."
    )
    gpus: int | None = knob(
        None, "Processes on this host, one per GPU. Default: one for each GPU.", minimum=1
    )
    eager: bool = knob(False, "On a GPU, run the target's layers without compiling them.")
    require_fast_kernels: bool = knob(
        False, "Fail where a GPU would run a hybrid target's layers in plain torch."
    )
    calibration_tokens: int = knob(
        16_384, "Tokens that calibrate the codec, drawn from the whole corpus.", minimum=1
    )
    dtype: str = knob(
        "bfloat16",
        "Precision the target runs in; fp8: the products of its large linears, the rest bfloat16.",
        choices=("bfloat16", "float32", "fp8"),
    )
    seed: int = knob(0, "Seed of the calibration sample.", minimum=0, maximum=LARGEST_SEED)
    device: str = knob("auto", "Where the target runs.", choices=DEVICES)
    trust_remote_code: bool = knob(False, "Run Python code that the target's folder brings along.")


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(Config):
    """What an extract will take, told beforehand."""

    target: Path = same_knob(ExtractConfig, "target")
    data: tuple[Path, ...] = same_knob(ExtractConfig, "data")
    output: Path = knob(Path(), "Where the data set would go: whose free space is told.")
    target_layer_ids: tuple[int, ...] | None = same_knob(ExtractConfig, "target_layer_ids")
    codec: str = same_knob(ExtractConfig, "codec")
    final_hidden: str = same_knob(ExtractConfig, "final_hidden")
    final_codec: str = same_knob(ExtractConfig, "final_codec")
    max_length: int = same_knob(ExtractConfig, "max_length")
    over_long: str = same_knob(ExtractConfig, "over_long")
    shard_tokens: int = same_knob(ExtractConfig, "shard_tokens")
    batch_tokens: int = same_knob(ExtractConfig, "batch_tokens")
    gpus: int | None = knob(None, "GPUs to tell the time for. Default: 1, 2, 4 and 8.", minimum=1)
    dtype: str = same_knob(ExtractConfig, "dtype")
    tflops: float | None = knob(
        None,
        "TFLOP/s of a GPU in the target's layers. Default: what an H200 reaches in --dtype.",
        minimum=1e-3,
    )
    sample_lines: int = knob(
        1000, "Lines that are tokenised, drawn from all data files.", minimum=2
    )
    seed: int = knob(0, "Seed of that draw.", minimum=0, maximum=LARGEST_SEED)
    json: bool = knob(False, "One JSON object instead of tables.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Stage two: shards -> drafter."""

    shards: tuple[Path, ...] = knob(help="Data sets to train on.")
    eval_shards: tuple[Path, ...] = knob(help="Held-out data sets, to evaluate on while training.")
    target: Path = knob(help="Folder of the target; only embedding and lm_head are read.")
    output: Path = knob(help="Run folder: checkpoints, log, final drafter.")
    mask_token_id: int | None = knob(
        None, "Token that stands for 'to be drafted'. Default: known for Qwen3.x.", minimum=0
    )
    block_size: int = knob(16, "Tokens in a block, the anchor included.", minimum=2, maximum=64)
    layers: int = knob(5, "Layers of the drafter.", minimum=1, maximum=1024)
    heads: int = knob(32, "Query heads.", minimum=1, maximum=WIDEST)
    kv_heads: int = knob(8, "Key/value heads.", minimum=1, maximum=WIDEST)
    head_dim: int = knob(128, "Width of a head.", minimum=2, maximum=WIDEST)
    mlp_width: int | None = knob(
        None, "MLP width. Default: the target's.", minimum=1, maximum=WIDEST
    )
    sliding_layers: int | None = knob(
        None, "First layers that slide; the rest see all. Default: all but the last.", minimum=0
    )
    sliding_window: int = knob(
        2048, "Context positions a sliding layer sees.", minimum=1, maximum=MOST_TOKENS
    )
    rope_theta: float | None = knob(None, "RoPE base. Default: the target's.", minimum=1)
    row_tokens: int = knob(4096, "Context tokens of a packed row.", minimum=2, maximum=MOST_TOKENS)
    anchors: int = knob(512, "Anchor slots in a row.", minimum=1, maximum=WIDEST)
    rows_per_step: int = knob(8, "Rows that make one optimizer step, over all ranks.", minimum=1)
    steps: int = knob(10_000, "Optimizer steps.", minimum=1)
    optimizer: str = knob(
        "adamw",
        "adamw, or muon for the matrices and adamw for the norms.",
        choices=("adamw", "muon"),
    )
    lr: float = knob(6e-4, "Peak learning rate of AdamW.", minimum=0)
    muon_lr: float = knob(5e-3, "Peak learning rate of Muon.", minimum=0)
    shard_optimizer: bool = knob(
        False, "Each rank keeps its share of AdamW's state alone; Muon's is shared out anyway."
    )
    weight_decay: float = knob(0.0, "Decoupled weight decay.", minimum=0)
    warmup: float = knob(0.04, "Share of the steps that warm up.", minimum=0, maximum=1)
    schedule: str = knob(
        "cosine",
        "After the warm-up: one cosine to the end, or wsd: constant, then a cosine at the end.",
        choices=SCHEDULES,
    )
    decay: float = knob(
        0.2, "Share of the steps over which wsd falls at the end.", minimum=0, maximum=1
    )
    lr_floor: float = knob(
        0.0, "What the rate falls to at the end, as a share of the peak.", minimum=0, maximum=1
    )
    clip: float = knob(1.0, "Largest norm of the whole gradient.", minimum=0)
    gamma: float | None = knob(
        None,
        "Decay of slot weights, in slots. Default: 7 for blocks of 16, else half the block.",
        minimum=1e-3,
    )
    objective: str = knob(
        "ce",
        "ce: the data's tokens; kl: the target's own distribution (extract with --final-hidden).",
        choices=("ce", "kl"),
    )
    weighting: str = knob(
        "decay",
        "Weights of slots: decay by place (--gamma), or dpace, by what the drafter gets right.",
        choices=("decay", "dpace"),
    )
    dpace_alpha: float = knob(
        0.5, "How much of D-PACE's weights does not depend on the drafter.", minimum=0, maximum=1
    )
    feature_noise: float = knob(
        0.0,
        "Largest uniform noise on the context features, as a share of their size; 0: none.",
        minimum=0,
        maximum=1,
    )
    noise_until: float = knob(
        1.0,
        "Share of the steps over which the noise falls to none, in a straight line.",
        minimum=0,
        maximum=1,
    )
    warm_start: Path | None = knob(
        None, "Exported drafter, ours or published, to start from instead of random weights."
    )
    precision: str = knob(
        "bf16",
        "Precision of the drafter's matmuls; fp8: of the large ones, the rest bf16.",
        choices=("bf16", "fp8", "fp32"),
    )
    gpus: int | None = same_knob(ExtractConfig, "gpus")
    reader_processes: int | None = knob(
        None,
        "Processes that read rows ahead, for each GPU. Default: 4, as far as there are CPUs, and "
        "none without a GPU.",
        minimum=0,
        maximum=256,
    )
    eval_every: int = knob(500, "Steps between held-out evaluations.", minimum=1)
    eval_rows: int = knob(32, "Held-out rows in an evaluation while training.", minimum=1)
    eval_documents: int = knob(
        16,
        "Held-out documents that are replayed at each evaluation: their acceptance length is the "
        "score of the best drafter. 0: none, the streak is.",
        minimum=0,
    )
    save_every: int = knob(500, "Steps between checkpoints.", minimum=1)
    keep_checkpoints: int = knob(2, "Newest checkpoints that stay.", minimum=1)
    log_every: int = knob(10, "Steps between log lines.", minimum=1)
    track: str = knob("none", "Where else the log's numbers go.", choices=TRACKERS)
    max_bad_steps: int = knob(
        10,
        "Steps in a row that may change nothing (gradient not finite) before the end.",
        minimum=1,
    )
    max_restarts: int = knob(
        3,
        "Times that the ranks start again from the newest checkpoint after one of them died.",
        minimum=0,
        maximum=100,
    )
    resume: bool = knob(False, "Go on from the newest checkpoint in --output.")
    seed: int = knob(0, "Seed of weights, order and anchors.", minimum=0, maximum=LARGEST_SEED)
    device: str = knob("auto", "Where the drafter trains.", choices=DEVICES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"--head-dim is {self.head_dim}; RoPE needs an even width")
        if self.sliding_layers is not None and self.sliding_layers > self.layers:
            raise ValueError(
                f"--sliding-layers is {self.sliding_layers}, but --layers is {self.layers}"
            )
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(
                f"--warmup {self.warmup} and --decay {self.decay} together are more than all steps"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Config):
    """Replay of held-out documents: acceptance lengths."""

    drafter: Path = knob(help="Exported drafter: config.json and model.safetensors.")
    target: Path = knob(help="Folder of the target; only embedding and lm_head are read.")
    shards: tuple[Path, ...] = knob(help="Held-out data sets.")
    output: Path = knob(help="JSON file to write.")
    block_size: int | None = knob(
        None, "Block size to replay with. Default: the drafter's own.", minimum=2, maximum=64
    )
    batch_tokens: int = knob(
        16_384, "Padded context tokens replayed together.", minimum=1, maximum=MOST_TOKENS
    )
    dtype: str = knob(
        "bfloat16", "Precision the drafter runs in.", choices=("bfloat16", "float32")
    )
    device: str = knob("auto", "Where the drafter runs.", choices=DEVICES)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(Config):
    """A full check of a data set."""

    repair: bool = knob(False, "Set bad shards aside, so that the next extract redoes them.")
    json: bool = knob(False, "One JSON object instead of text.")


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Config):
    """A look into one shard or data set."""

    document: int = knob(0, "Document to decode, by its place in the shard.", minimum=0)
    target: Path | None = knob(None, "Folder whose tokenizer turns ids into text.")
    json: bool = knob(False, "One JSON object instead of a table.")
