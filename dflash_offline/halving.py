"""A target that makes do with half a row once the GPU's memory has run out.

A row that does not fit is run as consecutive parts of at most half the tokens, and so is every row
after it: fewer tokens at once are slower, but a run that dies at night is slower still. It happens
once; a second time the memory is too small, and the error stands. Where a document begins in its
row only rounding tells, so what is stored keeps its meaning.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from dflash_offline.metrics import say
from dflash_offline.planning import Row, cut_row
from dflash_offline.target import TappedTarget

T = TypeVar("T")


class Halving:
    """Runs `target` over rows of at most `row_tokens` (of one document, if that is longer)."""

    def __init__(self, target: TappedTarget, row_tokens: int) -> None:
        self.target, self.row_tokens = target, row_tokens
        self.has_halved = False

    def run(self, row: Row, use: Callable[[Tensor], T]) -> list[tuple[Row, T]]:
        """What `use` makes of the states [N, L, D] of the row, or of each of its parts.

        `use` runs on the GPU too: memory that it lacks counts as well.
        """
        if not self.has_halved:
            try:
                return [(row, use(self.states(row)))]
            except torch.OutOfMemoryError as error:
                found = str(error).split(". ")[0]
            self._halve(found)  # here, where no traceback holds the tensors of that pass
        return [(part, use(self.states(part))) for part in cut_row(row, self.row_tokens)]

    def states(self, row: Row) -> Tensor:
        """bf16 [N, L, D] on the target's device: of all tokens of the row in order."""
        return self.target.taps([document.input_ids for document in row])

    def _halve(self, found: str) -> None:
        self.has_halved = True
        self.row_tokens = max(1, self.row_tokens // 2)
        self.target.halve_rows()
        say(
            f"warning: out of memory ({found}); rows of at most {self.row_tokens:,} tokens from "
            "here on, half as many as --batch-tokens says"
        )
