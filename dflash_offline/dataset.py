"""A data set's directory: contract, manifests, and the protocol that commits a shard.

    DATASET/
      dataset.json             contract, codec and provenance; carries its own sha256
      calibration.safetensors  the codec's tensors, where it has any
      shards/NAME/             the arrays of one shard (shards.py says which)
      shards/NAME/COMMIT.json  bytes and crc32c of every file of the shard
      manifest/rank-NN.jsonl   a line per committed shard, each with its own crc32c

A shard is written under a temporary name, synced, renamed, and only then named in a manifest.
Readers trust nothing else, so they may run while writers write, and a process killed at any moment
leaves a shard whole or not there. Committing reads the shard back once for its checksums.

Nothing here knows what is in a shard's files.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import google_crc32c
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from dflash_offline.codec import Codec, load_codec
from dflash_offline.files import sync, write_whole
from dflash_offline.spec import canonical_hash, read_json

SCHEMA_VERSION = 1
_NOT_COMPARED = ("target.name",)  # a folder's name says nothing about its content
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TEMPORARY = re.compile(r"\.tmp-(\d+)-[0-9a-f]+")

Files = dict[str, dict[str, int]]  # of a shard: path in it -> bytes and crc32c


@dataclass(frozen=True)
class ShardRecord:
    """A committed shard as its manifest line names it."""

    name: str
    documents: int
    tokens: int
    supervised: int
    commit_crc32c: int


@dataclass(frozen=True)
class Resumption:
    """What a rank finds when it starts; `missing` are its shards that are still to be written."""

    missing: list[str]
    adopted: int
    removed: int


def _crc32c_of_file(path: Path) -> int:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum.update(block)
    return int.from_bytes(checksum.digest(), "big")


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _check_name(name: str, where: str) -> None:
    if not _SAFE_NAME.fullmatch(name):
        raise ValueError(f"{where} names a shard {name!r}; only A-Z a-z 0-9 . _ - may be in it")


def _manifest_line(record: ShardRecord) -> bytes:
    facts = asdict(record)
    return _json_bytes({**facts, "crc32c": google_crc32c.value(_json_bytes(facts))}) + b"\n"


def _read_manifest_line(line: bytes, where: str) -> ShardRecord:
    try:
        facts = json.loads(line)
        if facts.pop("crc32c") != google_crc32c.value(_json_bytes(facts)):
            raise ValueError
        record = ShardRecord(**facts)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{where} is damaged; delete that line and run extract again, which adopts the shard"
        ) from None
    _check_name(record.name, where)
    return record


def differences(old: Any, new: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted path, old and new value of every leaf that differs; an absent one is None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{field}.{key}".lstrip("."))
    elif old != new:
        yield field, old, new


@dataclass(frozen=True)
class Dataset:
    """A data set's directory: its contract, its codec, the list of committed shards.

    `contract` is all that gives the content its meaning; whoever resumes must agree with it. The
    store itself reads `target` (a TargetSpec), `target_layer_ids` and `layer_convention` of it.
    `provenance` (versions, times) is kept but never compared.
    """

    path: Path
    contract: dict[str, Any]
    codec: Codec
    provenance: dict[str, Any]

    @staticmethod
    def exists(path: Path) -> bool:
        return (path / "dataset.json").is_file()

    @classmethod
    def create_or_resume(
        cls,
        path: Path,
        *,
        contract: Mapping[str, Any],
        make_codec: Callable[[], Codec],
        provenance: Mapping[str, Any],
    ) -> "Dataset":
        """Go on with the data set in `path`, or start one; only then `make_codec` is called.

        One process does this; the others wait until `exists` and `open` with their contract.
        """
        if not cls.exists(path):
            _prepare_folder(path)
            codec = make_codec()
            facts = {
                "schema_version": SCHEMA_VERSION,
                "contract": contract,
                "codec": codec.recipe(),
                "calibration_sha256": _write_calibration(path, codec),
                "provenance": provenance,
            }
            facts = json.loads(_json_bytes(facts))  # as it will be read: lists, not tuples
            text = json.dumps({**facts, "sha256": canonical_hash(facts)}, indent=1)
            write_whole(path / "dataset.json", text.encode())
        return cls.open(path, contract=contract)

    @classmethod
    def open(cls, path: Path, *, contract: Mapping[str, Any] | None = None) -> "Dataset":
        """The data set in `path`; ValueError if `contract` is given and differs from its own."""
        if not cls.exists(path):
            raise FileNotFoundError(f"{path} is no data set: it has no dataset.json; run extract")
        file = path / "dataset.json"
        facts = read_json(file)
        if facts.pop("sha256", None) != canonical_hash(facts):
            raise ValueError(f"{file} does not match its own sha256; restore it or extract anew")
        if facts["schema_version"] > SCHEMA_VERSION:
            raise ValueError(
                f"{file} has schema_version {facts['schema_version']}, newer than "
                f"{SCHEMA_VERSION}; upgrade dflash-offline to read it"
            )
        dataset = cls(path, facts["contract"], _read_codec(path, facts), facts["provenance"])
        if contract is not None:
            dataset._refuse_other(json.loads(_json_bytes(contract)))
        return dataset

    def _refuse_other(self, contract: dict[str, Any]) -> None:
        for field, old, new in differences(self.contract, contract):
            if field not in _NOT_COMPARED:
                raise ValueError(
                    f"{self.path} was made with {field} = {old!r}, but now it is {new!r}; "
                    "go back to the old value or choose another output folder"
                )

    def shard_path(self, name: str) -> Path:
        return self.path / "shards" / name

    def refuse_taken(self, name: str) -> None:
        """ValueError if `name` cannot be a new shard's."""
        _check_name(name, "the plan")
        if self.shard_path(name).exists():
            raise ValueError(f"{self.shard_path(name)} exists already; resume before writing")

    def committed(self) -> dict[str, ShardRecord]:
        """The shards that the manifests name, in the order of their names.

        A last line without its end is being written or was cut by a crash: not yet a commit.
        """
        records: dict[str, ShardRecord] = {}
        for manifest in sorted((self.path / "manifest").glob("rank-*.jsonl")):
            for number, line in enumerate(manifest.read_bytes().split(b"\n")[:-1], 1):
                where = f"{manifest} line {number}"
                record = _read_manifest_line(line, where)
                if records.setdefault(record.name, record) != record:
                    raise ValueError(
                        f"{where} names shard {record.name} a second time, with other content; "
                        "delete both lines and run extract again"
                    )
        return dict(sorted(records.items()))

    def resume(self, names: Sequence[str], *, rank: int = 0, size: int = 1) -> Resumption:
        """Clean up after an earlier run, and say which of this rank's shards are missing.

        Called once, before this rank writes. Temporary folders of rank k are removed by rank
        k % size, so no rank takes away what another one is writing. Of `names`, a shard that was
        renamed but not yet named in a manifest is adopted if all its checksums hold.
        """
        adopted = removed = 0
        for folder in sorted((self.path / "shards").glob(".tmp-*")):
            match = _TEMPORARY.fullmatch(folder.name)
            if match and int(match[1]) % size == rank:
                shutil.rmtree(folder)
                removed += 1
        committed = self.committed()
        missing = [name for name in names if name not in committed]
        for name in [name for name in missing if self.shard_path(name).exists()]:
            if self._adopt(name, rank):
                missing.remove(name)
                adopted += 1
            else:
                shutil.rmtree(self.shard_path(name))
                removed += 1
        return Resumption(missing, adopted, removed)

    def _adopt(self, name: str, rank: int) -> bool:
        folder = self.shard_path(name)
        try:
            facts = read_json(folder / "COMMIT.json")
            counts = {key: facts[key] for key in ("documents", "tokens", "supervised")}
            crc32c = _crc32c_of_file(folder / "COMMIT.json")
            record = ShardRecord(facts["shard"], **counts, commit_crc32c=crc32c)
            check_shard(folder, record)
        except (ValueError, KeyError, OSError):
            return False
        if record.name != name:
            return False
        self._name_in_manifest(record, rank)
        return True

    def temporary_folder(self, rank: int) -> Path:
        """Where `rank` may write a shard before it is published."""
        return self.shard_path(f".tmp-{rank}-{uuid.uuid4().hex}")

    def publish(self, folder: Path, record: ShardRecord, *, rank: int) -> None:
        """Make a sealed temporary folder the shard of `record`: rename, then the manifest line."""
        folder.rename(self.shard_path(record.name))
        sync(folder.parent)
        self._name_in_manifest(record, rank)

    def _name_in_manifest(self, record: ShardRecord, rank: int) -> None:
        """The commit. A line that a crash cut short is dropped first: it never counted."""
        manifest = self.path / "manifest" / f"rank-{rank:02}.jsonl"
        manifest.touch()
        with manifest.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write(_manifest_line(record))
            file.flush()
            os.fsync(file.fileno())
        sync(manifest.parent)

    def set_aside(self, name: str) -> Path:
        """Take a shard out of the data set, so that the next extract writes it again.

        Its manifest lines go first: from then on no reader trusts it. The folder, if there is one,
        is kept for a look under bad/.
        """
        for manifest in sorted((self.path / "manifest").glob("rank-*.jsonl")):
            lines = manifest.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _line_shard(line) != name]
            if len(kept) < len(lines):
                write_whole(manifest, b"".join(kept))
        aside = self.path / "bad" / f"{name}-{uuid.uuid4().hex[:8]}"
        if self.shard_path(name).exists():
            aside.parent.mkdir(exist_ok=True)
            self.shard_path(name).rename(aside)
            sync(self.shard_path(name).parent)
        return aside


def _line_shard(line: bytes) -> str | None:
    """The shard that a manifest line names; None if it cannot be told."""
    try:
        name = json.loads(line)["name"]
    except (ValueError, TypeError, KeyError):
        return None
    return name if isinstance(name, str) else None


def _prepare_folder(path: Path) -> None:
    """The empty frame of a new data set. Traces of a start that was killed may be there."""
    known = {"calibration.safetensors", "shards", "manifest"}
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if any(name not in known and not name.startswith(".") for name in names):
        raise ValueError(f"{path} holds other files and no data set; choose an empty folder")
    for folder in ("shards", "manifest"):
        (path / folder).mkdir(parents=True, exist_ok=True)


def _write_calibration(path: Path, codec: Codec) -> str | None:
    tensors = {name: tensor.cpu().contiguous() for name, tensor in codec.tensors().items()}
    if not tensors:
        return None
    content = save_tensors(tensors)
    write_whole(path / "calibration.safetensors", content)
    return sha256(content).hexdigest()


def _read_codec(path: Path, facts: Mapping[str, Any]) -> Codec:
    if facts["calibration_sha256"] is None:
        return load_codec(facts["codec"], {})
    file = path / "calibration.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing, and no shard can be decoded without it")
    content = file.read_bytes()
    if sha256(content).hexdigest() != facts["calibration_sha256"]:
        raise ValueError(f"{file} is not the one that dataset.json names; restore it")
    return load_codec(facts["codec"], load_tensors(content))


def seal(folder: Path, facts: Mapping[str, Any]) -> int:
    """Write COMMIT.json over all files and force everything to the disk; its own crc32c."""
    paths = sorted(folder.rglob("*"))
    files: Files = {}
    for path in (path for path in paths if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "crc32c": _crc32c_of_file(path)}
        sync(path)
    content = _json_bytes({**facts, "files": files})
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


def read_commit(folder: Path, record: ShardRecord) -> Files:
    """The files of a shard, once COMMIT.json is the one that the manifest line means."""
    if not (folder / "COMMIT.json").is_file():
        raise damage(folder, "COMMIT.json", "is missing")
    content = (folder / "COMMIT.json").read_bytes()
    if google_crc32c.value(content) != record.commit_crc32c:
        raise damage(folder, "COMMIT.json", "is not the one that the manifest names")
    files: Files = json.loads(content)["files"]
    for name in files:
        if name.startswith("/") or ".." in name.split("/"):
            raise damage(folder, "COMMIT.json", f"names {name!r}, outside the shard")
    return files


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


def check_shard(folder: Path, record: ShardRecord) -> None:
    """Read every file of a shard; ValueError names the first that is missing, short or changed."""
    files = read_commit(folder, record)
    check_sizes(folder, files)
    check_checksums(folder, files)
