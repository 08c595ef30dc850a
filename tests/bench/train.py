"""One training step's forward and backward passes beside SpecForge's, at the real size, on a GPU.

    python tests/bench/train.py [--rounds 8] [--fp8] [--profile] [--tiny]

Prints one JSON line. The drafter is that of Qwen3.6-27B (5 layers, 1.73 B parameters, random
weights, the same in both), the row one document of 4,096 tokens of which 512 are a prompt, with
512 anchors, the same in both. In one process, interleaved, medians:

  ours       row_loss and its backward pass, masks made anew each time
  ours_fp8   the same with --fp8
  specforge  SpecForge 0.2.0's OnlineDFlashModel with Liger's norms and MLP, flex_attention

Needs the wheels specforge 0.2.0 and liger-kernel 0.8.5, both without their dependencies.
`gradient_distance` is the relative L2 distance of all gradients from SpecForge's, for the same
loss over the same anchors. --tiny is a small case on a CPU in float32, by SDPA, where both must
agree but for float32's rounding.
"""

import argparse
import json
import statistics
import sys
import time

import torch
from torch import nn

from dflash_offline.anchors import make_blocks
from dflash_offline.batch import Batch
from dflash_offline.drafter import Drafter
from dflash_offline.head import Head
from dflash_offline.loss import Objective
from dflash_offline.packing import pack_row
from dflash_offline.spec import DrafterSpec
from dflash_offline.step import Task, row_loss

REAL = {
    "hidden_size": 5120, "vocab_size": 248_320, "mlp_width": 17_408, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "sliding_window": 2048, "rope_theta": 1e7, "block_size": 16,
    "mask_token_id": 248_070, "target_layer_ids": (1, 16, 31, 46, 61), "num_target_layers": 64,
}  # fmt: skip
TINY = {
    **REAL, "hidden_size": 64, "vocab_size": 300, "mlp_width": 96, "heads": 4, "kv_heads": 2,
    "head_dim": 16, "sliding_window": 20, "block_size": 8, "mask_token_id": 7,
}  # fmt: skip


def say(text):
    print(text, flush=True, file=sys.stderr)


class Case:
    """A row, its anchors and the target's ends."""

    def __init__(self, tiny):
        self.sizes = TINY if tiny else REAL
        self.device = torch.device("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.tokens, self.prompt, self.slots = (96, 12, 20) if tiny else (4096, 512, 512)
        g = torch.Generator().manual_seed(0)
        width, vocab = self.sizes["hidden_size"], self.sizes["vocab_size"]
        self.ids = torch.randint(10, vocab, (self.tokens,), generator=g)
        self.mask = torch.arange(self.tokens) >= self.prompt
        candidates = torch.arange(self.prompt, self.tokens - 1)
        chosen = torch.randperm(len(candidates), generator=g)[: self.slots]
        self.anchors = candidates[chosen].sort().values
        torch.manual_seed(0)
        self.taps = self.random(self.tokens, 5 * width)
        self.head = self.random(vocab, width) * width**-0.5
        self.embedding = self.random(vocab, width)

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def spec(self):
        kinds = ("sliding_attention",) * 4 + ("full_attention",)
        return DrafterSpec(
            layer_types=kinds, rms_norm_eps=1e-6, max_position_embeddings=262_144,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            **self.sizes,
        )  # fmt: skip

    def batch(self):
        row = pack_row([(self.ids, self.mask)], self.tokens)
        blocks = make_blocks(
            row, self.anchors, slots=self.slots, block_size=self.sizes["block_size"],
            mask_token_id=self.sizes["mask_token_id"], gamma=7.0,
        )  # fmt: skip
        rows = blocks.weights_AK.flatten().nonzero().flatten()
        known = {
            "taps_SM": self.taps, "document_ids_S": row.document_ids_S.to(self.device),
            "position_ids_S": row.position_ids_S.to(self.device), "blocks": blocks.to(self.device),
            "weight": float(blocks.weights_AK.sum()), "rows": rows.to(self.device),
            "supervised_slots": len(rows), "final_SD": None, "coverage": None, "seed": 0,
        }  # fmt: skip
        return Batch(**{name: known[name] for name in Batch.__annotations__})


def ours(case, weights, *, fp8):
    """A function that runs both passes, and the drafter. Masters in fp32, as in training."""
    drafter = Drafter(case.spec()).to(case.device)
    drafter.load_state_dict({name: value.float() for name, value in weights.items()})
    compiled = case.device.type == "cuda"
    if fp8:
        say(f"{drafter.multiply_in_fp8()} matrices in fp8")
    if compiled:
        drafter.compile_layers()
    head = Head(case.head, compiled=compiled, fp8=fp8)
    task = Task(case.spec(), case.embedding, head, Objective())
    batch = case.batch()

    def step():
        sums = row_loss(drafter, task, batch)
        sums.loss.backward()
        return sums.loss.detach() / sums.weight

    return step, drafter, batch.weight


def specforge(case, liger):
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    spec = case.spec()
    config = Qwen3Config(
        hidden_size=spec.hidden_size, intermediate_size=spec.mlp_width, num_hidden_layers=5,
        num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim,
        vocab_size=spec.vocab_size, rope_theta=spec.rope_theta, max_position_embeddings=262_144,
        sliding_window=spec.sliding_window, use_sliding_window=True, max_window_layers=5,
        layer_types=list(spec.layer_types), rms_norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    config.num_target_layers, config.block_size = 64, spec.block_size
    ids = list(spec.target_layer_ids)
    config.dflash_config = {"mask_token_id": spec.mask_token_id, "target_layer_ids": ids}
    backend = "flex_attention" if case.device.type == "cuda" else "sdpa"
    config._attn_implementation = backend
    kernels = ()
    if liger:
        from specforge.modeling.draft.dflash_kernels import load_liger_dflash_kernels

        kernels = (load_liger_dflash_kernels(),)
    drafter = DFlashDraftModel(config, *kernels).to(case.device, case.dtype)
    head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(case.head, requires_grad=False)
    embedding = nn.Embedding(spec.vocab_size, spec.hidden_size, device="meta")
    embedding.weight = nn.Parameter(case.embedding, requires_grad=False)
    model = OnlineDFlashModel(
        drafter, head, embedding, spec.mask_token_id, block_size=spec.block_size,
        num_anchors=case.slots, loss_decay_gamma=7.0, attention_backend=backend,
    )  # fmt: skip
    anchors = case.anchors[None].to(case.device)
    model._sample_anchor_positions = lambda *_: (anchors, torch.ones_like(anchors).bool())
    row = (
        case.ids[None].to(case.device),
        case.taps[None],
        case.mask[None].float().to(case.device),
    )

    def step():
        loss, _, _ = model(*row)
        loss.backward()
        return loss.detach()

    return step, drafter


def seconds(step, drafter, device):
    drafter.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def gradients(step, drafter, scale=1.0):
    drafter.zero_grad(set_to_none=True)
    loss = float(step())
    found = {name: p.grad.float() / scale for name, p in drafter.named_parameters()}
    return loss, found


def distance(ours, theirs):
    apart = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs)
    return (apart / sum(float(value.square().sum()) for value in theirs.values())) ** 0.5


def needed_flop(case):
    """6 a weight and query, 4 a head weight and supervised slot, 6 a context weight and token."""
    s = case.sizes
    d, e = s["hidden_size"], s["head_dim"]
    layer = 2 * d * s["heads"] * e + 2 * d * s["kv_heads"] * e + 3 * d * s["mlp_width"]
    queries = case.slots * s["block_size"]
    slots = queries * (s["block_size"] - 1) / s["block_size"]
    context = case.tokens * (5 * d * d + 5 * 2 * d * s["kv_heads"] * e)
    return 6 * queries * 5 * layer + 4 * slots * d * s["vocab_size"] + 6 * context


def profile(step, drafter):
    drafter.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda k: -k.self_device_time_total)
    for kernel in kernels[:30]:
        say(f"{kernel.self_device_time_total / 1e3:8.2f} ms {kernel.count:4} x {kernel.key[:90]}")
    total = sum(k.self_device_time_total for k in kernels)
    say(f"{total / 1e3:8.2f} ms in all")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    case = Case(options.tiny)
    their_step, theirs = specforge(case, liger=not options.tiny)
    weights = {name: value.detach() for name, value in theirs.state_dict().items()}
    works = {"specforge": (their_step, theirs)}
    for name, fp8 in [("ours", False), *([("ours_fp8", True)] if options.fp8 else [])]:
        step, drafter, weight = ours(case, weights, fp8=fp8)
        works[name] = (step, drafter)
    peaks, compiling = {}, {}
    for name, (step, drafter) in works.items():
        compiling[name] = round(seconds(step, drafter, case.device), 1)
        say(f"{name}: first pass {compiling[name]} s")
        if not options.tiny:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            seconds(step, drafter, case.device)
            peaks[name] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 1)
    times = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, (step, drafter) in works.items():
            times[name].append(seconds(step, drafter, case.device))
    median = {name: statistics.median(taken) for name, taken in times.items()}
    if options.profile:
        for name in works:
            say(name)
            profile(*works[name])
    loss, their_gradients = gradients(*works["specforge"])
    found = {name: gradients(*works[name], weight) for name in works if name != "specforge"}
    print(
        json.dumps(
            {
                "bench": "train",
                "gpu": "none" if options.tiny else torch.cuda.get_device_name(),
                "median_ms": {name: round(1e3 * s, 1) for name, s in median.items()},
                "times_specforge": {
                    name: round(median["specforge"] / s, 3) for name, s in median.items()
                },
                "needed_tflops": {
                    name: round(needed_flop(case) / s / 1e12) for name, s in median.items()
                },
                "gib_of_a_pass": peaks, "first_pass_s": compiling,
                "loss": {"specforge": loss, **{name: value for name, (value, _) in found.items()}},
                "gradient_distance": {
                    name: distance(value, their_gradients) for name, (_, value) in found.items()
                },
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
