"""The comparators of tests/bench do what their rows claim, by loops that know nothing of them."""

import numpy as np
import pytest
import torch
from bench.comparators import family, hadamard, pack, unpack

TOKENS, LAYERS, WIDTH = 41, 2, 192
BITS = {
    "raw": 16,
    "int8": 8 + 16 / 64,
    "int8, no channel scale": 8 + 16 / 64,
    "e4m3, scale per token": 8 + 16 / WIDTH,
    "int6 g64, channel scale": 6 + 16 / 64,
    "int6 g64, Hadamard": 6 + 16 / 64,
    "int4 g32, channel scale": 4 + 16 / 32,
    "int4 g64, Hadamard": 4 + 16 / 64,
}
BF16_ROUNDING = 1 / 256


def hostile_states():
    """Loud channels, a sink, a silent token, a token of subnormals, a silent channel."""
    g = torch.Generator().manual_seed(5)
    taps = torch.randn(TOKENS, LAYERS, WIDTH, generator=g)
    taps[..., ::50] *= 200
    taps[0] *= 100
    taps[3] = 0
    taps[4] *= 1e-39
    taps[:, 1, 7] = 0
    return taps.bfloat16()


@pytest.fixture(scope="module")
def codecs():
    return family(hostile_states())


def signs_by_parity(size):
    """Sylvester's matrix entry by entry: minus where i and j share an odd number of bits."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


def test_sylvester_matrix_of_four_is_the_one_in_the_books():
    rows = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert torch.equal(hadamard(4), torch.tensor(rows) / 2)


def test_hadamard_matrix_is_orthonormal_and_symmetric():
    matrix = hadamard(64).double().numpy()
    assert np.array_equal(matrix, signs_by_parity(64) / 8)
    assert np.array_equal(matrix @ matrix.T, np.eye(64))


def test_bytes_hold_the_codes_in_known_places():
    codes = torch.tensor([1, 2, 3, 0, 3, 2, 1, 0], dtype=torch.uint8)
    # By twos: channels 0, 2, 4, 6 are the lowest bits upwards of one byte, 1, 3, 5, 7 of another.
    assert pack(codes, 2).tolist() == [
        1 + 3 * 4 + 3 * 16 + 1 * 64,
        2 + 0 * 4 + 2 * 16 + 0 * 64,
    ]
    assert pack(torch.tensor([1, 15, 4, 8], dtype=torch.uint8), 4).tolist() == [0x41, 0x8F]


def test_six_bits_in_two_planes_give_back_all_64_codes():
    codes = torch.arange(64, dtype=torch.uint8).repeat(3, 1)[:, torch.randperm(64)]
    low, high = pack(codes & 15, 4), pack(codes >> 4, 2)
    assert (low.shape, high.shape) == ((3, 32), (3, 16))
    assert torch.equal(unpack(low, 4) | unpack(high, 2) << 4, codes)


@pytest.mark.parametrize("title", BITS)
def test_planes_take_the_bits_of_the_title(codecs, title):
    planes = codecs[title].encode(hostile_states())
    size = sum(plane.nbytes for plane in planes.values())
    assert 8 * size / hostile_states().numel() == pytest.approx(BITS[title], abs=1e-9)


@pytest.mark.parametrize("title", BITS)
def test_zeros_stay_zeros_and_nothing_becomes_nan(codecs, title):
    codec = codecs[title]
    decoded = codec.decode(codec.encode(hostile_states()))
    assert (decoded.dtype, decoded.shape) == (torch.bfloat16, (TOKENS, LAYERS, WIDTH))
    assert decoded.isfinite().all() and (decoded[3] == 0).all()


def test_e4m3_loses_at_most_a_sixteenth_of_a_value_or_half_its_smallest_step(codecs):
    codec, taps = codecs["e4m3, scale per token"], hostile_states()
    exact = taps.double().numpy()
    decoded = codec.decode(codec.encode(taps)).double().numpy()
    for token in range(TOKENS):
        for layer in range(LAYERS):
            x = exact[token, layer]
            scale = max(np.abs(x).max() / 448 * (1 + BF16_ROUNDING), 2.0**-126)
            step = np.maximum(np.abs(x) / 16, scale * 2.0**-10)  # the smallest code is 2**-9
            assert (np.abs(decoded[token, layer] - x) <= allowed(step, np.abs(x))).all()


@pytest.mark.parametrize(("bits", "group"), [(6, 64), (4, 32)])
def test_codes_after_channel_scales_lose_at_most_half_a_step(codecs, bits, group):
    codec, taps = codecs[f"int{bits} g{group}, channel scale"], hostile_states()
    channel_scale = codecs["int8"].tensors()["channel_scale"].double().numpy()
    exact = taps.double().numpy()
    decoded = codec.decode(codec.encode(taps)).double().numpy()
    for layer in range(LAYERS):
        for start in range(0, WIDTH, group):
            part = slice(start, start + group)
            scale = channel_scale[layer, part]
            for token in range(TOKENS):
                x = exact[token, layer, part]
                bound = allowed(half_step(x / scale, bits) * scale, np.abs(x))
                assert (np.abs(decoded[token, layer, part] - x) <= bound).all()


def test_int8_without_channel_scale_is_scaled_by_the_loudest_state_of_a_group(codecs):
    codec, taps = codecs["int8, no channel scale"], hostile_states()
    scales = codec.encode(taps)["scales"].view(torch.bfloat16).double().numpy()
    groups = np.abs(taps.double().numpy()).reshape(TOKENS, LAYERS, 3, 64)
    expected = np.maximum(groups.max(-1) / 127, 2.0**-126)
    np.testing.assert_allclose(scales, expected, rtol=BF16_ROUNDING)


@pytest.mark.parametrize("bits", [6, 4])
def test_rotated_codes_lose_at_most_half_a_step_per_rotated_value(codecs, bits):
    codec, taps = codecs[f"int{bits} g64, Hadamard"], hostile_states()
    signs = codec.evener.signs_D.double().numpy()
    assert set(signs) == {-1.0, 1.0}
    matrix = signs_by_parity(64) / 8
    exact = taps.double().numpy()
    decoded = codec.decode(codec.encode(taps)).double().numpy()
    for start in range(0, WIDTH, 64):
        part = slice(start, start + 64)
        for token in range(TOKENS):
            for layer in range(LAYERS):
                x = exact[token, layer, part]
                rotated = matrix @ (x * signs[part])
                # A rotation keeps norms: the norm of 64 errors is eight times one of them.
                bound = allowed(8 * half_step(rotated, bits), np.linalg.norm(x))
                assert np.linalg.norm(decoded[token, layer, part] - x) <= bound


def half_step(values, bits):
    """Half the distance of two codes whose largest is the loudest value."""
    largest = {6: 31, 4: 7}[bits]
    return 0.5 * max(np.abs(values).max() / largest * (1 + BF16_ROUNDING), 2.0**-126)


def allowed(error, size):
    """`error`, and the rounding of the result to bf16; a hundredth more for fp32 on the way."""
    return 1.01 * error + size * BF16_ROUNDING
