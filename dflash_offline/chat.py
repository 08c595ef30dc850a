"""A turn of a chat as serving sends it: the target's own template, and token ids throughout."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dflash_offline.documents import Counts
from dflash_offline.facts import failing_as, shown
from dflash_offline.spec import TargetSpec

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """An assistant turn as serving sees it."""

    prompt: list[int]
    answer: list[int]
    produced: int
    """So many leading tokens of the answer come from the target."""


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
            counts.turns_without_prompt += 1
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
        ids = check_ids("token_ids", own_ids, self._spec.vocab_size)
        if not is_cut and (not ids or ids[-1] not in self.end_ids):
            raise ValueError(
                f"token_ids end with none of the end tokens {sorted(self.end_ids)}; "
                'a cut answer needs "finish_reason": "length"'
            )
        return ids


def check_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
    if not isinstance(ids, list):
        raise ValueError(f"{name} is a {type(ids).__name__}, not a list")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {shown(token)}; the target has ids 0 to {vocab_size - 1}"
            )
    return ids
