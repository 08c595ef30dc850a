"""Acceptance length, measured on stored hidden states exactly as greedy decoding would earn it.

Each assistant turn is a request. Decoding starts with the turn's first token as the anchor
(prefill made it; it is not gained). A cycle drafts K - 1 tokens, gains the leading run of matches
plus one, the target's own token, and moves on by that; the last cycle counts only tokens up to the
turn's end. Because the stored tokens are the target's greedy answers, replay needs no target
forward: a draft is right where it equals the stored token.

Requests run side by side, one block each, against a context cache made once per request. So the
rule of mask.py is written once more here, for one block per row; tests compare both with z-lab's.
Letters: B requests, S context, K block size, M = taps * hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_offline.drafter import Drafter, KeysValues
from dflash_offline.head import label_ranks
from dflash_offline.loss import hit_sums
from dflash_offline.shard_set import ShardSet
from dflash_offline.target import FrozenEnds

_NGRAM_SIZES = (4, 3, 2, 1)
_SCORE_ROWS = 512


@dataclass(frozen=True)
class Request:
    """One assistant turn: `start` is its first token's place in the document, `stop` its end."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Outcome:
    """What a request gained: `tokens` in `cycles` target forwards."""

    request: Request
    tokens: int
    cycles: int

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.cycles


def find_requests(document: int, loss_mask: Tensor) -> list[Request]:
    """Turns of two tokens or more: a single token leaves nothing to draft."""
    padded = F.pad(loss_mask.to(torch.int8), (1, 1))
    edges = padded.diff()
    starts = (edges == 1).nonzero().flatten().tolist()
    stops = (edges == -1).nonzero().flatten().tolist()
    return [Request(document, a, b) for a, b in zip(starts, stops, strict=True) if b - a > 1]


def mean_acceptance(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """(mean over requests, pooled): z-lab's number, and all tokens over all cycles."""
    mean = sum(o.acceptance_length for o in outcomes) / len(outcomes)
    return mean, sum(o.tokens for o in outcomes) / sum(o.cycles for o in outcomes)


class _Batch:
    """Requests decoded side by side; finished ones are dropped when they are the majority."""

    def __init__(
        self,
        drafter: Drafter,
        ends: FrozenEnds,
        shards: ShardSet,
        requests: Sequence[Request],
        block_size: int,
    ) -> None:
        self.drafter, self.ends, self.block_size = drafter, ends, block_size
        self.device, dtype = ends.embedding.device, ends.embedding.dtype
        size = max(r.stop for r in requests)
        spec = drafter.spec
        ids = torch.zeros(len(requests), size + block_size, dtype=torch.long)
        taps = torch.zeros(
            len(requests),
            size,
            len(spec.target_layer_ids) * spec.hidden_size,
            dtype=dtype,
            device=self.device,
        )
        for i, request in enumerate(requests):
            ids[i, : request.stop] = shards.tokens(request.document)[0][: request.stop]
            states = shards.taps(request.document, device=self.device)[: request.stop]
            taps[i, : request.stop] = states.flatten(1)
        self.ids_BS = ids.to(self.device)
        self.anchors_B = torch.tensor([r.start for r in requests], device=self.device)
        self.stops_B = torch.tensor([r.stop for r in requests], device=self.device)
        self.which_B = torch.arange(len(requests), device=self.device)
        self.size = size
        positions = torch.arange(size, device=self.device).expand(len(requests), -1)
        self.cache: list[KeysValues] = drafter.context_cache(taps, positions)

    def compact(self) -> None:
        active = self.anchors_B < self.stops_B - 1
        if int(active.sum()) * 2 > len(active):
            return
        self.ids_BS, self.anchors_B = self.ids_BS[active], self.anchors_B[active]
        self.stops_B, self.which_B = self.stops_B[active], self.which_B[active]
        self.cache = [(keys[active], values[active]) for keys, values in self.cache]

    def _masks(self) -> dict[str, Tensor]:
        spec, device, block_size = self.drafter.spec, self.device, self.block_size
        slots_K = torch.arange(block_size, device=device)
        context_S = torch.arange(self.size, device=device)
        before_BKS = (context_S < self.anchors_B[:, None, None]).expand(-1, block_size, -1)
        whole_BKK = torch.ones(
            len(self.anchors_B), block_size, block_size, dtype=torch.bool, device=device
        )
        masks = {"full_attention": torch.cat((before_BKS, whole_BKK), -1)[:, None]}
        if spec.sliding_window is not None:
            places_BK = self.anchors_B[:, None] + slots_K
            near = places_BK[..., None] - context_S < spec.sliding_window
            back = slots_K[:, None] - slots_K
            causal = whole_BKK & (back >= 0) & (back < spec.sliding_window)
            masks["sliding_attention"] = torch.cat((before_BKS & near, causal), -1)[:, None]
        return masks

    def draft(self) -> tuple[Tensor, Tensor]:
        """(ranks, supervised) [B, K] of one cycle: the rank of each slot's true token."""
        spec = self.drafter.spec
        places_BK = self.anchors_B[:, None] + torch.arange(self.block_size, device=self.device)
        labels_BK = self.ids_BS.gather(1, places_BK)
        blocks_BK = torch.full_like(labels_BK, spec.mask_token_id)
        blocks_BK[:, 0] = labels_BK[:, 0]
        hidden = self.drafter.draft(
            F.embedding(blocks_BK, self.ends.embedding),
            block_positions_BQ=places_BK,
            cache=self.cache,
            masks=self._masks(),
        )
        ranks_BK = torch.zeros_like(labels_BK)
        ranks_BK[:, 1:] = _ranks(hidden[:, 1:], self.ends.lm_head, labels_BK[:, 1:])
        supervised_BK = places_BK < self.stops_B[:, None]
        supervised_BK[:, 0] = False
        return ranks_BK, supervised_BK


def _ranks(hidden_BKD: Tensor, head_VD: Tensor, labels_BK: Tensor) -> Tensor:
    rows, labels = hidden_BKD.flatten(0, 1), labels_BK.flatten()
    parts = []
    for start in range(0, len(rows), _SCORE_ROWS):
        part = slice(start, start + _SCORE_ROWS)
        logits = F.linear(rows[part], head_VD).float()
        own = logits.gather(1, labels[part, None])
        parts.append(label_ranks(logits, labels[part, None], own))
    return torch.cat(parts).view_as(labels_BK)


def batch_requests(requests: Sequence[Request], budget: int) -> list[list[Request]]:
    """Requests of similar length together, within `budget` padded tokens or one by one."""
    batches: list[list[Request]] = []
    for request in sorted(requests, key=lambda r: r.stop):
        if batches and request.stop * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(request)
        else:
            batches.append([request])
    return batches


@torch.inference_mode()
def replay(
    drafter: Drafter,
    ends: FrozenEnds,
    shards: ShardSet,
    requests: Sequence[Request],
    *,
    block_size: int,
    batch_tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[list[Outcome], dict[str, Tensor]]:
    """Outcomes in the order of `requests`, and the per-slot sums of loss.hit_sums.

    `advance` is told the tokens of each finished batch.
    """
    found: dict[Request, Outcome] = {}
    sums: dict[str, Tensor] = {}
    for members in batch_requests(requests, batch_tokens):
        batch = _Batch(drafter, ends, shards, members, block_size)
        tokens = torch.zeros(len(members), dtype=torch.long, device=batch.device)
        cycles = torch.zeros_like(tokens)
        while len(batch.anchors_B):
            ranks, supervised = batch.draft()
            active = batch.anchors_B < batch.stops_B - 1
            hits = (ranks == 0) & supervised
            run = hits[:, 1:].int().cumprod(1).sum(1)
            gained = torch.minimum(run + 1, batch.stops_B - 1 - batch.anchors_B)
            tokens[batch.which_B] += gained
            cycles[batch.which_B] += active.long()
            batch.anchors_B = batch.anchors_B + gained
            for name, value in hit_sums(ranks, supervised).items():
                sums[name] = sums[name] + value if name in sums else value
            batch.compact()
        for request, t, c in zip(members, tokens.tolist(), cycles.tolist(), strict=True):
            found[request] = Outcome(request, t, c)
        advance(sum(r.stop - r.start for r in members))
    return [found[r] for r in requests], sums


def ngram_outcome(request: Request, ids: Sequence[int], block_size: int) -> Outcome:
    """The same replay by a drafter without training: prompt lookup.

    It looks up the longest suffix of 4 to 1 tokens at its latest earlier place in prompt and
    answer so far, and proposes the (at most K - 1) known tokens that followed.
    """
    latest: dict[tuple[int, ...], int] = {}  # n-gram -> where the token after it stands
    indexed = 0
    anchor, tokens, cycles = request.start, 0, 0
    while anchor < request.stop - 1:
        for end in range(indexed + 1, anchor + 1):  # n-grams whose next token is known
            for n in _NGRAM_SIZES:
                if n <= end:
                    latest[tuple(ids[end - n : end])] = end
        indexed = anchor
        run = _ngram_run(latest, ids, anchor, request.stop, block_size)
        gained = min(run + 1, request.stop - 1 - anchor)
        tokens, cycles, anchor = tokens + gained, cycles + 1, anchor + gained
    return Outcome(request, tokens, cycles)


def _ngram_run(
    latest: dict[tuple[int, ...], int], ids: Sequence[int], anchor: int, stop: int, block_size: int
) -> int:
    for n in _NGRAM_SIZES:
        place = latest.get(tuple(ids[anchor + 1 - n : anchor + 1])) if n <= anchor + 1 else None
        if place is not None:
            proposal = ids[place : min(place + block_size - 1, anchor + 1)]
            truth = ids[anchor + 1 : stop]
            run = 0
            while run < min(len(proposal), len(truth)) and proposal[run] == truth[run]:
                run += 1
            return run
    return 0
