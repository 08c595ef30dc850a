"""The documents that conversations become, and what became of the rest."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor


class Document:
    """One sequence that the target reads: a conversation, or the part of it serving would send.

    It is a view of a longer tensor: a million take 0.2 GB so, with tensors of their own 1.3.
    """

    __slots__ = ("_ids", "_mask", "_start", "_stop", "index")
    index: int
    """Place among all documents of the corpus, the dropped ones included."""

    def __init__(
        self,
        index: int,
        input_ids: Tensor,
        loss_mask: Tensor,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """Of the tensors' tokens those from bounds[0] to before bounds[1], or all."""
        self.index, self._ids, self._mask = index, input_ids, loss_mask
        self._start, self._stop = bounds or (0, len(input_ids))

    @property
    def input_ids(self) -> Tensor:
        """int32 [T]"""
        return self._ids[self._start : self._stop]

    @property
    def loss_mask(self) -> Tensor:
        """bool [T]; true: a token the target produced"""
        return self._mask[self._start : self._stop]

    def __len__(self) -> int:
        return self._stop - self._start


@dataclass
class Counts:
    """What became of the lines, for the summary: nothing is dropped or cut unseen.

    documents = documents that are kept + the sum of `dropped`.
    """

    conversations: int = 0
    conversations_without_document: int = 0
    """Chats with a prompt that fits for none of their turns."""
    split_conversations: int = 0
    """Chats that became several documents, because the template rewrites their history."""
    turns_without_prompt: int = 0
    """Turns that do not begin with a generation prompt of serving: not supervised."""
    documents: int = 0
    """All that the lines hold, the dropped ones included."""
    truncated: int = 0
    """Documents that are kept, but not to their end."""
    cut_answers: int = 0
    """Answers with finish_reason "length": their end-of-turn token is not supervised."""
    answers_with_end_token_inside: int = 0
    """Answers whose text spells an end token: the span ends there, the rest is not supervised."""
    thinking_turns: int = 0
    """Turns with reasoning, where the template has the choice."""
    plain_turns: int = 0
    """Turns without, where the template has the choice."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Documents that are not kept, by reason."""

    def add(self, other: "Counts") -> None:
        for name, more in vars(other).items():
            vars(self)[name] += more


@dataclass(frozen=True)
class Corpus:
    documents: list[Document]
    counts: Counts
    sha256: dict[str, str]
    """File, as it was named, -> hash of its bytes."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


def documents_in(
    index_D: Tensor, starts: Tensor, input_ids_N: Tensor, loss_mask_N: Tensor
) -> list[Document]:
    """Views of the documents that stand end to end in the last two."""
    places = zip(index_D.tolist(), pairwise(starts.tolist()), strict=True)
    return [Document(index, input_ids_N, loss_mask_N, bounds) for index, bounds in places]
