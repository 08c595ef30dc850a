"""Schedules against hand-made tables; optimizers, alone and dealt out, against torch's own."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from worlds import in_worlds

from dflash_offline.config import TrainConfig
from dflash_offline.optim import (
    deal,
    in_turns,
    make_optimizers,
    newton_schulz_flops,
    noise_share,
    rate,
    set_rate,
)

PATHS = {"shards": (), "eval_shards": (), "target": Path(), "output": Path()}
SHAPES = [(6, 4), (4, 9), (5, 5), (12, 4), (3, 8)]
SHARES = [0.5, 1.0, 0.25]  # of the peak rate, step by step


def test_rate_warms_up_linearly_and_falls_along_a_cosine():
    assert [rate(s, 100, 0.04) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4, 100, 0.04) == 1.0
    assert rate(52, 100, 0.04) == pytest.approx(0.5)
    assert rate(99, 100, 0.04) == pytest.approx(0.5 * (1 + math.cos(math.pi * 95 / 96)))
    assert rate(0, 1, 0.0) == 1.0


def test_a_cosine_with_a_floor_falls_to_it():
    # 2 steps of warm-up, 4 that fall: cosines at 0, 45, 90 and 135 degrees.
    half = math.sqrt(0.5)
    cosines = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    expected = [0.5, 1.0] + [0.2 + 0.8 * c for c in cosines]
    assert [rate(s, 6, 1 / 3, floor=0.2) for s in range(6)] == pytest.approx(expected)
    assert rate(6, 6, 1 / 3, floor=0.2) == pytest.approx(0.2)


def test_wsd_warms_up_stays_and_falls_over_the_last_share():
    # 10 steps: 2 warm up, 4 stay, 4 fall along a cosine that ends where step 10 would be.
    half = math.sqrt(0.5)
    expected = [0.5, 1, 1, 1, 1, 1, 1, (1 + half) / 2, 0.5, (1 - half) / 2]
    got = [rate(s, 10, 0.2, "wsd", decay=0.4) for s in range(10)]
    assert got == pytest.approx(expected)
    with_floor = [rate(s, 10, 0.2, "wsd", decay=0.4, floor=0.5) for s in range(10)]
    assert with_floor == pytest.approx([0.5] + [0.5 + 0.5 * share for share in expected[1:]])
    assert [rate(s, 4, 0.25, "wsd", decay=0.0) for s in range(4)] == [1.0] * 4


def test_a_wsd_schedule_whose_parts_overlap_is_refused():
    with pytest.raises(ValueError, match=r"--warmup 0\.5 and --decay 0\.6 together are more than"):
        TrainConfig(**PATHS, schedule="wsd", warmup=0.5, decay=0.6)
    TrainConfig(**PATHS, schedule="cosine", warmup=0.5, decay=0.6)
    TrainConfig(**PATHS, schedule="wsd", warmup=0.5, decay=0.5)


def test_feature_noise_falls_in_a_line_and_stays_away():
    assert [noise_share(s, 8, 0.5) for s in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert noise_share(4, 8, 1.0) == 0.5
    assert noise_share(0, 8, 0.0) == 0.0


def test_the_most_work_is_dealt_first_to_whoever_has_least():
    work = {"a": 3, "b": 10, "c": 4, "d": 4, "e": 1}
    assert deal(work, 2) == {"b": 0, "c": 1, "d": 1, "a": 1, "e": 0}
    assert set(deal(work, 1).values()) == {0}
    assert sorted(deal(work, 7).values()) == [0, 1, 2, 3, 4]


def test_owners_take_turns():
    owners = {"b": 0, "c": 1, "d": 1, "a": 1, "e": 0}
    assert in_turns(owners, 3) == [("b", 0), ("c", 1), ("e", 0), ("d", 1), ("a", 1)]


def test_newton_schulz_is_counted_by_its_products():
    """X X^T, the square of that, and that times X, of X with its short side first."""
    for rows, columns in ((3, 5), (5, 3)):
        gram, square, update = 2 * 3 * 5 * 3, 2 * 3 * 3 * 3, 2 * 3 * 3 * 5
        assert newton_schulz_flops(torch.empty(rows, columns)) == gram + square + update


def test_a_large_drafters_newton_schulz_is_shared_out_evenly():
    """By hand for five layers of 5120 x (4096, 1024, 1024, 4096; 3 x 17408) and fc: 197 TFLOP."""
    shapes = {"fc": (5120, 25600)}
    for layer in range(5):
        shapes |= {f"{layer}.{name}": (4096, 5120) for name in "qo"}
        shapes |= {f"{layer}.{name}": (1024, 5120) for name in "kv"}
        shapes |= {f"{layer}.{name}": (17408, 5120) for name in ("gate", "up", "down")}
    work = {
        name: newton_schulz_flops(torch.empty(shape, device="meta"))
        for name, shape in shapes.items()
    }
    assert round(5 * sum(work.values()) / 1e12) == 197
    for ranks in (2, 4, 8):
        owners = deal(work, ranks)
        shares = [sum(work[n] for n, o in owners.items() if o == r) for r in range(ranks)]
        assert max(shares) < 1.05 * sum(shares) / ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        draw = [torch.randn(shape, generator=g) for shape in [*SHAPES, (7,), (2,)]]
        self.weights = nn.ParameterList(draw)

    def set_gradients(self, step):
        """The same on every rank, as after a sum over them."""
        g = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=g)


def config_of(kind, **knobs):
    knobs = {"lr": 0.1, "muon_lr": 0.3, "weight_decay": 0.01, **knobs}
    return TrainConfig(**PATHS, optimizer=kind, **knobs)


def stepped_by_torch(kind):
    """After all steps with torch's own optimizers in one process."""
    model = Model()
    matrices, vectors = model.weights[:5], model.weights[5:]
    adamw = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01, "fused": True}
    if kind == "muon":
        first = torch.optim.Muon(matrices, lr=0.3, weight_decay=0.01)
    else:
        first = torch.optim.AdamW(matrices, **adamw)
    steppers = [(first, first.defaults["lr"]), (torch.optim.AdamW(vectors, **adamw), 0.1)]
    for step, share in enumerate(SHARES):
        model.set_gradients(step)
        for stepper, peak in steppers:
            stepper.param_groups[0]["lr"] = peak * share
            stepper.step()
    return list(model.parameters())


def steps_in_turn(model, optimizers):
    for step, share in enumerate(SHARES):
        model.set_gradients(step)
        optimizers.set_rate(share)
        optimizers.step()
        optimizers.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_has_exactly_one_optimizer(kind):
    model = Model()
    optimizers = make_optimizers(model, config_of(kind))
    held = [id(p) for o in optimizers.own for g in o.param_groups for p in g["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_are_adamws_and_muons_at_the_scheduled_rate(kind):
    model = Model()
    steps_in_turn(model, make_optimizers(model, config_of(kind)))
    for got, expected in zip(model.parameters(), stepped_by_torch(kind), strict=True):
        assert torch.equal(got, expected)


def test_a_rate_is_a_share_of_each_groups_own_peak():
    optimizers = make_optimizers(Model(), config_of("muon"))
    set_rate(optimizers.own, 0.5)
    optimizers.set_rate(0.25)
    assert [o.param_groups[0]["lr"] for o in optimizers.own] == [0.3 * 0.25, 0.1 * 0.25]


def dealt_steps(world, folder):
    """What came out, and the numbers of the parameters whose state this rank holds."""
    for name, knobs in KINDS.items():
        model = Model()
        optimizers = make_optimizers(model, config_of(**knobs), world)
        steps_in_turn(model, optimizers)
        held = {id(p) for o in optimizers.own for p in o.state}
        owned = [i for i, p in enumerate(model.weights) if id(p) in held]
        found = ([p.detach() for p in model.parameters()], owned)
        torch.save(found, folder / f"{name}-{world.size}-{world.rank}")


KINDS = {
    "adamw": {"kind": "adamw"},
    "sharded": {"kind": "adamw", "shard_optimizer": True},
    "muon": {"kind": "muon"},
}
# By hand, from elements (24, 36, 25, 48, 24) and from the Newton-Schulz of each matrix, which is
# as (256, 352, 375, 448, 171). Vectors, 5 and 6, are everyone's.
OWNED = {
    ("adamw", 2): [[0, 1, 2, 3, 4, 5, 6]] * 2,
    ("sharded", 2): [[0, 3, 5, 6], [1, 2, 4, 5, 6]],
    ("muon", 2): [[0, 3, 4, 5, 6], [1, 2, 5, 6]],
    ("adamw", 3): [[0, 1, 2, 3, 4, 5, 6]] * 3,
    ("sharded", 3): [[3, 5, 6], [1, 4, 5, 6], [0, 2, 5, 6]],
    ("muon", 3): [[3, 5, 6], [2, 4, 5, 6], [0, 1, 5, 6]],
}


def test_matrices_that_are_dealt_out_are_updated_as_by_one_process_bit_for_bit(tmp_path):
    in_worlds(dealt_steps, (2, 3), tmp_path)
    for (name, size), owned in OWNED.items():
        expected = stepped_by_torch(KINDS[name]["kind"])
        found = [torch.load(tmp_path / f"{name}-{size}-{rank}") for rank in range(size)]
        assert [numbers for _, numbers in found] == owned
        for got, _ in found:
            assert all(map(torch.equal, got, expected))
