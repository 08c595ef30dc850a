"""`inspect-shard`: what it prints is what was written."""

import json

import pytest
import torch
from click.testing import CliRunner
from test_shards import Document, append, make_dataset, make_document, make_taps

from dflash_offline.cli.inspect_shard import inspect_shard
from dflash_offline.shards import ShardWriter
from dflash_offline.spec import TargetSpec


def run(*args):
    return CliRunner().invoke(inspect_shard, [str(arg) for arg in args])


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
