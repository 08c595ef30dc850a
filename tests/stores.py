"""Data sets with random hidden states, for tests that need no target."""

import torch

from dflash_offline.codec import make_codec, measure
from dflash_offline.dataset import Dataset
from dflash_offline.documents import Document
from dflash_offline.shards import ShardWriter
from dflash_offline.spec import LAYER_CONVENTION, TargetSpec


def make_store(
    path, target_folder, documents, *, layer_ids=(1, 2, 3), seed=0, codec="raw", contract=()
):
    """One shard of `documents` (pairs of token ids and loss mask), with random taps."""
    spec = TargetSpec.read(target_folder)
    g = torch.Generator().manual_seed(seed)
    contract = {
        **dict(contract),
        "target": spec.to_dict(),
        "target_layer_ids": list(layer_ids),
        "layer_convention": LAYER_CONVENTION,
    }
    chosen = make_codec(codec, layers=len(layer_ids), width=spec.hidden_size)
    dataset = Dataset.create_or_resume(
        path, contract=contract, make_codecs=lambda: (chosen, None), provenance={}
    )
    with ShardWriter(dataset, "shard-000000") as writer:
        for index, (ids, mask) in enumerate(documents):
            taps = torch.randn(len(ids), len(layer_ids), spec.hidden_size, generator=g).bfloat16()
            planes = chosen.encode(taps)
            document = Document(index, ids.int(), mask.bool())
            writer.append([document], planes, measure(taps, chosen.decode(planes)))
        writer.commit()
    return path


def random_documents(count, *, seed=0, vocab=200, shortest=12, longest=40, prompt=4):
    """Random tokens, `prompt` of them unsupervised; no token below 5 (eos, pad, mask)."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        n = int(torch.randint(shortest, longest, (1,), generator=g))
        made.append((torch.randint(5, vocab, (n,), generator=g), torch.arange(n) >= prompt))
    return made
