"""Codecs against hand-written loops, on benign and hostile hidden states."""

import numpy as np
import pytest
import torch

from dflash_offline.codec import load_codec, make_codec, measure, needs_calibration


def bf16_states(tokens, layers, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, layers, width, generator=generator).bfloat16()


def hostile_states():
    """What residual streams really do, and more: each oddity in tokens or channels of its own."""
    taps = bf16_states(61, 3, 192, seed=1)
    taps[:, :, 7] *= 200  # a channel that is always loud
    taps[0] *= 150  # a sink token, whose energy sits in one channel
    taps[0, 1, 50] = 23_808
    taps[:, :, 64:128] *= 2.0**-20  # a whole group of nearly dead channels
    taps[:, :, 130] = 0  # a dead channel
    taps[9, :, 130] = 40  # ... that speaks once
    taps[5] = 0  # a token of zeros
    taps[6] = 1e-40  # subnormals
    taps[7, 0] = 1e30
    taps[:, 2] *= 1e-6  # a quiet layer
    return taps


def bf16_from_bits(bits):
    """uint16 bf16 bits -> float32, as IEEE says: the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def decode_by_loop(codes, scales, channel_scale, group):
    tokens, layers, width = codes.shape
    values = np.zeros(codes.shape, np.float32)
    scale = bf16_from_bits(scales)
    for n in range(tokens):
        for layer in range(layers):
            for d in range(width):
                step = np.float32(codes[n, layer, d]) * scale[n, layer, d // group]
                values[n, layer, d] = step * channel_scale[layer, d]
    return values


@pytest.mark.parametrize("name", ["raw", "lossless"])
def test_exact_codecs_restore_every_bit_pattern(name):
    taps = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16).reshape(-1, 2, 16)
    codec = make_codec(name, layers=2, width=16)
    planes = codec.encode(taps)
    for plane, spec in codec.arrays().items():
        assert str(planes[plane].dtype) == f"torch.{spec.dtype}"
        assert planes[plane].shape == (len(taps), *spec.shape_per_token)
    assert torch.equal(codec.decode(planes).view(torch.int16), taps.view(torch.int16))


@pytest.mark.parametrize("name", ["raw", "lossless"])
def test_exact_codecs_take_a_strided_view(name):
    taps = bf16_states(4, 6, 8)[:, ::2]
    codec = make_codec(name, layers=3, width=8)
    assert torch.equal(codec.decode(codec.encode(taps)), taps)


def test_lossless_planes_are_exponent_and_sign_with_mantissa():
    taps = bf16_states(9, 2, 32) * 3.0
    planes = make_codec("lossless", layers=2, width=32).encode(taps)
    mantissa, exponent = np.frexp(taps.float().numpy())  # mantissa in [0.5, 1)
    assert np.array_equal(planes["exponents"].numpy(), exponent + 126)
    rest = planes["signs_mantissas"].numpy()
    assert np.array_equal(rest >= 128, mantissa < 0)
    assert np.array_equal((rest & 127) / 128, np.abs(mantissa) * 2 - 1)


def test_fill_values_are_taken_by_no_finite_state():
    finite = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16)
    finite = finite[finite.isfinite()].reshape(-1, 1, 32)
    planes = make_codec("lossless", layers=1, width=32).encode(finite)
    assert int(planes["exponents"].max()) < 0xFF


def test_int8_decodes_as_a_loop_over_codes_and_scales_does():
    taps = bf16_states(9, 2, 96)
    codec = make_codec("int8", layers=2, width=96, calibration=taps)
    planes = codec.encode(taps)
    expected = decode_by_loop(
        planes["codes"].numpy(),
        planes["scales"].numpy(),
        codec.tensors()["channel_scale"].numpy(),
        group=32,
    )
    assert torch.equal(codec.decode(planes), torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("calibrate_on", [bf16_states(32, 3, 192, seed=2), hostile_states()])
def test_int8_keeps_its_error_bound_on_hostile_states(calibrate_on):
    taps = hostile_states()
    codec = make_codec("int8", layers=3, width=192, calibration=calibrate_on)
    planes = codec.encode(taps)
    decoded = codec.decode(planes).double().numpy()
    exact = taps.double().numpy()
    channel_scale = codec.tensors()["channel_scale"].double().numpy()
    assert np.isfinite(channel_scale).all() and (channel_scale >= 1).all()
    assert np.isfinite(decoded).all()
    codes = planes["codes"].numpy()
    assert codes.min() >= -127
    # A scale of zero would make codes of 0 / 0, which each device casts to another integer.
    assert bf16_from_bits(planes["scales"].numpy()).min() >= 2.0**-126
    group = codec.recipe()["group"]
    assert group == 64
    for layer in range(3):
        for start in range(0, 192, group):
            part = slice(start, start + group)
            scale = channel_scale[layer, part]
            loudest = np.abs(exact[:, layer, part] / scale).max(1, keepdims=True)
            # Half a code; a scale is rounded to bf16 by at most 1/256, and is 2**-126 at least.
            bound = 0.5 * np.maximum(loudest / 127 * (1 + 1 / 256), 2.0**-126) * scale
            bound = bound + np.abs(exact[:, layer, part]) / 200  # the last rounding to bf16
            error = np.abs(decoded[:, layer, part] - exact[:, layer, part])
            assert (error <= bound).all()


def test_int8_gives_zeros_for_zeros():
    codec = make_codec("int8", layers=1, width=64, calibration=bf16_states(8, 1, 64))
    zeros = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    assert torch.equal(codec.decode(codec.encode(zeros)), zeros)


def test_int8_calibrated_on_silence_is_plain_group_quantisation():
    silence = torch.zeros(8, 1, 64, dtype=torch.bfloat16)
    codec = make_codec("int8", layers=1, width=64, calibration=silence)
    assert len(codec.tensors()["channel_scale"].unique()) == 1
    taps = bf16_states(50, 1, 64)
    decoded = codec.decode(codec.encode(taps)).float()
    relative = (decoded - taps.float()).norm(dim=-1) / taps.float().norm(dim=-1)
    assert relative.max() < 0.02


def test_channel_scale_is_proportional_to_the_median_and_clamped_from_below():
    taps = bf16_states(31, 1, 32)
    taps[:, 0, 3] *= 1000
    taps[:, 0, 4] = 0
    scale = make_codec("int8", layers=1, width=32, calibration=taps).tensors()["channel_scale"][0]
    medians = np.median(np.abs(taps[:, 0].float().numpy()), axis=0)
    alive = medians > 0
    np.testing.assert_allclose(
        (scale.numpy() / scale[0].item())[alive], (medians / medians[0])[alive], rtol=1e-5
    )
    assert scale[4] == 1.0


def test_loud_channels_cost_the_quiet_ones_little():
    taps = bf16_states(400, 2, 256, seed=3)
    taps[:, :, ::50] *= 200
    codec = make_codec("int8", layers=2, width=256, calibration=taps[:200])
    error = (codec.decode(codec.encode(taps[200:])).float() - taps[200:].float()).abs()
    quiet = torch.ones(256, dtype=torch.bool)
    quiet[::50] = False
    relative = error[..., quiet].norm(dim=-1) / taps[200:][..., quiet].float().norm(dim=-1)
    assert relative.median() < 0.01


@pytest.mark.parametrize(("width", "group"), [(5120, 128), (576, 64), (96, 32), (32, 32)])
def test_group_is_the_largest_that_divides_the_width(width, group):
    codec = make_codec("int8", layers=1, width=width, calibration=bf16_states(3, 1, width))
    assert codec.recipe()["group"] == group
    assert codec.arrays()["scales"].shape_per_token == (1, width // group)


def test_int8_at_5_by_5120_takes_half_of_bf16():
    codec = make_codec("int8", layers=5, width=5120, calibration=bf16_states(2, 5, 5120))
    specs = codec.arrays().values()
    size = sum(np.prod(s.shape_per_token) * np.dtype(s.dtype).itemsize for s in specs)
    assert size == 26_000


def test_width_that_no_group_divides_is_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match="width that 32 divides, but the target's is 100; use raw"
    ):
        make_codec("int8", layers=1, width=100, calibration=bf16_states(2, 1, 100))


def test_unknown_codec_is_refused():
    with pytest.raises(ValueError, match="no codec 'zip'"):
        make_codec("zip", layers=1, width=32)
    with pytest.raises(ValueError, match="'later' is unknown"):
        load_codec({"name": "later"}, {})


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_calibration_is_refused(bad):
    taps = bf16_states(5, 1, 32)
    taps[3, 0, 1] = bad
    with pytest.raises(ValueError, match="1 of 5 tokens of the calibration sample"):
        make_codec("int8", layers=1, width=32, calibration=taps)


def test_codec_survives_recipe_and_tensors():
    taps = bf16_states(40, 2, 64)
    for name in ("raw", "lossless", "int8"):
        codec = make_codec(name, layers=2, width=64, calibration=taps)
        again = load_codec(codec.recipe(), codec.tensors()).to("cpu")
        planes = codec.encode(taps)
        assert torch.equal(again.decode(planes), codec.decode(planes))
        assert bool(codec.tensors()) == needs_calibration(name)


def test_measured_facts_are_those_of_float64_arithmetic():
    taps = hostile_states()
    decoded = (taps.float() * 1.01).bfloat16()
    facts = measure(taps, decoded).double().numpy()
    exact, other = taps.double().numpy(), decoded.double().numpy()
    norm = np.sqrt((exact**2).sum(-1))
    error = np.sqrt(((other - exact) ** 2).sum(-1))
    np.testing.assert_allclose(facts[..., 2], np.abs(exact).max(-1), rtol=1e-6)
    np.testing.assert_allclose(facts[..., 1], norm / np.sqrt(192), rtol=1e-5, atol=1e-44)
    ordinary = np.delete(np.arange(61), [5, 6])  # neither zeros nor subnormals
    np.testing.assert_allclose(facts[ordinary, :, 3], error[ordinary] / norm[ordinary], rtol=1e-4)
    assert (facts[5] == 0).all()
    mean_error = np.abs(facts[..., 0] - exact.mean(-1))
    assert (mean_error <= 1e-6 * np.abs(exact).max(-1)).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_state_shows_in_its_facts(bad):
    taps = bf16_states(3, 2, 32)
    taps[1, 0, 5] = bad
    finite = measure(taps, taps).isfinite().all(-1)
    assert finite.tolist() == [[True, True], [False, True], [True, True]]
