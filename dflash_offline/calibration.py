"""Codecs fitted to a seeded sample of the corpus, and refused if they are too coarse for it.

A sample of 16,384 tokens takes the target one row; an error that only the first shard would show
takes hours to appear.

N tokens of the sample, L tapped layers (and the final hidden state after them, if it is stored), D
hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_offline.codec import Codec, make_codec, measure, needs_calibration
from dflash_offline.config import ExtractConfig
from dflash_offline.documents import Document
from dflash_offline.halving import Halving
from dflash_offline.metrics import progress
from dflash_offline.planning import draw_sample, pack_rows, row_length
from dflash_offline.quarantine import all_broken


def needs_sample(config: ExtractConfig) -> bool:
    """Whether a codec is fitted to hidden states."""
    names = [config.codec, *([config.final_codec] if config.final_hidden != "none" else [])]
    return any(map(needs_calibration, names))


def run_sample(target: Halving, documents: Sequence[Document], config: ExtractConfig) -> Tensor:
    """States bf16 [N, L, D] of documents drawn from the whole corpus, to calibrate codecs on.

    They stay on the target's device: medians of 16,384 tokens take 10 s on one CPU core.
    """
    sample = draw_sample(documents, config.calibration_tokens, config.seed)
    parts: list[Tensor] = []
    with progress("calibrating the codec", total=sum(map(len, sample)), unit="tok") as bar:
        for row in pack_rows(sample, target.row_tokens):
            parts += [sound_NLD for _, sound_NLD in target.run(row, _finite)]
            bar.advance(row_length(row))
    sample_NLD = torch.cat(parts)
    if not len(sample_NLD):
        raise ValueError(all_broken(len(sample)))
    return sample_NLD


def _finite(taps_NLD: Tensor) -> Tensor:
    return taps_NLD[taps_NLD.isfinite().flatten(1).all(1)]


def fit_codecs(
    config: ExtractConfig, layers: int, width: int, sample_NLD: Tensor | None
) -> tuple[Codec, Codec | None]:
    """The codec of the taps and that of the final hidden state, if this is to be stored."""

    def fit(name: str, part: slice, what: str) -> Codec:
        own_NLD = None if sample_NLD is None else sample_NLD[:, part]
        sizes = {"layers": part.stop - part.start, "width": width}
        codec = make_codec(name, **sizes, calibration=own_NLD)
        if own_NLD is not None:
            _refuse_error(codec, own_NLD, config.max_codec_error, what)
        return codec

    codec = fit(config.codec, slice(0, layers), "the tapped layers")
    if config.final_hidden == "none":
        return codec, None
    final = slice(layers, layers + 1)
    return codec, fit(config.final_codec, final, "the final hidden state")


def _refuse_error(codec: Codec, sample_NLD: Tensor, limit: float, what: str) -> None:
    """ValueError if the codec is too coarse for its own sample: hours before a shard says so."""
    errors_NL = torch.cat(
        [measure(part, codec.decode(codec.encode(part)))[..., 3] for part in sample_NLD.split(512)]
    )
    worst = float(errors_NL.double().quantile(0.99, dim=0).max())
    if worst > limit:
        raise ValueError(
            f"codec {codec.name} stores {what} of the calibration sample with a relative error of "
            f"{worst:.1%} (p99 over tokens), above {limit:.1%}; use lossless (--codec, "
            "--final-codec), or raise --max-codec-error"
        )
