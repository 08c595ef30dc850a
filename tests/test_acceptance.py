"""Replay against a loop over z-lab's model, and prompt lookup against its definition."""

import random

import pytest
import torch
from drafters import FULL, SLIDING, small_drafter, small_spec
from stores import make_store
from torch.nn import functional as F

from dflash_offline.acceptance import (
    Outcome,
    Request,
    batch_requests,
    find_requests,
    mean_acceptance,
    ngram_outcome,
    replay,
)
from dflash_offline.shard_set import ShardSet
from dflash_offline.target import FrozenEnds

K = 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory, tiny_llama):
    """Five documents, the last with three turns; few distinct tokens, so that drafts hit."""
    g = torch.Generator().manual_seed(3)
    documents = []
    for n in (9, 30, 17, 22):
        documents.append((torch.randint(5, 8, (n,), generator=g), torch.arange(n) >= 4))
    mask = torch.zeros(31, dtype=torch.bool)
    for a, b in ((3, 11), (14, 15), (20, 31)):
        mask[a:b] = True
    documents.append((torch.randint(5, 8, (31,), generator=g), mask))
    path = make_store(tmp_path_factory.mktemp("replay") / "store", tiny_llama, documents)
    return ShardSet((path,))


def drafter_for(shards, kinds):
    spec = small_spec(
        kinds, hidden_size=64, vocab_size=512, target_layer_ids=(1, 2, 3), mask_token_id=3
    )
    return small_drafter(spec)


def ends_of_three_tokens(spec):
    """A head that only ever prefers tokens 5, 6 and 7, so that a random drafter is often right."""
    g = torch.Generator().manual_seed(1)
    embedding = torch.randn(spec.vocab_size, spec.hidden_size, generator=g)
    head = torch.zeros_like(embedding)
    head[5:8] = torch.randn(3, spec.hidden_size, generator=g)
    head[:5] = head[8:] = -head[5:8].mean(0)
    return FrozenEnds(embedding, head)


def by_the_client(model, ends, shards, request):
    """One request, one cycle at a time, through z-lab's model without a cache."""
    ids = shards.tokens(request.document)[0].long()
    taps = shards.taps(request.document).float().flatten(1)
    anchor, tokens, cycles = request.start, 0, 0
    while anchor < request.stop - 1:
        block = torch.tensor([int(ids[anchor])] + [3] * (K - 1))
        hidden = model(
            position_ids=torch.arange(anchor + K)[None],
            noise_embedding=F.embedding(block, ends.embedding)[None],
            target_hidden=taps[None, :anchor],
        )[0]
        drafts = (hidden[1:] @ ends.lm_head.T).argmax(-1).tolist()
        truth = ids[anchor + 1 : request.stop].tolist()
        run = 0
        while run < min(len(drafts), len(truth)) and drafts[run] == truth[run]:
            run += 1
        gained = min(run + 1, len(truth))
        anchor, tokens, cycles = anchor + gained, tokens + gained, cycles + 1
    return tokens, cycles


@pytest.mark.parametrize("kinds", [(FULL,), (SLIDING, FULL)])
@pytest.mark.parametrize("batch_tokens", [1, 64, 10_000])
def test_batched_replay_equals_z_labs_model_one_request_at_a_time(shards, kinds, batch_tokens):
    from test_drafter import zlab_model

    drafter = drafter_for(shards, kinds)
    ends = ends_of_three_tokens(drafter.spec)
    requests = [r for i in range(len(shards)) for r in find_requests(i, shards.tokens(i)[1])]
    outcomes, sums = replay(
        drafter.eval(), ends, shards, requests, block_size=K, batch_tokens=batch_tokens
    )
    with torch.no_grad():
        model = zlab_model(drafter)
        expected = [by_the_client(model, ends, shards, r) for r in requests]
    assert [(o.tokens, o.cycles) for o in outcomes] == expected
    assert [o.request for o in outcomes] == requests
    cycles = sum(o.cycles for o in outcomes)
    assert int(sums["blocks"]) == cycles
    assert 1.2 < mean_acceptance(outcomes)[0] < K, "the comparison saw hits and misses"
    # A cycle gains its run and the target's own token, less what lies past the turn's end.
    assert 0 <= int(sums["run"]) + cycles - sum(o.tokens for o in outcomes) <= len(requests)


def test_requests_are_the_supervised_spans_of_two_tokens_or_more(shards):
    assert find_requests(4, shards.tokens(4)[1]) == [Request(4, 3, 11), Request(4, 20, 31)]
    assert find_requests(0, torch.tensor([True, True])) == [Request(0, 0, 2)]
    assert find_requests(0, torch.tensor([False, True, False])) == []


def test_means_over_requests_and_over_all_tokens_differ():
    outcomes = [Outcome(Request(0, 0, 9), 8, 2), Outcome(Request(1, 0, 9), 8, 8)]
    assert mean_acceptance(outcomes) == (2.5, 1.6)


def test_batches_respect_the_budget_and_lose_nobody():
    requests = [Request(i, 0, stop) for i, stop in enumerate((50, 3, 20, 20, 7, 120))]
    batches = batch_requests(requests, 60)
    assert sorted(r.document for b in batches for r in b) == list(range(6))
    assert all(len(b) == 1 or len(b) * max(r.stop for r in b) <= 60 for b in batches)


def lookup_by_definition(ids, request, block_size):
    """Search prompt and answer so far from the end for the longest suffix of 4 to 1 tokens."""
    anchor, tokens, cycles = request.start, 0, 0
    while anchor < request.stop - 1:
        known = ids[: anchor + 1]
        proposal = []
        for n in (4, 3, 2, 1):
            for place in range(len(known) - n - 1, -1, -1):
                if len(known) > n and known[place : place + n] == known[-n:]:
                    proposal = known[place + n : place + n + block_size - 1]
                    break
            if proposal:
                break
        truth = ids[anchor + 1 : request.stop]
        run = 0
        while run < min(len(proposal), len(truth)) and proposal[run] == truth[run]:
            run += 1
        gained = min(run + 1, len(truth))
        anchor, tokens, cycles = anchor + gained, tokens + gained, cycles + 1
    return tokens, cycles


@pytest.mark.parametrize("seed", range(20))
def test_prompt_lookup_equals_its_definition(seed):
    draw = random.Random(seed)
    ids = [draw.randrange(3 + seed % 3) for _ in range(draw.randint(6, 60))]
    start = draw.randint(0, len(ids) // 2)
    request = Request(0, start, len(ids))
    got = ngram_outcome(request, ids, block_size=2 + seed % 7)
    assert (got.tokens, got.cycles) == lookup_by_definition(ids, request, 2 + seed % 7)


def test_prompt_lookup_on_a_repeated_phrase_by_hand():
    ids = [1, 2, 3, 4, 9, 1, 2, 3, 4, 9]
    # anchor 5 (token 1): proposes 2 3 4, all right, plus the target's 9: four tokens, one cycle
    got = ngram_outcome(Request(0, 5, 10), ids, block_size=4)
    assert (got.tokens, got.cycles) == (4, 1)
