"""Estimates against what extract makes of the same files, and against files of known content."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_conversations import ONE_TURN, assistant, copy_with_template, user, write
from test_extract import config as extract_config
from test_extract import write_chats, write_rows
from tiny_target import WORDS

from dflash_offline import sizing
from dflash_offline.cli.main import main
from dflash_offline.config import EstimateConfig
from dflash_offline.conversations import read_documents
from dflash_offline.dataset import Dataset
from dflash_offline.sampling import estimate_corpus
from dflash_offline.spec import TargetSpec
from dflash_offline.stages import extract as stage
from dflash_offline.stages.estimate import estimate
from dflash_offline.stages.extract import extract

REAL_TARGET = Path(__file__).parent.parent / "demo" / "target"
REAL_DATA = Path(__file__).parent / "real" / "conversations.jsonl"


def sampled(data, target, *, lines=1000, max_length=4096, seed=0):
    files = [data] if isinstance(data, Path) else data
    return estimate_corpus(
        files, target=target, max_length=max_length, sample_lines=lines, seed=seed
    )


def row(tokens, prompt=2):
    mask = [0] * prompt + [1] * (tokens - prompt)
    return {"input_ids": [7] * tokens, "loss_mask": mask}


def read_by_extract(data, target, max_length=4096):
    spec = TargetSpec.read(target)
    return read_documents([data], target=target, spec=spec, max_length=max_length)


def words(count, first=0):
    return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(count))


def test_files_of_few_lines_are_counted_whole(tmp_path, tiny_llama):
    """Of 5, 9, 40 and 3 tokens cut to 8: the last two lines have nothing to learn there."""
    lines = [row(5), row(9), {"input_ids": [1] * 40, "loss_mask": [0] * 39 + [1]}, row(3)]
    one = write(tmp_path / "one.jsonl", lines[:1])
    two = tmp_path / "two.jsonl"
    two.write_text("\n".join(map(json.dumps, lines[1:])))  # no newline at its end
    found = sampled([one, two], tiny_llama, max_length=8)
    size = one.stat().st_size + two.stat().st_size
    assert (found.bytes, found.lines, found.lines_read) == (size, 4, 4)
    assert (found.documents, found.tokens, found.tokens_error) == (2, 5 + 8, 0)


def chats_of_every_kind():
    thought = {"reasoning_content": words(9)}
    return [
        {"prompt": words(5), "response": words(30, 3)},
        {"messages": [user(words(3)), assistant(words(7))]},
        {"messages": [user("how many"), assistant("three", **thought)]},
        {"messages": [user("how"), assistant("no", **thought), user("so"),
                      assistant(words(20), **thought), user("then"), assistant("yes")]},
        {"messages": [{"role": "system", "content": words(4)}, user("count"), assistant("one two"),
                      assistant("three four"), user("list"), assistant(words(50))]},
        {"messages": [user(words(70)), assistant(words(5)), user("no")]},
        row(31),
        row(120, prompt=90),
    ]  # fmt: skip


@pytest.mark.parametrize("max_length", [4096, 60])
def test_documents_and_tokens_are_those_that_extract_reads(tmp_path, tiny_target, max_length):
    """Templates that keep and that rewrite history; answers that --max-length cuts off."""
    data = write(tmp_path / "data.jsonl", chats_of_every_kind())
    read = read_by_extract(data, tiny_target, max_length)
    found = sampled(data, tiny_target, max_length=max_length)
    assert (found.documents, found.tokens) == (len(read.documents), read.tokens)
    assert max(map(len, read.documents)) == min(max_length, 120)


def test_templates_find_what_transformers_gives_them(tmp_path, tiny_llama):
    """Special tokens, tools through tojson, a loop control and the generation tag."""
    template = (
        "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content + '<|im_start|>' }}{% endif %}{% endfor %}"
    )
    target = copy_with_template(tiny_llama, tmp_path, template)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings["bos_token"] = {"__type": "AddedToken", "content": "<|audio_start|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    tools = [{"type": "function", "function": {"name": "count <two> & 'three'"}}]
    messages = [{"role": "system", "content": "yes"}, user("how many"), assistant("four")]
    data = write(tmp_path / "data.jsonl", [{"messages": messages, "tools": tools}])
    assert sampled(data, target).tokens == read_by_extract(data, target).tokens > 40


def test_a_template_may_stand_in_the_tokenizers_settings(tmp_path, tiny_llama):
    target = shutil.copytree(tiny_llama, tmp_path / "target")
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").unlink()
    settings = json.loads((target / "tokenizer_config.json").read_text())
    data = write(tmp_path / "data.jsonl", [{"prompt": "how many", "response": "three four"}])
    named = [{"name": "other", "template": "x"}, {"name": "default", "template": template}]
    for value in (template, named):
        settings["chat_template"] = value
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
        assert sampled(data, target).tokens == len(ONE_TURN.split())


def uneven_file(path):
    """Every tenth line is a hundred times as long as the others, and ids are of any width."""
    lines = [row(1000 if i % 10 == 3 else 10 + i % 3) for i in range(4_000)]
    for i, line in enumerate(lines):
        line["input_ids"] = [(i * 37) % 400] * len(line["input_ids"])
    write(path, lines)
    return sum(len(line["input_ids"]) for line in lines)


def test_an_estimate_is_as_near_as_it_says(tmp_path, tiny_llama):
    """Two standard errors hold the truth in 95 cases of 100; here 60 draws of 100 lines."""
    data = tmp_path / "data.jsonl"
    truth = uneven_file(data)
    found = [sampled(data, tiny_llama, lines=100, seed=seed) for seed in range(60)]
    errors = [one.tokens - truth for one in found]
    near = sum(abs(error) <= one.tokens_error for error, one in zip(errors, found, strict=True))
    assert near >= 54
    assert abs(sum(errors) / 60) < 0.01 * truth, "biased"
    assert all(0 < one.tokens_error < 0.1 * truth for one in found)
    assert all(one.lines_read <= 100 for one in found)
    lines = sum(one.lines for one in found) / 60
    assert lines == pytest.approx(4_000, rel=0.1)
    assert sum(one.documents for one in found) / 60 == pytest.approx(4_000, rel=0.1)


def test_the_draw_is_seeded(tmp_path, tiny_llama):
    uneven_file(tmp_path / "data.jsonl")
    first, again, other = (
        sampled(tmp_path / "data.jsonl", tiny_llama, lines=40, seed=seed) for seed in (5, 5, 6)
    )
    assert first == again
    assert first.tokens != other.tokens


def test_the_draw_is_spread_over_all_files(tmp_path, tiny_llama):
    """Two files of 5,000 tokens each, in lines of 10 and of 100."""
    one, two = (write(tmp_path / f"{n}.jsonl", [row(n)] * (5_000 // n)) for n in (10, 100))
    for order in ([one, two], [two, one]):
        found = sampled(order, tiny_llama, lines=40)
        assert found.tokens == pytest.approx(10_000, rel=0.05)
        assert found.lines == pytest.approx(550, rel=0.05)


def test_a_line_drawn_twice_is_read_once(tmp_path, tiny_llama):
    data = write(tmp_path / "data.jsonl", [row(5)] * 20 + [row(50_000)] + [row(5)] * 20)
    found = sampled(data, tiny_llama, lines=10, max_length=100_000)
    assert found.lines_read == 1
    assert found.tokens == pytest.approx(50_200, rel=0.02)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty; it needs one conversation a line"),
        ("\n\n", "none of the 2 lines looked at holds a document"),
        ('{"messages": [\n', "line 1: not JSON: "),
        ("\n[1]\n", "line 2: a list, not a JSON object"),
        ('{"text": "x"}\n', "line 1: has the keys ['text']; expected messages, or prompt"),
        ('{"messages": []}\n', "line 1: messages must be a list of objects that is not empty"),
        ('{"messages": [{"content": "x"}]}\n', "line 1: message 1 has no role"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', "line 1: has no assistant turn"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "line 1: begins with an"),
        ('{"prompt": "x", "response": 3}\n', "line 1: the chat template refuses these messages"),
        ('{"prompt": "x", "response": "\\ud800"}\n', "line 1: holds half of a surrogate pair"),
        ('{"input_ids": [1], "loss_mask": [1, 1]}\n', "line 1: 1 input_ids, but 2 values in"),
        ('{"input_ids": 3, "loss_mask": [1, 1]}\n', "line 1: input_ids and loss_mask must be"),
        ("[" * 100_000 + "\n", "line 1: RecursionError"),
    ],
)
def test_bad_data_is_one_sentence_that_names_file_and_line(tmp_path, tiny_llama, content, told):
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    with pytest.raises(ValueError) as refused:
        sampled(data, tiny_llama)
    assert str(refused.value).startswith(str(data))
    assert told in str(refused.value)


def test_a_bad_line_in_the_middle_of_a_sample_has_its_number(tmp_path, tiny_llama):
    """The 1,234th line is nearly all of the file, so it is drawn."""
    data = write(tmp_path / "data.jsonl", [row(5)] * 3_000)
    lines = data.read_text().splitlines()
    lines[1_233] = "{" + " " * 5_000_000
    data.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"data\.jsonl line 1234: not JSON"):
        sampled(data, tiny_llama, lines=50)


def test_a_target_that_cannot_count_chats_is_named(tmp_path, tiny_llama):
    chat = write(tmp_path / "chat.jsonl", [{"prompt": "how many", "response": "three"}])
    ids = write(tmp_path / "ids.jsonl", [row(6)])
    target = shutil.copytree(tiny_llama, tmp_path / "target")
    (target / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist, and chats can"):
        sampled(chat, target)
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json holds no tokenizer to use"):
        sampled(chat, target)
    (target / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template; add one or give input_ids"):
        sampled(chat, target)
    assert sampled(ids, target).tokens == 6
    (target / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"the chat template of .* cannot be used"):
        sampled(chat, target)


def knobs(target, *data, **more):
    return EstimateConfig(target=target, data=data, output=data[0].parent / "out", **more)


def test_an_estimate_tells_of_an_extract_what_it_then_does(tmp_path, tiny_qwen35):
    """Of all lines, so that tokens are exact; inodes are counted on the disk."""
    data = tmp_path / "data.jsonl"
    write_chats(data)
    found = estimate(knobs(tiny_qwen35, data, final_hidden="after-norm", shard_tokens=100,
                           batch_tokens=100, codec="raw", final_codec="raw"))  # fmt: skip
    output = tmp_path / "out"
    summary = extract(extract_config(tiny_qwen35, data, output, final_hidden="after-norm",
                                     shard_tokens=100, batch_tokens=100, codec="raw",
                                     final_codec="raw"))  # fmt: skip
    assert (found.data.documents, found.data.tokens) == (summary["documents"], summary["tokens"])
    shards = list((output / "shards").iterdir())
    assert len(shards) - found.shards in (0, 1, 2)  # rows are not full to the last token
    entries = sum(1 + len(list(shard.rglob("*"))) for shard in shards)
    assert found.codecs["raw"].inodes / found.shards == entries / len(shards)
    assert (found.work.layers, found.work.layers_run) == (8, 8)
    assert found.work.target_layer_ids == (1, 2, 3, 4, 5)


def test_hours_and_disk_speed_are_those_of_the_rate(tmp_path, tiny_llama):
    """A layer of 64 x 64, 2 of 32 x 64, 64 x 64, 3 of 128 x 64 and two norms of 64: 36,992
    weights. Four run, for the last tap is layer 3: 295,936 FLOP a token. At 0.591872 TFLOP/s a
    GPU makes 2,000,000 tokens/s."""
    data = write(tmp_path / "data.jsonl", [row(3_600)] * 2)
    how = {"target_layer_ids": (1, 3), "tflops": 0.591872, "codec": "raw"}
    found = estimate(knobs(tiny_llama, data, **how))
    assert found.work.weights == 4 * 36_992
    assert found.work.flop_per_token == 295_936
    assert [pace.gpus for pace in found.paces] == [1, 2, 4, 8]
    assert [pace.tokens_per_second for pace in found.paces] == pytest.approx([2e6, 4e6, 8e6, 16e6])
    assert [3600 * pace.hours for pace in found.paces] == pytest.approx(
        [3.6e-3, 1.8e-3, 0.9e-3, 0.45e-3]
    )
    # 7,200 tokens are 57 chunks of 128 x 256 + 4; 2,052 of index, 5 x 7,200 + 2 x 20 + 8,000.
    size = 57 * 32_772 + 2_052 + 44_040
    assert found.codecs["raw"].bytes == size
    speed = size / 7_200 * 2e6 / 1e9
    assert [pace.gigabytes_per_second for pace in found.paces] == pytest.approx(
        [speed, 2 * speed, 4 * speed, 8 * speed]
    )
    assert [pace.gpus for pace in estimate(knobs(tiny_llama, data, gpus=3, **how)).paces] == [3]


def fake_disk(monkeypatch, free):
    found = SimpleNamespace(f_frsize=1, f_bavail=free, f_files=10**6, f_favail=10**6)
    monkeypatch.setattr(sizing.os, "statvfs", lambda path: found)


def test_codecs_that_do_not_fit_are_marked(tmp_path, tiny_llama, monkeypatch):
    data = write(tmp_path / "data.jsonl", [row(4_000)] * 20)
    sizes = estimate(knobs(tiny_llama, data)).codecs
    assert sizes["int8"].bytes < sizes["lossless"].bytes < sizes["raw"].bytes
    fake_disk(monkeypatch, sizes["lossless"].bytes)
    fits = {codec: size.fits for codec, size in estimate(knobs(tiny_llama, data)).codecs.items()}
    assert fits == {"int8": True, "lossless": True, "raw": False}


def run_command(args, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    seen = capsys.readouterr()
    assert "Traceback" not in seen.err
    return ended.value.code, seen.out, seen.err


def test_the_command_prints_tables_or_json_and_nothing_else(tmp_path, tiny_llama, capsys):
    data = write(tmp_path / "data.jsonl", [row(100)] * 30)
    args = ["estimate", "--target", tiny_llama, "--data", data, "--output", tmp_path]
    code, out, err = run_command(args, capsys)
    assert (code, err) == (0, "")
    for word in ("30 of 30", "3,000", "int8", "lossless", "raw", "565 TFLOP/s", "GB/s to disk"):
        assert word in out, word
    code, out, err = run_command([*args, "--json", "--sample-lines", 5, "--gpus", 2], capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["data"]["tokens"] == pytest.approx(3_000, abs=1)
    assert found["data"]["lines_read"] <= 5
    assert found["output"] == str(tmp_path)
    assert [pace["gpus"] for pace in found["paces"]] == [2]
    assert not list(tmp_path.glob("*.extract.json"))


def test_the_commands_errors_are_one_sentence(tmp_path, tiny_llama, capsys):
    data = write(tmp_path / "data.jsonl", [row(100)])
    for args, told in [
        (["--target", tmp_path / "no", "--data", data], "no does not exist"),
        (["--target", tiny_llama, "--data", tmp_path / "x.jsonl"], "x.jsonl does not exist"),
        (["--target", tiny_llama, "--data", data, "--target-layer-ids", "8"], "layers 0 to 7"),
    ]:
        code, out, err = run_command(["estimate", *args], capsys)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert told in err
    code, _, err = run_command(["estimate", "--target", tiny_llama, "--data", data, "--tflops", 0],
                               capsys)  # fmt: skip
    assert (code, "--tflops is 0.0; it must be at least" in err) == (2, True)


def test_it_answers_without_torch_and_without_transformers(tmp_path, tiny_qwen35):
    data = tmp_path / "data.jsonl"
    write_chats(data, count=2_000)
    program = (
        "import sys, time; started = time.monotonic()\n"
        "from dflash_offline.cli.main import main\n"
        "try: main()\n"
        "finally:\n"
        "    loaded = {'torch', 'transformers', 'zarr', 'numpy'} & set(sys.modules)\n"
        "    print(time.monotonic() - started, loaded, file=sys.stderr)"
    )
    args = ["estimate", "--target", tiny_qwen35, "--data", data]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, loaded = done.stderr.split(maxsplit=1)
    assert loaded.strip() == "set()"
    assert float(seconds) < 3.0, "0.5 s on an idle machine"


def no_target(setup):
    raise AssertionError("the target was loaded")


def test_extract_refuses_a_disk_that_is_too_small_before_it_loads_the_target(
    tmp_path, tiny_llama, monkeypatch
):
    data, output = tmp_path / "data.jsonl", tmp_path / "out"
    write_rows(data)  # 280 tokens
    monkeypatch.setattr(stage, "load_target", no_target)
    fake_disk(monkeypatch, 100_000)
    with pytest.raises(
        ValueError, match=r"the 280 tokens still .* 100\.0 KB and 1,000,000 inodes"
    ):
        extract(extract_config(tiny_llama, data, output))
    assert not output.exists()


def test_extract_with_allow_partial_warns_and_runs(tmp_path, tiny_llama, monkeypatch, capsys):
    data, output = tmp_path / "data.jsonl", tmp_path / "out"
    write_rows(data)
    fake_disk(monkeypatch, 100_000)
    summary = extract(extract_config(tiny_llama, data, output, allow_partial=True))
    assert summary["tokens"] == 280
    assert "warning: the 280 tokens still to be extracted take" in capsys.readouterr().err


def test_extract_asks_only_for_what_is_missing(tmp_path, tiny_llama, monkeypatch):
    """The longest document goes first: it makes the first shard. Without that one, 151 tokens
    lack, and with all shards there no disk is too small."""
    data, output = tmp_path / "data.jsonl", tmp_path / "out"
    write_rows(data)
    args = extract_config(tiny_llama, data, output, shard_tokens=129, batch_tokens=129)
    extract(args)
    fake_disk(monkeypatch, 0)
    assert extract(args)["shards_written_now"] == 0
    dataset = Dataset.open(output)
    gone = [name for name, record in dataset.committed().items() if record.tokens < 129]
    assert gone
    for name in gone:
        dataset.set_aside(name)
    monkeypatch.setattr(stage, "load_target", no_target)
    with pytest.raises(ValueError, match="the 151 tokens still to be extracted"):
        extract(args)


@pytest.mark.real
@pytest.mark.skipif(not REAL_TARGET.exists(), reason="needs demo/target: `make test` makes it")
def test_the_demos_conversations_are_estimated_within_the_error_told():
    """extract made 266,352 + 14,839 tokens of 1,954 + 108 conversations (README)."""
    started = time.monotonic()
    found = estimate(EstimateConfig(target=REAL_TARGET, data=(REAL_DATA,)))
    print(f"{time.monotonic() - started:.2f} s: {found.data}")
    assert found.data.lines_read < 1_001
    assert found.data.tokens == pytest.approx(281_191, abs=found.data.tokens_error)
    assert found.data.documents == pytest.approx(2_062, rel=0.02)
    assert found.codecs["int8"].bytes_per_token == pytest.approx(2_980, rel=0.01)
    whole = estimate(EstimateConfig(target=REAL_TARGET, data=(REAL_DATA,), sample_lines=3_000))
    assert (whole.data.documents, whole.data.tokens) == (2_062, 281_191)
