"""Files and folders that appear whole or not at all, and stay after a power loss."""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk: a rename alone does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """A full disk or a spent quota becomes one sentence with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"the disk is full under {path}; free space and run the same command again, which "
            "goes on where it stopped"
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """The file appears under its name only when it is complete and on the disk."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file for people and programs, whole; paths in it become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(value, indent=1, default=str) + "\n").encode())


def start_folder(final: Path) -> Path:
    """An empty folder beside `final`, to be filled and then published under its name."""
    unfinished = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def publish_folder(unfinished: Path, final: Path) -> None:
    """Make a complete flat folder appear under its final name, replacing what is there."""
    for file in unfinished.iterdir():
        sync(file)
    sync(unfinished)
    replaced = final.with_name(f".{final.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
