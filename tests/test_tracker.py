"""What a tracker is told, read back by the package itself or seen by one that stands in for it."""

import sys
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_offline.tracker import Tracker

FACTS = {"loss": 1.5, "step": 3, "gradient_norm": float("nan"), "note": "text"}


def test_tensorboard_reads_back_the_numbers(tmp_path):
    with Tracker("tensorboard", tmp_path, {}) as tracker:
        tracker.write(3, FACTS)
        tracker.write(7, {"loss": 1.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "step"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 1.5), (7, 1.25)]


class StandIn(ModuleType):
    """Takes the calls of wandb that are documented: init, and log and finish of what it gives."""

    def __init__(self, fails=False):
        super().__init__("wandb")
        self.fails, self.seen, self.finished = fails, [], 0

    def init(self, **knobs):
        self.knobs = knobs
        return self

    def log(self, numbers, step):
        if self.fails:
            raise ConnectionError("no route\nto host")
        self.seen.append((step, numbers))

    def finish(self):
        self.finished += 1


def test_wandb_gets_the_numbers_and_the_configuration(tmp_path, monkeypatch):
    wandb = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker("wandb", tmp_path / "run", {"lr": 0.1, "output": tmp_path}) as tracker:
        tracker.write(3, FACTS)
    assert wandb.seen == [(3, {"loss": 1.5, "step": 3})]
    assert wandb.finished == 1
    assert wandb.knobs["config"] == {"lr": 0.1, "output": str(tmp_path)}
    assert wandb.knobs["name"] == "run"


def test_a_tracker_that_fails_is_told_of_once_and_left(tmp_path, monkeypatch, capsys):
    wandb = StandIn(fails=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker("wandb", tmp_path, {}) as tracker:
        tracker.write(1, FACTS)
        tracker.write(2, FACTS)
    said = capsys.readouterr().err
    assert said.count("warning: wandb failed (no route to host); going on without") == 1


def test_a_package_that_is_not_there_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r'--track wandb needs .*pip install "\.\[wandb\]"'):
        Tracker("wandb", tmp_path, {})


def test_none_writes_nothing(tmp_path):
    with Tracker("none", tmp_path, {}) as tracker:
        tracker.write(1, FACTS)
    assert list(tmp_path.iterdir()) == []
