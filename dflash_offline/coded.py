"""Hidden states of a row in coded form: which codecs they have, where they lie, how they decode.

Documents of one row may come from data sets with codecs of their own. Where these differ in their
scales alone, each span of the row keeps its codec. Where they differ in kind, the documents are
decoded on the CPU and the row is bf16 bits, `raw`: twice the bytes, and time of a core.

Letters: S row positions, M = tapped layers * hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dflash_offline.codec import Codec, RawCodec
from dflash_offline.dataset import FINAL_PREFIX
from dflash_offline.shard_set import ShardSet
from dflash_offline.slab import Shapes, Slab, slab_bytes


@dataclass(frozen=True)
class Span:
    """The tokens of a row from `start` to the next span; `codec` counts StateCoding.codecs."""

    codec: int
    start: int


def decode_flat(codec: Codec, planes: dict[str, Tensor]) -> Tensor:
    """bf16 [S, M]"""
    return codec.decode(planes).flatten(1)


class StateCoding:
    """How the taps of rows are coded, or with `final` their last hidden states."""

    def __init__(
        self, shards: ShardSet, *, final: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        if final:
            shards.final_norm()  # refuses data sets without such states
        layers = 1 if final else len(shards.target_layer_ids)
        stored = shards.final_codecs if final else shards.codecs
        raw = RawCodec(layers, shards.target.hidden_size)
        self._shards, self._final = shards, final
        self._prefix = FINAL_PREFIX if final else ""  # as in a shard
        self.codecs = [codec.to(device) for codec in (*stored, raw)]

    def choose(self, documents: Sequence[int]) -> list[int]:
        """The codec that each document has in its row. They differ in tensors at most."""
        stored = self._stored(documents)
        if len({self.codecs[number].name for number in stored}) == 1:
            return stored
        return [len(self.codecs) - 1] * len(documents)

    def _stored(self, documents: Sequence[int]) -> list[int]:
        return [self._shards.codec_number(i, final=self._final) for i in documents]

    def shapes(self, codec: int, row_tokens: int) -> Shapes:
        """The planes of a row."""
        return {
            self._prefix + name: ((row_tokens, *spec.shape_per_token), getattr(torch, spec.dtype))
            for name, spec in self.codecs[codec].arrays().items()
        }

    def largest(self, row_tokens: int) -> Shapes:
        """The planes of the largest row that there may be."""
        *stored, raw = range(len(self.codecs))
        is_mixed = len({self.codecs[number].name for number in stored}) > 1
        possible = [*stored, raw] if is_mixed else stored
        return max((self.shapes(number, row_tokens) for number in possible), key=slab_bytes)

    def read(self, documents: Sequence[int], slab: Slab, row_tokens: int) -> tuple[Span, ...]:
        """Fill the planes in `slab`, which was made with `shapes`. Padding is 0, and decodes to 0.

        ValueError names the shard that is damaged.
        """
        spans, start = list[Span](), 0
        chosen = self.choose(documents)
        for i, old, new in zip(documents, self._stored(documents), chosen, strict=True):
            planes = self._shards.planes(i, row_tokens - start, final=self._final)
            if new != old:
                planes = self.codecs[new].encode(self.codecs[old].decode(planes))
            if not spans or spans[-1].codec != new:
                spans.append(Span(new, start))
            stop = start + len(next(iter(planes.values())))
            for name, plane in planes.items():
                slab[self._prefix + name][start:stop] = plane
            start = stop
        for name in self.shapes(chosen[0], row_tokens):
            slab[name][start:].zero_()
        return tuple(spans)

    def decode(
        self,
        slab: Slab,
        spans: Sequence[Span],
        whole: Callable[[Codec, dict[str, Tensor]], Tensor] = decode_flat,
    ) -> Tensor:
        """bf16 [S, M]; by `whole` at once, and so in one shape, unless codecs share the row."""
        names = self.codecs[spans[0].codec].arrays()
        planes = {name: slab[self._prefix + name] for name in names}
        if len(spans) == 1:
            return whole(self.codecs[spans[0].codec], planes)
        bounds = pairwise([*(span.start for span in spans), None])
        parts = [{n: plane[start:stop] for n, plane in planes.items()} for start, stop in bounds]
        decoded = [decode_flat(self.codecs[s.codec], p) for s, p in zip(spans, parts, strict=True)]
        return torch.cat(decoded)
