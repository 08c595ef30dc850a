"""The whole product on SmolLM2-135M, against z-lab's reference client (PyPI dflash 0.1.0).

Everything runs in fp32: bf16 kernels round differently for different batch shapes, and a greedy
choice between two near-equal tokens would then depend on how the text was fed.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from dflash_offline.config import EvaluateConfig, ExtractConfig, TrainConfig
from dflash_offline.shard_set import ShardSet
from dflash_offline.stages.evaluate import evaluate
from dflash_offline.stages.extract import extract
from dflash_offline.stages.train import train

TARGET = Path(__file__).parent.parent / "demo" / "target"
PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Count from one to five.",
    "Name three colours of the rainbow.",
]
BLOCK = 6
MASK_TOKEN = 16
ANSWER_TOKENS = 40

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (TARGET / "config.json").exists(), reason="needs demo/target: `make test` makes it"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def all_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    return [
        list(
            tokenizer.apply_chat_template(
                c, add_generation_prompt=True, return_dict=True
            ).input_ids
        )
        for c in chats
    ]


@pytest.fixture(scope="module")
def answers(target, prompts):
    """Plain greedy decoding by transformers: what every lossless decoder must reproduce."""
    with torch.inference_mode():
        return [
            target.generate(
                torch.tensor([ids]), max_new_tokens=ANSWER_TOKENS, do_sample=False
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, prompts, answers):
    """Extract, train a little, evaluate: the folders and the report."""
    folder = tmp_path_factory.mktemp("real")
    lines = [
        {"input_ids": p + a, "loss_mask": [0] * len(p) + [1] * len(a)}
        for p, a in zip(prompts, answers, strict=True)
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    extract(
        ExtractConfig(
            target=TARGET, data=(data,), output=folder / "shards", codec="raw", dtype="float32"
        )
    )
    stores = (folder / "shards",)
    train(
        TrainConfig(
            shards=stores, eval_shards=stores, target=TARGET, output=folder / "run", steps=20,
            optimizer="muon", muon_lr=0.02, lr=3e-3,
            mask_token_id=MASK_TOKEN, block_size=BLOCK, layers=2, sliding_layers=1, heads=4,
            kv_heads=2, head_dim=64, mlp_width=256, sliding_window=32, row_tokens=256, anchors=32,
            rows_per_step=1, log_every=20, device="cpu",
        )
    )  # fmt: skip
    evaluate(
        EvaluateConfig(
            drafter=folder / "run" / "drafter", target=TARGET, shards=stores, dtype="float32",
            output=folder / "evaluation.json", device="cpu",
        )
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def client_model(run):
    from dflash.model import DFlashDraftModel

    model, info = DFlashDraftModel.from_pretrained(
        run / "run" / "drafter", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def test_stored_taps_are_the_targets_hidden_states(run, target):
    shards = ShardSet((run / "shards",))
    ids, _ = shards.tokens(0)
    with torch.inference_mode():
        states = target(ids[None].long(), output_hidden_states=True).hidden_states
    expected = torch.stack([states[i + 1][0] for i in (1, 8, 14, 20, 27)], 1)
    # One step of bf16 where the fp32 sums of another batch shape fall on the other side.
    torch.testing.assert_close(shards.taps(0).float(), expected, atol=1e-3, rtol=2**-7)


def test_the_client_drafts_with_our_logits(run, client_model, target):
    from dflash_offline.checkpoint import load_drafter

    shards = ShardSet((run / "shards",))
    taps, (ids, mask) = shards.taps(0).float().flatten(1), shards.tokens(0)
    anchor = int(mask.nonzero()[2])
    block = torch.tensor([int(ids[anchor])] + [MASK_TOKEN] * (BLOCK - 1))
    embedded = F.embedding(block, target.get_input_embeddings().weight)[None]
    positions = torch.arange(anchor + BLOCK)[None]
    with torch.inference_mode():
        theirs = client_model(
            position_ids=positions, noise_embedding=embedded, target_hidden=taps[None, :anchor]
        )
        ours = load_drafter(
            run / "run" / "drafter", device=torch.device("cpu"), dtype=torch.float32
        )
        query, key = positions[0, anchor:, None], positions
        sliding = (key <= query) & (query - key < 32)
        got = ours.draft(
            embedded,
            block_positions_BQ=positions[:, anchor:],
            cache=ours.context_cache(taps[None, :anchor], positions[:, :anchor]),
            masks={
                "full_attention": torch.ones(BLOCK, anchor + BLOCK, dtype=torch.bool),
                "sliding_attention": sliding,
            },
        )
    torch.testing.assert_close(got, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_client_earns_the_acceptance_lengths_that_evaluate_reports(
    run, client_model, target, prompts, answers, monkeypatch
):
    import dflash.model as client

    plain = client.extract_context_feature

    def as_stored(hidden_states, layer_ids):
        """The store keeps hidden states in bf16; nothing else differs from the client's own."""
        return plain(hidden_states, layer_ids).bfloat16().float()

    monkeypatch.setattr(client, "extract_context_feature", as_stored)
    monkeypatch.setattr(client, "_cuda_time", lambda: 0.0)  # it would ask for a CUDA device
    report = json.loads((run / "evaluation.json").read_text())
    documents = {d["id"]: d for d in report["documents"]}
    eos = target.generation_config.eos_token_id
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        # Room for a whole block at the end: the client shrinks its last blocks otherwise.
        result = client.dflash_generate(
            client_model, target, torch.tensor([prompt]), ANSWER_TOKENS + BLOCK,
            stop_token_ids=[eos], block_size=BLOCK, return_stats=True,
        )  # fmt: skip
        text = result.output_ids[0, len(prompt) :].tolist()
        assert text[: len(answer)] == answer, "the client is lossless on this target"
        gained = cycles = 0
        for produced in result.acceptance_lengths:
            if gained < len(answer) - 1:
                gained, cycles = min(gained + produced, len(answer) - 1), cycles + 1
        assert (documents[index]["tokens"], documents[index]["cycles"]) == (gained, cycles)
    lengths = [d["acceptance_length"] for d in documents.values()]
    assert 1.5 < max(lengths) < BLOCK, "the comparison saw hits and misses"
    assert report["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
