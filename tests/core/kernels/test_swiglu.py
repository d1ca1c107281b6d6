"""SwiGLU and its written-out backward against numpy and autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from core.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward
from tests.core.numbers import draw, gradients, leaf, near

SIZES = [(0, 3), (1, 1), (7, 5), (13, 8)]


def backward(grad: Tensor, gate: Tensor, up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    out_gate, out_up = torch.full_like(gate, torch.nan), torch.full_like(up, torch.nan)
    act, of_weight = swiglu_backward(grad.clone(), gate, up, weight, out_gate=out_gate, out_up=out_up)
    near(act, swiglu(torch.cat([gate, up], 1).double(), None if weight is None else weight.double()))
    return out_gate, out_up, of_weight


@pytest.mark.parametrize(("rows", "ffn"), SIZES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_forms_equal_the_formula(rows: int, ffn: int, weighted: bool, dtype: torch.dtype) -> None:
    x, weight = draw(0, rows, 2 * ffn, dtype=dtype), draw(1, rows, dtype=dtype) if weighted else None
    gate, up = np.split(x.double().numpy(), 2, axis=1)
    truth = gate / (1 + np.exp(-gate)) * up
    if weight is not None:
        truth = truth * weight.double().numpy()[:, None]
    near(swiglu(x, weight), torch.from_numpy(truth))
    assert swiglu(x, weight).dtype == dtype
    near(swiglu_forward(x[:, :ffn], x[:, ffn:], weight), torch.from_numpy(truth))


@pytest.mark.parametrize(("rows", "ffn"), SIZES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_backward_equals_autograd(rows: int, ffn: int, weighted: bool, dtype: torch.dtype) -> None:
    x, grad = draw(0, rows, 2 * ffn, dtype=dtype), draw(2, rows, ffn, dtype=dtype)
    weight = draw(1, rows, dtype=dtype) if weighted else None
    wide, w = leaf(x.double()), leaf(weight.double()) if weight is not None else None
    swiglu(wide, w).backward(grad.double())
    of_gate, of_up, of_weight = backward(grad, x[:, :ffn], x[:, ffn:], weight)
    near(torch.cat([of_gate, of_up], 1), wide.grad)
    if w is None:
        assert of_weight is None
    else:
        near(of_weight, w.grad)


def test_the_definition_passes_finite_differences_with_a_float32_weight_in_another_dtype() -> None:
    x, weight = draw(0, 3, 4).requires_grad_(), draw(1, 3).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (x, weight))
    mixed = gradients(swiglu, [draw(0, 3, 4), draw(1, 3, dtype=torch.float32)])
    assert mixed[0].dtype == torch.float64 and mixed[2].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_gates_stay_finite(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], dtype=dtype)
    one, weight = torch.ones_like(gate), torch.ones(1, dtype=dtype)
    near(swiglu_forward(gate, one, weight), gate.double().clamp(min=0))
    of_gate, of_up, of_weight = backward(one, gate, one, weight)
    near(of_gate, torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0]]))
    near(of_up, gate.double().clamp(min=0))
    near(of_weight, gate.double().clamp(min=0).sum(1))
