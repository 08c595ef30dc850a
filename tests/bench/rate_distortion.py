"""What each codec costs in bits, in fidelity on real hidden states, and in time.

    python tests/bench/rate_distortion.py [--target demo/target] [--tokens 12288] [--table]

Prints one JSON line; progress, and with --table a Markdown table, go to stderr. Without a target
it takes the speeds alone. Price: some 20 minutes of one CPU core; 6 GB of memory.

Text: sources of Python's standard library, and licences and descriptions of installed packages, as
this interpreter finds them: another installation measures other text. Codecs are calibrated on
some documents and tested on others.

Fidelity is held against SmolLM2 in fp32. Codecs get its states in bf16: `raw` shows what that
rounding costs alone. The error of a token at a tap is the norm of what was lost over the norm of
the state. Quantiles are over all tokens and taps, the sinks too (the first token of a document,
with 100 times the norm), so they count in the 99th percentile and the worst. For the channel error
each channel is divided by its rms over the test tokens first. KL (nats) and top-1 (share of tokens
whose likeliest successor stays) hold the target's predictions against those it makes when one
tap's decoded states are put back into it. `whole model in bf16` is the noise that every user of
bf16 lives with; its KL and top-1 are the same under both taps.

Bits count every byte of the planes, at this target's width, where int8 has groups of 64 (128 at a
width of 5,120). Speed is GB of bf16 a second on random states of 5 taps x 5,120: torch's part, one
kernel an operation in the comparators; the zstd of `lossless`, on one CPU core, stands beside it.
`raw` is a view and takes no time.

N tokens, L taps, D hidden, T tokens of a document, C codecs, V vocabulary.
"""

import argparse
import importlib.metadata
import itertools
import json
import random
import sys
import sysconfig
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from comparators import family
from numcodecs.zstd import Zstd
from store import interleaved, states
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

TAPS = (1, 8, 14, 20, 27)
PUT_BACK = (8, 20)
CALIBRATION_TOKENS = 16_384
SHORTEST, LONGEST = 512, 1024  # tokens of a document; longer files are cut
SPEED_TOKENS = {"cpu": 512, "cuda": 4096}  # more than caches hold
ZSTD, ZSTD_TOKENS = Zstd(1), 128  # as in a shard
NOISE = "whole model in bf16"
COLUMNS = {  # key of a row -> title and format
    "bits": ("bits a value", ".2f"),
    "median": ("error, median", ".2%"),
    "p99": ("p99", ".2%"),
    "worst": ("worst", ".2%"),
    "channel_median": ("channel error, median", ".2%"),
    "channel_p99": ("p99", ".2%"),
    "kl_8": ("KL, tap 8", ".1e"),
    "top1_8": ("top-1", ".1%"),
    "kl_20": ("KL, tap 20", ".1e"),
    "top1_20": ("top-1", ".1%"),
    "encode_GBps": ("encode, GB/s", ".3g"),
    "decode_GBps": ("decode, GB/s", ".3g"),
}
START = time.monotonic()


def say(message):
    print(f"[{time.monotonic() - START:6.1f} s] {message}", file=sys.stderr, flush=True)


def texts():
    """The first 8 KiB of a source and of a text about a package in turns, in a seeded order."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = (
        file for package in importlib.metadata.distributions() for file in package.files or ()
    )
    about = sorted(
        Path(file.locate())
        for file in files
        if file.name.split(".")[0] in ("METADATA", "LICENSE", "COPYING")
    )
    for paths in (sources, about):
        random.Random(0).shuffle(paths)
    for path in itertools.chain(*zip(sources, about, strict=False)):
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")[:8192]


def documents(tokenizer):
    """Token ids [T]. Nothing that begins or ends like an earlier document: licences repeat."""
    seen = set()
    for text in texts():
        words = " ".join(text.split())
        ends = {words[:200], words[-200:]}
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= SHORTEST and not ends & seen:
            seen |= ends
            yield torch.tensor(ids[:LONGEST])


def take(source, tokens):
    """The next documents of `source`, with that many tokens or a few more."""
    taken = []
    while sum(map(len, taken)) < tokens:
        if (ids_T := next(source, None)) is None:
            raise ValueError("this Python installation has too little text; lower --tokens")
        taken.append(ids_T)
    return taken


def states_of(model, ids):
    """What the taps give on all documents, [N, L, D] in the model's precision."""
    found = []
    for ids_T in ids:
        out = model.get_decoder()(ids_T[None], use_cache=False, output_hidden_states=True)
        found.append(torch.cat([out.hidden_states[layer + 1] for layer in TAPS]).transpose(0, 1))
    return torch.cat(found)


def predict(model, ids_T):
    return model(ids_T[None], use_cache=False).logits[0]


def predict_from(model, ids_T, layer, states_CTD):
    """Logits [C, T, V] where `layer` gives `states_CTD` instead of its own states.

    The layers below run once: the hook turns a batch of one document into a batch of C.
    """
    module = model.get_decoder().layers[layer]
    hook = module.register_forward_hook(lambda *_: states_CTD)
    try:
        return model(ids_T[None], use_cache=False).logits
    finally:
        hook.remove()


def likeness(expected_TV, logits_TV):
    """Sums over tokens: KL(expected || other), and where both rank the same token first.

    `expected_TV` are fp64 log-probabilities: a KL of 1e-6 is below the noise of fp32.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=logits_TV.device)
    for expected, logits in zip(expected_TV.split(128), logits_TV.split(128), strict=True):
        other = logits.double().log_softmax(-1)
        kl = F.kl_div(other, expected, reduction="sum", log_target=True)
        sums += torch.stack([kl, (other.argmax(-1) == expected.argmax(-1)).sum()])
    return sums


def likenesses(model, in_bf16, test, decoded):
    """Mean `likeness` by title and layer."""
    sums, start = defaultdict(int), 0
    for ids_T in test:
        end = start + len(ids_T)
        expected_TV = predict(model, ids_T).double().log_softmax(-1)
        noise = likeness(expected_TV, predict(in_bf16, ids_T))
        for layer in PUT_BACK:
            tap = TAPS.index(layer)
            states_CTD = torch.stack([taps[start:end, tap].float() for taps in decoded.values()])
            logits_CTV = predict_from(model, ids_T, layer, states_CTD)
            for title, logits_TV in zip(decoded, logits_CTV, strict=True):
                sums[title, layer] += likeness(expected_TV, logits_TV)
            sums[NOISE, layer] += noise
        start = end
        say(f"put back {start} tokens of {sum(map(len, test))}")
    return {key: (total / start).tolist() for key, total in sums.items()}


def errors(exact_NLD, decoded_NLD):
    """The part of a row that tells what was lost of the states."""

    def quantiles(exact, decoded):
        error_NL = (decoded - exact).norm(dim=-1) / exact.norm(dim=-1)
        return error_NL.flatten().quantile(exact.new_tensor([0.5, 0.99, 1.0])).tolist()

    rms_LD = exact_NLD.square().mean(0).sqrt()
    median, p99, worst = quantiles(exact_NLD, decoded_NLD.float())
    channel_median, channel_p99, _ = quantiles(exact_NLD / rms_LD, decoded_NLD.float() / rms_LD)
    row = {"median": median, "p99": p99, "worst": worst}
    return row | {"channel_median": channel_median, "channel_p99": channel_p99}


def chunks(exponents_NLD):
    """What zstd gets to see at a time."""
    return [chunk.numpy() for chunk in exponents_NLD.cpu().split(ZSTD_TOKENS)]


def each(function, items):
    return [function(item) for item in items]


def stored_bits(planes):
    size = sum(plane.nbytes for name, plane in planes.items() if name != "exponents")
    if "exponents" in planes:
        size += sum(map(len, each(ZSTD.encode, chunks(planes["exponents"]))))
    return 8 * size


def fidelity(model, in_bf16, calibration, test):
    """Rows by title: every codec's bits, and what it and bf16 do to states and predictions."""
    codecs = family(states_of(model, calibration).bfloat16())
    exact_NLD = states_of(model, test)
    rows, decoded = {}, {}
    for title, codec in codecs.items():
        planes = codec.encode(exact_NLD.bfloat16())
        decoded[title] = codec.decode(planes)
        rows[title] = {"bits": stored_bits(planes) / exact_NLD.numel()}
        rows[title] |= errors(exact_NLD, decoded[title])
    rows[NOISE] = errors(exact_NLD, states_of(in_bf16, test))
    for (title, layer), means in likenesses(model, in_bf16, test, decoded).items():
        rows[title][f"kl_{layer}"], rows[title][f"top1_{layer}"] = means
    return rows


def speeds(device):
    """Rows by title: GB of bf16 a second."""
    taps_NLD = states(SPEED_TOKENS[device.type], 5, 5120).to(device)
    works = {}
    for title, codec in family(taps_NLD[:256]).items():
        planes = codec.encode(taps_NLD)
        works[title, "encode"] = partial(codec.encode, taps_NLD)
        works[title, "decode"] = partial(codec.decode, planes)
        if "exponents" in planes:
            plain = chunks(planes["exponents"])
            works[title, "zstd_encode"] = partial(each, ZSTD.encode, plain)
            works[title, "zstd_decode"] = partial(each, ZSTD.decode, each(ZSTD.encode, plain))
    rows = defaultdict(dict)
    for (title, what), seconds in interleaved(works, device).items():
        if title != "raw":
            rows[title][f"{what}_GBps"] = 2e-9 * taps_NLD.numel() / seconds
    return rows


def markdown(rows):
    lines = [["codec", *(title for title, _ in COLUMNS.values())], ["---"] * (len(COLUMNS) + 1)]
    for name, row in rows.items():
        cells = [f"{row[k]:{form}}" if k in row else "-" for k, (_, form) in COLUMNS.items()]
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fidelity_on(folder, tokens, device):
    """Rows by title, and how much text they rest on."""
    source = documents(AutoTokenizer.from_pretrained(folder))
    test, calibration = (
        [ids_T.to(device) for ids_T in take(source, count)]
        for count in (tokens, CALIBRATION_TOKENS)
    )
    model, in_bf16 = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    say(f"states of {len(calibration)} documents to calibrate on and {len(test)} to test on")
    sizes = {
        "tokens": sum(map(len, test)),
        "calibration_tokens": sum(map(len, calibration)),
    }
    return fidelity(model, in_bf16, calibration, test), sizes


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="the folder of SmolLM2")
    parser.add_argument("--tokens", type=int, default=12_288, help="to test on")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--table", action="store_true", help="a Markdown table on stderr, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if options.device == "auto" else options.device)

    rows, facts = defaultdict(dict), {}
    if options.target:
        rows, facts = fidelity_on(options.target, options.tokens, device)
    say("speeds")
    for title, row in speeds(device).items():
        rows[title] |= row

    if options.table:
        print(markdown(rows), file=sys.stderr)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core"
    facts = {"bench": "rate_distortion", "device": where, **facts}
    rows = {t: {k: float(f"{v:.4g}") for k, v in row.items()} for t, row in rows.items()}
    print(json.dumps(facts | {"codecs": rows}))


if __name__ == "__main__":
    main()
