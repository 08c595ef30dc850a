"""Conversation files -> documents: token ids and the mask of the tokens that the target produced.

One JSON object a line: {"messages": [...]} (with "tools" if need be), {"prompt", "response"}, or
{"input_ids", "loss_mask"}. Chats go through the target's own template, a turn at a time and as
serving sends it: the ids of the generation prompt, then those of the answer up to its end-of-turn
token. That needs no generation markers in the template and no search in text. The price is that
each turn is rendered with its whole history, so a chat of n turns is tokenised n times.

Turns that continue one another stay one document. Templates that rewrite history (Qwen3.x drops
old reasoning) give each turn a document of its own, because that is what the target will see.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from dflash_offline.facts import check_file, failing_as, reason, shown
from dflash_offline.spec import TargetSpec

ROLES = ("system", "developer", "user", "assistant", "tool")

NOTHING_TO_LEARN = "no two neighbouring tokens of the target"
CUT_BEFORE_ANSWER = "cut by --max-length before the answer"
PROMPT_NO_PREFIX = "generation prompt is no prefix of the rendered turn"

Message = dict[str, Any]
Sequences = list[tuple[list[int], list[bool]]]
"""Ids and loss mask of each document that a line holds."""


@dataclass(frozen=True, eq=False)
class Document:
    """One sequence that the target reads: a conversation, or the part of it serving would send."""

    index: int
    """Place among all documents of the corpus, the dropped ones included."""
    input_ids: Tensor
    """int32 [T]"""
    loss_mask: Tensor
    """bool [T]; true: a token the target produced"""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass
class Counts:
    """What became of the lines, for the summary: nothing is dropped or cut unseen."""

    conversations: int = 0
    split_conversations: int = 0
    """Chats that became several documents, because the template rewrites their history."""
    truncated: int = 0
    cut_answers: int = 0
    """Answers with finish_reason "length": their end-of-turn token is not supervised."""
    answers_with_end_token_inside: int = 0
    """Answers whose text spells an end token: the span ends there, the rest is not supervised."""
    thinking_turns: int = 0
    """Turns with reasoning, where the template has the choice."""
    plain_turns: int = 0
    """Turns without, where the template has the choice."""
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Corpus:
    documents: list[Document]
    counts: Counts
    sha256: dict[str, str]
    """File, as it was named, -> hash of its bytes."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


@dataclass(frozen=True)
class Turn:
    """An assistant turn as serving sees it."""

    prompt: list[int]
    answer: list[int]
    produced: int
    """So many leading tokens of the answer come from the target."""


def read_documents(
    files: Sequence[Path],
    *,
    target: Path,
    spec: TargetSpec,
    max_length: int,
    trust_remote_code: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Corpus:
    """All documents of `files` in order. ValueError names the file and line that is malformed.

    `on_bytes` is told how many bytes of the files each line took.
    """
    _check_files(files)
    chat = ChatTemplate(target, spec, trust_remote_code=trust_remote_code)
    counts = Counts()
    digests = {str(file): hashlib.sha256() for file in files}
    documents: list[Document] = []
    index = 0
    for file, number, line in _lines(files):
        digests[str(file)].update(line)
        if on_bytes:
            on_bytes(len(line))
        try:
            sequences = _sequences(line, chat, spec.vocab_size, counts)
        except ValueError as error:
            raise ValueError(f"{file} line {number}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{file} line {number}: {reason(error)}") from error
        for ids, mask in sequences:
            document = _document(index, ids, mask, max_length, counts)
            documents += [document] if document else []
            index += 1
    if not documents:
        reasons = "; ".join(f"{reason}: {n:,}" for reason, n in counts.dropped.items())
        raise ValueError(
            f"{', '.join(digests)}: no document is left ({reasons or 'no conversation found'})"
        )
    return Corpus(documents, counts, {name: d.hexdigest() for name, d in digests.items()})


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer. ValueError if it has none."""
    with failing_as(f"{folder} holds no tokenizer to use"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


class ChatTemplate:
    """The target's tokenizer and chat template, loaded when the first chat needs them."""

    def __init__(self, folder: Path, spec: TargetSpec, *, trust_remote_code: bool) -> None:
        self._folder = folder
        self._spec = spec
        self._trust_remote_code = trust_remote_code

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = load_tokenizer(self._folder, trust_remote_code=self._trust_remote_code)
        if not tokenizer.chat_template:
            raise ValueError(f"{self._folder} has no chat template; add one or give input_ids")
        return tokenizer

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn, wherever the folder names them."""
        own = self.tokenizer.eos_token_id
        return frozenset(self._spec.eos_token_ids) | ({own} if own is not None else set())

    @cached_property
    def switches(self) -> tuple[dict[str, bool], ...]:
        """The ways in which serving can ask for a turn; the last one without reasoning."""
        if "enable_thinking" not in str(self.tokenizer.chat_template):
            return ({},)
        return ({}, {"enable_thinking": True}, {"enable_thinking": False})

    def turn(self, messages: list[Message], tools: Any, counts: Counts) -> Turn | None:
        """The last of `messages`, an assistant's, as serving asks for it; None if it cannot be.

        Of the generation prompts that serving can send, the longest that begins the rendered turn
        is the right one: the empty think block where there is no reasoning, `<think>` where there
        is. All that follows it is the target's.
        """
        rendered, prompts = self._rendered(messages, tools)
        own_ids = messages[-1].get("token_ids")
        # With one prompt there is nothing to choose, and text may not tokenise to the ids it was.
        is_given = own_ids is not None and len(prompts) == 1
        fitting = [ids for ids in prompts if is_given or rendered[: len(ids)] == ids]
        if not fitting:
            counts.dropped[PROMPT_NO_PREFIX] += 1
            return None
        prompt = max(fitting, key=len)
        if len(prompts) > 1:
            counts.plain_turns += prompt == prompts[-1]
            counts.thinking_turns += prompt != prompts[-1]
        is_cut = messages[-1].get("finish_reason") == "length"
        counts.cut_answers += is_cut
        if own_ids is not None:
            answer = self._checked(own_ids, is_cut)
            return Turn(prompt, answer, len(answer))
        rest = rendered[len(prompt) :]
        answer = self._until_end(rest)
        is_longer = not self.end_ids.isdisjoint(rest[len(answer) :])
        counts.answers_with_end_token_inside += is_longer and self._spells_end(messages[-1])
        return Turn(prompt, answer, len(answer) - is_cut)

    def _rendered(self, messages: list[Message], tools: Any) -> tuple[list[int], list[list[int]]]:
        """Ids of `messages`, and of each generation prompt that may have asked for the last."""

        def render(messages: list[Message], **how: bool) -> str:
            chat = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **how)
            return str(chat)

        history, ways = messages[:-1], self.switches
        with failing_as("the chat template refuses these messages"):
            prompts = [render(history, add_generation_prompt=True, **way) for way in ways]
            texts = [render(messages), *prompts]
            # The template writes its own special tokens, so the tokenizer must add none.
            ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[0], ids[1:]

    def _spells_end(self, message: Message) -> bool:
        """Whether an end token is in the message itself: a template may write two of its own."""
        text = json.dumps(message, ensure_ascii=False)
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return not self.end_ids.isdisjoint(ids)

    def _until_end(self, ids: list[int]) -> list[int]:
        for i, token in enumerate(ids):
            if token in self.end_ids:
                return ids[: i + 1]
        raise ValueError(
            f"the template ends the turn with none of the target's end tokens "
            f"{sorted(self.end_ids)}; name the right one in generation_config.json"
        )

    def _checked(self, own_ids: Any, is_cut: bool) -> list[int]:
        ids = _check_ids("token_ids", own_ids, self._spec.vocab_size)
        if not is_cut and (not ids or ids[-1] not in self.end_ids):
            raise ValueError(
                f"token_ids end with none of the end tokens {sorted(self.end_ids)}; "
                'a cut answer needs "finish_reason": "length"'
            )
        return ids


def _check_files(files: Sequence[Path]) -> None:
    """All there, before the first is read, and no conversation twice."""
    known: set[Path] = set()
    for file in files:
        check_file(file, "data file")
        if file.resolve() in known:
            raise ValueError(f"data file {file} is given twice; name it once")
        known.add(file.resolve())


def _lines(files: Sequence[Path]) -> Iterator[tuple[Path, int, bytes]]:
    for file in files:
        number = 0
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                yield file, number, line
        if not number:
            raise ValueError(f"{file} is empty; it needs one conversation a line")


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


def _check_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
    if not isinstance(ids, list):
        raise ValueError(f"{name} is a {type(ids).__name__}, not a list")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {shown(token)}; the target has ids 0 to {vocab_size - 1}"
            )
    return ids


def _from_ids(input_ids: Any, mask: Any, vocab_size: int) -> tuple[list[int], list[bool]]:
    ids = _check_ids("input_ids", input_ids, vocab_size)
    if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
        raise ValueError("loss_mask must be a list of 0 and 1")
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} input_ids, but {len(mask)} values in loss_mask")
    return ids, list(map(bool, mask))


def _document(
    index: int, ids: list[int], mask: list[bool], max_length: int, counts: Counts
) -> Document | None:
    """The document, cut to `max_length`; None, and counted, if it has nothing to learn."""
    loss_mask = torch.tensor(mask[:max_length], dtype=torch.bool)
    # A block needs an anchor and one token after it, both the target's own.
    if not bool((loss_mask[1:] & loss_mask[:-1]).any()):
        is_cut = any(mask[max_length:])
        counts.dropped[CUT_BEFORE_ANSWER if is_cut else NOTHING_TO_LEARN] += 1
        return None
    counts.truncated += len(ids) > max_length
    return Document(index, torch.tensor(ids[:max_length], dtype=torch.int32), loss_mask)
