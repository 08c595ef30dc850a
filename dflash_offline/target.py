"""The frozen target: hidden states of its tapped layers, and the two matrices at its ends.

TappedTarget runs the text tower only as deep as the deepest tap: no lm_head, no vision tower, no
layer above. Forward hooks keep references to the tapped layers' outputs; layers add out of place,
so nothing is copied. Documents run side by side in rows without padding (packed.py). The price is
that a state may differ by rounding with its place in a row; that nothing else differs is tested
each time a target is loaded.

FrozenEnds reads embedding and lm_head straight from the safetensors; the target is not loaded.

Letters: T tokens of a document, N of a row, L tapped layers, D hidden, V vocabulary rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_offline.facts import Facts
from dflash_offline.fp8 import quantise_linears
from dflash_offline.packed import PackedTower, has_fast_kernels, hybrid_names
from dflash_offline.skeleton import build_skeleton
from dflash_offline.weights import Weights

_FINAL = -1  # the final hidden state's place among the layers' outputs
# Of the documents that the self-test runs together: neither divides the delta rule's chunk of 64.
_TEST_LENGTHS = (70, 133)
_NOISE_FACTOR = 5
# States that have nothing in common differ by 141 %. Random layers make more of the noise than
# trained ones.
_FP8_DIFFERS = 1.0
_LAYERS = "its layers are of a kind that cannot be run over several documents at once"
_CAUSES = {
    "kernels": _LAYERS,
    "rows": _LAYERS,
    "fp8": "its linears cannot be run in fp8 on this device; use --dtype bfloat16",
}
_LEAST_ROUNDING = 1e-3  # in float32, where a short test may meet hardly any
# fla's delta rule keeps bf16 where transformers' reference keeps float32: 10 % after 62 random
# layers, 9 % in a tiny model of long memory. What computes something else is off by 100 %.
_FAST_KERNELS_DIFFER = 0.25

EMBEDDING_KEYS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
LM_HEAD_KEYS = ("lm_head.weight", "language_model.lm_head.weight")


class TappedTarget:
    """The target's text tower up to its deepest tap, in eval mode on one device."""

    def __init__(
        self,
        tower: Any,
        layer_ids: Sequence[int],
        *,
        final_hidden: str = "none",
        fp8: bool = False,
        compiled_row: int | None = None,
    ) -> None:
        self._tower, self._compiled_row = tower, compiled_row
        self.device = next(tower.parameters()).device
        dtype = next(tower.parameters()).dtype
        # fla's delta rule takes no float32.
        fast = has_fast_kernels(self.device) and dtype != torch.float32
        self._packed = PackedTower(tower, fast=fast)
        self._states_1ND: dict[int, Tensor] = {}
        self._kept = tuple(layer_ids)
        layers = _decoder_layers(tower)
        self.flop_per_token = _flop_per_token(layers, tower.config)
        for i in layer_ids:
            layers[i].register_forward_hook(self._keeper(i))
        if final_hidden != "none":
            self._kept += (_FINAL,)
            self._keep_final(after_norm=final_hidden == "after-norm")
        self.fp8_linears = 0
        self._self_test(layers, fp8)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        target_layer_ids: Sequence[int],
        device: torch.device | str,
        dtype: torch.dtype,
        final_hidden: str = "none",
        fp8: bool = False,
        compiled_row: int | None = None,
        trust_remote_code: bool = False,
    ) -> "TappedTarget":
        """The target in `folder`, without what lies above the deepest of `target_layer_ids`.

        With `final_hidden` (before-norm or after-norm) it is loaded whole, but for its lm_head.
        With `fp8` the large linears of its layers are quantised, whatever `dtype` the rest is in.
        With `compiled_row` its layers are compiled for rows of that many tokens, which takes a
        minute and saves a sixth of the time. ValueError says why the folder cannot be loaded.
        """
        weights = Weights(folder, device)  # a damaged file is named before anything is built
        tower = build_skeleton(
            folder,
            depth=max(target_layer_ids) + 1 if final_hidden == "none" else None,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        weights.fill(tower)
        return cls(
            tower.to(device),  # its buffers; the weights are there
            target_layer_ids,
            final_hidden=final_hidden,
            fp8=fp8,
            compiled_row=compiled_row,
        )

    @torch.no_grad()
    def taps(self, documents: Sequence[Tensor]) -> Tensor:
        """bf16 [N, L, D] on the device: the output of each tapped layer, before any norm.

        Documents are ids, int [T]; N tokens of all of them in order run in one row. Compiled
        layers know rows of one length, or, for a longer document, of its next multiple. The final
        hidden state, if it is asked for, is the last of the L.
        """
        tokens = sum(map(len, documents))
        self._packed.row(documents, self.padded(tokens))
        return self._take()[:tokens]

    def padded(self, tokens: int) -> int:
        """How many tokens a row of so many runs over."""
        step = self._compiled_row or 1
        return -(-tokens // step) * step

    def halve_rows(self) -> None:
        """Give back what a pass without enough memory left, and run in rows of half the tokens."""
        self._states_1ND.clear()
        if self._compiled_row:
            self._compiled_row = -(-self._compiled_row // 2)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _take(self) -> Tensor:
        taps_NLD = torch.stack([self._states_1ND.pop(i)[0] for i in self._kept], dim=1)
        return taps_NLD.to(torch.bfloat16)

    def describe_kernels(self) -> dict[str, str]:
        """What computes attention, and in a hybrid target the delta rule and convolution."""
        kernels = {"attention": "sdpa by document"}
        if hybrid_names(self._tower):
            by = "fla" if self._packed.fast else "torch"
            kernels |= {"delta rule": by, "convolution": by}
        if self.fp8_linears:
            kernels["matmul"] = "fp8 e4m3 by row"
        return kernels

    def slow_path(self) -> str | None:
        """What a user should know if a GPU runs a hybrid target's delta rule in plain torch."""
        if self.device.type == "cpu" or self.describe_kernels().get("delta rule") != "torch":
            return None
        return (
            "this hybrid target runs its delta rule in plain torch, about half as fast as it "
            "could; pip install '.[gpu]' in its repository brings the kernels (fla-core)"
        )

    @torch.no_grad()
    def _self_test(self, layers: nn.ModuleList, fp8: bool) -> None:
        """ValueError if a document in a row gives other states than transformers gives it alone.

        Rounding is measured, and allowed: a document alone against itself at the head of a longer
        one, which no causal layer lets it see. A leak is some hundred times as large. On the way
        the layers are quantised and compiled, so that the test is of what will run. In fp8 the
        kernels are compared before that: after many layers its noise would hide theirs.
        """
        g = torch.Generator().manual_seed(0)
        vocab = self._tower.get_input_embeddings().num_embeddings
        one, two = (torch.randint(vocab, (n,), generator=g) for n in _TEST_LENGTHS)
        plain = self._alone(one)
        found = {"kernels": _distance(self.taps([one]), plain)} if fp8 else {}
        if fp8:
            self.fp8_linears = quantise_linears(layers)
        noise = _distance(self._alone(torch.cat([one, two]))[: len(one)], self._alone(one))
        if self._compiled_row:
            for layer in layers:
                layer.forward = torch.compile(layer.forward, dynamic=False)
        apart = self.taps([one]), self.taps([two])
        together = self.taps([one, two]).split(_TEST_LENGTHS)
        found["rows"] = max(map(_distance, together, apart))
        found["fp8" if fp8 else "kernels"] = _distance(apart[0], plain)
        self.self_test = {"rounding": noise, **found}
        self._check(self._limits(noise))

    def _limits(self, noise: float) -> dict[str, float]:
        eps = torch.finfo(next(self._tower.parameters()).dtype).eps
        rounding = max(_NOISE_FACTOR * noise, 8 * eps, _LEAST_ROUNDING)
        is_other = self._packed.fast and bool(hybrid_names(self._tower))
        return {
            "kernels": max(rounding, _FAST_KERNELS_DIFFER) if is_other else rounding,
            "rows": rounding,
            "fp8": _FP8_DIFFERS,
        }

    def _check(self, limits: Mapping[str, float]) -> None:
        for what, limit in limits.items():
            if what in self.self_test and not self.self_test[what] <= limit:
                raise ValueError(
                    f"{type(self._tower).__name__} fails the self-test of {what}: states differ "
                    f"by {self.self_test[what]:.1%} where rounding explains {limit:.1%}; "
                    f"{_CAUSES[what]}"
                )

    def _alone(self, ids_T: Tensor) -> Tensor:
        self._packed.alone(ids_T)
        return self._take()

    def _keeper(self, layer_id: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            self._states_1ND[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    def _keep_final(self, *, after_norm: bool) -> None:
        norm = getattr(self._tower, "norm", None)
        if not isinstance(norm, nn.Module):
            raise ValueError(
                f"{type(self._tower).__name__} has no final norm to take the last hidden state "
                "at; extract without --final-hidden"
            )

        def keep(_norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._states_1ND[_FINAL] = output if after_norm else inputs[0]

        norm.register_forward_hook(keep)


def _distance(ours_NLD: Tensor, theirs_NLD: Tensor) -> float:
    """Relative L2 distance, mean over tokens, of the worst tap; inf if it is not finite.

    By token, because the first one of a document is a hundred times as loud as the others.
    """
    theirs_NLD = theirs_NLD.double()
    apart_NL = (ours_NLD.double() - theirs_NLD).norm(dim=2)
    relative_NL = apart_NL / theirs_NLD.norm(dim=2).clamp(min=1e-30)
    return float(relative_NL.mean(0).nan_to_num(torch.inf).max())


def _decoder_layers(tower: Any) -> nn.ModuleList:
    depth = tower.config.num_hidden_layers
    for module in tower.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"{type(tower).__name__} has no list of {depth} decoder layers to tap")


def _flop_per_token(layers: nn.ModuleList, config: Any) -> float:
    """Two for each weight that a token meets; of a mixture's experts those it is sent to."""
    names = ("num_experts", "num_local_experts")
    experts = next((vars(config)[name] for name in names if vars(config).get(name)), None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    return 2 * sum(
        weight.numel() * (share if ".experts." in name else 1.0)
        for name, weight in layers.named_parameters()
        if weight.ndim > 1
    )


@dataclass(frozen=True, eq=False)
class FrozenEnds:
    """What the drafter borrows from the target and never trains."""

    embedding: Tensor
    """[V, D]"""
    lm_head: Tensor
    """[V, D]; the same tensor where the target ties its ends"""

    @property
    def tied(self) -> bool:
        return self.lm_head is self.embedding

    @classmethod
    def load(cls, folder: Path, *, device: torch.device | str, dtype: torch.dtype) -> "FrozenEnds":
        """From the folder's safetensors. ValueError or FileNotFoundError names what is missing."""
        weights = Weights(folder, device)
        embedding = weights.first(EMBEDDING_KEYS, dtype)
        if _is_tied(weights):
            return cls(embedding, embedding)
        lm_head = weights.first(LM_HEAD_KEYS, dtype)
        if lm_head.shape != embedding.shape:
            raise ValueError(
                f"{folder}: lm_head is {tuple(lm_head.shape)}, the embedding "
                f"{tuple(embedding.shape)}; a drafter needs both alike"
            )
        return cls(embedding, lm_head)


def load_final_norm(folder: Path, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The target's last norm, as its own class computes it: in Qwen3.5 the gain is 1 + weight."""
    weights = Weights(folder, device)
    tower = build_skeleton(folder, depth=1, dtype=dtype, trust_remote_code=False)
    part = next(p for p in weights.parts(tower.state_dict()) if p.target == "norm.weight")
    gain = torch.empty(part.stored.shape, dtype=dtype, device=weights.device)
    weights.copy(part.stored, gain)
    norm: nn.Module = tower.norm
    norm.load_state_dict({"weight": gain}, assign=True)
    return norm.requires_grad_(False)


def _is_tied(weights: Weights) -> bool:
    """As the config says; if it says nothing, whether a head of its own is missing."""
    config = Facts.read(weights.folder / "config.json")
    for part in (config, config.inner("text_config")):
        if part.has("tie_word_embeddings"):
            return bool(part.flag("tie_word_embeddings", None))
    return not any(key in weights for key in LM_HEAD_KEYS)
