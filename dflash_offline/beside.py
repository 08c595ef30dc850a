"""The files beside a data set: the store itself holds nothing that its checksums do not cover."""

import os
from pathlib import Path


def config_path(output: Path) -> Path:
    """The resolved configuration of its extraction."""
    return _beside(output, "extract.json")


def corpus_path(output: Path) -> Path:
    """The documents that its conversations became."""
    return _beside(output, "corpus.safetensors")


def logs_path(output: Path) -> Path:
    """The folder of what each process says."""
    return _beside(output, "logs")


def heartbeat_path(output: Path, rank: int) -> Path:
    return logs_path(output) / f"rank-{rank:02}.heartbeat.json"


def quarantine_path(output: Path, rank: int) -> Path:
    """Documents with broken states, which are left out."""
    return logs_path(output) / f"rank-{rank:02}.quarantine.jsonl"


def _beside(output: Path, ending: str) -> Path:
    whole = Path(os.path.realpath(output))  # resolve() fails on links in a circle
    return whole.with_name(f"{whole.name}.{ending}")
