"""Conversation files -> documents: token ids and the mask of the tokens that the target produced.

One JSON object a line: {"messages": [...]} (with "tools" if need be), {"prompt", "response"}, or
{"input_ids", "loss_mask"}. Chats go through the target's own template, a turn at a time and as
serving sends it: the ids of the generation prompt, then those of the answer up to its end-of-turn
token. That needs no generation markers in the template and no search in text. The price is that
each turn is rendered with its whole history, so a chat of n turns is tokenised n times.

Turns that continue one another stay one document. Templates that rewrite history (Qwen3.x drops
old reasoning) give each turn a document of its own, because that is what the target will see.

Lines are read in chunks, by one process or by several, which makes no difference to the result.
"""

import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_offline.chat import ChatTemplate, Message, check_ids, load_tokenizer
from dflash_offline.documents import Corpus, Counts, Document, documents_in
from dflash_offline.facts import check_file, reason, shown
from dflash_offline.launch import end_with_parent
from dflash_offline.spec import TargetSpec
from dflash_offline.workers import in_order

ROLES = ("system", "developer", "user", "assistant", "tool")

NOTHING_TO_LEARN = "fewer than two supervised tokens in a row"
CUT_BEFORE_ANSWER = "cut by --max-length before the answer"
LONGER = "longer than --max-length"

OVER_LONG = ("truncate", "drop")
"""What may be done with a document that is longer than --max-length."""

# A few seconds of work: small beside a corpus, large beside what it takes to hand it over.
_CHUNK_BYTES = 1 << 20

Sequences = list[tuple[list[int], list[bool]]]
"""Ids and loss mask of each document that a line holds."""


def read_documents(
    files: Sequence[Path],
    *,
    target: Path,
    spec: TargetSpec,
    max_length: int,
    over_long: str = "truncate",
    processes: int = 1,
    trust_remote_code: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Corpus:
    """All documents of `files` in order. ValueError names the file and line that is malformed.

    A document of more than `max_length` tokens is cut to its first ones, or dropped if that is
    what `over_long` says. `on_bytes` is told how many bytes of the files have been read since.
    """
    check_files(files)
    reader = Reader(target, spec, max_length, over_long, trust_remote_code)
    digests = {str(file): hashlib.sha256() for file in files}
    counts = Counts()
    documents: list[Document] = []
    with closing(_parts(reader, _chunks(files, digests), processes)) as parts:
        for part in parts:
            documents += part.documents(counts.documents)
            counts.add(part.counts)
            if on_bytes:
                on_bytes(part.bytes)
    if not documents:
        raise ValueError(f"{', '.join(digests)}: no document is left ({_reasons(counts)})")
    return Corpus(documents, counts, {name: d.hexdigest() for name, d in digests.items()})


def _reasons(counts: Counts) -> str:
    found = {**counts.dropped, "turns without the generation prompt": counts.turns_without_prompt}
    text = "; ".join(f"{reason}: {n:,}" for reason, n in found.items() if n)
    return text or "no conversation found"


def check_files(files: Sequence[Path]) -> None:
    """All there and none empty, before the first is read, and no conversation twice."""
    known: set[Path] = set()
    for file in files:
        check_file(file, "data file")
        if file.resolve() in known:
            raise ValueError(f"data file {file} is given twice; name it once")
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty; it needs one conversation a line")
        known.add(file.resolve())


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a file: `size` bytes from `start`, the first of them line `number`."""

    file: Path
    number: int
    start: int
    size: int

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """From the file, which the page cache still holds: cheaper than from another process."""
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            yield from enumerate(io.BytesIO(stream.read(self.size)), self.number)


def _chunks(files: Sequence[Path], digests: Mapping[str, Any]) -> Iterator[Chunk]:
    """Hashes the files on its way through them."""
    for file in files:
        number, start = 1, 0
        with file.open("rb") as stream:
            while lines := stream.readlines(_CHUNK_BYTES):
                content = b"".join(lines)
                digests[str(file)].update(content)
                yield Chunk(file, number, start, len(content))
                number, start = number + len(lines), start + len(content)


@dataclass(frozen=True)
class Part:
    """What a chunk became: the D documents that are kept, end to end, N tokens in all.

    In numpy's arrays, which travel between processes as they are.
    """

    index_D: NDArray[np.int64]
    """Place among all documents of the chunk."""
    starts: NDArray[np.int64]
    """[D + 1]"""
    input_ids_N: NDArray[np.int32]
    loss_mask_N: NDArray[np.bool_]
    counts: Counts
    bytes: int

    def documents(self, before: int) -> list[Document]:
        """Views; `before` documents came before those of this chunk."""
        index_D, starts, *tokens = map(
            torch.from_numpy,
            (self.index_D + before, self.starts, self.input_ids_N, self.loss_mask_N),
        )
        return documents_in(index_D, starts, *tokens)


def _parts(
    reader: "Reader", chunks: Iterator[Chunk], processes: int
) -> Generator[Part, None, None]:
    if processes == 1:
        yield from map(reader.read, chunks)
        return
    if reader.trust_remote_code:
        # Copies the folder's code to where transformers imports it from, before many do at once.
        with suppress(ValueError):
            load_tokenizer(reader.target, trust_remote_code=True)
    read = functools.partial(_read_in_worker, reader)
    yield from in_order(read, chunks, processes=processes, start=_start_worker)


def _start_worker(parent: int) -> None:
    """There is a process for each core, so each takes one."""
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def _read_in_worker(reader: "Reader", chunk: Chunk) -> Part:
    return _of_this_process(reader).read(chunk)


@functools.cache
def _of_this_process(reader: "Reader") -> "Reader":
    """The first of its equals: it has the tokenizer loaded when the next chunk comes."""
    return reader


@dataclass(frozen=True)
class Reader:
    """Makes documents of lines."""

    target: Path
    spec: TargetSpec
    max_length: int
    over_long: str
    trust_remote_code: bool

    def __post_init__(self) -> None:
        assert self.over_long in OVER_LONG, self.over_long

    @cached_property
    def _chat(self) -> "ChatTemplate":
        return ChatTemplate(self.target, self.spec, trust_remote_code=self.trust_remote_code)

    def read(self, chunk: Chunk) -> Part:
        """ValueError names the file and line that is malformed."""
        counts = Counts()
        index: list[int] = []
        kept: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
        for number, line in chunk.lines():
            for ids, mask in self._sequences_of(line, f"{chunk.file} line {number}", counts):
                if document := self._kept(ids, mask, counts):
                    index.append(counts.documents)
                    kept.append(document)
                counts.documents += 1
        ids_N = np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in kept)])
        mask_N = np.concatenate([np.empty(0, np.bool_), *(mask for _, mask in kept)])
        starts = np.array([0, *accumulate(len(ids) for ids, _ in kept)])
        return Part(np.array(index, np.int64), starts, ids_N, mask_N, counts, chunk.size)

    def _sequences_of(self, line: bytes, where: str, counts: Counts) -> Sequences:
        try:
            return _sequences(line, self._chat, self.spec.vocab_size, counts)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{where}: {reason(error)}") from error

    def _kept(
        self, ids: list[int], mask: list[bool], counts: Counts
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]] | None:
        """Ids and mask, cut to `max_length`; None, and counted, if the document is dropped."""
        is_longer = len(ids) > self.max_length
        if is_longer and self.over_long == "drop":
            counts.dropped[LONGER] += 1
            return None
        loss_mask = np.array(mask[: self.max_length], np.bool_)
        # A block needs an anchor and one token after it, both the target's own.
        if not (loss_mask[1:] & loss_mask[:-1]).any():
            is_cut = any(mask[self.max_length :])
            counts.dropped[CUT_BEFORE_ANSWER if is_cut else NOTHING_TO_LEARN] += 1
            return None
        counts.truncated += is_longer
        return np.array(ids[: self.max_length], np.int32), loss_mask


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not a JSON object")
    return record


def _sequences(line: bytes, chat: ChatTemplate, vocab_size: int, counts: Counts) -> Sequences:
    if not line.strip():
        return []
    record = _record(line)
    counts.conversations += 1
    if "messages" in record:
        return _from_messages(record["messages"], record.get("tools"), chat, counts)
    if "prompt" in record and "response" in record:
        answer = {k: v for k, v in record.items() if k in ("finish_reason", "token_ids")}
        user: Message = {"role": "user", "content": record["prompt"]}
        assistant: Message = {"role": "assistant", "content": record["response"], **answer}
        return _from_messages([user, assistant], None, chat, counts)
    if "input_ids" in record and "loss_mask" in record:
        return [_from_ids(record["input_ids"], record["loss_mask"], vocab_size)]
    raise ValueError(
        f"has the keys {shown(sorted(record))}; expected messages, or prompt and response, or "
        "input_ids and loss_mask"
    )


def _from_messages(messages: Any, tools: Any, chat: ChatTemplate, counts: Counts) -> Sequences:
    """One sequence for each run of turns in which every prompt continues the turn before it."""
    _check_messages(messages)
    _check_text("tools", tools)
    sequences: Sequences = []
    ids: list[int] = []
    mask: list[bool] = []
    for end, message in enumerate(messages, 1):
        is_answer = message["role"] == "assistant"
        turn = chat.turn(messages[:end], tools, counts) if is_answer else None
        if turn is None:
            continue
        if ids and turn.prompt[: len(ids)] != ids:
            sequences.append((ids, mask))
            mask = []  # the turns so far are history now, supervised in their own documents
        mask = mask + [False] * (len(turn.prompt) - len(mask))
        mask += [i < turn.produced for i in range(len(turn.answer))]
        ids = turn.prompt + turn.answer
    sequences += [(ids, mask)] if ids else []
    counts.split_conversations += len(sequences) > 1
    counts.conversations_without_document += not sequences
    return sequences


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list that is not empty")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is a {type(message).__name__}, not an object")
        _check_text(f"message {number}", message)
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"message {number} has role {shown(role)}; known: {', '.join(ROLES)}")
        has_calls = role == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not (content is None and has_calls):
            raise ValueError(f"message {number}: content must be text, got {shown(content)}")
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("has no assistant turn to learn from")
    if messages[0]["role"] == "assistant":
        raise ValueError("begins with an assistant turn; there is no prompt to answer")


def _check_text(what: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds half of a surrogate pair; mend its text") from None


def _from_ids(input_ids: Any, mask: Any, vocab_size: int) -> tuple[list[int], list[bool]]:
    ids = check_ids("input_ids", input_ids, vocab_size)
    if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
        raise ValueError("loss_mask must be a list of 0 and 1")
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} input_ids, but {len(mask)} values in loss_mask")
    return ids, list(map(bool, mask))
