"""Schedules and optimizers against torch's own steps."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from dflash_offline.config import TrainConfig
from dflash_offline.optim import make_optimizers, rate, set_rate

PATHS = {"shards": (), "eval_shards": (), "target": Path(), "output": Path()}


def test_rate_warms_up_linearly_and_falls_along_a_cosine():
    assert [rate(s, 100, 0.04) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4, 100, 0.04) == 1.0
    assert rate(52, 100, 0.04) == pytest.approx(0.5)
    assert rate(99, 100, 0.04) == pytest.approx(0.5 * (1 + math.cos(math.pi * 95 / 96)))
    assert rate(0, 1, 0.0) == 1.0


def test_every_parameter_has_exactly_one_optimizer():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    for kind, count in (("adamw", 1), ("muon", 2)):
        optimizers = make_optimizers(model, TrainConfig(**PATHS, optimizer=kind))
        assert len(optimizers) == count
        held = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]
        assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_steps_are_adamws_and_muons_at_the_scheduled_rate():
    for kind in ("adamw", "muon"):
        torch.manual_seed(0)
        ours, theirs = (
            nn.Sequential(nn.Linear(5, 7, bias=False), nn.LayerNorm(7)) for _ in range(2)
        )
        theirs.load_state_dict(ours.state_dict())
        config = TrainConfig(**PATHS, optimizer=kind, lr=0.1, muon_lr=0.3, weight_decay=0.01)
        optimizers = make_optimizers(ours, config)
        matrix, *vectors = theirs.parameters()
        if kind == "adamw":
            first = torch.optim.AdamW([matrix], lr=0.05, betas=(0.9, 0.95), weight_decay=0.01)
        else:
            first = torch.optim.Muon([matrix], lr=0.15, weight_decay=0.01)
        second = torch.optim.AdamW(vectors, lr=0.05, betas=(0.9, 0.95), weight_decay=0.01)
        set_rate(optimizers, 0.5)
        x, goal = torch.randn(3, 5), torch.randn(3, 7)
        for model, steppers in ((ours, optimizers), (theirs, [first, second])):
            (model(x) - goal).square().sum().backward()
            for stepper in steppers:
                stepper.step()
        for got, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(got, expected)
