"""What makes a shard committed: COMMIT.json over its files, and a line in a manifest.

COMMIT.json holds bytes and crc32c of every file of the shard and the hash of the data set that it
belongs to; the manifest line holds the counts and the crc32c of COMMIT.json, and a crc32c of its
own. Whatever is read back is checked against both, and what does not fit is named.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from dflash_offline.files import sync

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LARGEST_COUNT = 1 << 40  # no shard comes near; what claims more is damaged

Files = dict[str, dict[str, int]]  # of a shard: path in it -> bytes and crc32c


@dataclass(frozen=True)
class ShardRecord:
    """A committed shard as its manifest line names it."""

    name: str
    documents: int
    tokens: int
    supervised: int
    commit_crc32c: int

    def is_plausible(self) -> bool:
        """Whether every number is one that a commit may have written."""
        counts = (self.documents, self.tokens, self.supervised, self.commit_crc32c)
        return all(map(is_count, counts)) and max(counts[0], counts[2]) <= self.tokens


def _crc32c_of_file(path: Path) -> int:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum.update(block)
    return int.from_bytes(checksum.digest(), "big")


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def check_name(name: Any, where: str) -> None:
    if not (isinstance(name, str) and _SAFE_NAME.fullmatch(name)):
        raise ValueError(f"{where} names a shard {name!r}; only A-Z a-z 0-9 . _ - may be in it")


def manifest_line(record: ShardRecord) -> bytes:
    facts = asdict(record)
    return json_bytes({**facts, "crc32c": google_crc32c.value(json_bytes(facts))}) + b"\n"


def read_manifest_line(line: bytes, where: str) -> ShardRecord:
    try:
        facts = json.loads(line)
        if facts.pop("crc32c") != google_crc32c.value(json_bytes(facts)):
            raise ValueError
        record = ShardRecord(**facts)
        if not record.is_plausible():
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(
            f"{where} is damaged; delete that line and run extract again, which adopts the shard"
        ) from None
    check_name(record.name, where)
    return record


def seal(folder: Path, facts: Mapping[str, Any], *, known: Files, required: Iterable[str]) -> int:
    """Write COMMIT.json over all files and force everything to the disk; its own crc32c.

    The files in `known` are on the disk already, with these bytes and crc32c. ValueError, and no
    COMMIT.json, if one of `required` is not among the files, or one of `known` has another size.
    """
    paths = sorted(folder.rglob("*"))
    files: Files = {}
    for path in (path for path in paths if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in known:
            files[name] = {"bytes": path.stat().st_size, "crc32c": _crc32c_of_file(path)}
            sync(path)
        elif path.stat().st_size == known[name]["bytes"]:
            files[name] = known[name]
    if lost := next((name for name in required if name not in files), None):
        raise ValueError(
            f"{folder / lost} was removed or changed while its shard was written; stop what else "
            "works in this folder and run extract again"
        )
    content = json_bytes({**facts, "files": files})
    (folder / "COMMIT.json").write_bytes(content)
    sync(folder / "COMMIT.json")
    for path in (folder, *(path for path in paths if path.is_dir())):
        sync(path)
    return int(google_crc32c.value(content))


def damage(folder: Path, file: str, what: str) -> ValueError:
    return ValueError(
        f"shard {folder.name}: {folder / file} {what}; run dflash-offline verify --repair "
        f"{folder.parent.parent}, then run extract again"
    )


def read_commit(folder: Path, record: ShardRecord, dataset_sha256: str) -> Files:
    """The files of a shard, once COMMIT.json is the one that the manifest line means."""
    if not (folder / "COMMIT.json").is_file():
        raise damage(folder, "COMMIT.json", "is missing")
    content = (folder / "COMMIT.json").read_bytes()
    if google_crc32c.value(content) != record.commit_crc32c:
        raise damage(folder, "COMMIT.json", "is not the one that the manifest names")
    commit = parse_commit(folder, content)
    if commit.get("dataset_sha256") != dataset_sha256:
        raise damage(folder, "COMMIT.json", "belongs to another data set")
    files: Files = commit["files"]
    for name in files:
        if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
            raise damage(folder, "COMMIT.json", f"names {name!r}, outside the shard")
    return files


def parse_commit(folder: Path, content: bytes) -> dict[str, Any]:
    """COMMIT.json as an object whose `files` can be relied on."""
    try:
        commit: dict[str, Any] = json.loads(content)
        entries = commit["files"].values()
        is_sound = all(is_count(facts[key]) for facts in entries for key in ("bytes", "crc32c"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise damage(folder, "COMMIT.json", "holds no list of files as a commit writes it")
    return commit


def check_sizes(folder: Path, files: Files) -> None:
    for name, facts in files.items():
        try:
            size = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise damage(folder, name, "is missing") from None
        if size != facts["bytes"]:
            raise damage(folder, name, f"has {size} bytes instead of {facts['bytes']}")


def check_checksums(folder: Path, files: Files) -> None:
    for name, facts in files.items():
        if _crc32c_of_file(folder / name) != facts["crc32c"]:
            raise damage(folder, name, "does not match its crc32c")


def read_checked(folder: Path, file: str, files: Files) -> bytes:
    """All of a file of a shard, once it is the one that was committed."""
    if file not in files:
        raise damage(folder, file, "is not in COMMIT.json")
    check_sizes(folder, {file: files[file]})
    content = (folder / file).read_bytes()
    if google_crc32c.value(content) != files[file]["crc32c"]:
        raise damage(folder, file, "does not match its crc32c")
    return content


def check_shard(folder: Path, record: ShardRecord, dataset_sha256: str) -> None:
    """Read every file of a shard; ValueError names the first that is missing, short or changed."""
    files = read_commit(folder, record, dataset_sha256)
    check_sizes(folder, files)
    check_checksums(folder, files)
