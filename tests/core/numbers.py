"""Random operands and comparisons by a format's own precision, for tests of arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

BACKENDS = ("native", "float32")


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, drawn in float64 and rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def leaf(tensor: Tensor) -> Tensor:
    """A copy that collects a gradient, strides kept."""
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def near(actual: Tensor | None, truth: Tensor | None, *, units: float = 8.0, least: float = 1e-30) -> None:
    """`actual` has the shape of `truth` and lies within `units` roundings of its own format, by the largest element.

    least: the size of what a truth near zero was added up from.
    """
    assert actual is not None and truth is not None, "there is no gradient"
    assert actual.shape == truth.shape, f"{tuple(actual.shape)} is not {tuple(truth.shape)}"
    if not actual.numel():
        return
    actual, truth = actual.detach(), truth.detach()
    assert bool(torch.isfinite(actual).all()), "not finite"
    bound = units * torch.finfo(actual.dtype).eps * max(float(truth.double().abs().max()), least)
    error = float((actual.double() - truth.double()).abs().max())
    assert error <= bound, f"off by {error:g}, {error / bound * units:.1f} roundings"


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], seed: int = 99) -> list[Tensor]:
    """The result of `function(*tensors)` and the gradients of its product with fixed random numbers."""
    leaves = [leaf(tensor) for tensor in tensors]
    result = function(*leaves)
    if result.numel():
        (result.double() * draw(seed, *result.shape)).sum().backward()
    else:
        result.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in leaves)
    return [result.detach(), *(x.grad for x in leaves if x.grad is not None)]


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Let bfloat16 products run natively, or widened to float32, whatever this machine would do."""
    answer: Callable[[], Any] = (lambda: True) if backend == "native" else (lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", answer)
