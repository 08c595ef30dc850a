"""The tokenised corpus in a file: of many ranks and reruns only the first tokenises.

A safetensors file with D documents end to end, N tokens in all: index int64 [D], starts int64
[D + 1], input_ids int32 [N], loss_mask bool [N]. Its metadata hold the counts, the hashes of the
data files, a checksum over everything, and a key: a hash of all that decides the content. A file
of other data, another target or other rules is not used but replaced.

It takes 5 bytes a token of the disk. It is mapped, so the ranks of a host share it in the page
cache; each of them hashes the data files, to know the key, and checks the checksum, at GB/s.

A template may write today's date: a rerun that finds the file keeps the day of the first run.
"""

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

import google_crc32c
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dflash_offline.conversations import check_files, read_documents
from dflash_offline.documents import Corpus, Counts, documents_in
from dflash_offline.facts import canonical_hash, reason
from dflash_offline.files import sha256_of, write_whole
from dflash_offline.metrics import bytes_text, progress, say
from dflash_offline.spec import TargetSpec

_FORMAT = 1  # of the file, and of how lines become documents: to be raised with either
_TENSORS = ("index", "starts", "input_ids", "loss_mask")
_PACKAGES = ("transformers", "tokenizers", "jinja2")  # another version may make other tokens
_BLOCK_BYTES = 1 << 22
_LOOK_SECONDS = 1.0

_FEW_BYTES, _BYTES_PER_PROCESS, _MOST_PROCESSES = 32_000_000, 16_000_000, 32


def corpus_of(
    path: Path,
    files: Sequence[Path],
    *,
    target: Path,
    spec: TargetSpec,
    max_length: int,
    over_long: str = "truncate",
    processes: int = 1,
    trust_remote_code: bool = False,
    must_keep: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Corpus:
    """The documents of `files` from `path`; if they are not there, read_documents, kept in `path`.

    If `path` cannot be written, that is a warning, or an OSError where other ranks wait for it and
    `must_keep` says so. `on_bytes` is told how many bytes of the files have been read since, and a
    negative number where they must be read once more.
    """
    key_of = partial(
        corpus_key,
        target=target,
        spec=spec,
        max_length=max_length,
        over_long=over_long,
        trust_remote_code=trust_remote_code,
    )
    if path.exists():  # or else one reading is enough to hash and to tokenise
        sha256 = hash_files(files, on_bytes)
        if corpus := load_corpus(path, key_of(sha256)):
            say(f"tokenised corpus read from {path}")
            return replace(corpus, sha256=sha256)
        say(f"{path} is damaged, or of other data or settings; it is made anew")
        if on_bytes:
            on_bytes(-sum(file.stat().st_size for file in files))
    corpus = read_documents(
        files,
        target=target,
        spec=spec,
        max_length=max_length,
        over_long=over_long,
        processes=processes,
        trust_remote_code=trust_remote_code,
        on_bytes=on_bytes,
    )
    _keep(path, corpus, key_of(corpus.sha256), must_keep)
    return corpus


def _keep(path: Path, corpus: Corpus, key: str, must_keep: bool) -> None:
    try:
        save_corpus(path, corpus, key)
    except OSError as error:
        sentence = f"the tokenised corpus cannot be kept in {path} ({reason(error)})"
        if must_keep:
            raise OSError(f"{sentence}, where other ranks wait for it; see to that") from error
        say(f"warning: {sentence}; a rerun will tokenise again")
    else:
        say(f"tokenised, kept in {path} ({bytes_text(path.stat().st_size)})")


def wait_for_corpus(
    path: Path,
    files: Sequence[Path],
    *,
    target: Path,
    spec: TargetSpec,
    max_length: int,
    over_long: str = "truncate",
    trust_remote_code: bool = False,
    seconds: float,
) -> Corpus:
    """What corpus_of gives, once rank 0 has called it; ValueError if that takes longer."""
    sha256 = hash_files(files)
    key = corpus_key(
        sha256,
        target=target,
        spec=spec,
        max_length=max_length,
        over_long=over_long,
        trust_remote_code=trust_remote_code,
    )
    deadline = time.monotonic() + seconds
    with progress("waiting for rank 0 to tokenise", total=None, unit="s") as bar:
        while (corpus := load_corpus(path, key)) is None:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"rank 0 made no {path} of this rank's data and settings in {seconds:.0f} s; "
                    "its own output says why"
                )
            time.sleep(_LOOK_SECONDS)
            bar.advance(_LOOK_SECONDS)
    return replace(corpus, sha256=sha256)


def hash_files(
    files: Sequence[Path], on_bytes: Callable[[int], None] | None = None
) -> dict[str, str]:
    """File, as it is named, -> sha256. Refuses the files that read_documents refuses unread."""
    check_files(files)
    hashes: dict[str, str] = {}
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                if on_bytes:
                    on_bytes(len(block))
        hashes[str(file)] = digest.hexdigest()
    return hashes


def corpus_key(
    sha256: Mapping[str, str],
    *,
    target: Path,
    spec: TargetSpec,
    max_length: int,
    over_long: str,
    trust_remote_code: bool = False,
) -> str:
    """Hash of all that decides what documents files with these hashes hold. Their order counts."""
    code = sorted(target.glob("*.py")) if trust_remote_code else []
    return canonical_hash(
        {
            "format": _FORMAT,
            "data": list(sha256.values()),
            "tokenizer": spec.tokenizer_hash,
            "template": spec.template_hash,
            "code": {path.name: sha256_of(path) for path in code},
            "end_tokens": sorted(spec.eos_token_ids),
            "vocab_size": spec.vocab_size,
            "max_length": max_length,
            "over_long": over_long,
            "packages": {name: version(name) for name in _PACKAGES},
        }
    )


def save_corpus(path: Path, corpus: Corpus, key: str) -> None:
    """Whole or not at all. Takes some 17 bytes a token of memory for the moment."""
    documents = corpus.documents
    tensors = {
        "index": torch.tensor([document.index for document in documents]),
        "starts": torch.tensor([0, *accumulate(map(len, documents))]),
        "input_ids": torch.cat([document.input_ids for document in documents]),
        "loss_mask": torch.cat([document.loss_mask for document in documents]),
    }
    facts = json.dumps({"key": key, "counts": vars(corpus.counts), "sha256": corpus.sha256})
    crc = str(_checksum(facts, tensors))
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path)
    write_whole(path, save(tensors, {"facts": facts, "crc32c": crc}))


def _remove_unfinished(path: Path) -> None:
    """What a process left that was killed while it wrote: gigabytes that nobody sees."""
    for file in path.parent.iterdir():
        if file.name.startswith(f".{path.name}."):
            file.unlink(missing_ok=True)


def load_corpus(path: Path, key: str) -> Corpus | None:
    """What was kept in `path` under this key, mapped; None if it is not there or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            facts = json.loads(metadata["facts"])
            if facts["key"] != key:
                return None
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
        if metadata["crc32c"] != str(_checksum(metadata["facts"], tensors)):
            return None
        counts = Counts(**{**facts["counts"], "dropped": Counter(facts["counts"]["dropped"])})
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if not _is_corpus(**tensors):  # whoever forges one can make a checksum too
        return None
    return Corpus(documents_in(*tensors.values()), counts, facts["sha256"])


def _is_corpus(index: Tensor, starts: Tensor, input_ids: Tensor, loss_mask: Tensor) -> bool:
    """Whether these are documents end to end."""
    kinds = [(t.dtype, t.ndim) for t in (index, starts, input_ids, loss_mask)]
    expected = [(torch.int64, 1), (torch.int64, 1), (torch.int32, 1), (torch.bool, 1)]
    if kinds != expected or len(starts) != len(index) + 1 or len(input_ids) != len(loss_mask):
        return False
    is_end_to_end = bool(starts[0] == 0) and bool(starts[-1] == len(input_ids))
    return is_end_to_end and bool((starts.diff() > 0).all())


def _checksum(facts: str, tensors: Mapping[str, Tensor]) -> int:
    """Of the facts, and of each tensor's name, type, shape and bytes."""
    crc = google_crc32c.value(facts.encode())
    for name in _TENSORS:
        tensor = tensors[name]
        crc = google_crc32c.extend(crc, f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        crc = google_crc32c.extend(crc, tensor.numpy())
    return int(crc)


def tokenising_processes(files_bytes: int, ranks_on_host: int = 1) -> int:
    """How many pay: none but this one for little, then one for many seconds of work.

    `ranks_on_host` that tokenise at the same time share the cores; one core is left to others.
    """
    if files_bytes < _FEW_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    most = min(cores // ranks_on_host - 1, _MOST_PROCESSES)
    return max(min(files_bytes // _BYTES_PER_PROCESS, most), 1)
