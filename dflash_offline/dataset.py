"""A data set's directory: contract, manifests, and the protocol that commits a shard.

    DATASET/
      dataset.json             contract, codec and provenance; carries its own sha256
      calibration.safetensors  the codec's tensors, where it has any
      shards/NAME/             the arrays of one shard (shards.py says which)
      shards/NAME/COMMIT.json  bytes and checksums of all files, its data set's sha256
      manifest/rank-NN.jsonl   a line per committed shard, each with its own crc32c
      manifest/rank-NN.lock    held by the process that writes as this rank

A shard is written under a temporary name, synced, renamed, and only then named in a manifest.
Readers trust nothing else, so they may run while writers write, and a process killed at any moment
leaves a shard whole or not there.

Nothing here knows what is in a shard's files.
"""

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from dflash_offline.codec import GROUP_SIZES, ArraySpec, Codec, Int8Codec, load_codec
from dflash_offline.commit import (
    ShardRecord,
    check_name,
    check_shard,
    is_count,
    json_bytes,
    manifest_line,
    parse_commit,
    read_manifest_line,
)
from dflash_offline.config import WIDEST
from dflash_offline.facts import canonical_hash, read_json, read_small
from dflash_offline.files import sync, write_whole
from dflash_offline.spec import TargetSpec

# 1: first. 2: contract with kernels, truncation rule and final hidden state; final_codec.
SCHEMA_VERSION = 2
FINAL_PREFIX = "final_"  # of the names of the final hidden state's planes and tensors
# A folder's name says nothing about its content. Kernels are known once the target is loaded, and
# compared then; the self-test's distances are never twice the same.
_NOT_COMPARED = ("target.name", "kernels", "self_test")
_TEMPORARY = re.compile(r"\.tmp-(\d+)-[0-9a-f]+")
_LOCK = re.compile(r"rank-(\d+)\.lock")
_LARGEST_MANIFEST = 1 << 30
_LARGEST_CALIBRATION = 1 << 34
_MOST_LAYERS = 4096
_RESTORE = "restore it, or extract into another folder"
# The locks of this process, by device and inode. Nothing closes them before the process ends.
_HELD: dict[tuple[int, int], int] = {}


@dataclass(frozen=True)
class Resumption:
    """What a rank finds when it starts; `missing` are its shards that are still to be written.

    `removed` counts temporary folders, which are gone, and unsound shards, now under bad/.
    """

    missing: list[str]
    adopted: int
    removed: int


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
    `final_codec` is there if shards hold the final hidden state too. `provenance` (versions,
    times) is kept but never compared. `sha256` is dataset.json's: every shard carries it, so that
    no other data set takes the shard for its own.
    """

    path: Path
    contract: dict[str, Any]
    codec: Codec
    final_codec: Codec | None
    provenance: dict[str, Any]
    sha256: str

    @property
    def plane_specs(self) -> dict[str, ArraySpec]:
        """The arrays of a shard that hold hidden states, by name."""
        final = self.final_codec.arrays() if self.final_codec else {}
        return {
            **self.codec.arrays(),
            **{FINAL_PREFIX + name: spec for name, spec in final.items()},
        }

    @property
    def tap_names(self) -> list[str]:
        """What is stored of each token, in words."""
        names = [f"layer {i}" for i in self.contract["target_layer_ids"]]
        if self.final_codec:
            names.append(f"final, {self.contract['final_hidden']}")
        return names

    @staticmethod
    def exists(path: Path) -> bool:
        return (path / "dataset.json").is_file()

    @classmethod
    def create_or_resume(
        cls,
        path: Path,
        *,
        contract: Mapping[str, Any],
        make_codecs: Callable[[], tuple[Codec, Codec | None]],
        provenance: Mapping[str, Any],
    ) -> "Dataset":
        """Go on with the data set in `path`, or start one; only then `make_codecs` is called.

        It gives the codec of the taps and that of the final hidden state, if this is stored.

        One process does this; the others wait until `exists` and `open` with their contract.
        """
        if not cls.exists(path):
            _prepare_folder(path)
        if not cls.exists(path):  # still, now that no other process can make one
            codec, final_codec = make_codecs()
            facts = {
                "schema_version": SCHEMA_VERSION,
                "contract": contract,
                "codec": codec.recipe(),
                "final_codec": final_codec.recipe() if final_codec else None,
                "calibration_sha256": _write_calibration(path, codec, final_codec),
                "provenance": provenance,
            }
            facts = json.loads(json_bytes(facts))  # as it will be read: lists, not tuples
            text = json.dumps({**facts, "sha256": canonical_hash(facts)}, indent=1)
            write_whole(path / "dataset.json", text.encode())
        return cls.open(path, contract=contract)

    @classmethod
    def open(cls, path: Path, *, contract: Mapping[str, Any] | None = None) -> "Dataset":
        """The data set in `path`; ValueError if `contract` is given and differs from its own."""
        if not cls.exists(path):
            raise FileNotFoundError(f"{path} is no data set: it has no dataset.json; run extract")
        facts = _read_facts(path / "dataset.json")
        contents = facts["contract"], *_read_codecs(path, facts), facts["provenance"]
        dataset = cls(path, *contents, facts["sha256"])
        if contract is not None:
            _refuse_older(path, facts["schema_version"])
            dataset._refuse_other(json.loads(json_bytes(contract)))
        return dataset

    @classmethod
    def refuse_in_advance(cls, path: Path, known: Mapping[str, Any]) -> None:
        """ValueError if `path` holds other files, or a data set of other rules.

        For before anything costs time: `known` is what is known of the contract by then.
        """
        if not cls.exists(path):
            _refuse_other_files(path)
            return
        dataset = cls.open(path)
        known = json.loads(json_bytes(known))
        dataset._refuse_other({**dataset.contract, **known})

    def _refuse_other(self, contract: dict[str, Any]) -> None:
        for field, old, new in differences(self.contract, contract):
            if not field.startswith(_NOT_COMPARED):
                self._refuse(field, old, new)

    def refuse_other_kernels(self, kernels: Mapping[str, str]) -> None:
        """ValueError unless the target runs on the kernels that made the shards so far.

        What an earlier version did not write down is not known, and not compared.
        """
        for field, old, new in differences(self.contract["kernels"], dict(kernels), "kernels"):
            if old is not None:
                self._refuse(field, old, new)

    def _refuse(self, field: str, old: Any, new: Any) -> None:
        raise ValueError(
            f"{self.path} was made with {field} = {old!r}, but now it is {new!r}; "
            "go back to the old value or choose another output folder"
        )

    def shard_path(self, name: str) -> Path:
        return self.path / "shards" / name

    def refuse_taken(self, name: str) -> None:
        """ValueError if `name` cannot be a new shard's."""
        check_name(name, "the plan")
        if os.path.lexists(self.shard_path(name)):
            raise ValueError(
                f"{self.shard_path(name)} exists already: another extract with another number of "
                "processes writes here; stop it and run the same command again"
            )

    def committed(self) -> dict[str, ShardRecord]:
        """The shards that the manifests name, in the order of their names.

        A last line without its end is being written or was cut by a crash: not yet a commit.
        """
        records: dict[str, ShardRecord] = {}
        for manifest in self._manifests():
            content = read_small(manifest, _LARGEST_MANIFEST)
            for number, line in enumerate(content.split(b"\n")[:-1], 1):
                where = f"{manifest} line {number}"
                record = read_manifest_line(line, where)
                if records.setdefault(record.name, record) != record:
                    raise ValueError(
                        f"{where} names shard {record.name} a second time, with other content; "
                        "delete both lines and run extract again"
                    )
        return dict(sorted(records.items()))

    def _manifests(self) -> list[Path]:
        """None of them a link, through which another file would be read and written."""
        manifests = sorted((self.path / "manifest").glob("rank-*.jsonl"))
        for manifest in manifests:
            _refuse_link(manifest)
        return manifests

    def resume(self, names: Sequence[str], *, rank: int = 0, size: int = 1) -> Resumption:
        """Clean up after an earlier run, and say which of this rank's shards are missing.

        Called once, before this rank writes; from then on its lock is held. Rank k of an earlier
        run is cleaned up by rank k % size, and only if no process holds k's lock. Of `names`, a
        shard that was renamed but not yet named in a manifest is adopted if its checksums hold.
        """
        _make_frame(self.path)
        for writer in {rank, *_of_rank(self.path / "manifest", _LOCK, rank, size).values()}:
            _lock(self.path, writer)
        removed = self._remove_temporary(rank, size)
        committed = self.committed()
        missing = [name for name in names if name not in committed]
        waiting = [name for name in missing if os.path.lexists(self.shard_path(name))]
        adopted = {name for name in waiting if self._adopt(name, rank)}
        for name in set(waiting) - adopted:
            self.set_aside(name)
            removed += 1
        missing = [name for name in missing if name not in adopted]
        return Resumption(missing, len(adopted), removed)

    def _remove_temporary(self, rank: int, size: int) -> int:
        temporary = _of_rank(self.path / "shards", _TEMPORARY, rank, size)
        for folder, writer in temporary.items():
            _refuse_no_folder(folder)
            _lock(self.path, writer)
            shutil.rmtree(folder)
        return len(temporary)

    def _adopt(self, name: str, rank: int) -> bool:
        """Name a shard in the manifest if it is sound and this data set's."""
        folder = self.shard_path(name)
        _refuse_no_folder(folder)
        try:
            content = read_small(folder / "COMMIT.json", _LARGEST_MANIFEST)
            commit = parse_commit(folder, content)
            counts = {key: commit[key] for key in ("documents", "tokens", "supervised")}
            record = ShardRecord(name, **counts, commit_crc32c=google_crc32c.value(content))
            check_shard(folder, record, self.sha256)
        except (ValueError, KeyError, OSError):
            return False
        if commit.get("shard") != name or not record.is_plausible():
            return False
        self._name_in_manifest(record, rank)
        return True

    def temporary_folder(self, rank: int) -> Path:
        """Where `rank` may write a shard before it is published."""
        return self.shard_path(f".tmp-{rank}-{uuid.uuid4().hex}")

    def publish(self, folder: Path, record: ShardRecord, *, rank: int) -> None:
        """Make a sealed temporary folder the shard of `record`: rename, then the manifest line."""
        self.refuse_taken(record.name)
        folder.rename(self.shard_path(record.name))
        sync(folder.parent)
        self._name_in_manifest(record, rank)

    def _name_in_manifest(self, record: ShardRecord, rank: int) -> None:
        """The commit. A line that a crash cut short is dropped first: it never counted."""
        manifest = self.path / "manifest" / f"rank-{rank:02}.jsonl"
        _refuse_link(manifest)
        manifest.touch()
        with manifest.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write(manifest_line(record))
            file.flush()
            os.fsync(file.fileno())
        sync(manifest.parent)

    def set_aside(self, name: str) -> Path:
        """Take a shard out of the data set, so that the next extract writes it again.

        Its manifest lines go first: from then on no reader trusts it. The folder, if there is one,
        is kept for a look under bad/.
        """
        _refuse_link(self.path / "bad")
        for manifest in self._manifests():
            lines = read_small(manifest, _LARGEST_MANIFEST).splitlines(keepends=True)
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
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def _make_frame(path: Path) -> None:
    """The folders of a data set, where they are not there already."""
    try:
        for folder in ("shards", "manifest"):
            (path / folder).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{path} is no folder; choose another output folder") from None


def _prepare_folder(path: Path) -> None:
    """The empty frame of a new data set, locked. Traces of a start that was killed may be there.

    What a data set left behind that lost its dataset.json is nobody's: it is not written into.
    """
    _refuse_other_files(path)
    _make_frame(path)
    for entry in (*(path / "shards").iterdir(), *(path / "manifest").iterdir()):
        if not _LOCK.fullmatch(entry.name):
            raise ValueError(
                f"{path} has no dataset.json, but {entry} is there; restore dataset.json, or "
                "extract into another folder"
            )
    _lock(path, 0)


def _refuse_other_files(path: Path) -> None:
    known = {"calibration.safetensors", "shards", "manifest", "bad"}
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if any(name not in known and not name.startswith(".") for name in names):
        raise ValueError(f"{path} holds other files and no data set; choose an empty folder")


def _lock(path: Path, rank: int) -> None:
    """Write as `rank` until this process ends, however it ends; ValueError if another one does."""
    file = path / "manifest" / f"rank-{rank:02}.lock"
    _refuse_link(file)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    key = (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino)
    try:
        if key not in _HELD:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"another extract writes to {path} as rank {rank}; wait for it or stop it"
        ) from None
    if _HELD.setdefault(key, descriptor) != descriptor:
        os.close(descriptor)


def _of_rank(folder: Path, pattern: re.Pattern[str], rank: int, size: int) -> dict[Path, int]:
    """Entries that carry the number of a rank k, and k, where k is for `rank` of `size`."""
    matches = {entry: pattern.fullmatch(entry.name) for entry in sorted(folder.iterdir())}
    ranks = {entry: int(match[1]) for entry, match in matches.items() if match}
    return {entry: k for entry, k in ranks.items() if k % size == rank}


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and what it points to would be written; remove it")


def _refuse_no_folder(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        raise ValueError(f"{path} is a link or a file, not a shard; remove it and extract again")


def _read_facts(file: Path) -> dict[str, Any]:
    """dataset.json, once it matches its own hash and has all that the store reads of it."""
    facts = read_json(file)
    stored = facts.pop("sha256", None)
    try:
        is_whole = stored == canonical_hash(facts)
    except RecursionError:
        is_whole = False
    if not is_whole:
        raise ValueError(f"{file} does not match its own sha256; {_RESTORE}")
    version = facts.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ValueError(
            f"{file} has schema_version {version}, newer than {SCHEMA_VERSION}; upgrade "
            "dflash-offline to read it"
        )
    wrong = next((name for name, fits in _fitting(facts) if not fits), None)
    if wrong:
        raise ValueError(f"{file} has a {wrong} that no extract wrote; {_RESTORE}")
    return {**facts, "sha256": stored}


def _fitting(facts: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each field of dataset.json, and whether it is of the form that the store relies on."""
    yield "schema_version", is_count(facts.get("schema_version"))
    contract = facts.get("contract")
    yield "contract", isinstance(contract, dict)
    assert isinstance(contract, dict)
    target = contract.get("target")
    yield "contract.target", isinstance(target, dict) and _is_target(target)
    yield "contract.target_layer_ids", _are_all(contract.get("target_layer_ids"), int)
    yield "contract.layer_convention", isinstance(contract.get("layer_convention"), str)
    yield "contract.documents", is_count(contract.get("documents", 0))
    yield "contract.data_sha256", _are_all(contract.get("data_sha256", []), str)
    yield "contract.kernels", isinstance(contract.get("kernels", {}), dict)
    yield "codec", isinstance(facts.get("codec"), dict)
    yield "final_codec", isinstance(facts.get("final_codec"), dict | None)
    final_hidden = contract.get("final_hidden")
    yield (
        "contract.final_hidden",
        isinstance(final_hidden, str) if facts.get("final_codec") else final_hidden is None,
    )
    yield "calibration_sha256", isinstance(facts.get("calibration_sha256"), str | None)
    yield "provenance", isinstance(facts.get("provenance"), dict)


def _are_all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _is_target(facts: Mapping[str, Any]) -> bool:
    """Whether TargetSpec.from_dict makes a TargetSpec of it, each field of its type."""
    types = {field.name: field.type for field in fields(TargetSpec)}
    if facts.keys() != types.keys() or not _are_all(facts["eos_token_ids"], int):
        return False
    plain = {name: kind for name, kind in types.items() if name != "eos_token_ids"}
    return all(
        isinstance(facts[name], int | float if kind is float else kind)  # type: ignore[arg-type]
        for name, kind in plain.items()
    )


def _refuse_older(path: Path, version: int) -> None:
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema_version {version}: it can be read, but this version writes "
            f"{SCHEMA_VERSION}; extract into another folder (train takes several)"
        )


def _write_calibration(path: Path, codec: Codec, final_codec: Codec | None) -> str | None:
    final = final_codec.tensors() if final_codec else {}
    tensors = {**codec.tensors(), **{FINAL_PREFIX + name: t for name, t in final.items()}}
    if not tensors:
        return None
    content = save_tensors({name: t.cpu().contiguous() for name, t in tensors.items()})
    write_whole(path / "calibration.safetensors", content)
    return sha256(content).hexdigest()


def _read_codecs(path: Path, facts: Mapping[str, Any]) -> tuple[Codec, Codec | None]:
    tensors = _read_calibration(path, facts["calibration_sha256"])
    width = facts["contract"]["target"]["hidden_size"]
    layers = len(facts["contract"]["target_layer_ids"])
    codec = _load_codec(path, facts["codec"], tensors, (layers, width))
    if facts.get("final_codec") is None:
        return codec, None
    final = {
        name.removeprefix(FINAL_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(FINAL_PREFIX)
    }
    return codec, _load_codec(path, facts["final_codec"], final, (1, width))


def _load_codec(
    path: Path,
    recipe: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    sizes: tuple[int, int],
) -> Codec:
    """A codec for `sizes` (layers, width)."""
    file = path / "dataset.json"
    try:
        codec = load_codec(recipe, tensors)
    except KeyError as error:
        raise ValueError(f"{file} has a codec without {error}; {_RESTORE}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if (codec.layers, codec.width) != sizes or not _is_usable(codec):
        raise ValueError(f"{file} has a codec that is none or not this data set's; {_RESTORE}")
    return codec


def _read_calibration(path: Path, stored: str | None) -> dict[str, torch.Tensor]:
    if stored is None:
        return {}
    file = path / "calibration.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing, and no shard can be decoded without it")
    content = read_small(file, _LARGEST_CALIBRATION)
    if sha256(content).hexdigest() != stored:
        raise ValueError(f"{file} is not the one that dataset.json names; restore it")
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file ({error}); {_RESTORE}") from None


def _is_usable(codec: Codec) -> bool:
    """Whether the codec has sizes and scales that decode something."""
    sizes = ((codec.layers, _MOST_LAYERS), (codec.width, WIDEST))
    if not all(is_count(size) and 0 < size <= most for size, most in sizes):
        return False
    if not isinstance(codec, Int8Codec):
        return True
    scale_LD = codec.channel_scale_LD
    return (
        type(codec.group) is int
        and codec.group in GROUP_SIZES
        and codec.width % codec.group == 0
        and scale_LD.shape == (codec.layers, codec.width)
        and scale_LD.dtype == torch.float32
        and bool((scale_LD.isfinite() & (scale_LD > 0)).all())
    )
