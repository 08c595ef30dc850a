"""Codecs that the product leaves out, to be compared with those it has.

Each has the product's `encode` and `decode` and keeps its scales in bf16, on the device of the
states. FP8 is what peers store: a scale per token and layer, three bits of mantissa. Packed codes
are what a smaller `int8` would be: 6 or 4 bits, with loud channels evened out either by the
product's channel scales or by a rotation. Price of a rotation: one small GEMM each way, and noise
of the loud channels in the quiet ones.

N tokens, L tapped layers, D hidden, G groups of a layer's channels.
"""

from dataclasses import dataclass

import torch

from dflash_offline.codec import load_codec, make_codec

LOWEST_SCALE = 2.0**-126  # bf16's smallest normal number
LARGEST_E4M3 = 448
HADAMARD = 64


@dataclass(frozen=True)
class E4m3Codec:
    """state = FP8 code x scale of its token and layer."""

    def encode(self, taps_NLD):
        scales_NL1 = stored_scales(taps_NLD.float(), LARGEST_E4M3)
        codes_NLD = (taps_NLD.float() / scales_NL1.float()).to(torch.float8_e4m3fn)
        return {"codes": codes_NLD, "scales": scales_NL1}

    def decode(self, planes):
        return (planes["codes"].float() * planes["scales"].float()).bfloat16()


@dataclass(frozen=True, eq=False)
class PackedCodec:
    """state = code x group scale, in an evened space; the codes fill whole bytes.

    Four bits of a code are in the plane `low`; of six, the other two are in `high`.
    """

    bits: int
    group: int
    evener: "ChannelScale | Rotation"

    def encode(self, taps_NLD):
        even_NLGd = self.evener.apply(taps_NLD.float()).unflatten(-1, (-1, self.group))
        scales_NLG1 = stored_scales(even_NLGd, self.largest)
        codes_NLGd = (even_NLGd / scales_NLG1.float()).round() + self.largest
        codes_NLD = codes_NLGd.to(torch.uint8).flatten(-2)
        planes = {"low": pack(codes_NLD & 15, 4), "scales": scales_NLG1}
        return planes | ({"high": pack(codes_NLD >> 4, 2)} if self.bits == 6 else {})

    def decode(self, planes):
        codes_NLD = unpack(planes["low"], 4)
        if self.bits == 6:
            codes_NLD |= unpack(planes["high"], 2) << 4
        codes_NLGd = (codes_NLD.float() - self.largest).unflatten(-1, (-1, self.group))
        return self.evener.undo((codes_NLGd * planes["scales"].float()).flatten(-2)).bfloat16()

    @property
    def largest(self):
        return 2 ** (self.bits - 1) - 1


@dataclass(frozen=True, eq=False)
class ChannelScale:
    """Each channel divided by its fixed scale."""

    scale_LD: torch.Tensor

    def apply(self, taps_NLD):
        return taps_NLD / self.scale_LD

    def undo(self, even_NLD):
        return even_NLD * self.scale_LD


@dataclass(frozen=True, eq=False)
class Rotation:
    """Random signs, then a Hadamard matrix over each run of h channels; it is its own inverse."""

    signs_D: torch.Tensor
    hadamard_hh: torch.Tensor

    @classmethod
    def random(cls, width, device):
        generator = torch.Generator().manual_seed(0)
        signs_D = torch.randint(2, (width,), generator=generator) * 2.0 - 1
        return cls(signs_D.to(device), hadamard(HADAMARD).to(device))

    def apply(self, taps_NLD):
        return self._turn(taps_NLD * self.signs_D)

    def undo(self, even_NLD):
        return self._turn(even_NLD) * self.signs_D

    def _turn(self, values_NLD):
        runs = values_NLD.unflatten(-1, (-1, len(self.hadamard_hh)))
        return (runs @ self.hadamard_hh).flatten(-2)


def family(calibration_NLD):
    """Every codec of the comparison by its title, calibrated and on the sample's device."""
    _, layers, width = calibration_NLD.shape
    size = {"layers": layers, "width": width}
    raw, lossless, int8 = (
        make_codec(name, **size, calibration=calibration_NLD).to(calibration_NLD.device)
        for name in ("raw", "lossless", "int8")
    )
    scale_LD = int8.tensors()["channel_scale"]
    scaled = ChannelScale(scale_LD)
    rotated = Rotation.random(width, calibration_NLD.device)
    return {
        "raw": raw,
        "lossless": lossless,
        "int8": int8,
        "int8, no channel scale": load_codec(
            int8.recipe(), {"channel_scale": torch.ones_like(scale_LD)}
        ),
        "e4m3, scale per token": E4m3Codec(),
        "int6 g64, channel scale": PackedCodec(6, 64, scaled),
        "int6 g64, Hadamard": PackedCodec(6, 64, rotated),
        "int4 g32, channel scale": PackedCodec(4, 32, scaled),
        "int4 g64, Hadamard": PackedCodec(4, 64, rotated),
    }


def stored_scales(values, largest):
    """bf16 [..., 1]: what makes the loudest of the last axis `largest`; never zero.

    Its rounding lets the loudest miss `largest` by 1/256, which no code here is fine enough to
    tell; so none needs a clamp.
    """
    loudest = values.abs().amax(-1, keepdim=True)
    return loudest.div(largest).clamp(min=LOWEST_SCALE).bfloat16()


def pack(codes, bits):
    """uint8 [..., D * bits / 8] of codes of 4 or 2 bits, uint8 [..., D].

    A byte holds codes that are D * bits / 8 channels apart, so both ways go over whole runs.
    """
    first, *others = codes.chunk(8 // bits, -1)
    for place, part in enumerate(others, 1):
        first = first | part << bits * place
    return first


def unpack(plane, bits):
    """What `pack` was given."""
    mask = 2**bits - 1
    return torch.cat([plane >> bits * place & mask for place in range(8 // bits)], -1)


def hadamard(size):
    """Sylvester's matrix of a power of two, orthonormal and symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5
