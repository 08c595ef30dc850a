"""Who may import whom: cli -> stages -> core, and the core in floors of its own."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    0: {
        "__init__",
        "config",
        "facts",
        "world",
        "metrics",
        "behind",
        "files",
        "workers",
        "beside",
        "slab",
        "tensor_file",
    },
    1: {
        "spec",
        "codec",
        "mask",
        "optim",
        "commit",
        "packed",
        "fp8",
        "skeleton",
        "weights",
        "launch",
        "heartbeat",
        "tracker",
        "stopping",
        "documents",
    },
    2: {
        "chat",
        "head",
        "matmul_rate",
        "target",
        "drafter",
        "dataset",
        "elastic",
        "direct",
        "sizing",
        "sampling",
    },
    3: {"shards", "checkpoint", "planning", "conversations", "meter", "quarantine"},
    4: {"shard_set", "encoding", "halving", "summary", "corpus"},
    5: {"packing", "coded", "contract", "calibration", "shard_store"},
    6: {"anchors"},
    7: {"loss", "batch"},
    8: {"step", "acceptance", "feed"},
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
ONLY_IN = {
    "zarr": {"dflash_offline/shards.py"},
    "tokenizers": {"dflash_offline/sampling.py"},
    "jinja2": {"dflash_offline/sampling.py"},
    "transformers": {
        "dflash_offline/skeleton.py",
        "dflash_offline/packed.py",
        "dflash_offline/chat.py",
        "dflash_offline/acceptance.py",
        "cli/inspect_shard.py",
    },
}
LIGHT = {"config", "facts", "spec", "metrics", "sizing", "sampling", "estimate", "heartbeat"}
FILES = sorted(p for d in ("dflash_offline", "cli", "stages") for p in (ROOT / d).glob("*.py"))


def imports(path, top_level_only=False):
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            yield node.module


def own_imports(path):
    return {n.split(".")[1:][0] for n in imports(path) if n.startswith("dflash_offline.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    used = own_imports(path)
    if path.parent.name == "dflash_offline":
        floor = FLOOR[path.stem]
        assert all(FLOOR[name] < floor for name in used), used
    elif path.parent.name == "stages":
        assert not used & {"cli", "stages"}, "stages know only the core"
    else:
        assert used <= {"cli", "stages", "config", "metrics"}, used


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_packages_stay_in_their_files(path):
    used = {name.split(".")[0] for name in imports(path)}
    name = str(path.relative_to(ROOT))
    for package, homes in ONLY_IN.items():
        assert package not in used or name in homes
    for package in ("click", "rich"):
        assert package not in used or path.parent.name == "cli" or path.stem == "metrics"


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name == "cli" or p.stem in LIGHT],
    ids=lambda p: str(p.relative_to(ROOT)),
)  # fmt: skip
def test_the_command_line_starts_without_torch(path):
    top = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert not top & {"torch", "transformers", "zarr", "safetensors"}


def test_every_core_file_has_a_floor():
    assert {p.stem for p in (ROOT / "dflash_offline").glob("*.py")} == set(FLOOR)
