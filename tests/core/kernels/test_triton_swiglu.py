"""SwiGLU times a row's weight in Triton, with the backward that recomputes, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward
from tests.core.kernels.triton_case import CPU, DTYPES, agree, kernels
from tests.core.numbers import draw, near

pytest.importorskip("triton", minversion="3.7")

# Rows and width: none, ones, primes, more columns than a tile has.
SIZES = [(0, 3), (1, 1), (7, 5), (5, 0), (13, 8), (3, 1031)]
CASES = [*((*sizes, torch.float32) for sizes in SIZES), *((13, 8, dtype) for dtype in DTYPES if dtype != torch.float32)]


def operands(rows: int, ffn: int, dtype: torch.dtype, weighted: bool) -> list[Tensor]:
    weight = draw(1, rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return [draw(0, rows, 2 * ffn, dtype=dtype), *([weight] if weighted else [])]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("rows", "ffn", "dtype"), CASES)
def test_values_and_gradients_are_those_of_torch(
    device: torch.device, rows: int, ffn: int, dtype: torch.dtype, weighted: bool
) -> None:
    agree(swiglu, operands(rows, ffn, dtype, weighted), device)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("rows", "ffn", "dtype"), CASES)
def test_the_pieces_for_experts_are_those_of_torch(
    device: torch.device, rows: int, ffn: int, dtype: torch.dtype, weighted: bool
) -> None:
    """Halves of one tensor are read and written where they lie; the activation comes with the gradients."""
    found = []
    for name, place, kind in (("triton", device, dtype), ("reference", CPU, torch.float64)):
        x, *weights = (t.to(place, kind) for t in operands(rows, ffn, dtype, weighted))
        grad, weight = draw(2, rows, ffn, dtype=dtype).to(place, kind), weights[0] if weights else None
        out = torch.full_like(x, torch.nan)
        (gate, up), (of_gate, of_up) = x.chunk(2, dim=1), out.chunk(2, dim=1)
        with kernels(name):
            act = swiglu_forward(gate, up, weight)
            again, of_weight = swiglu_backward(grad, gate, up, weight, out_gate=of_gate, out_up=of_up)
        assert again.dtype == act.dtype == kind
        found.append([act, again, out, *([] if of_weight is None else [of_weight])])
    for got, truth in zip(*found, strict=True):
        near(got.cpu(), truth, units=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates_stay_finite_in_triton(device: torch.device, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], dtype=dtype)
    agree(swiglu, [torch.cat([gate, torch.ones_like(gate)], 1), torch.ones(1, dtype=dtype)], device)


def test_triton_passes_finite_differences(device: torch.device) -> None:
    x, weight = (t.to(device).requires_grad_() for t in operands(3, 2, torch.float64, True))
    with kernels("triton"):
        assert torch.autograd.gradcheck(swiglu, (x, weight))
        assert torch.autograd.gradcheck(swiglu, (x, None))


def test_an_expanded_gradient_and_a_turned_input_are_read_right(device: torch.device) -> None:
    turned = draw(0, 6, 5).T
    agree(swiglu, [turned, draw(1, 10)[::2]], device)
    found = []
    for name, place in (("triton", device), ("reference", CPU)):
        x = turned.to(place).requires_grad_()
        with kernels(name):
            swiglu(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad.cpu())
    near(*found)


def test_only_the_inputs_are_kept_for_the_backward(device: torch.device) -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    x, weight = (t.to(device).requires_grad_() for t in operands(5, 3, torch.bfloat16, True))
    with kernels("triton"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        swiglu(x, weight)
    assert kept == [x.data_ptr(), weight.data_ptr()]
