"""Documents whose hidden states are broken: set aside by id, and a run with too many of them ends.

A state is broken if it holds an inf or NaN, or is zero throughout. The ids go to a file of JSON
lines beside the data set, whose shards simply lack those documents. A shard that is written anew
tells of its documents again, so readers count ids, not lines.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from dflash_offline.documents import Document
from dflash_offline.metrics import say

_REMEDY = "check the target's weights, or run it in another precision (--dtype float32)"


class Quarantine:
    """Of one rank. The limit is a share of all its documents, so it is never met too early."""

    def __init__(self, path: Path, *, documents: int, before: int, largest_share: float) -> None:
        """`documents` that the rank has to run, of which `before` were broken in earlier runs."""
        self.path, self._documents, self._share = path, documents, largest_share
        self.broken = before

    def add(self, shard: str, broken: Iterable[tuple[Document, int]]) -> None:
        """Documents and how many of their tokens are broken. ValueError once it is too many."""
        for document, tokens in broken:
            self._write({"document": document.index, "broken_tokens": tokens, "shard": shard})
            say(f"warning: document {document.index} set aside: broken states of {tokens} tokens")
            self.broken += 1
        if self.broken > self._share * self._documents:
            raise ValueError(
                f"{self.broken:,} of {self._documents:,} documents have hidden states that are "
                f"inf, NaN or zero, more than --max-bad-fraction {self._share:g} allows; their "
                f"numbers are in {self.path}; {_REMEDY}"
            )

    def _write(self, entry: dict[str, int | str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def all_broken(documents: int) -> str:
    """The refusal where nothing is left."""
    return (
        f"all of {documents:,} documents have hidden states that are inf, NaN or zero; {_REMEDY}"
    )
