"""A kernel that does nothing but encode, for tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.kernels.triton.rounding import encode, widen

_BLOCK = 4096


def launch(x_N: Tensor, noise_N: Tensor | None, element: str) -> Tensor:
    """The codes of numbers: [N] uint8."""
    out = torch.empty(x_N.shape, dtype=torch.uint8, device=x_N.device)
    _encode[(triton.cdiv(len(x_N), _BLOCK),)](
        x_N, noise_N, out, len(x_N), ELEMENT=element, STOCHASTIC=noise_N is not None, BLOCK=_BLOCK
    )
    return out


@triton.jit
def _encode(x_ptr, noise_ptr, out_ptr, count, ELEMENT: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = widen(tl.load(x_ptr + n, mask=n < count, other=0))
    noise = x
    if STOCHASTIC:
        noise = tl.load(noise_ptr + n, mask=n < count, other=0.5)
    tl.store(out_ptr + n, encode(x, noise, ELEMENT, STOCHASTIC), mask=n < count)
