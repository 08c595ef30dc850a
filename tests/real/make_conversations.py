"""The demo's conversations: seeded prompts, answered greedily by the demo's own target.

Two narrow domains, chosen because a small drafter can learn them on two CPU cores within minutes:

* `average`: "What is the average of 16, 18 and 41?" - three or four numbers, with or without a
  noun for what they measure. The worked answers share their wording, not their numbers.
* `code`: "Write a Python function that ..." - one-line functions that test a number, or filter,
  count or summarise a list, with a short explanation.

What that means for a result: no held-out prompt or answer occurs in training, but the held-out
prompts combine the same words with other numbers, and 45 of the 108 held-out answers differ from
some training answer in their numbers only. So an acceptance length on them tells how well these
two kinds of answer were learnt, nothing about open chat. The answers are SmolLM2-135M-Instruct's
own (bf16, greedy, no filter for truth): fluent, mostly on topic, often wrong in their sums.

Origin: the prompts are made by this program, the answers by the model `smollm2.py` unpacks
(Apache-2.0); the file is Apache-2.0 like the rest of the repository. It is never edited by hand.

Dropped and counted: answers whose text does not re-tokenise to their own ids, empty ones, and
held-out conversations whose prompt or answer also occurs in training. Answers cut by the limit
stay, with finish_reason "length". Price: 183,735 tokens at 60-190 tokens/s on one core, beside
other work; OMP_NUM_THREADS=1, for two threads were slower. Each finished batch is appended to
OUT.partial, and a second run goes on from there. A run from scratch makes the same prompts; some
answers may change, since bf16 sums depend on the batch and the machine.

    python tests/real/make_conversations.py TARGET_DIR [--out FILE] [--batch 96]
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

SEED = 20
HELDOUT = 110
NEW_TOKENS = 160
DEFAULT_OUT = Path(__file__).with_name("conversations.jsonl")
QUANTITIES = [
    *("age", "angle", "area", "bill", "budget", "cost", "debt", "delay", "depth", "distance"),
    *("dose", "duration", "fare", "fee", "fine", "grade", "height", "income", "length", "level"),
    *("limit", "loan", "mark", "mass", "price", "profit", "rank", "rating", "rent", "salary"),
    *("score", "size", "speed", "tax", "temperature", "time", "tip", "wage", "weight", "width"),
]
COMPARISONS = ("greater than", "less than", "at least", "at most", "equal to")


@dataclass(frozen=True)
class Family:
    """Prompts of one form; FILLERS says what may stand in the braces."""

    domain: str
    count: int
    template: str


# The counts give each domain about half of the tokens.
FAMILIES = {
    "average3": Family("average", 380, "What is the average of {three}?"),
    "average4": Family("average", 300, "What is the average of {four}?"),
    "average_of": Family("average", 340, "What is the average of the {nouns} {three}?"),
    "test": Family(
        "code", 130, "Write a Python function that checks whether {noun} is {property}."
    ),
    "compare": Family(
        "code", 450, "Write a Python function that checks whether {noun} is {bound}."
    ),
    "filter": Family(
        "code",
        200,
        "Write a Python function that returns all {nouns} in a list that are {bound}. "
        "Explain it in one sentence.",
    ),
    "count": Family(
        "code",
        170,
        "Write a Python function that counts how many {nouns} in a list are {bound}. "
        "Explain it in one sentence.",
    ),
    "summary": Family(
        "code",
        120,
        "Write a Python function that returns the {total} of a list of {nouns}. "
        "Explain it in one sentence.",
    ),
}


@dataclass(frozen=True)
class Prompt:
    id: str
    split: str
    domain: str
    text: str


@dataclass(frozen=True)
class Answer:
    """What the target produced, end-of-turn token included if it got that far."""

    id: str
    token_ids: list[int]


def listing(rng: random.Random, count: int) -> str:
    """`16, 18 and 41`: numbers below 61."""
    numbers = [str(rng.randint(2, 60)) for _ in range(count)]
    return f"{', '.join(numbers[:-1])} and {numbers[-1]}"


def singular(rng: random.Random) -> str:
    noun = rng.choice(QUANTITIES)
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plural(rng: random.Random) -> str:
    noun = rng.choice(QUANTITIES)
    irregular = {"mass": "masses", "salary": "salaries", "tax": "taxes"}
    return irregular.get(noun, noun + "s")


FILLERS: dict[str, Callable[[random.Random], str]] = {
    "three": lambda rng: listing(rng, 3),
    "four": lambda rng: listing(rng, 4),
    "noun": singular,
    "nouns": plural,
    "property": lambda rng: rng.choice(("even", "odd", "positive", "negative")),
    "bound": lambda rng: f"{rng.choice(COMPARISONS)} {rng.randint(2, 99)}",
    "total": lambda rng: rng.choice(("sum", "average", "maximum", "minimum")),
}


def draw_texts(template: str, rng: random.Random) -> Iterator[str]:
    """Endless random fillings of the template, no text twice."""
    seen: set[str] = set()
    while True:
        text = re.sub(r"{(\w+)}", lambda brace: FILLERS[brace[1]](rng), template)
        if text not in seen:
            seen.add(text)
            yield text


def make_prompts(seed: int) -> list[Prompt]:
    """All prompts, each text once; HELDOUT of them, drawn uniformly, are held out."""
    rng = random.Random(seed)
    drawn = [
        (f"{name}-{number:03}", family.domain, text)
        for name, family in FAMILIES.items()
        for number, text in enumerate(islice(draw_texts(family.template, rng), family.count))
    ]
    heldout = set(rng.sample(range(len(drawn)), HELDOUT))
    return [
        Prompt(id, "heldout" if index in heldout else "train", domain, text)
        for index, (id, domain, text) in enumerate(drawn)
    ]


def prompt_messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def render(tokenizer: Any, messages: list[dict[str, str]], *, generate: bool) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=generate, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])


def answer_batch(model: Any, tokenizer: Any, prompts: list[Prompt]) -> list[Answer]:
    """Greedy answers. Padded on the left and masked: the padding token is the end token here."""
    texts = [
        tokenizer.apply_chat_template(
            prompt_messages(prompt.text), add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=NEW_TOKENS)
    produced = ids[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [
        Answer(prompt.id, row[: row.index(end) + 1] if end in row else row)
        for prompt, row in zip(prompts, produced, strict=True)
    ]


def read_partial(path: Path) -> dict[str, Answer]:
    if not path.exists():
        return {}
    with path.open() as lines:
        answers = [Answer(**json.loads(line)) for line in lines]
    return {answer.id: answer for answer in answers}


def answer_all(
    model: Any, tokenizer: Any, prompts: list[Prompt], partial: Path, *, batch: int
) -> dict[str, Answer]:
    """Answer every prompt that `partial` does not hold yet; append batch by batch.

    Batches are of one family and of like length, so their rows end at about the same time.
    """
    answers = read_partial(partial)
    todo = [prompt for prompt in prompts if prompt.id not in answers]
    todo.sort(key=lambda prompt: (prompt.id.split("-")[0], len(prompt.text)))
    batches = [todo[first : first + batch] for first in range(0, len(todo), batch)]
    random.Random(SEED).shuffle(batches)  # progress is even, whatever is slow comes at any time
    start, tokens = time.monotonic(), 0
    for number, chunk in enumerate(batches, 1):
        fresh = answer_batch(model, tokenizer, chunk)
        with partial.open("a") as out:
            out.writelines(json.dumps(asdict(answer)) + "\n" for answer in fresh)
        answers |= {answer.id: answer for answer in fresh}
        tokens += sum(len(answer.token_ids) for answer in fresh)
        rate = tokens / (time.monotonic() - start)
        print(
            f"batch {number}/{len(batches)}: {tokens:,} tokens, {rate:.0f} tok/s",
            file=sys.stderr,
            flush=True,
        )
    return answers


def conversation(tokenizer: Any, prompt: Prompt, answer: Answer) -> dict[str, Any] | None:
    """The finished line, or None if the text does not lead back to the ids the target produced."""
    ended = answer.token_ids[-1] == tokenizer.eos_token_id
    content = tokenizer.decode(answer.token_ids[:-1] if ended else answer.token_ids)
    messages = prompt_messages(prompt.text)
    expected = render(tokenizer, messages, generate=True) + answer.token_ids
    reply = {"role": "assistant", "content": content}
    if (
        not content
        or render(tokenizer, [*messages, reply], generate=False)[: len(expected)] != expected
    ):
        return None
    reply["finish_reason"] = "stop" if ended else "length"
    return {
        "id": prompt.id,
        "split": prompt.split,
        "domain": prompt.domain,
        "messages": [*messages, reply],
    }


def drop_leaked(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the held-out conversations that share a prompt or an answer with training."""
    seen = {
        message["content"]
        for line in lines
        if line["split"] == "train"
        for message in line["messages"]
    }
    return [
        line
        for line in lines
        if line["split"] == "train" or not any(m["content"] in seen for m in line["messages"])
    ]


def summarise(
    lines: list[dict[str, Any]], answers: dict[str, Answer], dropped: Counter[str]
) -> str:
    """Counts of what was written and of what was dropped, by split and domain."""
    table = ["split    domain    conversations  tokens   stop  length"]
    for key in sorted({(line["split"], line["domain"]) for line in lines}):
        group = [line for line in lines if (line["split"], line["domain"]) == key]
        tokens = sum(len(answers[line["id"]].token_ids) for line in group)
        ends = Counter(line["messages"][-1]["finish_reason"] for line in group)
        table.append(
            f"{key[0]:<8} {key[1]:<9} {len(group):>13,} {tokens:>7,} "
            f"{ends['stop']:>6,} {ends['length']:>7,}"
        )
    tokens = sum(len(answers[line["id"]].token_ids) for line in lines)
    table.append(f"in all: {len(lines):,} conversations, {tokens:,} supervised tokens")
    table += [f"dropped, {reason}: {count:,}" for reason, count in sorted(dropped.items())]
    return "\n".join(table)


def finish(tokenizer: Any, prompts: list[Prompt], answers: dict[str, Answer], out: Path) -> str:
    """Check, write `out` and return the summary."""
    made = [conversation(tokenizer, prompt, answers[prompt.id]) for prompt in prompts]
    whole = [line for line in made if line is not None]
    lines = drop_leaked(whole)
    dropped = Counter(
        {
            "does not round-trip or is empty": len(made) - len(whole),
            "held-out prompt or answer also in training": len(whole) - len(lines),
        }
    )
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return summarise(lines, answers, dropped)


def main() -> int:
    parser = argparse.ArgumentParser(description="Let the demo's target answer seeded prompts.")
    parser.add_argument("target", type=Path, help="folder that smollm2.py made")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=96, help="conversations at once")
    arguments = parser.parse_args()
    if not (arguments.target / "config.json").is_file():
        print(f"error: {arguments.target} holds no model; run smollm2.py first", file=sys.stderr)
        return 1
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.bfloat16)
    prompts = make_prompts(SEED)
    partial = arguments.out.with_name(arguments.out.name + ".partial")
    answers = answer_all(model, tokenizer, prompts, partial, batch=arguments.batch)
    print(finish(tokenizer, prompts, answers, arguments.out))
    partial.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
