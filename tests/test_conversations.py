"""Loss masks against tables written by hand, and every way a line can be wrong."""

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_target import TEMPLATES, build_tokenizer
from transformers import AutoTokenizer

from dflash_offline import conversations
from dflash_offline.conversations import read_documents
from dflash_offline.spec import TargetSpec
from dflash_offline.workers import in_order

# A table is one string: tokens apart by spaces, `_` a leading space, `/` a newline, `//` the
# empty line that is one token; a trailing `*` marks a token the target produced.
SPELLING = {"_": "\u0120", "/": "\u010a"}


def table(tokenizer, text):
    """Ids and mask of a hand-written table, by a look-up in the vocabulary alone."""
    cells = [(cell.removesuffix("*"), cell.endswith("*")) for cell in text.split()]
    pieces = []
    for cell, _ in cells:
        is_marker = cell.startswith("<")
        pieces.append(cell if is_marker else "".join(SPELLING.get(c, c) for c in cell))
    vocab = tokenizer.get_vocab()
    return [vocab[piece] for piece in pieces], [mask for _, mask in cells]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path, target, *, max_length=4096, **how):
    spec = TargetSpec.read(target)
    files = [path] if isinstance(path, Path) else path
    return read_documents(files, target=target, spec=spec, max_length=max_length, **how)


def read_chats(tmp_path, target, *chats, **how):
    records = [chat if isinstance(chat, dict) else {"messages": chat} for chat in chats]
    return read(write(tmp_path / "data.jsonl", records), target, **how)


def assert_documents(corpus, target, *tables):
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = [(d.input_ids.tolist(), d.loss_mask.tolist()) for d in corpus.documents]
    assert found == [table(tokenizer, text) for text in tables]


def copy_with_template(target, folder, template):
    copy = shutil.copytree(target, folder / "target")
    (copy / "chat_template.jinja").unlink()
    tokenizer = build_tokenizer(TEMPLATES["llama"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(copy)
    return copy


ONE_TURN = (
    "<|im_start|> user / how _many <|im_end|> / <|im_start|> assistant / three* _four* <|im_end|>*"
)


def test_single_turn_supervises_answer_and_its_end_token(tmp_path, tiny_llama):
    corpus = read_chats(tmp_path, tiny_llama, [user("how many"), assistant("three four")])
    assert_documents(corpus, tiny_llama, ONE_TURN)
    assert corpus.documents[0].input_ids.dtype == torch.int32
    assert corpus.documents[0].loss_mask.dtype == torch.bool


def test_prompt_and_response_are_a_chat_of_two_messages(tmp_path, tiny_llama):
    corpus = read_chats(tmp_path, tiny_llama, {"prompt": "how many", "response": "three four"})
    assert_documents(corpus, tiny_llama, ONE_TURN)


def test_stable_template_keeps_all_turns_in_one_document(tmp_path, tiny_llama):
    system = {"role": "system", "content": "count"}
    chat = [system, user("how"), assistant("one two"), user("then"), assistant("yes"), user("so")]
    corpus = read_chats(tmp_path, tiny_llama, chat)
    assert_documents(
        corpus,
        tiny_llama,
        "<|im_start|> system / count <|im_end|> / <|im_start|> user / how <|im_end|> / "
        "<|im_start|> assistant / one* _two* <|im_end|>* / "
        "<|im_start|> user / then <|im_end|> / <|im_start|> assistant / yes* <|im_end|>*",
    )
    assert corpus.counts.split_conversations == 0
    assert (corpus.counts.thinking_turns, corpus.counts.plain_turns) == (0, 0)


def test_answer_cut_by_length_keeps_its_end_token_unsupervised(tmp_path, tiny_llama):
    chat = [user("how"), assistant("one two", finish_reason="length")]
    corpus = read_chats(tmp_path, tiny_llama, chat)
    assert_documents(
        corpus,
        tiny_llama,
        "<|im_start|> user / how <|im_end|> / <|im_start|> assistant / one* _two* <|im_end|>",
    )
    assert corpus.counts.cut_answers == 1


@pytest.mark.parametrize("has_text", [True, False])
def test_token_ids_stand_verbatim_after_the_prompt(tmp_path, tiny_llama, has_text):
    # "o" "n" "e" apart: the target may well produce what text would not tokenise to.
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids, _ = table(tokenizer, "o n e <|im_end|>")
    text = "one" if has_text else ""
    corpus = read_chats(tmp_path, tiny_llama, [user("how"), assistant(text, token_ids=ids)])
    prompt = "<|im_start|> user / how <|im_end|> / <|im_start|> assistant / "
    assert_documents(corpus, tiny_llama, prompt + "o* n* e* <|im_end|>*")


def test_cut_token_ids_are_all_supervised(tmp_path, tiny_llama):
    ids, _ = table(AutoTokenizer.from_pretrained(tiny_llama), "one _two")
    chat = [user("how"), assistant("one two", token_ids=ids, finish_reason="length")]
    prompt = "<|im_start|> user / how <|im_end|> / <|im_start|> assistant / "
    assert_documents(read_chats(tmp_path, tiny_llama, chat), tiny_llama, prompt + "one* _two*")


THINK = [user("how"), assistant("yes", reasoning_content="two")]
PLAIN = [user("how"), assistant("yes")]


def test_reasoning_that_the_prompt_opens_is_supervised_after_it(tmp_path, tiny_qwen35):
    corpus = read_chats(tmp_path, tiny_qwen35, THINK, PLAIN)
    prompt = "<|im_start|> user / how <|im_end|> / <|im_start|> assistant / "
    assert_documents(
        corpus,
        tiny_qwen35,
        prompt + "<think> / two* /* </think>* //* yes* <|im_end|>*",
        prompt + "<think> // </think> // yes* <|im_end|>*",
    )
    assert (corpus.counts.thinking_turns, corpus.counts.plain_turns) == (1, 1)


def test_reasoning_that_the_target_opens_is_supervised_whole(tmp_path, tiny_qwen3):
    corpus = read_chats(tmp_path, tiny_qwen3, THINK, PLAIN)
    prompt = "<|im_start|> user / how <|im_end|> / <|im_start|> assistant / "
    assert_documents(
        corpus,
        tiny_qwen3,
        prompt + "<think>* /* two* /* </think>* //* yes* <|im_end|>*",
        prompt + "<think> // </think> // yes* <|im_end|>*",
    )
    assert (corpus.counts.thinking_turns, corpus.counts.plain_turns) == (1, 1)


def test_template_that_drops_old_reasoning_gives_a_document_per_turn(tmp_path, tiny_qwen35):
    chat = [*THINK, user("then"), assistant("no", reasoning_content="one")]
    corpus = read_chats(tmp_path, tiny_qwen35, chat, PLAIN)
    first = "<|im_start|> user / how <|im_end|> / <|im_start|> assistant / "
    assert_documents(
        corpus,
        tiny_qwen35,
        first + "<think> / two* /* </think>* //* yes* <|im_end|>*",
        first + "yes <|im_end|> / <|im_start|> user / then <|im_end|> / <|im_start|> assistant / "
        "<think> / one* /* </think>* //* no* <|im_end|>*",
        first + "<think> // </think> // yes* <|im_end|>*",
    )
    assert [d.index for d in corpus.documents] == [0, 1, 2]
    assert corpus.counts.conversations == 2
    assert corpus.counts.split_conversations == 1


def test_turns_after_one_user_turn_stay_together_in_a_thinking_template(tmp_path, tiny_qwen35):
    tool = {"role": "tool", "content": "four"}
    chat = [user("how"), assistant("one", reasoning_content="so"), tool, assistant("yes")]
    corpus = read_chats(tmp_path, tiny_qwen35, chat)
    assert_documents(
        corpus,
        tiny_qwen35,
        "<|im_start|> user / how <|im_end|> / <|im_start|> assistant / "
        "<think> / so* /* </think>* //* one* <|im_end|>* / <|im_start|> tool / four <|im_end|> / "
        "<|im_start|> assistant / <think> // </think> // yes* <|im_end|>*",
    )


def test_mask_equals_generation_markers_but_for_the_given_think_tag(tmp_path, tiny_qwen35):
    """The template's own markers count the given `<think>` and newline; the target does not."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen35)
    marked = tokenizer.apply_chat_template(
        THINK, return_dict=True, return_assistant_tokens_mask=True
    )
    expected = torch.tensor(marked["assistant_masks"], dtype=torch.bool)
    start = int(expected.int().argmax())
    expected[start : start + 2] = False
    (document,) = read_chats(tmp_path, tiny_qwen35, THINK).documents
    length = len(document)
    assert document.input_ids.tolist() == marked["input_ids"][:length]
    assert torch.equal(document.loss_mask, expected[:length])
    assert not expected[length:].any()


def test_a_word_in_the_answer_that_ends_turns_ends_the_span(tmp_path, tiny_llama):
    chat = [user("how"), assistant("one two<|im_end|>three")]
    prompt = "<|im_start|> user / how <|im_end|> / <|im_start|> assistant / "
    corpus = read_chats(tmp_path, tiny_llama, chat)
    assert_documents(corpus, tiny_llama, prompt + "one* _two* <|im_end|>*")
    assert corpus.counts.answers_with_end_token_inside == 1


def test_end_tokens_of_the_template_are_not_counted_as_the_answers(tmp_path, tiny_llama):
    template = TEMPLATES["llama"].replace("<|im_end|>", "<|im_end|><|endoftext|>")
    target = copy_with_template(tiny_llama, tmp_path, template)
    chat = [user("how<|im_end|>"), assistant("yes"), user("then"), assistant("no<|endoftext|>so")]
    assert read_chats(tmp_path, target, PLAIN).counts.answers_with_end_token_inside == 0
    assert read_chats(tmp_path, target, chat).counts.answers_with_end_token_inside == 1


def test_pre_tokenised_lines_pass_through(tmp_path, tiny_llama):
    record = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, True, 0]}
    (document,) = read_chats(tmp_path, tiny_llama, record).documents
    assert document.input_ids.tolist() == [5, 6, 7, 8]
    assert document.loss_mask.tolist() == [False, True, True, False]


def test_pre_tokenised_lines_need_no_tokenizer(tmp_path, tiny_llama):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_llama / name, tmp_path)
    corpus = read_chats(tmp_path, tmp_path, {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]})
    assert len(corpus.documents) == 1
    with pytest.raises(ValueError, match="holds no tokenizer"):
        read_chats(tmp_path, tmp_path, PLAIN)


def test_long_documents_are_cut_and_counted(tmp_path, tiny_llama):
    full = {"input_ids": list(range(9)), "loss_mask": [0, 0, 0, 1, 1, 1, 1, 1, 1]}
    late = {"input_ids": list(range(9)), "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1, 1]}
    never = {"input_ids": list(range(9)), "loss_mask": [1, 0, 1, 0, 1, 0, 0, 0, 0]}
    corpus = read_chats(tmp_path, tiny_llama, full, late, never, max_length=5)
    (document,) = corpus.documents
    assert document.input_ids.tolist() == [0, 1, 2, 3, 4]
    assert corpus.counts.truncated == 1
    assert dict(corpus.counts.dropped) == {
        "cut by --max-length before the answer": 1,
        "fewer than two supervised tokens in a row": 1,
    }


def test_long_documents_are_dropped_by_choice_and_counted(tmp_path, tiny_llama):
    fitting = {"input_ids": list(range(5)), "loss_mask": [0, 0, 0, 1, 1]}
    full = {"input_ids": list(range(6)), "loss_mask": [0, 0, 0, 1, 1, 1]}
    never = {"input_ids": list(range(9)), "loss_mask": [0] * 9}
    corpus = read_chats(
        tmp_path, tiny_llama, full, fitting, never, PLAIN, max_length=5, over_long="drop"
    )
    (document,) = corpus.documents
    assert (document.index, document.input_ids.tolist()) == (1, [0, 1, 2, 3, 4])
    assert (corpus.counts.documents, corpus.counts.truncated) == (4, 0)
    assert dict(corpus.counts.dropped) == {"longer than --max-length": 3}


def test_document_numbers_count_the_dropped_ones(tmp_path, tiny_llama):
    good = {"input_ids": [1, 2], "loss_mask": [1, 1]}
    bad = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    corpus = read_chats(tmp_path, tiny_llama, good, bad, good)
    assert [d.index for d in corpus.documents] == [0, 2]


def test_files_are_read_in_order_and_hashed(tmp_path, tiny_llama):
    one = write(tmp_path / "one.jsonl", [{"input_ids": [1, 2], "loss_mask": [1, 1]}])
    two = write(tmp_path / "two.jsonl", [{"input_ids": [3, 4], "loss_mask": [1, 1]}])
    seen = []
    corpus = read_documents(
        [two, one],
        target=tiny_llama,
        spec=TargetSpec.read(tiny_llama),
        max_length=9,
        on_bytes=seen.append,
    )
    assert [d.input_ids.tolist() for d in corpus.documents] == [[3, 4], [1, 2]]
    assert corpus.sha256 == {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (two, one)
    }
    assert sum(seen) == one.stat().st_size + two.stat().st_size


def test_prompt_that_is_no_token_prefix_leaves_the_turn_out_and_counts_it(tmp_path, tiny_llama):
    # The newline of the prompt and that of the answer become one token.
    chat = [user("how"), assistant("\nyes"), user("then"), assistant("no so")]
    corpus = read_chats(tmp_path, tiny_llama, chat)
    assert_documents(
        corpus,
        tiny_llama,
        "<|im_start|> user / how <|im_end|> / <|im_start|> assistant // yes <|im_end|> / "
        "<|im_start|> user / then <|im_end|> / <|im_start|> assistant / no* _so* <|im_end|>*",
    )
    assert corpus.counts.turns_without_prompt == 1
    assert corpus.counts.conversations_without_document == 0
    assert corpus.counts.dropped.total() == 0


def test_a_chat_may_give_no_document_at_all(tmp_path, tiny_llama):
    unfit = [user("how"), assistant("\nyes"), user("then"), assistant("\nno")]
    corpus = read_chats(tmp_path, tiny_llama, unfit, PLAIN)
    assert [document.index for document in corpus.documents] == [0]
    counts = corpus.counts
    assert (counts.conversations, counts.conversations_without_document) == (2, 1)
    assert (counts.turns_without_prompt, counts.documents) == (2, 1)
    with pytest.raises(ValueError, match=r"no document .*turns without the generation prompt: 2"):
        read_chats(tmp_path, tiny_llama, unfit)


def ids(tokens, mask):
    return {"input_ids": [5] * tokens, "loss_mask": list(map(int, mask))}


UNFIT = assistant("no", reasoning_content="\none")  # the prompt's newline and this one: one token
AGAIN = [user("then"), assistant("no", reasoning_content="one")]
NOTHING, LATE, LONGER = (
    "fewer than two supervised tokens in a row",
    "cut by --max-length before the answer",
    "longer than --max-length",
)
# Lines for a template that drops old reasoning, read up to 40 tokens. With each stand its fates
# where long documents are cut and where they are dropped: a document kept, or the reason.
FATES = (
    (ids(3, "011"), [True], [True]),
    (ids(3, "101"), [NOTHING], [NOTHING]),
    (ids(0, ""), [NOTHING], [NOTHING]),
    (ids(40, "01" * 19 + "11"), [True], [True]),
    (ids(41, "11" + "0" * 39), [True], [LONGER]),
    (ids(41, "0" * 39 + "11"), [LATE], [LONGER]),
    (ids(41, "0" * 41), [NOTHING], [LONGER]),
    ({"messages": PLAIN}, [True], [True]),
    ({"messages": [*THINK, *AGAIN]}, [True, True], [True, True]),
    ({"messages": [*THINK, *AGAIN, user("how " * 30), PLAIN[1]]}, [True, True, LATE],
     [True, True, LONGER]),
    ({"messages": [user("how"), UNFIT, *AGAIN]}, [True], [True]),
    ({"messages": [user("how"), UNFIT]}, [], []),
)  # fmt: skip


def mixed_lines():
    """Line i of the table 2 i + 1 times, blank ones between them, in no order."""
    lines = [json.dumps(line) for i, (line, *_) in enumerate(FATES) for _ in range(2 * i + 1)]
    lines += ["", "  "] * 5
    random.Random(0).shuffle(lines)
    return lines


@pytest.mark.parametrize("over_long", ["truncate", "drop"])
def test_documents_read_are_those_kept_and_those_dropped_by_each_reason(
    tmp_path, tiny_qwen35, over_long
):
    (tmp_path / "data.jsonl").write_text("\n".join(mixed_lines()))
    corpus = read(tmp_path / "data.jsonl", tiny_qwen35, max_length=40, over_long=over_long)
    expected, kept = Counter(), 0
    for i, (_, cut, dropped) in enumerate(FATES):
        for fate in cut if over_long == "truncate" else dropped:
            kept += (2 * i + 1) * (fate is True)
            expected[fate] += 2 * i + 1
    assert expected.pop(True) == kept == len(corpus.documents)
    counts = corpus.counts
    assert dict(counts.dropped) == dict(expected)
    assert counts.documents == kept + sum(counts.dropped.values())
    assert counts.conversations == sum(2 * i + 1 for i in range(len(FATES)))
    assert (counts.conversations_without_document, counts.split_conversations) == (23, 17 + 19)
    assert counts.turns_without_prompt == 21 + 23
    assert counts.truncated == (9 if over_long == "truncate" else 0)


def facts_of(corpus):
    """All of a corpus, to compare."""
    documents = [(d.index, d.input_ids.tolist(), d.loss_mask.tolist()) for d in corpus.documents]
    return documents, vars(corpus.counts), corpus.sha256


def test_several_processes_read_what_one_reads(tmp_path, tiny_qwen35, monkeypatch):
    """Chunks of a few lines, of which some hold no document, over two files."""
    real = (Path(__file__).parent / "real" / "conversations.jsonl").read_text().splitlines()
    mixed = mixed_lines()
    (tmp_path / "one.jsonl").write_text("\n" * 5000 + "\n".join([*mixed, *real[:40]]))
    (tmp_path / "two.jsonl").write_text("\r\n".join([*real[-40:], *mixed, ""]))
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    expected = facts_of(read(files, tiny_qwen35, max_length=40))
    monkeypatch.setattr(conversations, "_CHUNK_BYTES", 2000)
    seen = []
    how = {"max_length": 40, "processes": 2, "trust_remote_code": True, "on_bytes": seen.append}
    corpus = read(files, tiny_qwen35, **how)
    assert facts_of(corpus) == expected
    assert all(d.input_ids.dtype == torch.int32 for d in corpus.documents)
    assert all(d.loss_mask.dtype == torch.bool for d in corpus.documents)
    assert len(seen) > 20
    assert sum(seen) == sum(file.stat().st_size for file in files)


def test_several_processes_tell_of_the_first_bad_line(tmp_path, tiny_llama, monkeypatch):
    """It ends the second chunk of 1,000 lines; the chunks after it fail at once."""
    monkeypatch.setattr(conversations, "_CHUNK_BYTES", 1000 * len(f"{GOOD}\n"))
    bad = '{"input_ids": [1, 512], "loss_mask": [1, 1]}'
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text("\n".join([GOOD] * 1999 + [bad] + ["{"] * 5000))
    two.write_text("{")
    with pytest.raises(ValueError, match="the target has ids 0 to 511") as serial:
        read([one, two], tiny_llama)
    with pytest.raises(ValueError, match="the target has ids 0 to 511") as caught:
        read([one, two], tiny_llama, processes=2)
    assert str(caught.value) == str(serial.value)
    assert str(caught.value).startswith(f"{one} line 2000: ")


def settings_of_process(_):
    return os.environ["TOKENIZERS_PARALLELISM"], torch.get_num_threads()


def test_a_process_of_several_takes_one_core(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = in_order(settings_of_process, [0], processes=1, start=conversations._start_worker)
    assert list(found) == [("false", 1)]


GOOD = '{"prompt": "how", "response": "one two"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("\xff", "not UTF-8"),
        ("[" * 100_000, "not JSON"),
        ('{"messages": ' + "1" * 5000 + "}", "not JSON"),
        ("[1]", "a list, not a JSON object"),
        ('{"text": "x"}', r"has the keys \['text'\]"),
        ('{"messages": []}', "a list that is not empty"),
        ('{"messages": "how"}', "a list that is not empty"),
        ('{"messages": ["how"]}', "message 1 is a str"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "message 1 has role 'robot'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 1: content must be text"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant turn"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "begins with an assistant turn"),
        ('{"prompt": "how", "response": null}', "message 2: content must be text"),
        ('{"prompt": "how", "response": "\\ud800"}', "message 2 holds half of a surrogate pair"),
        ('{"messages": [{"role": "user", "x": ["\\udfff"]}]}', "message 1 holds half of a surr"),
        ('{"messages": [{"role": "user", "content": ["%s"]}]}' % ("x" * 99_999), "must be text"),
        ('{"messages": [{"role": "%s"}]}' % ("x" * 99_999), "message 1 has role"),
        ('{"%s": 1}' % ("x" * 99_999), "has the keys"),
        ('{"input_ids": ["%s"], "loss_mask": [1]}' % ("x" * 99_999), "input_ids holds"),
        ('{"prompt": "how", "response": "", "token_ids": [1]}', "none of the end tokens"),
        ('{"prompt": "how", "response": "", "token_ids": [512]}', "512; the target has ids 0 to"),
        ('{"prompt": "how", "response": "", "token_ids": "one"}', "token_ids is a str"),
        ('{"input_ids": [1, -1], "loss_mask": [1, 1]}', "input_ids holds -1"),
        ('{"input_ids": [1, 512], "loss_mask": [1, 1]}', "input_ids holds 512"),
        ('{"input_ids": [1, true], "loss_mask": [1, 1]}', "input_ids holds True"),
        ('{"input_ids": [1, 2.0], "loss_mask": [1, 1]}', "input_ids holds 2.0"),
        ('{"input_ids": 7, "loss_mask": [1, 1]}', "input_ids is a int"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "a list of 0 and 1"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "2 input_ids, but 1 values"),
    ],
    ids=lambda text: text[:40],
)
def test_malformed_line_is_named_by_file_and_number(tmp_path, tiny_llama, line, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(f"{GOOD}\n\n{line}\n{GOOD}\n".encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        read(path, tiny_llama)
    assert str(caught.value).startswith(f"{path} line 3: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_template_error_is_named_by_line(tmp_path, tiny_qwen35):
    system = {"role": "system", "content": "count"}
    with pytest.raises(ValueError, match=r"line 2: the chat template refuses .* No user query"):
        read_chats(tmp_path, tiny_qwen35, PLAIN, [system, assistant("one")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1/0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages.x.y }}",
        "{{ messages[0] + 1 }}",
        "{% if %}",
    ],
)
def test_template_that_raises_anything_is_named_by_line(tmp_path, tiny_llama, template):
    target = copy_with_template(tiny_llama, tmp_path, template)
    with pytest.raises(ValueError, match=r"line 1: the chat template refuses .*: \w+: ") as caught:
        read_chats(tmp_path, target, PLAIN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("tokenizer.json", "{"), ("tokenizer_config.json", "[]")],
)
def test_damaged_tokenizer_is_one_sentence(tmp_path, tiny_llama, name, content):
    target = shutil.copytree(tiny_llama, tmp_path / "target")
    (target / name).write_text(content)
    with pytest.raises(
        ValueError, match=rf"line 1: {target} holds no tokenizer .*: \w+: "
    ) as caught:
        read_chats(tmp_path, target, PLAIN)
    assert "\n" not in str(caught.value)


def test_template_without_the_targets_end_token_is_an_error(tmp_path, tiny_llama):
    template = TEMPLATES["llama"].replace("<|im_end|>", "<tool_call>")
    target = copy_with_template(tiny_llama, tmp_path, template)
    with pytest.raises(ValueError, match=r"line 1: .* generation_config.json"):
        read_chats(tmp_path, target, PLAIN)


def test_empty_and_missing_files_are_named(tmp_path, tiny_llama):
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        read(empty, tiny_llama)
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl does not exist"):
        read(tmp_path / "missing.jsonl", tiny_llama)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_data_that_is_no_regular_file_is_named_and_not_waited_for(tmp_path, tiny_llama, make):
    make(tmp_path / "odd")
    with pytest.raises(ValueError, match=r"data file .*odd is not a regular file"):
        read(tmp_path / "odd", tiny_llama)
    with pytest.raises(ValueError, match=r"data file \. is not a regular file"):
        read(Path(), tiny_llama)  # --data ''


def test_a_file_given_twice_is_refused_by_whatever_name(tmp_path, tiny_llama):
    data = write(tmp_path / "data.jsonl", [{"input_ids": [1, 2], "loss_mask": [1, 1]}])
    link = tmp_path / "link.jsonl"
    link.symlink_to(data)
    spec = TargetSpec.read(tiny_llama)
    for other in (data, link, tmp_path / "." / ".." / tmp_path.name / "data.jsonl"):
        with pytest.raises(ValueError, match=rf"data file {other} is given twice"):
            read_documents([data, other], target=tiny_llama, spec=spec, max_length=9)


def test_no_document_left_is_an_error_that_says_why(tmp_path, tiny_llama):
    record = {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}
    with pytest.raises(ValueError, match=r"no document is left .fewer than two supervised .*: 2"):
        read_chats(tmp_path, tiny_llama, record, record)


def test_tools_of_a_line_reach_the_template(tmp_path, tiny_llama):
    template = "{%- if tools -%}{{- tools[0].function.name -}}{%- endif -%}" + TEMPLATES["llama"]
    target = copy_with_template(tiny_llama, tmp_path, template)
    tools = [{"type": "function", "function": {"name": "list"}}]
    corpus = read_chats(tmp_path, target, {"messages": PLAIN, "tools": tools})
    prompt = "list <|im_start|> user / how <|im_end|> / <|im_start|> assistant / "
    assert_documents(corpus, target, prompt + "yes* <|im_end|>*")


def test_target_without_chat_template_is_an_error(tmp_path, tiny_llama):
    target = copy_with_template(tiny_llama, tmp_path, None)
    with pytest.raises(ValueError, match="has no chat template"):
        read_chats(tmp_path, target, PLAIN)
