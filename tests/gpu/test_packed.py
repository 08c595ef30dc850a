"""Rows of several documents on a GPU: fla's kernels, compiled layers, fp8."""

import pytest
import torch
from tiny_target import VOCAB, build_tiny_target, reference_states

from dflash_offline.target import TappedTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # Triton and the compiler warn of their own
]

LAYER_IDS = (0, 2, 5)
LENGTHS = (1, 5, 63, 64, 65, 4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_target(tmp_path_factory.mktemp("tiny"), "qwen3_5_multimodal")


def load(folder, **knobs):
    knobs = {"device": "cuda", "dtype": torch.bfloat16, "target_layer_ids": LAYER_IDS, **knobs}
    return TappedTarget.load(folder, **knobs)


def documents():
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=g) for n in LENGTHS]


@pytest.mark.parametrize("compiled_row", [None, 8192])
def test_documents_of_a_row_have_the_states_they_have_alone(folder, compiled_row):
    """Alone in the same kernels; and in fp32 by transformers' reference functions on the CPU.

    The tiny model's random layers of long memory make 9 % of fla's rounding after six of them.
    """
    target = load(folder, compiled_row=compiled_row)
    row = documents()
    together = target.taps(row).split(LENGTHS)
    for ids, ours in zip(row, together, strict=True):
        alone = target.taps([ids])
        assert (ours - alone).float().norm() / alone.float().norm() < 0.03
        states, _ = reference_states(folder, ids[None], torch.float32)
        theirs = torch.stack([states[i + 1][0] for i in LAYER_IDS], 1)
        assert (ours.cpu().float() - theirs).norm() / theirs.norm() < 0.25


def test_layers_are_compiled_once_for_all_rows_of_a_length(folder):
    target = load(folder, compiled_row=2048)
    counters = torch._dynamo.utils.counters["stats"]
    compiled = counters["unique_graphs"]
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = torch.randint(1, 400, (5,), generator=g).tolist()
        target.taps([torch.randint(0, VOCAB, (n,), generator=g) for n in lengths])
    assert counters["unique_graphs"] == compiled > 0
