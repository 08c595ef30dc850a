"""Files that others wrote: values checked as they are taken, errors in one sentence. No torch."""

import hashlib
import json
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYER_TYPES = ("full_attention", "sliding_attention")

_SHOWN_VALUE, _SHOWN_REASON = 80, 240
_LARGEST_JSON = 1 << 28
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _SHOWN_VALUE
REQUIRED: Any = object()


def shown(value: Any) -> str:
    """`value` as Python spells it, for a message: no more of it than a line holds."""
    text = _BRIEF.repr(value)
    return text if len(text) <= _SHOWN_VALUE else f"{text[: _SHOWN_VALUE - 3]}..."


def reason(error: BaseException) -> str:
    """What a library's error says, in one line and without its paragraphs."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return text if len(text) <= _SHOWN_REASON else f"{text[: _SHOWN_REASON - 3]}..."


@contextmanager
def failing_as(sentence: str) -> Iterator[None]:
    """Whatever a library raises over a user's file becomes one ValueError.

    Libraries answer a damaged file with errors of any type. Full memory is no fault of the file.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's; it is not imported here
            raise
        raise ValueError(f"{sentence}: {reason(error)}") from error


def check_file(path: Path, what: str = "") -> None:
    """FileNotFoundError or ValueError unless a regular file: to read a fifo may never end."""
    named = f"{what} {path}".lstrip()
    if not path.exists():
        raise FileNotFoundError(f"{named} does not exist")
    if not path.is_file():
        raise ValueError(f"{named} is not a regular file")


def read_small(path: Path, most: int) -> bytes:
    """All of a file that has at most `most` bytes: a sparse one may claim more than memory has."""
    check_file(path)
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"{path} has {size:,} bytes; a sound one has at most {most:,}")
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError that names the file and the place."""
    content = read_small(path, _LARGEST_JSON)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


@dataclass(frozen=True)
class Facts:
    """A JSON object that others wrote: each value is checked for type and range as it is taken.

    ValueError names the file, the key and the value. Null is a value only where a default is None.
    """

    file: Path | str
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Facts":
        return cls(path, read_json(path))

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def inner(self, key: str) -> "Facts":
        """The object under `key`; empty if there is none."""
        value = self.values.get(key)
        self._check(key, value, value is None or isinstance(value, dict), "a JSON object")
        return Facts(self.file, value or {})

    def text(self, key: str) -> str:
        value = self._get(key)
        self._check(key, value, isinstance(value, str), "text")
        return str(value)

    def flag(self, key: str, default: bool | None) -> Any:
        value = self._get(key, default)
        is_fit = value is default or isinstance(value, bool)
        return self._check(key, value, is_fit, "true or false")

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """Positive and finite."""
        value = self._get(key, default)
        is_fit = type(value) in (int, float) and 0 < value <= sys.float_info.max
        return float(self._check(key, value, is_fit, "a positive number"))

    def whole(
        self,
        key: str,
        *,
        least: int = 1,
        most: int = 2**31 - 1,
        multiple_of: int = 1,
        default: Any = REQUIRED,
    ) -> Any:
        """An int, or None where that is the default."""
        value = self._get(key, default)
        is_fit = type(value) is int and least <= value <= most and value % multiple_of == 0
        wanted = f"a whole number from {least} to {most}"
        wanted += f", a multiple of {multiple_of}" if multiple_of > 1 else ""
        return self._check(key, value, is_fit or value is default, wanted)

    def token_ids(self, key: str, rows: int) -> list[int]:
        """The ids under `key`, which may hold one, a list or nothing."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        is_fit = all(type(token) is int and 0 <= token < rows for token in ids)
        self._check(key, value, is_fit, f"a token id, or a list of them, from 0 to {rows - 1}")
        return ids

    def rising(self, key: str, *, below: int) -> tuple[int, ...]:
        ids = self._get(key)
        is_fit = isinstance(ids, list) and all(type(i) is int and 0 <= i < below for i in ids)
        is_fit = is_fit and bool(ids) and ids == sorted(set(ids))
        return tuple(self._check(key, ids, is_fit, f"a rising list of ids below {below}"))

    def layer_types(self, layers: int) -> tuple[str, ...]:
        """The kind of each drafter layer: full attention where nothing is said."""
        kinds = self.values.get("layer_types")
        if kinds is None:
            return ("full_attention",) * layers
        is_fit = isinstance(kinds, list) and all(kind in LAYER_TYPES for kind in kinds)
        is_fit = is_fit and len(kinds) == layers
        wanted = f"a list of {layers} (num_hidden_layers) of {', '.join(LAYER_TYPES)}"
        return tuple(self._check("layer_types", kinds, is_fit, wanted))

    def _get(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(key, default)
        if value is REQUIRED:
            raise ValueError(f"{self.file} lacks the key {key!r}")
        return value

    def _check(self, key: str, value: Any, is_fit: bool, wanted: str) -> Any:
        if not is_fit:
            raise ValueError(f"{self.file}: {key} is {shown(value)}; it must be {wanted}")
        return value


def canonical_hash(value: Any) -> str:
    """sha256 of a JSON value in one canonical spelling."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
