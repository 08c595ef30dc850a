"""Stage one at the real size of Qwen3.6-27B's text tower, with random weights, on one GPU.

    python tests/bench/extract.py [--rows 32] [--layers 62] [--precision both] [--folder DIR]

Prints one JSON line. Documents have log-normal lengths (median 1,200, up to 8,192 tokens) and
random ids. In one process, on the same documents:

  plain    some of the documents: transformers with fla's kernels, batches of up to 8,192 tokens
           padded on the right (sorted by length), hooks on the tapped layers, nothing kept
  peer     half of those: one document at a time, output_hidden_states=True, torch.save of the
           taps, as Model-Optimizer's compute_hidden_states_hf.py does it
  forward  rows of 16,384 tokens, compiled layers, nothing encoded
  extract  the stage's own loop: rows, int8, checksums, shards committed to DIR

Rates are real tokens (padding does not count) a second, the shards' fsync included; they take
turns, after a turn of plain and peer that tunes kernels. Then the large linears become fp8, and
forward and extract are run again. --profile adds where the time of one row goes, by kernel.
Needs fla-core and some 70 GB of GPU memory.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModel

from dflash_offline.config import ExtractConfig
from dflash_offline.documents import Corpus, Counts, Document
from dflash_offline.encoding import make_encoder
from dflash_offline.meter import Meter
from dflash_offline.planning import pack_rows, plan_shards
from dflash_offline.spec import TargetSpec
from dflash_offline.stages import extract as stage
from dflash_offline.target import TappedTarget
from dflash_offline.world import World

LAYER_IDS = (1, 16, 31, 46, 61)
ROW = 16_384
VOCAB = 4096  # rows of the embedding: the rest of the real 248,320 would only take memory
# What a token costs: twice the weights of the linears it passes.
TEXT = {
    "hidden_size": 5120, "intermediate_size": 17_408, "vocab_size": VOCAB, "head_dim": 256,
    "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip


def say(text):
    print(text, flush=True, file=__import__("sys").stderr)


def build_tower(layers):
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4 + 1)
    config = AutoConfig.for_model(
        "qwen3_5_text", num_hidden_layers=layers, layer_types=kinds[:layers], **TEXT
    )
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        tower = AutoModel.from_config(config)
    torch.set_default_dtype(torch.float32)
    g = torch.Generator("cuda").manual_seed(0)
    for parameter in tower.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, parameter.shape[1] ** -0.5, generator=g)
    return tower.eval().requires_grad_(False)


def draw_documents(rows):
    """Documents of `rows` rows, taken evenly from those of a corpus of a million tokens."""
    g = torch.Generator().manual_seed(0)
    documents = []
    for i in range(600):
        n = int((torch.randn((), generator=g) * 0.9).exp().mul(1200).clamp(16, 8192))
        ids = torch.randint(0, VOCAB, (n,), generator=g, dtype=torch.int32)
        documents.append(Document(i, ids, torch.ones(n, dtype=torch.bool)))
    packed = pack_rows(documents, ROW)
    kept = [d for k in range(rows) for d in packed[k * len(packed) // rows]]
    return sorted(kept, key=lambda document: document.index)


def sorted_batches(documents, tokens=8192):
    batch = []
    for document in sorted(documents, key=len):
        if batch and len(document) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(document)
    yield batch


def plain_forward(tower, documents, functions):
    """transformers' own forward pass; fla's convolution is put in, for which it has no wrapper."""
    with functions():
        for batch in sorted_batches(documents):
            ids = pad_sequence([document.input_ids for document in batch], batch_first=True)
            tower(input_ids=ids.cuda(), use_cache=False)


def peer_loop(tower, documents, functions, folder):
    with functions():
        for document in documents:
            ids = document.input_ids[None].cuda()
            states = tower(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
            taps = torch.cat([states[i + 1][0] for i in LAYER_IDS if i + 1 < len(states)], -1)
            torch.save(taps.cpu(), folder / f"{document.index}.pt")


def fla_functions(target):
    """Both of fla's kernels without borders, as transformers would call them, and plain sdpa."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def convolve(x, weight, bias=None, activation=None, **_):
        return causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)[0].mT

    def delta_rule(q, k, v, *, g, beta, **_):
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)

    named = {"causal_conv1d_fn": convolve, "torch_chunk_gated_delta_rule": delta_rule}
    return lambda: target._packed._functions(named, "sdpa")


def make_setup(documents, target, layers, folder):
    ids = tuple(i for i in LAYER_IDS if i < layers)
    config = ExtractConfig(
        target=Path("random"), data=(Path("random"),), output=folder, batch_tokens=ROW
    )
    spec = TargetSpec(
        name="random", content_hash="", model_type="qwen3_5", num_layers=64, hidden_size=5120,
        mlp_width=17_408, vocab_size=VOCAB, rms_norm_eps=1e-6, rope_theta=1e7,
        max_position_embeddings=262_144, bos_token_id=None, pad_token_id=None, eos_token_ids=(),
        tokenizer_hash="", template_hash="",
    )  # fmt: skip
    world = World(0, 1, torch.device("cuda", 0))
    corpus = Corpus(documents=documents, counts=Counts(), sha256={})
    setup = stage.Setup(config, world, spec, ids, 8192, corpus, plan(documents))
    setup.__dict__["target"] = target  # a cached property: nothing is loaded
    return setup


def plan(documents):
    return plan_shards(documents, shard_tokens=65_536, row_tokens=ROW)


def run_stage(setup, dataset):
    """All shards anew, into a data set whose codec is fitted."""
    for name in list(dataset.committed()):
        shutil.rmtree(dataset.set_aside(name))
    meter = Meter(setup.config.output)
    stage.write_shards(setup, dataset, stage.resume(setup, dataset), meter)


def forward_only(target, documents):
    for row in pack_rows(documents, ROW):
        target.taps([document.input_ids for document in row])


def seconds_of(work):
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def take_turns(works, rounds):
    """Median seconds of each."""
    times = {name: [] for name in works}
    for turn in range(rounds):
        for name, work in works.items():
            if name in ("plain", "peer") and not turn:
                say(f"{name} {seconds_of(work):.2f} s, kernels tuned")
            times[name].append(seconds_of(work))
            say(f"{name} {times[name][-1]:.2f} s")
    return {name: statistics.median(taken) for name, taken in times.items()}


def profile(work):
    """Share of GPU time by kind of kernel, and the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        seconds = seconds_of(work)
    kernels = sorted(found.key_averages(), key=lambda k: -k.self_device_time_total)
    total = sum(kernel.self_device_time_total for kernel in kernels)
    for kernel in kernels[:25]:
        share, each = kernel.self_device_time_total / total, kernel.self_device_time_total
        each /= kernel.count
        say(f"{share:7.2%} {kernel.count:5} x {each:8.0f} us {kernel.key[:80]}")
    say(f"kernels {total / 1e6:.3f} s of {seconds:.3f} s")


def uncompile(tower):
    for layer in tower.layers:
        layer.__dict__.pop("forward", None)


def run_bf16(tower, ids, documents, folder, options):
    """Seconds of each work, and how many tokens each has run over."""
    started = time.monotonic()
    target = TappedTarget(tower, ids, compiled_row=ROW)
    say(f"compiled in {time.monotonic() - started:.0f} s, {target.self_test}")
    setup, dataset = open_stage(documents, target, options.layers, folder / "bf16")
    functions = fla_functions(target)
    compiled = [layer.forward for layer in tower.layers]
    few = documents[:: options.few]

    def as_it_is(work):
        uncompile(tower)
        work()
        for layer, forward in zip(tower.layers, compiled, strict=True):
            layer.forward = forward

    works = {
        **stage_works(target, setup, dataset, documents),
        "plain": lambda: as_it_is(lambda: plain_forward(tower, few, functions)),
        "peer": lambda: as_it_is(lambda: peer_loop(tower, few[::2], functions, folder)),
    }
    if options.profile:
        profile(lambda: forward_only(target, documents[: ROW // 2000]))
    works = {name: work for name, work in works.items() if name != options.leave_out}
    times = take_turns(works, options.rounds)
    shutil.rmtree(setup.config.output)
    for layer in tower.layers:
        layer._forward_hooks.clear()
    uncompile(tower)
    torch.compiler.reset()
    sizes = {"forward": documents, "extract": documents, "plain": few, "peer": few[::2]}
    return times, {name: sum(map(len, part)) for name, part in sizes.items()}, target.self_test


def run_fp8(tower, ids, documents, folder, options):
    started = time.monotonic()
    target = TappedTarget(tower, ids, compiled_row=ROW, fp8=True)
    say(f"compiled in {time.monotonic() - started:.0f} s, {target.self_test}")
    setup, dataset = open_stage(documents, target, options.layers, folder / "fp8")
    if options.profile:
        profile(lambda: forward_only(target, documents[: ROW // 2000]))
    times = take_turns(stage_works(target, setup, dataset, documents), options.rounds)
    return times, dict.fromkeys(times, sum(map(len, documents))), target.self_test


def stage_works(target, setup, dataset, documents):
    return {
        "forward": lambda: forward_only(target, documents),
        "extract": lambda: run_stage(setup, dataset),
    }


def open_stage(documents, target, layers, folder):
    """The stage's setup and an empty data set; its calibration also tunes the kernels."""
    setup = make_setup(documents, target, layers, folder)
    started = time.monotonic()
    dataset = stage.open_dataset(setup)
    # Compiled once, as in a run of many shards.
    encode = make_encoder(dataset, target.device, compiled=True)
    for part in (documents[:3], documents[3:9]):
        encode(target.taps([document.input_ids for document in part]))
    stage.make_encoder = lambda *_, **__: encode
    say(f"codec fitted and compiled in {time.monotonic() - started:.0f} s")
    return setup, dataset


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="of 16,384 tokens")
    parser.add_argument(
        "--few", type=int, default=8, help="plain runs over one document in so many"
    )
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=("both", "bf16", "fp8"), default="both")
    parser.add_argument("--leave-out", default="", help="works not to run: peer, say")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    documents = draw_documents(options.rows)
    tower = build_tower(options.layers)
    linears = [m for m in tower.layers.modules() if isinstance(m, torch.nn.Linear)]
    flop = 2 * sum(linear.weight.numel() for linear in linears)
    ids = tuple(i for i in LAYER_IDS if i < options.layers)
    rows = sum(len(shard) for shard in plan(documents).values())
    line = {
        "bench": "extract", "gpu": torch.cuda.get_device_name(), "layers": options.layers,
        "documents": len(documents), "tokens": sum(map(len, documents)),
        "row_filler": round(1 - sum(map(len, documents)) / (ROW * rows), 4),
    }  # fmt: skip
    precisions = ("bf16", "fp8") if options.precision == "both" else (options.precision,)
    try:
        for precision in precisions:
            run = run_bf16 if precision == "bf16" else run_fp8
            times, tokens, self_test = run(tower, ids, documents, folder, options)
            line[precision] = describe(times, tokens, flop) | {"self_test": self_test}
    finally:
        shutil.rmtree(folder)
    print(json.dumps(line))


def describe(times, tokens, flop):
    rates = {name: tokens[name] / seconds for name, seconds in times.items()}
    found = {
        "tokens_per_second": {name: round(rate) for name, rate in rates.items()},
        "extract_over_forward": round(rates["extract"] / rates["forward"], 3),
        "forward_tflops": round(flop * rates["forward"] / 1e12),
    }
    if others := sorted({"plain", "peer"} & rates.keys()):
        found |= {f"over_{name}": round(rates["extract"] / rates[name], 3) for name in others}
    return found


if __name__ == "__main__":
    main()
