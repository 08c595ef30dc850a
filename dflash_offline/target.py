"""The frozen target: hidden states of its tapped layers, and the two matrices at its ends.

TappedTarget runs the text tower only as deep as the deepest tap: no lm_head, no vision tower, no
layer above. Forward hooks keep references to the tapped layers' outputs; layers add out of place,
so nothing is copied. Documents run side by side in rows without padding (packed.py). The price is
that a state may differ by rounding with its place in a row; that nothing else differs is tested
each time a target is loaded.

FrozenEnds reads embedding and lm_head straight from the safetensors; the target is not loaded.

Letters: T tokens of a document, N of a row, L tapped layers, D hidden, V vocabulary rows.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.utils import logging as transformers_logging

from dflash_offline.facts import Facts, failing_as, read_json, reason, shown
from dflash_offline.fp8 import quantise_linears
from dflash_offline.packed import PackedTower, has_fast_kernels, hybrid_names

_FINAL = -1  # the final hidden state's place among the layers' outputs
# Of the documents that the self-test runs together: neither divides the delta rule's chunk of 64.
_TEST_LENGTHS = (70, 133)
_NOISE_FACTOR = 5
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
        self._packed = PackedTower(tower, fast=has_fast_kernels(self.device))
        self._states_1ND: dict[int, Tensor] = {}
        self._kept = tuple(layer_ids)
        layers = _decoder_layers(tower)
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
        With `compiled_row` its layers are compiled for rows of that many tokens, which takes half
        a minute and saves a sixth of the time. ValueError says why the folder cannot be loaded.
        """
        _weight_files(folder)  # a damaged file is named here; transformers names none
        depth = max(target_layer_ids) + 1 if final_hidden == "none" else None
        # The weights left out on purpose would fill a screen.
        with failing_as(f"{folder} cannot be loaded as a target"), _quiet():
            tower, loading = AutoModel.from_pretrained(
                folder,
                config=_config_up_to(folder, depth, trust_remote_code),
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # named below; transformers only logs them
                output_loading_info=True,
            )
        _check_loaded(folder, loading)
        tower = tower.to(device).eval().requires_grad_(False)
        return cls(
            tower,
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
        step = self._compiled_row or 1
        self._packed.row(documents, -(-tokens // step) * step)
        return self._take()[:tokens]

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
        the layers are quantised and compiled, so that the test is of what will run.
        """
        g = torch.Generator().manual_seed(0)
        vocab = self._tower.get_input_embeddings().num_embeddings
        one, two = (torch.randint(vocab, (n,), generator=g) for n in _TEST_LENGTHS)
        exact = self._alone(one)
        if fp8:
            self.fp8_linears = quantise_linears(layers)
        plain = self._alone(one)
        noise = _distance(self._alone(torch.cat([one, two]))[: len(one)], plain)
        if self._compiled_row:
            for layer in layers:
                layer.forward = torch.compile(layer.forward, dynamic=False)
        apart = self.taps([one]), self.taps([two])
        together = self.taps([one, two]).split(_TEST_LENGTHS)
        self.self_test = {
            "rounding": noise,
            "kernels": _distance(apart[0], plain),
            "rows": max(map(_distance, together, apart)),
            **({"fp8": _distance(plain, exact)} if fp8 else {}),
        }
        eps = torch.finfo(next(self._tower.parameters()).dtype).eps
        rounding = max(_NOISE_FACTOR * noise, 8 * eps)
        is_other = self._packed.fast and bool(hybrid_names(self._tower))
        limits = {
            "kernels": max(rounding, _FAST_KERNELS_DIFFER) if is_other else rounding,
            "rows": rounding,
        }
        for what, limit in limits.items():
            if not self.self_test[what] <= limit:
                raise ValueError(
                    f"{type(self._tower).__name__} fails the self-test of {what}: states differ "
                    f"by {self.self_test[what]:.1%} where rounding explains {limit:.1%}; its "
                    "layers are of a kind that cannot be run over several documents at once"
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
    """Largest relative L2 distance of a tap over all tokens; inf if it is not finite."""
    theirs_NLD = theirs_NLD.double()
    apart_L = (ours_NLD.double() - theirs_NLD).norm(dim=(0, 2)) / theirs_NLD.norm(dim=(0, 2))
    return float(apart_L.nan_to_num(torch.inf).max())


def _config_up_to(folder: Path, depth: int | None, trust_remote_code: bool) -> Any:
    """The config of a text tower of `depth` layers, or of all that it has."""
    text = AutoConfig.from_pretrained(
        folder, trust_remote_code=trust_remote_code
    ).get_text_config()
    if depth is None:
        return text
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    return text


def _check_loaded(folder: Path, loading: dict[str, Any]) -> None:
    """ValueError unless the weights are all there and have the shapes of the config."""
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of its text tower, {', '.join(missing[:3])} "
            "among them; the target's folder is incomplete"
        )
    if mismatched := sorted(loading["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ValueError(
            f"{folder}: {len(mismatched)} weights do not fit its config.json: {name} is "
            f"{tuple(found)}, by the config {tuple(expected)}"
        )


def _decoder_layers(tower: Any) -> nn.ModuleList:
    depth = tower.config.num_hidden_layers
    for module in tower.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"{type(tower).__name__} has no list of {depth} decoder layers to tap")


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of transformers', and no progress bar where nobody watches."""
    verbosity = transformers_logging.get_verbosity()
    hide_bar = transformers_logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    transformers_logging.set_verbosity_error()
    if hide_bar:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if hide_bar:
            transformers_logging.enable_progress_bar()


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
        files = _weight_files(folder)
        embedding = _read(folder, files, EMBEDDING_KEYS).to(device, dtype)
        if _is_tied(folder, files):
            return cls(embedding, embedding)
        lm_head = _read(folder, files, LM_HEAD_KEYS).to(device, dtype)
        if lm_head.shape != embedding.shape:
            raise ValueError(
                f"{folder}: lm_head is {tuple(lm_head.shape)}, the embedding "
                f"{tuple(embedding.shape)}; a drafter needs both alike"
            )
        return cls(embedding, lm_head)


def _is_tied(folder: Path, files: dict[str, Path]) -> bool:
    """As the config says; if it says nothing, whether a head of its own is missing."""
    config = Facts.read(folder / "config.json")
    for part in (config, config.inner("text_config")):
        if part.has("tie_word_embeddings"):
            return bool(part.flag("tie_word_embeddings", None))
    return not any(key in files for key in LM_HEAD_KEYS)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Weight name -> the safetensors file that holds it, sharded or not."""
    files: dict[str, Path] = {}
    for path in _weight_paths(folder):
        with _opened(path) as weights:
            files |= dict.fromkeys(weights.keys(), path)
    if not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file; convert the model first")
    return files


def _weight_paths(folder: Path) -> list[Path]:
    """In transformers' order: one whole file goes before an index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    return _indexed(index) if index.exists() else sorted(folder.glob("*.safetensors"))


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, all of its own folder and of those the identity covers."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index}: weight_map is {shown(names)}; it must name each weight's file")
    for name in names.values():
        is_name = isinstance(name, str) and Path(name).name == name
        if not is_name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index} names {shown(name)}, which is no .safetensors file of that folder"
            )
    return [index.with_name(name) for name in sorted(set(names.values()))]


def _read(folder: Path, files: dict[str, Path], names: Sequence[str]) -> Tensor:
    for name in names:
        if name in files:
            with _opened(files[name]) as weights:
                tensor: Tensor = weights.get_tensor(name)
                return tensor
    raise ValueError(f"{folder} has none of the weights {', '.join(names)}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:  # the latter may name no file
        raise ValueError(f"{path} is not a whole safetensors file: {reason(error)}") from None
