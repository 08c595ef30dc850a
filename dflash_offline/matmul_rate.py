"""What a device reaches in one large matrix product: the yardstick of a run on that very card.

Data sheets promise more, and clocks, power limits and neighbours differ. Operands are random: with
zeros the same card is 13 % faster.
"""

import statistics
import time
from collections.abc import Callable

import torch

from dflash_offline.fp8 import multiply, quantise_rows

_ROUNDS, _WARM_UP = 10, 3
_ROWS = {"cuda": 16_384, "cpu": 128}
_SIDES = {"cuda": (5120, 17_408), "cpu": (512, 2048)}  # the MLP of Qwen3.6-27B; a CPU takes 1 ms


def measure_matmul_rate(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> float:
    """FLOP/s, the median of ten products; with `fp8` of codes that are there already."""
    rows, (inner, outer) = _ROWS[device.type], _SIDES[device.type]
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, inner, generator=g, device=device).to(dtype)
    w = torch.randn(outer, inner, generator=g, device=device).to(dtype)
    coded_x, coded_w = (quantise_rows(x), quantise_rows(w)) if fp8 else (None, None)

    def product() -> None:
        if coded_x and coded_w:
            multiply(coded_x, coded_w, dtype)
        else:
            x @ w.t()

    times = [_seconds(product, device) for _ in range(_WARM_UP + _ROUNDS)][_WARM_UP:]
    return 2 * rows * inner * outer / statistics.median(times)


def _seconds(product: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    product()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
