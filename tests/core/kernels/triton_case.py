"""Torch's form against Triton's on one case, wherever that runs; the tests of tests/gpu run the same on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.kernels.permute import RowMap
from tests.core.numbers import draw, leaf, near

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """The kernels of that name run inside: reference or triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_KERNELS", name)
        yield


def moved(rows: RowMap, device: torch.device) -> RowMap:
    """The row map on another device."""
    tensors = {name: tensor.to(device) for name, tensor in vars(rows).items() if isinstance(tensor, Tensor)}
    return replace(rows, **tensors)


def results(
    function: Callable[..., Tensor | tuple[Tensor, ...]], tensors: list[Tensor], drawn: torch.dtype
) -> list[Tensor]:
    """What `function` returns, and the gradients of its product with fixed random numbers of dtype `drawn`; all on the CPU."""
    leaves = [leaf(tensor) for tensor in tensors]
    out = function(*leaves)
    outs = (out,) if isinstance(out, Tensor) else out
    numbers = [draw(90 + i, *x.shape, dtype=drawn).to(x.device, x.dtype) for i, x in enumerate(outs)]
    torch.autograd.backward(outs, numbers)
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in leaves)
    return [*(x.detach().cpu() for x in outs), *(x.grad.cpu() for x in leaves if x.grad is not None)]


def agree(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: list[Tensor],
    device: torch.device,
    rows: RowMap | None = None,
    units: float = 4.0,
) -> None:
    """`function(*tensors)`, or `function(rows, *tensors)`, by Triton on `device` equals torch's in float64, gradients too."""

    def on(place: torch.device) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        return function if rows is None else lambda *x: function(moved(rows, place), *x)

    dtype = tensors[0].dtype
    with kernels("reference"):
        truth = results(on(CPU), [x.double() for x in tensors], dtype)
    with kernels("triton"):
        got = results(on(device), [x.to(device) for x in tensors], dtype)
    for a, b in zip(got, truth, strict=True):
        near(a, b, units=units, least=1e-4)
