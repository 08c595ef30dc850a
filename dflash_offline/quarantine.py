"""Documents whose hidden states are broken: set aside by id, and a run with too many of them ends.

A state is broken if it holds an inf or NaN, or is zero throughout. The ids go to a file of JSON
lines beside the data set, whose shards simply lack those documents.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from dflash_offline.documents import Document
from dflash_offline.metrics import say

_REMEDY = "check the target's weights, or run it in another precision (--dtype float32)"


class Quarantine:
    """Of one rank. The limit is a share of all documents, so it is never met too early."""

    def __init__(
        self, path: Path, *, documents: int, committed: Callable[[], int], largest_share: float
    ) -> None:
        """`documents` of the corpus; `committed` tells how many all ranks' shards lack."""
        self.path, self._documents, self._share = path, documents, largest_share
        self._committed = committed
        self._open = 0  # of the shard that is being written
        self._known = _entries(path)

    def add(self, shard: str, broken: Sequence[tuple[Document, int]]) -> None:
        """Documents and how many of their tokens are broken. ValueError once it is too many."""
        for document, tokens in broken:
            self._write({"document": document.index, "broken_tokens": tokens, "shard": shard})
            say(f"warning: document {document.index} set aside: broken states of {tokens} tokens")
        self._open += len(broken)
        if broken:
            self.check()

    def committed(self) -> None:
        """The shard that was being written is there."""
        self._open = 0

    def check(self) -> None:
        """ValueError if too many are broken, those of earlier runs included."""
        broken = self._committed() + self._open
        if broken > self._share * self._documents:
            raise ValueError(
                f"{broken:,} of {self._documents:,} documents have hidden states that are "
                f"inf, NaN or zero, more than --max-bad-fraction {self._share:g} allows; their "
                f"numbers are in {self.path.parent}; {_REMEDY}"
            )

    def _write(self, entry: dict[str, int | str]) -> None:
        """Once: a shard that is written anew tells of its documents again."""
        line = json.dumps(entry)
        if line in self._known:
            return
        self._known.add(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _entries(path: Path) -> set[str]:
    """The lines of an earlier run, if there was one; what else lies there is none."""
    lines: Iterable[str] = ()
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return set(lines)


def all_broken(documents: int) -> str:
    """The refusal where nothing is left."""
    return (
        f"all of {documents:,} documents have hidden states that are inf, NaN or zero; {_REMEDY}"
    )
