"""Stage one at the real size of Qwen3.6-27B's text tower, with random weights, on one GPU.

    python tests/bench/extract.py [--rows 12] [--layers 62] [--folder DIR]

Prints one JSON line. Documents have log-normal lengths (median 1,200, up to 8,192 tokens) and
random ids. In one process, on the same documents:

  plain    a quarter of the documents: transformers with fla's kernels, batches of up to 8,192
           tokens padded on the right (sorted by length), hooks on the tapped layers, nothing kept
  peer     an eighth of them: one document at a time, output_hidden_states=True, torch.save of the
           taps, as the offline recipes of the field do it
  forward  rows of 16,384 tokens, compiled layers, nothing encoded
  extract  the stage's own loop: rows, int8, checksums, shards committed to DIR

Rates are real tokens (padding does not count) a second, the shards' fsync included; they take
turns, after one round that also tunes kernels. Then the large linears become fp8, and forward and
extract are run again.
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
from dflash_offline.conversations import Corpus, Counts, Document
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
    plan = plan_shards(documents, shard_tokens=65_536, row_tokens=ROW)
    tokens = sum(map(len, documents))
    world = World(0, 1, torch.device("cuda", 0))
    corpus = Corpus(documents=documents, counts=Counts(), sha256={})
    setup = stage.Setup(config, world, spec, ids, 8192, corpus, plan)
    setup.__dict__["target"] = target  # a cached property: nothing is loaded
    rows = [row for shard in plan.values() for row in shard]
    return setup, 1 - tokens / (ROW * len(rows))


def run_stage(setup, dataset):
    """All shards anew, into a data set whose codec is fitted."""
    for name in list(dataset.committed()):
        shutil.rmtree(dataset.set_aside(name))
    stage.write_shards(setup, dataset, stage.resume(setup, dataset))


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
    times = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            seconds = seconds_of(work)
            say(f"{name} {seconds:.2f} s" + ("" if turn else " (to warm up)"))
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(taken) for name, taken in times.items()}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=12, help="of 16,384 tokens")
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    documents = draw_documents(options.rows)
    tokens = sum(map(len, documents))
    started = time.monotonic()
    tower = build_tower(options.layers)
    say(f"built in {time.monotonic() - started:.0f} s")
    linears = [m for m in tower.layers.modules() if isinstance(m, torch.nn.Linear)]
    flop = 2 * sum(linear.weight.numel() for linear in linears)
    ids = tuple(i for i in LAYER_IDS if i < options.layers)
    found = {}
    try:
        started = time.monotonic()
        target = TappedTarget(tower, ids, compiled_row=ROW)
        say(f"compiled in {time.monotonic() - started:.0f} s, {target.self_test}")
        compiling = time.monotonic() - started
        setup, unfilled = make_setup(documents, target, options.layers, folder / "bf16")
        started = time.monotonic()
        dataset = stage.open_dataset(setup)
        say(f"codec fitted in {time.monotonic() - started:.0f} s")
        functions = fla_functions(target)
        compiled = [layer.forward for layer in tower.layers]
        few = documents[::4]

        def uncompiled(work):
            for layer in tower.layers:
                layer.__dict__.pop("forward", None)
            work()
            for layer, forward in zip(tower.layers, compiled, strict=True):
                layer.forward = forward

        works = {
            "plain": lambda: uncompiled(lambda: plain_forward(tower, few, functions)),
            "peer": lambda: uncompiled(lambda: peer_loop(tower, few[::2], functions, folder)),
            "forward": lambda: forward_only(target, documents),
            "extract": lambda: run_stage(setup, dataset),
        }
        sizes = {"plain": few, "peer": few[::2], "forward": documents, "extract": documents}
        found["bf16"] = take_turns(works, options.rounds)
        shutil.rmtree(setup.config.output)
        uncompiled(lambda: [layer._forward_hooks.clear() for layer in tower.layers])
        for layer in tower.layers:
            layer.__dict__.pop("forward", None)
        torch.compiler.reset()
        target = TappedTarget(tower, ids, compiled_row=ROW, fp8=True)
        say(f"fp8: {target.self_test}")
        setup, _ = make_setup(documents, target, options.layers, folder / "fp8")
        dataset = stage.open_dataset(setup)
        works = {
            "forward": lambda: forward_only(target, documents),
            "extract": lambda: run_stage(setup, dataset),
        }
        found["fp8"] = take_turns(works, options.rounds)
    finally:
        shutil.rmtree(folder)
    rates = {
        precision: {
            name: round(sum(map(len, sizes[name])) / seconds) for name, seconds in times.items()
        }
        for precision, times in found.items()
    }
    print(
        json.dumps(
            {
                "bench": "extract", "gpu": torch.cuda.get_device_name(), "tokens": tokens,
                "documents": len(documents), "layers": options.layers, "tokens_per_second": rates,
                "over_plain": round(rates["bf16"]["extract"] / rates["bf16"]["plain"], 3),
                "extract_over_forward": {
                    p: round(t["extract"] / t["forward"], 3) for p, t in found.items()
                },
                "forward_tflops": {
                    p: round(flop * tokens / t["forward"] / 1e12) for p, t in found.items()
                },
                "row_filler": round(unfilled, 4), "fp8_error": target.self_test["fp8"],
                "self_test": target.self_test, "compile_seconds": round(compiling),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
