"""What makes a shard committed: COMMIT.json over its files, and a line in a manifest.

COMMIT.json holds bytes and checksums of every file of the shard and the hash of the data set that
it belongs to. The manifest line holds the counts, the crc32c of COMMIT.json and a crc32c of its
own. Whatever is read back is checked against both, and what does not fit is named.

The crc32c of a file made of chunks that their own crc32c follows is the same whatever it holds. So
a plane's file has the list of its chunks' crc32c instead, by which a read knows its chunk too, and
other files have zlib's crc32, of another polynomial.
"""

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from dflash_offline.facts import read_small, shown
from dflash_offline.files import sync

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LARGEST_COMMIT = 1 << 26
_LARGEST_COUNT = 1 << 40  # no shard comes near; what claims more is damaged

# Of a shard: path in it -> bytes and crc32, or, of a plane's file, chunk_crc32c and index_entries.
Files = dict[str, dict[str, Any]]
CRC_BYTES = 4
ABSENT = 2**64 - 1  # offset of a chunk that was left out
# By the key in COMMIT.json; schema 1 had crc32c for all files, which sees less.
_CHECKSUMS: dict[str, Callable[[bytes, int], int]] = {
    "crc32": zlib.crc32,
    "crc32c": lambda content, crc: google_crc32c.extend(crc, content),
}


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


def _checksum_of_file(path: Path, kind: str = "crc32") -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = _CHECKSUMS[kind](block, checksum)
    return checksum


def _kind(facts: Mapping[str, Any]) -> str:
    return "crc32" if "crc32" in facts else "crc32c"


def chunk_facts(size: int, crcs: Sequence[int], index_entries: int) -> dict[str, Any]:
    """A plane's file for COMMIT.json: crc32c of its chunks in base64, half as long as in JSON."""
    packed = base64.b64encode(np.array(crcs, "<u4").tobytes()).decode()
    return {"bytes": size, "chunk_crc32c": packed, "index_entries": index_entries}


def chunk_crcs(facts: Mapping[str, Any]) -> NDArray[Any] | None:
    """crc32c of each chunk, uint32; None where schema 1 has none. ValueError if it is damaged."""
    if "chunk_crc32c" not in facts:
        return None
    return np.frombuffer(base64.b64decode(facts["chunk_crc32c"], validate=True), "<u4")


def _is_sound(facts: Mapping[str, Any]) -> bool:
    if not is_count(facts["bytes"]):
        return False
    if "chunk_crc32c" in facts:
        entries = facts["index_entries"]
        return isinstance(facts["chunk_crc32c"], str) and is_count(entries) and entries < 1 << 20
    return is_count(facts[_kind(facts)])


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def check_name(name: Any, where: str) -> None:
    if not (isinstance(name, str) and _SAFE_NAME.fullmatch(name)):
        raise ValueError(
            f"{where} names a shard {shown(name)}; up to 128 of A-Z a-z 0-9 . _ - may be in it"
        )


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

    The files in `known` are on the disk already and have these facts. ValueError, and no
    COMMIT.json, if one of `required` is not among the files, or one of `known` has another size.
    """
    paths = sorted(folder.rglob("*"))
    files: Files = {}
    for path in (path for path in paths if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in known:
            files[name] = {"bytes": path.stat().st_size, "crc32": _checksum_of_file(path)}
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
    path = folder / (file if len(file) < 256 else shown(file))
    return ValueError(
        f"shard {folder.name}: {path} {what}; run dflash-offline verify --repair "
        f"{folder.parent.parent}, then run extract again"
    )


def read_commit(folder: Path, record: ShardRecord, dataset_sha256: str) -> Files:
    """The files of a shard, once COMMIT.json is the one that the manifest line means."""
    try:
        content = read_small(folder / "COMMIT.json", _LARGEST_COMMIT)
    except FileNotFoundError:
        raise damage(folder, "COMMIT.json", "is missing") from None
    if google_crc32c.value(content) != record.commit_crc32c:
        raise damage(folder, "COMMIT.json", "is not the one that the manifest names")
    commit = parse_commit(folder, content)
    if commit.get("dataset_sha256") != dataset_sha256:
        raise damage(folder, "COMMIT.json", "belongs to another data set")
    files: Files = commit["files"]
    for name in files:
        if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
            raise damage(folder, "COMMIT.json", f"names {shown(name)}, outside the shard")
    return files


def parse_commit(folder: Path, content: bytes) -> dict[str, Any]:
    """COMMIT.json as an object whose `files` can be relied on."""
    try:
        commit: dict[str, Any] = json.loads(content)
        is_sound = all(map(_is_sound, commit["files"].values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise damage(folder, "COMMIT.json", "holds no list of files as a commit writes it")
    return commit


def check_sizes(folder: Path, files: Files) -> None:
    for name, facts in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise damage(folder, name, "is missing") from None
        if size != facts["bytes"]:
            raise damage(folder, name, f"has {size} bytes instead of {facts['bytes']}")


def check_checksums(folder: Path, files: Files) -> None:
    for name, facts in files.items():
        if "chunk_crc32c" in facts:
            _check_chunks(folder, name, facts)
        elif _checksum_of_file(folder / name, _kind(facts)) != facts[_kind(facts)]:
            raise damage(folder, name, f"does not match its {_kind(facts)}")


def _check_chunks(folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Read a plane's file whole: its index leads to the chunks that were committed."""
    index_bytes = 16 * facts["index_entries"]
    end = facts["bytes"] - index_bytes - CRC_BYTES  # of the chunks
    if end < 0:
        raise damage(folder, name, "is too short for its index")
    with (folder / name).open("rb") as file:
        file.seek(end)
        index, crc_of_index = file.read(index_bytes), file.read(CRC_BYTES)
        is_sound = crc_of_index == _crc_bytes(google_crc32c.value(index))
        entries = np.frombuffer(index, "<u8").reshape(-1, 2)
        expected = chunk_crcs(facts)
        present = entries[entries[:, 0] != ABSENT].tolist()
        if not is_sound or expected is None or len(expected) != len(present):
            raise damage(folder, name, "does not match its index")
        for (offset, size), crc in zip(present, expected.tolist(), strict=True):
            file.seek(min(offset, end))
            chunk = file.read(min(size, end - min(offset, end)))
            content, stored = chunk[:-CRC_BYTES], chunk[-CRC_BYTES:]
            if google_crc32c.value(content) != crc or stored != _crc_bytes(crc):
                raise damage(folder, name, "does not match the crc32c of its chunks")


def _crc_bytes(crc: int) -> bytes:
    return crc.to_bytes(CRC_BYTES, "little")


def read_checked(folder: Path, file: str, files: Files) -> bytes:
    """All of a file of a shard, once it is the one that was committed."""
    if file not in files:
        raise damage(folder, file, "is not in COMMIT.json")
    check_sizes(folder, {file: files[file]})
    content = (folder / file).read_bytes()
    kind = _kind(files[file])
    if _CHECKSUMS[kind](content, 0) != files[file][kind]:
        raise damage(folder, file, f"does not match its {kind}")
    return content


def check_shard(folder: Path, record: ShardRecord, dataset_sha256: str) -> None:
    """Read every file of a shard; ValueError names the first that is missing, short or changed."""
    files = read_commit(folder, record, dataset_sha256)
    check_sizes(folder, files)
    check_checksums(folder, files)
