"""Data sets with random hidden states, for tests that need no target."""

import torch

from dflash_offline.codec import make_codec, measure
from dflash_offline.dataset import FINAL_PREFIX, Dataset
from dflash_offline.documents import Document
from dflash_offline.shards import ShardWriter
from dflash_offline.spec import LAYER_CONVENTION, TargetSpec


def make_store(
    path, target_folder, documents, *, layer_ids=(1, 2, 3), seed=0, codec="raw", final=None,
    contract=(),
):  # fmt: skip
    """One shard of `documents` (pairs of token ids and loss mask), with random taps.

    With `final` ("before-norm", "after-norm") random last hidden states too, in the same codec.
    """
    spec = TargetSpec.read(target_folder)
    g = torch.Generator().manual_seed(seed)
    contract = {
        **dict(contract),
        "target": spec.to_dict(),
        "target_layer_ids": list(layer_ids),
        "layer_convention": LAYER_CONVENTION,
        **({"final_hidden": final} if final else {}),
    }
    chosen = random_codec(codec, len(layer_ids), spec.hidden_size, seed)
    last = random_codec(codec, 1, spec.hidden_size, seed + 1) if final else None
    dataset = Dataset.create_or_resume(
        path, contract=contract, make_codecs=lambda: (chosen, last), provenance={}
    )
    with ShardWriter(dataset, "shard-000000") as writer:
        for index, (ids, mask) in enumerate(documents):
            document = Document(index, ids.int(), mask.bool())
            planes, facts = random_states(chosen, len(ids), g)
            if last:
                final_planes, final_facts = random_states(last, len(ids), g)
                planes |= {FINAL_PREFIX + name: plane for name, plane in final_planes.items()}
                facts = torch.cat([facts, final_facts], 1)
            writer.append([document], planes, facts)
        writer.commit()
    return path


def random_codec(name, layers, width, seed):
    """int8 with other scales for each seed."""
    sample = torch.randn(50, layers, width, generator=torch.Generator().manual_seed(seed))
    return make_codec(name, layers=layers, width=width, calibration=sample.bfloat16())


def random_states(codec, tokens, generator):
    taps = torch.randn(tokens, codec.layers, codec.width, generator=generator).bfloat16()
    planes = codec.encode(taps)
    return planes, measure(taps, codec.decode(planes))


def random_documents(count, *, seed=0, vocab=200, shortest=12, longest=40, prompt=4):
    """Random tokens, `prompt` of them unsupervised; no token below 5 (eos, pad, mask)."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        n = int(torch.randint(shortest, longest, (1,), generator=g))
        made.append((torch.randint(5, vocab, (n,), generator=g), torch.arange(n) >= prompt))
    return made
