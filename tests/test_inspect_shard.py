"""`inspect-shard`: what it prints is what was written."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from test_shards import Document, append, flip_bit, make_dataset, make_document, make_taps

from dflash_offline.cli.inspect_shard import inspect_shard
from dflash_offline.codec import measure
from dflash_offline.shards import ShardWriter
from dflash_offline.spec import TargetSpec
from dflash_offline.stages import inspect as stage


def run(*args, **runner):
    return CliRunner(**runner).invoke(inspect_shard, [str(arg) for arg in args])


def facts(*args):
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def data(tmp_path):
    data = make_dataset(tmp_path / "data", codec="raw")
    for name, sizes in (("shard-000000", [5, 9]), ("shard-000001", [33, 130, 2])):
        with ShardWriter(data, name) as writer:
            append(writer, data.codec, [make_document(tokens, tokens) for tokens in sizes])
            writer.commit()
    return data


def test_shard_behind_links_and_dots_is_the_shard(data, tmp_path):
    (tmp_path / "link").symlink_to(data.shard_path("shard-000001"))
    dotted = data.shard_path("shard-000000") / ".." / "shard-000001"
    for path in (tmp_path / "link", dotted):
        assert facts(path)["tokens"] == 165
    (data.path / "shards").rename(tmp_path / "other-disk")
    (data.path / "shards").symlink_to(tmp_path / "other-disk")
    assert facts(data.shard_path("shard-000001"))["tokens"] == 165


def test_one_shard_is_counted_alone(data):
    found = facts(data.shard_path("shard-000001"))
    assert (found["shards"], found["documents"], found["tokens"]) == (1, 3, 165)
    assert (found["shortest"], found["median"], found["longest"]) == (2, 33, 130)
    masks = torch.cat([make_document(n, n).loss_mask for n in (33, 130, 2)])
    assert found["supervised"] == int(masks.sum())
    assert found["supervised_share"] == pytest.approx(masks.float().mean().item())
    assert found["contract"]["target_layer_ids"] == [1, 3, 5]
    assert found["codec"] == {"name": "raw", "layers": 3, "width": 64}


def test_data_set_is_totalled_and_shows_its_first_shard(data):
    found = facts(data.path)
    assert (found["shards"], found["documents"], found["tokens"]) == (2, 5, 179)
    assert (found["shortest"], found["median"], found["longest"]) == (2, 9, 130)
    assert found["shard"] == "shard-000000"
    exact = torch.cat([make_taps(make_document(n, n)) for n in (5, 9)]).double()
    for layer, tap in enumerate(found["taps"]):
        assert tap["mean"] == pytest.approx(exact[:, layer].mean().item(), abs=1e-6)
        assert tap["std"] == pytest.approx(exact[:, layer].std(correction=0).item(), rel=1e-5)
        assert tap["max_abs"] == exact[:, layer].abs().max().item()
        assert tap["relative_l2_p99"] == 0


def test_bytes_are_those_on_the_disk(data):
    folder = data.shard_path("shard-000001")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    states = sum(path.stat().st_size for path in (folder / "bits/c").rglob("*/0/0"))
    found = facts(folder)
    assert found["bytes"] == size
    assert found["bytes_per_token"] == pytest.approx(size / 165)
    assert found["payload_bytes_per_token"] == pytest.approx(states / 165)
    assert found["ratio_to_bf16"] == pytest.approx(165 * 3 * 64 * 2 / size)


def write_states(path, taps_NLD):
    """A data set of one document with these bf16 states, as they are."""
    data = make_dataset(path, codec="raw")
    with ShardWriter(data, "shard-000000") as writer:
        planes = data.codec.encode(taps_NLD)
        facts = measure(taps_NLD, taps_NLD)
        writer.append([make_document(0, len(taps_NLD))], planes, facts)
        writer.commit()
    return data


def one_token(*parts):
    """Taps [1, 3, 64]: every layer holds `count` times each value, and zeros."""
    values = torch.cat([torch.full((count,), value) for count, value in parts])
    state_D = torch.nn.functional.pad(values, (0, 64 - len(values)))
    return state_D.expand(1, 3, 64).bfloat16()


def test_histogram_counts_every_value_by_its_exponent(tmp_path):
    edges = [1.0, 0.99609375, 1.9921875, 2.0, -2.0, 0.1, -300.0, 0.0, -0.0]
    extremes = [2.0**-133, -(2.0**-126), 2.0**-127, 1.5 * 2.0**127]
    g = torch.Generator().manual_seed(0)
    taps_NLD = torch.tensor(edges)[torch.randint(len(edges), (301, 3, 64), generator=g)]
    taps_NLD[7, 1, :4] = torch.tensor(extremes)
    seen = facts(write_states(tmp_path / "data", taps_NLD.bfloat16()).path)["histogram"]
    assert (seen["tokens"], seen["shard_tokens"]) == (301, 301)
    assert seen["exponents"] == list(range(-133, 128))
    for layer, (zeros, counts) in enumerate(zip(seen["zeros"], seen["counts"], strict=True)):
        values = taps_NLD[:, layer].flatten().tolist()
        found = dict(zip(seen["exponents"], counts, strict=True))
        assert zeros == values.count(0.0)
        assert {e: n for e, n in found.items() if n} == Counter(
            math.frexp(value)[1] - 1 for value in values if value
        )


def test_histogram_reads_whole_chunks_spread_over_a_long_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "_HISTOGRAM_TOKENS", 500)  # three chunks of 128, of eight
    chunk_N = torch.arange(1000) // 128
    data = write_states(
        tmp_path / "data", (2.0**chunk_N)[:, None, None].expand(-1, 3, 64).bfloat16()
    )
    flip_bit(data.shard_path("shard-000000") / "bits/c/0/0/0", 128 * 3 * 64 * 2 + 50)  # chunk 1
    seen = facts(data.path)["histogram"]
    assert (seen["tokens"], seen["shard_tokens"]) == (384, 1000)
    assert seen["exponents"] == [0, 1, 2, 3, 4, 5]
    assert seen["counts"] == [[8192, 0, 8192, 0, 0, 8192]] * 3
    assert "histogram over 384 of 1,000 tokens" in run(data.path).stdout


def test_histogram_of_zeros_alone_has_nothing_in_its_bins(tmp_path):
    data = write_states(tmp_path / "data", torch.zeros(5, 3, 64, dtype=torch.bfloat16))
    seen = facts(data.path)["histogram"]
    assert seen["zeros"] == [5 * 64] * 3
    assert not any(map(sum, seen["counts"]))
    assert run(data.path).exit_code == 0


@pytest.mark.parametrize(
    "charset, bars", [("utf-8", "\u2584 \u2588\u2584"), ("ascii", "4 84")], ids=["utf-8", "ascii"]
)
def test_bars_are_as_high_as_the_counts(tmp_path, charset, bars):
    taps_NLD = one_token((32, -1.0), (16, 2.0), (15, 0.25))  # and one zero
    result = run(write_states(tmp_path / "data", taps_NLD).path, charset=charset)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if bars in line]
    assert [line[1:-1].split()[:4] for line in lines] == [
        ["layer", i, lines[0][0], "1"] for i in "135"
    ]
    assert "2^-2 2^2" in result.stdout


def test_values_far_below_the_largest_share_the_first_bar(tmp_path):
    taps_NLD = one_token((32, 1.0), (4, 2.0**-100), (5, 2.0**-31), (1, -(2.0**-29)))
    shown = run(write_states(tmp_path / "data", taps_NLD).path).stdout
    assert "\u2583 \u2581" + 28 * " " + "\u2588" in shown  # nine of 32 are 2.25 eighths
    assert "<2^-30" + 23 * " " + "2^1" in shown


def test_error_is_told_over_all_shards(tmp_path):
    data = make_dataset(tmp_path / "data")  # int8
    exact = {"shard-000000": [5, 9], "shard-000001": [33, 130, 2], "shard-000002": [3]}
    p50, p99, top = [], [], []
    for name, sizes in exact.items():
        documents = [make_document(tokens, tokens) for tokens in sizes]
        with ShardWriter(data, name) as writer:
            append(writer, data.codec, documents)
            writer.commit()
        taps_NLD = torch.cat([make_taps(document) for document in documents])
        error_NLD = (data.codec.decode(data.codec.encode(taps_NLD)) - taps_NLD.double()).numpy()
        taps_NLD = taps_NLD.double().numpy()
        error_NL = np.linalg.norm(error_NLD, axis=2) / np.linalg.norm(taps_NLD, axis=2)
        p50.append(np.quantile(error_NL, 0.5, axis=0))
        p99.append(np.quantile(error_NL, 0.99, axis=0))
        top.append(np.abs(taps_NLD).max((0, 2)))
    expected = {
        "max_abs": np.max(top, 0),
        "p50_median": np.median(p50, 0),
        "p50_max": np.max(p50, 0),
        "p99_median": np.median(p99, 0),
        "p99_max": np.max(p99, 0),
    }
    found = facts(data.path)["all_taps"]
    for key, values in expected.items():
        assert [tap[key] for tap in found] == pytest.approx(values.tolist(), rel=1e-4), key
    worst = [list(exact)[i] for i in np.argmax(p99, 0)]
    assert [tap["worst_shard"] for tap in found] == worst
    assert set(worst) != {"shard-000000"}, "the first shard alone would not do"
    shown = run(data.path).stdout
    name = worst[np.argmax(np.max(p99, 0))]
    assert f"The largest error p99, {np.max(p99):.3%}, is in {name}." in shown
    assert "taps of all" not in run(data.shard_path("shard-000001")).stdout


def test_narrow_terminal_hides_no_value(data):
    shown = run(data.path, env={"COLUMNS": "20"}).stdout
    size = facts(data.path)["bytes"]
    for text in (f"{size:,}", "name raw, layers 3, width 64", "c0ffee", "error p99"):
        assert text in shown


def test_document_is_cut_where_supervision_changes(data):
    document = make_document(33, 33)
    view = facts(data.shard_path("shard-000001"), "--document", 0)["document"]
    assert (view["place"], view["index"], view["tokens"]) == (0, 33, 33)
    ids, mask = [], []
    for span in view["spans"]:
        ids += span["input_ids"]
        mask += [span["supervised"]] * len(span["input_ids"])
        assert span["text"] is None
    assert ids == document.input_ids.tolist()
    assert mask == document.loss_mask.tolist()
    assert all(
        a["supervised"] != b["supervised"]
        for a, b in zip(view["spans"], view["spans"][1:], strict=False)
    )


def test_text_marks_the_supervised_tokens(tmp_path, tiny_llama):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    data = make_dataset(tmp_path / "data", target=TargetSpec.read(tiny_llama).to_dict())
    question, answer = (tokenizer.encode(t, add_special_tokens=False) for t in ("what is", "two"))
    mask = torch.tensor([False] * len(question) + [True] * len(answer))
    document = Document(0, torch.tensor(question + answer, dtype=torch.int32), mask)
    with ShardWriter(data, "shard-000000") as writer:
        append(writer, data.codec, [document])
        writer.commit()
    result = run(data.path, "--target", tiny_llama)
    assert result.exit_code == 0, result.output
    assert f"{tokenizer.decode(question)}[[{tokenizer.decode(answer)}]]" in result.stdout


def test_tokenizer_of_another_target_is_refused(data, tiny_llama):
    error = run(data.path, "--target", tiny_llama).exception
    assert isinstance(error, ValueError)
    assert "has another tokenizer" in str(error)


def test_table_for_the_eye_names_the_main_facts(data):
    result = run(data.path)
    assert result.exit_code == 0, result.output
    wanted = ("179", "2 to 130, median 9", "name raw, layers 3", "ratio to bf16", "max |x|")
    for text in (*wanted, "target.content_hash", "c0ffee", "document 0"):
        assert text in result.stdout
    assert result.stderr == ""


def test_path_that_does_not_exist_is_wrong_usage(tmp_path):
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere" in result.output


def test_folder_that_is_no_data_set_is_named(tmp_path):
    error = run(tmp_path).exception
    assert isinstance(error, FileNotFoundError)
    assert "is neither a data set" in str(error)


def test_shard_that_was_never_committed_is_refused(data):
    stray = data.shard_path("shard-000009")
    stray.mkdir()
    error = run(stray).exception
    assert "was never committed" in str(error)


def test_document_beyond_the_last_is_refused_with_the_range(data):
    error = run(data.path, "--document", 2).exception
    assert "--document 2: shard shard-000000 holds documents 0 to 1" in str(error)


def test_a_target_without_a_chat_template_still_shows_text(tmp_path, tiny_llama):
    import shutil

    from stores import make_store, random_documents

    bare = tmp_path / "bare"
    shutil.copytree(tiny_llama, bare)
    (bare / "chat_template.jinja").unlink()
    store = make_store(tmp_path / "store", bare, random_documents(2))
    found = facts(store, "--target", bare)
    assert all(span["text"] for span in found["document"]["spans"])
