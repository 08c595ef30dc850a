"""Extraction on a CUDA device: memory that runs out for real, and states coded by a compiled pass.

What needs no GPU is in tests/test_extract.py.
"""

import json

import pytest
import torch
from tiny_target import VOCAB, build_tiny_target

from dflash_offline.codec import make_codec, measure
from dflash_offline.config import ExtractConfig
from dflash_offline.encoding import make_encoder
from dflash_offline.halving import Halving
from dflash_offline.stages.extract import extract
from dflash_offline.target import TappedTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # Triton and the compiler warn of their own
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_target(tmp_path_factory.mktemp("tiny"), "qwen3_5_multimodal")


class OneCodec:
    """What the encoder asks of a data set."""

    final_codec = None

    def __init__(self, codec):
        self.codec = codec


@pytest.mark.parametrize("name", ["int8", "lossless", "raw"])
def test_a_compiled_encoder_stores_what_the_codec_does(name):
    """Codes that lie on the border of two may differ by one: the GPU divides in another way."""
    g = torch.Generator("cuda").manual_seed(0)
    states = torch.randn(3000, 5, 640, generator=g, device="cuda").bfloat16()
    states[:, :, 7] *= 300
    codec = make_codec(name, layers=5, width=640, calibration=states)
    encode = make_encoder(OneCodec(codec), torch.device("cuda"), compiled=True)
    compiled = torch._dynamo.utils.counters["stats"]
    graphs = []
    for tokens in (3000, 2900, 2047, 130):
        part = states[:tokens]
        encoded = encode(part)
        encoded.wait()
        expected = {plane: values.cpu() for plane, values in codec.encode(part).items()}
        assert encoded.planes.keys() == expected.keys()
        for plane, values in expected.items():
            found = encoded.planes[plane]
            assert found.shape == values.shape
            apart = (found.to(torch.int32) - values.to(torch.int32)).abs()
            assert apart.max() <= (1 if name == "int8" else 0)
            assert (apart > 0).float().mean() < 1e-4
        facts = measure(part, codec.decode(codec.encode(part))).cpu()
        assert torch.allclose(encoded.facts_NL4, facts, rtol=1e-3, atol=1e-6)
        graphs.append(compiled["unique_graphs"])
    assert len(set(graphs)) == 1


def test_memory_that_runs_out_halves_the_rows(folder, tmp_path, monkeypatch, capsys):
    """A second tensor of half the card's memory leaves no room at the first row alone."""
    g = torch.Generator().manual_seed(0)
    data = tmp_path / "data.jsonl"
    with data.open("w") as file:
        for n in torch.randint(100, 1000, (40,), generator=g).tolist():
            ids = torch.randint(0, VOCAB, (n,), generator=g).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * n}) + "\n")
    real, rows = Halving.states, []

    def states(self, row):
        rows.append(sum(map(len, row)))
        if rows[-1] > 2048:
            torch.empty(torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8,
                        device="cuda")  # fmt: skip
        return real(self, row)

    monkeypatch.setattr(Halving, "states", states)
    knobs = {"batch_tokens": 4096, "codec": "raw", "device": "cuda"}
    summary = extract(
        ExtractConfig(target=folder, data=(data,), output=tmp_path / "shards", **knobs)
    )
    assert capsys.readouterr().err.count("rows of at most 2,048 tokens from here on") == 1
    assert summary["documents"] == 40
    assert rows[0] > 2048 >= max(rows[1:])


def test_a_row_that_fails_leaves_its_memory(folder):
    """States of a pass that broke off are given back before the halves are run."""
    target = TappedTarget.load(
        folder, target_layer_ids=(1, 3), device="cuda", dtype=torch.bfloat16, compiled_row=4096
    )
    ids = [torch.randint(0, VOCAB, (4000,))]
    target.taps(ids)
    target._states_1ND[1] = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    target.halve_rows()
    assert torch.cuda.memory_reserved() <= before - 2**30
    assert target.padded(3000) == 4096 and target.padded(2000) == 2048
