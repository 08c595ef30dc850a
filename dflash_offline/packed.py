"""Documents side by side in one row, none of which sees another: a target without padding.

A row is [1, N] tokens whose positions start again with each document. Three functions that the
layers of a transformers model call by name are replaced by ones that respect the borders:

* attention runs document by document (flash attention each time, where there is one);
* the convolution and the gated delta rule of hybrid layers are fla's Triton kernels, which take
  the borders, or, without them, transformers' own reference functions, document by document.

Shapes are those of the row, so a compiled layer is compiled once for all rows of N tokens.

Letters: N tokens of a row, H heads, D width of a head or of the convolution.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "dflash_packed"  # the name under which transformers finds ours
# Functions that hybrid models look up in their own module, at each call.
CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


@dataclass
class Borders:
    """Where the documents of the present row lie; its functions look here."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    documents: list[tuple[int, int]] = field(default_factory=list)
    """The spans without that of the filler, whose states nobody wants."""
    cumulative: Tensor | None = None
    """int64 [documents + 1] on the target's device, for kernels."""

    def set(self, lengths: Sequence[int], filler: int, device: torch.device) -> None:
        ends = torch.tensor([0, *lengths, *([filler] if filler else [])]).cumsum(0)
        self.spans = list(pairwise(ends.tolist()))
        self.documents = self.spans[: len(lengths)]
        self.cumulative = ends.to(device, non_blocking=True)


class PackedTower:
    """A text tower of transformers whose rows hold several documents."""

    def __init__(self, tower: nn.Module, *, fast: bool) -> None:
        """`fast`: fla's kernels for hybrid layers; RuntimeError or ImportError if they fail."""
        self.tower, self.borders, self.fast = tower, Borders(), fast
        self.device = next(tower.parameters()).device
        self._module = vars(sys.modules[type(tower).__module__])
        self._plain = {name: _unwrapped(self._module[name]) for name in hybrid_names(tower)}
        self._own = self._hybrid_functions()
        # cuDNN makes a plan for each length it meets, in 55 ms: by 128 there are 32 up to 4,096.
        # Filled up with zeros, since a masked key's NaN would still come through its value.
        self._stretch = 128 if self.device.type == "cuda" else 1
        self._attention = _outside_graphs(self._attend)

    def row(self, documents: Sequence[Tensor], length: int) -> None:
        """Run the tower over documents (int [T] each), in a row of at least `length` tokens.

        What is missing to `length` is filled up by a document of its own.
        """
        lengths = [len(ids) for ids in documents]
        filler = max(0, length - sum(lengths))
        ids_N = torch.cat([*documents, torch.zeros(filler, dtype=torch.int32)])
        # The filler's stay at 0: some rotary embeddings look at the largest position of a row.
        positions = [*map(torch.arange, lengths), torch.zeros(filler, dtype=torch.int64)]
        positions_N = torch.cat(positions)
        self.borders.set(lengths, filler, self.device)
        AttentionInterface.register(ATTENTION, self._attention)  # another tower's may stand there
        with self._functions(self._own, ATTENTION):
            self.tower(
                input_ids=self._on_device(ids_N.long())[None],
                position_ids=self._on_device(positions_N)[None],
                use_cache=False,
            )

    def alone(self, ids_T: Tensor) -> None:
        """Run the tower as transformers does, over one document; none of our functions is used."""
        with self._functions(self._plain, "sdpa"):
            self.tower(input_ids=ids_T.to(self.device)[None], use_cache=False)

    def _on_device(self, ids: Tensor) -> Tensor:
        if self.device.type == "cuda":
            ids = ids.pin_memory()
        return ids.to(self.device, non_blocking=True)

    @contextmanager
    def _functions(
        self, functions: Mapping[str, Callable[..., Any]], attention: str
    ) -> Iterator[None]:
        """Stand-ins in the model's module for a forward pass; others of the class keep theirs."""
        before = {name: self._module[name] for name in functions}
        self._module.update(functions)
        config: Any = self.tower.config
        config._attn_implementation = attention
        try:
            yield
        finally:
            self._module.update(before)

    def _hybrid_functions(self) -> dict[str, Callable[..., Any]]:
        if not self._plain:
            return {}
        if self.fast:
            functions = _fla_convolution(), _fla_delta_rule()
        else:
            functions = (
                _by_document(self._plain[CONVOLUTION], dim=-1),
                _by_document(self._plain[DELTA_RULE], dim=1),
            )
        convolve, delta_rule = (
            _outside_graphs(partial(function, self.borders)) for function in functions
        )
        return {CONVOLUTION: convolve, DELTA_RULE: _on_contiguous(delta_rule)}

    def _attend(
        self,
        module: nn.Module,
        query_1HND: Tensor,
        key_1HND: Tensor,
        value_1HND: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **other: Any,
    ) -> tuple[Tensor, None]:
        """Causal attention within each document; [1, N, H, D]. The filler gets zeros."""
        _refuse_unknown(module, other)
        parts = []
        for start, stop in self.borders.documents:
            more = -(stop - start) % self._stretch
            q, k, v = (
                F.pad(x[:, :, start:stop], (0, 0, 0, more)) if more else x[:, :, start:stop]
                for x in (query_1HND, key_1HND, value_1HND)
            )
            mask = _sliding_mask(q.shape[2], sliding_window, q.device)
            out_1HTD = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            parts.append(out_1HTD[:, :, : stop - start])
        _, heads, tokens, _ = query_1HND.shape
        filler = tokens - self.borders.documents[-1][1]
        parts.append(value_1HND.new_zeros(1, heads, filler, value_1HND.shape[3]))
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def hybrid_names(tower: nn.Module) -> list[str]:
    """Names of the functions that hybrid layers call; empty if all layers attend.

    ValueError if the target has recurrent layers of a kind that is not known here.
    """
    module = vars(sys.modules[type(tower).__module__])
    config: Any = tower.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds <= {"full_attention", "sliding_attention"}:
        return []
    names = [CONVOLUTION, DELTA_RULE]
    if kinds - {"full_attention", "sliding_attention", "linear_attention"} or not all(
        name in module for name in names
    ):
        raise ValueError(
            f"{type(tower).__name__} has layers of the kinds {', '.join(sorted(kinds))}, which "
            "cannot be run over several documents here; only full, sliding and gated delta rule "
            "layers can"
        )
    return names


def has_fast_kernels(device: torch.device) -> bool:
    """Whether fla is installed and there is a GPU for it."""
    return device.type == "cuda" and importlib.util.find_spec("fla") is not None


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled layer calls it as it is: borders change with each row."""
    disable: Callable[..., Any] = torch.compiler.disable
    return disable(lambda *args, **kwargs: function(*args, **kwargs))


def _on_contiguous(delta_rule: Callable[..., Any]) -> Callable[..., Any]:
    """Query, key and value are parts of one tensor; a compiled layer takes them apart faster.

    Three times as fast as the kernels' own calls of contiguous().
    """

    def call(query: Tensor, key: Tensor, value: Tensor, **other: Any) -> Any:
        return delta_rule(query.contiguous(), key.contiguous(), value.contiguous(), **other)

    return call


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' reference function under the wrapper that would call an installed package."""
    return getattr(function, "__wrapped__", function)


def _fla_convolution() -> Callable[..., Tensor]:
    from fla.modules.causal_conv1d import causal_conv1d

    def convolve(
        borders: Borders,
        x_1DN: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        x_1ND, _ = causal_conv1d(
            x_1DN.transpose(1, 2),
            weight,
            bias,
            activation=activation,
            cu_seqlens=borders.cumulative,
        )
        return x_1ND.transpose(1, 2)

    return convolve


def _fla_delta_rule() -> Callable[..., tuple[Tensor, None]]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def delta_rule(
        borders: Borders,
        query_1NHD: Tensor,
        key_1NHD: Tensor,
        value_1NHD: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        **_: Any,
    ) -> tuple[Tensor, None]:
        out, _ = chunk_gated_delta_rule(
            query_1NHD,
            key_1NHD,
            value_1NHD,
            g=g,
            beta=beta,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=borders.cumulative,
        )
        return out, None

    return delta_rule


def _by_document(function: Callable[..., Any], dim: int) -> Callable[..., Any]:
    """A reference function, called once a document; `dim` is the token axis of its tensors."""

    def call(borders: Borders, *args: Any, **kwargs: Any) -> Any:
        tokens = borders.spans[-1][1]

        def cut(value: Any, start: int, stop: int) -> Any:
            is_row = isinstance(value, Tensor) and value.ndim > 2 and value.shape[dim] == tokens
            return value.narrow(dim, start, stop - start) if is_row else value

        outs = [
            function(
                *(cut(arg, *span) for arg in args),
                **{name: cut(value, *span) for name, value in kwargs.items()},
            )
            for span in borders.spans
        ]
        if isinstance(outs[0], tuple):
            return torch.cat([out[0] for out in outs], dim), None
        return torch.cat(outs, dim)

    return call


def _refuse_unknown(module: nn.Module, other: dict[str, Any]) -> None:
    """Attention of another kind would be computed wrongly, and nobody would see it."""
    for name in ("softcap", "s_aux"):
        if other.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for attention with {name}, which is not known here"
            )


def _sliding_mask(tokens: int, window: int | None, device: torch.device) -> Tensor | None:
    """True where a query sees a key; None where causal order says it all."""
    if window is None or window >= tokens:
        return None
    ones = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)
