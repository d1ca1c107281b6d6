"""The rate of a plain large matrix product on this rank, against which model FLOP utilisation is measured."""

from __future__ import annotations

import time

import torch

from core.precision.matmul import linear

_SIZE = 1024
_SECONDS = 0.4


def measure_matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP per second of square products in `dtype` (1024 on a CPU, 8192 on an accelerator), the best of several; measured while
    all ranks measure, since they share the machine."""
    size = _SIZE if device.type == "cpu" else 8 * _SIZE
    a, b = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
    best, end = 0.0, time.perf_counter() + _SECONDS
    with torch.no_grad():
        while best == 0.0 or time.perf_counter() < end:
            start = _now(device)
            linear(a, b)
            best = max(best, 2.0 * size**3 / (_now(device) - start))
    return best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
