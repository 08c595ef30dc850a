"""Hidden states -> planes of small integers and back, in torch ops that run where the states are.

`raw` keeps the bf16 bits: 2 bytes a value, no error. `lossless` keeps them too, as a plane of
exponents, which zstd shrinks to some 3 bits, and a plane of signs and mantissas, which nothing
shrinks: 1.4 bytes a value, at the price of zstd on the CPU for every read. `int8` divides each
channel by a scale that was fixed once from a sample of the corpus, then stores 8-bit codes with
one bf16 scale per token, layer and group of channels: 1.016 bytes a value, a median error near
0.8 % of a token's norm.
The channel scale is what makes eight bits enough: a few channels are 15 to 200 times louder than
the rest on every token, and would take the whole range of codes for themselves.

N tokens, L tapped layers, D hidden, G groups of a layer's channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GROUP_SIZES = (128, 64, 32)
# A channel's scale is at least this share of its layer's median one. Channels that were silent in
# the sample may speak later; with a scale near zero they would drown their whole group.
_LOWEST_CHANNEL_SCALE = 1 / 64
_LARGEST_CODE = 127
_CPU_BLOCK_TOKENS = 16
# bf16's smallest normal number. Smaller group scales lose the bits that the error bound rests on.
_LOWEST_GROUP_SCALE = 2.0**-126


@dataclass(frozen=True)
class ArraySpec:
    """One plane as an array on disk."""

    shape_per_token: tuple[int, ...]
    dtype: str
    fill: int
    """What an array that was never written reads as."""
    logical_dtype: str | None = None
    """What the bits mean, where `dtype` does not say it."""
    fill_is_illegal: bool = True
    """Whether no encoded state ever takes the value `fill`."""
    compressed: bool = False
    """Whether an entropy coder pays: codes that use their range well only cost it time."""


@dataclass(frozen=True)
class RawCodec:
    """The bf16 bits themselves, as uint16: no array format has a bf16 of its own."""

    layers: int
    width: int
    name: str = "raw"

    def arrays(self) -> dict[str, ArraySpec]:
        return {"bits": ArraySpec((self.layers, self.width), "uint16", 0xFFFF, "bfloat16")}

    def encode(self, taps_NLD: Tensor) -> dict[str, Tensor]:
        return {"bits": taps_NLD.contiguous().view(torch.uint16)}

    def decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        return planes["bits"].view(torch.bfloat16)

    def recipe(self) -> dict[str, Any]:
        return {"name": self.name, "layers": self.layers, "width": self.width}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def to(self, device: torch.device | str) -> "RawCodec":
        return self


@dataclass(frozen=True)
class LosslessCodec:
    """The bf16 bits in two planes: sign and mantissa are noise, exponents are nearly constant.

    Coding the exponents alone comes within 2 % of their entropy (2.7 to 2.9 bits on SmolLM2), and
    the halves are joined where the states are wanted, by integer operations.
    """

    layers: int
    width: int
    name: str = "lossless"

    def arrays(self) -> dict[str, ArraySpec]:
        shape = (self.layers, self.width)
        return {
            # An exponent of 255 is inf or NaN, which no writer stores.
            "exponents": ArraySpec(shape, "uint8", 0xFF, compressed=True),
            "signs_mantissas": ArraySpec(shape, "uint8", 0xFF, fill_is_illegal=False),
        }

    def encode(self, taps_NLD: Tensor) -> dict[str, Tensor]:
        return _joined([self._encode(part_NLD) for part_NLD in _blocks(taps_NLD)])

    def decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        return _cat([self._decode(part) for part in _plane_blocks(planes)])

    def _encode(self, taps_NLD: Tensor) -> dict[str, Tensor]:
        bits = taps_NLD.contiguous().view(torch.int16).int()
        return {
            "exponents": ((bits >> 7) & 0xFF).to(torch.uint8),
            "signs_mantissas": ((bits >> 8) & 0x80 | (bits & 0x7F)).to(torch.uint8),
        }

    def _decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        exponents, rest = planes["exponents"].int(), planes["signs_mantissas"].int()
        bits = (rest & 0x80) << 8 | exponents << 7 | rest & 0x7F
        return bits.to(torch.int16).view(torch.bfloat16)

    def recipe(self) -> dict[str, Any]:
        return {"name": self.name, "layers": self.layers, "width": self.width}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def to(self, device: torch.device | str) -> "LosslessCodec":
        return self


@dataclass(frozen=True, eq=False)
class Int8Codec:
    """state = code x group scale x channel scale.

    Error of a value: at most half a code, that is 1/254 of its group's largest state after the
    division by the channel scales, plus the last rounding to bf16.
    """

    layers: int
    width: int
    group: int
    channel_scale_LD: Tensor
    """float32, at least 1: dividing by it can never overflow."""
    name: str = "int8"

    def arrays(self) -> dict[str, ArraySpec]:
        groups = (self.layers, self.width // self.group)
        return {
            "codes": ArraySpec((self.layers, self.width), "int8", -128),
            "scales": ArraySpec(groups, "uint16", 0xFFFF, "bfloat16"),  # the fill is a NaN
        }

    def encode(self, taps_NLD: Tensor) -> dict[str, Tensor]:
        return _joined([self._encode(part_NLD) for part_NLD in _blocks(taps_NLD)])

    def decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        return _cat([self._decode(part) for part in _plane_blocks(planes)])

    def _encode(self, taps_NLD: Tensor) -> dict[str, Tensor]:
        even_NLGd = (taps_NLD / self.channel_scale_LD).unflatten(-1, (-1, self.group))
        top_NLG = torch.linalg.vector_norm(even_NLGd, torch.inf, dim=-1)
        # Divide by the scale as it is stored, or its rounding adds to the error. Rounded down by
        # bf16's 2^-8 it gives 127.496 at most, which still rounds to the largest code.
        scales_NLG = top_NLG.div_(_LARGEST_CODE).clamp_(min=_LOWEST_GROUP_SCALE).bfloat16()
        codes_NLGd = even_NLGd.div_(scales_NLG.float()[..., None]).round_()
        return {
            "codes": codes_NLGd.to(torch.int8).flatten(-2),
            "scales": scales_NLG.view(torch.uint16),
        }

    def _decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        scales_NLG = planes["scales"].view(torch.bfloat16).float()
        even_NLGd = planes["codes"].unflatten(-1, (-1, self.group)) * scales_NLG[..., None]
        taps_NLD: Tensor = even_NLGd.flatten(-2) * self.channel_scale_LD
        return taps_NLD.bfloat16()

    def recipe(self) -> dict[str, Any]:
        sizes = {"layers": self.layers, "width": self.width, "group": self.group}
        return {"name": self.name, **sizes}

    def tensors(self) -> dict[str, Tensor]:
        return {"channel_scale": self.channel_scale_LD}

    def to(self, device: torch.device | str) -> "Int8Codec":
        scale_LD = self.channel_scale_LD.to(device)
        return Int8Codec(self.layers, self.width, self.group, scale_LD)


# One interface: `arrays` lists the planes, whose first axis is the token; `encode` and `decode`
# stay on the device of what they are given; `recipe` (JSON) and `tensors` are all that decoding
# needs.
Codec = RawCodec | LosslessCodec | Int8Codec


def needs_calibration(name: str) -> bool:
    """Whether `make_codec` must be shown a sample of hidden states."""
    return name == "int8"


def make_codec(name: str, *, layers: int, width: int, calibration: Tensor | None = None) -> Codec:
    """A new codec; int8 is calibrated on `calibration`, bf16 [N, L, D]."""
    if name == "raw":
        return RawCodec(layers, width)
    if name == "lossless":
        return LosslessCodec(layers, width)
    if name != "int8":
        raise ValueError(f"there is no codec {name!r}; choose int8, lossless or raw")
    group = next((size for size in GROUP_SIZES if width % size == 0), None)
    if group is None:
        raise ValueError(
            f"codec int8 needs a width that 32 divides, but the target's is {width}; use raw"
        )
    assert calibration is not None and calibration.shape[1:] == (layers, width)
    return Int8Codec(layers, width, group, _channel_scale(calibration))


def load_codec(recipe: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Codec:
    """The codec that `recipe` and `tensors` describe, as a codec's own methods gave them."""
    if recipe["name"] == "raw":
        return RawCodec(recipe["layers"], recipe["width"])
    if recipe["name"] == "lossless":
        return LosslessCodec(recipe["layers"], recipe["width"])
    if recipe["name"] != "int8":
        raise ValueError(f"codec {recipe['name']!r} is unknown here; upgrade dflash-offline")
    sizes = (recipe["layers"], recipe["width"], recipe["group"])
    return Int8Codec(*sizes, tensors["channel_scale"])


def _blocks(x: Tensor) -> Sequence[Tensor]:
    """Tokens to be coded at once: on a CPU few enough that float32 copies stay in its cache."""
    return x.split(_CPU_BLOCK_TOKENS) if x.device.type == "cpu" and len(x) else (x,)


def _plane_blocks(planes: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for parts in zip(*map(_blocks, planes.values()), strict=True):
        yield dict(zip(planes, parts, strict=True))


def _joined(blocks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: _cat([block[name] for block in blocks]) for name in blocks[0]}


def _cat(blocks: Sequence[Tensor]) -> Tensor:
    """Without a copy where there is but one."""
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


def refuse_non_finite(taps_NLD: Tensor, what: str) -> None:
    """ValueError if a state is inf or NaN. Waits for the device."""
    bad = int((~taps_NLD.isfinite()).flatten(1).any(1).sum())
    if bad:
        raise ValueError(
            f"{bad} of {len(taps_NLD)} tokens of {what} have hidden states that are inf or NaN; "
            "run the target in another precision (--dtype float32)"
        )


def _channel_scale(taps_NLD: Tensor) -> Tensor:
    """Median |x| per channel, float32 [L, D], in units of the lowest scale allowed in the layer.

    The unit is free, since group scales take it up; this one keeps every scale at 1 or above.
    """
    refuse_non_finite(taps_NLD, "the calibration sample")
    # By layer, because the float32 copy of a whole sample is twice its size.
    median_LD = torch.stack([layer.abs().float().median(0).values for layer in taps_NLD.unbind(1)])
    for median_D in median_LD:
        speaking = median_D[median_D > 0]
        usual = float(speaking.median()) if len(speaking) else 1.0
        median_D.div_(max(usual * _LOWEST_CHANNEL_SCALE, 2.0**-126)).clamp_(1.0, 2.0**30)
    return median_LD


def measure(taps_NLD: Tensor, decoded_NLD: Tensor) -> Tensor:
    """Facts per token and layer, float32 [N, L, 4]: mean, rms, max |x|, relative L2 error.

    Made on the device without waiting for it. Inf or NaN in a state or its decoded form shows up
    in the facts. Squares are taken of x / max |x|, so that large states do not overflow.
    """
    taps_NLD = taps_NLD.float()
    top_NL1 = taps_NLD.abs().amax(-1, keepdim=True)
    unit_NL1 = top_NL1.clamp(min=torch.finfo(torch.float32).tiny)
    norm_NL = (taps_NLD / unit_NL1).square().mean(-1).sqrt()
    error_NL = ((decoded_NLD.float() - taps_NLD) / unit_NL1).square().mean(-1).sqrt()
    relative_NL = torch.where(norm_NL > 0, error_NL / norm_NL, error_NL)
    facts = (taps_NLD.mean(-1), norm_NL * unit_NL1[..., 0], top_NL1[..., 0], relative_NL)
    return torch.stack(facts, -1)
