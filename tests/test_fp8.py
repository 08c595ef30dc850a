"""Products in fp8 against the same products in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import ScalingType

from dflash_offline.fp8 import Fp8Linear, fp8_linear, quantise_linears, quantise_rows


def test_codes_are_within_half_a_step_of_three_mantissa_bits():
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(0)) * 100
    x[3] *= 1e4
    codes, scale = quantise_rows(x.bfloat16())
    again = codes.double() * scale.double()
    top = x.bfloat16().double().abs().amax(-1, keepdim=True)
    # Half of 2^-3 of the value; below 2^-6 of the largest code's 448 steps are of equal size.
    bound = torch.maximum(x.bfloat16().double().abs() / 16, top / 448 * 2**-10)
    assert ((again - x.bfloat16().double()).abs() <= bound * 1.0001).all()


def test_a_row_of_zeros_stays_zero():
    codes, scale = quantise_rows(torch.zeros(2, 32))
    assert (codes.float() * scale == 0).all()


def has_scaled_mm():
    one = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scale = torch.ones(16, 1)
    try:
        F.scaled_mm(
            one, one.t(), scale, ScalingType.RowWise, scale.t(), ScalingType.RowWise,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
    except NotImplementedError:
        return False
    return True


@pytest.mark.skipif(not has_scaled_mm(), reason="this torch has no fp8 products on a CPU")
@pytest.mark.parametrize("shape", [(5, 64), (2, 7, 64), (1, 64)])
def test_a_linear_gives_nearly_the_exact_product(shape):
    g = torch.Generator().manual_seed(1)
    linear = nn.Linear(64, 48, bias=False)
    linear.weight.data = torch.randn(48, 64, generator=g)
    linear.weight.data[7] *= 300  # a loud output does not spoil the others
    x = torch.randn(*shape, generator=g)
    x[..., 0, :] *= 500  # nor does a loud token
    ours = Fp8Linear(linear)(x.bfloat16())
    exact = x.bfloat16().double() @ linear.weight.double().t()
    assert ours.shape == exact.shape and ours.dtype == torch.bfloat16
    size = x.bfloat16().double().norm(dim=-1)[..., None] * linear.weight.double().norm(dim=1)
    assert ((ours.double() - exact).abs() <= 0.03 * size).all()


def test_only_large_linears_without_bias_are_replaced():
    layer = nn.Sequential(
        nn.Linear(256, 512, bias=False),
        nn.Sequential(nn.Linear(512, 256, bias=False), nn.Linear(256, 48, bias=False)),
        nn.Linear(256, 256),
        nn.Linear(256, 264, bias=False),
    )
    assert quantise_linears(nn.ModuleList([layer])) == 2
    assert [type(m).__name__ for m in layer.modules() if not list(m.children())] == [
        "Fp8Linear", "Fp8Linear", "Linear", "Linear", "Linear",
    ]  # fmt: skip


@pytest.mark.skipif(not has_scaled_mm(), reason="this torch has no fp8 products on a CPU")
def test_gradients_of_a_linear_are_nearly_the_exact_ones():
    """Inputs' gradients through fp8, weights' gradients not: these are exact but for bf16."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, 40, 64, generator=g, dtype=torch.float64)
    weight = torch.randn(48, 64, generator=g, dtype=torch.float64)
    d_out = torch.randn(3, 40, 48, generator=g, dtype=torch.float64)
    given = [t.bfloat16().requires_grad_() for t in (x, weight)]
    out = fp8_linear(*given)
    out.backward(d_out.bfloat16())
    exact = [t.detach().double().requires_grad_() for t in given]
    exact_out = F.linear(*exact)
    exact_out.backward(d_out.bfloat16().double())

    def distance(ours, theirs):
        return float((ours.double() - theirs).norm() / theirs.norm())

    assert out.dtype == torch.bfloat16
    assert distance(out.detach(), exact_out.detach()) < 0.04
    assert distance(given[0].grad, exact[0].grad) < 0.04
    assert distance(given[1].grad, exact[1].grad) < 0.004
