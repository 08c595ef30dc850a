"""The demo's conversation file: its size and shape, and that held-out means held out."""

import json
from collections import Counter
from pathlib import Path

import pytest
from real.make_conversations import SEED, make_prompts

FILE = Path(__file__).parent / "real" / "conversations.jsonl"


@pytest.fixture(scope="module")
def conversations():
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def texts(conversations, split, role):
    return [
        message["content"]
        for conversation in conversations
        if conversation["split"] == split
        for message in conversation["messages"]
        if message["role"] == role
    ]


def test_file_is_small_and_holds_enough_of_both_splits(conversations):
    splits = Counter(conversation["split"] for conversation in conversations)
    assert FILE.stat().st_size < 3_000_000
    assert splits.keys() == {"train", "heldout"}
    assert splits["train"] >= 1500
    assert splits["heldout"] >= 60


def test_each_line_is_one_question_and_one_answer(conversations):
    for conversation in conversations:
        assert conversation.keys() == {"id", "split", "domain", "messages"}
        question, answer = conversation["messages"]
        assert question.keys() == {"role", "content"}
        assert answer.keys() == {"role", "content", "finish_reason"}
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert answer["finish_reason"] in ("stop", "length")
        assert answer["content"].strip()
        assert "<|" not in question["content"] + answer["content"], "template text in a turn"


def test_ids_and_prompts_occur_once(conversations):
    prompts = [conversation["messages"][0]["content"] for conversation in conversations]
    assert len({conversation["id"] for conversation in conversations}) == len(conversations)
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_no_heldout_text_occurs_in_training(conversations, role):
    heldout, train = (texts(conversations, split, role) for split in ("heldout", "train"))
    assert not set(heldout) & set(train)


def test_both_domains_are_in_both_splits_and_most_answers_end_by_themselves(conversations):
    kinds = Counter((line["split"], line["domain"]) for line in conversations)
    ends = Counter(line["messages"][1]["finish_reason"] for line in conversations)
    assert kinds.keys() == {(s, d) for s in ("train", "heldout") for d in ("average", "code")}
    assert min(kinds.values()) >= 30
    assert ends["stop"] > 0.8 * len(conversations)


def test_every_prompt_is_the_one_the_program_makes(conversations):
    """The file comes from make_conversations.py at its present state, not from an editor."""
    made = {(p.id, p.split, p.domain, p.text) for p in make_prompts(SEED)}
    found = {
        (c["id"], c["split"], c["domain"], c["messages"][0]["content"]) for c in conversations
    }
    assert found <= made
