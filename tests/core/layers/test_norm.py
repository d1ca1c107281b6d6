"""RMSNorm against numpy, finite differences and the published models' norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from core.config.architecture import RMSNorm as RMSNormConfig
from core.layers.norm import RMSNorm, rms_norm_reference
from core.state.spec import Constant
from tests.core.layers.places import place
from tests.core.numbers import draw, gradients, near


def build(size: int, dtype: torch.dtype, eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(RMSNormConfig(eps=eps), size, place=place(dtype))
    norm.weight.data.copy_(draw(5, size))
    return norm


def run(norm: RMSNorm, x: Tensor) -> list[Tensor]:
    """Result and gradients by x and weight of the module, through functional weights."""
    return gradients(lambda v, w: torch.func.functional_call(norm, {"weight": w}, v), [x, norm.weight.detach()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (5, 13), (3, 2, 11), (4, 64)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_values_are_those_of_the_formula(dtype: torch.dtype, shape: tuple[int, ...], eps: float) -> None:
    norm, x = build(shape[-1], dtype, eps), draw(0, *shape, dtype=dtype)
    wide = x.double().numpy()
    truth = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * norm.weight.detach().double().numpy()
    near(norm(x).detach(), torch.from_numpy(truth), units=2 if dtype == torch.bfloat16 else 8)
    near(rms_norm_reference(x, norm.weight, eps).detach(), torch.from_numpy(truth))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 7), (1, 5), (5, 13), (3, 2, 11), (257, 8)])
def test_gradients_are_those_of_the_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm, x = build(shape[-1], dtype), draw(0, *shape, dtype=dtype)
    truth = gradients(lambda v, w: rms_norm_reference(v, w, 1e-6), [x.double(), norm.weight.detach().double()])
    for ours, exact in zip(run(norm, x), truth, strict=True):
        near(ours, exact, units=4 if dtype == torch.bfloat16 else 32)


def test_gradients_equal_those_by_differences() -> None:
    norm = build(3, torch.float64, eps=0.1)
    assert torch.autograd.gradcheck(norm, draw(0, 4, 3).requires_grad_())
    x = draw(0, 4, 3)
    weight = norm.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: torch.func.functional_call(norm, {"weight": w}, x), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_published_models_norm(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    norm, x = build(24, dtype), draw(0, 7, 24, dtype=dtype)
    theirs = Qwen3MoeRMSNorm(24, eps=1e-6).to(dtype)
    theirs.weight.data.copy_(norm.weight.data)
    near(norm(x).detach(), theirs(x).detach(), units=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_zeros_and_of_huge_numbers_stay_finite(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 4, dtype=dtype)
    x[1] = 1e15
    for tensor in run(build(4, dtype), x):
        assert bool(torch.isfinite(tensor).all())


def test_rows_in_any_memory_order_give_the_same() -> None:
    norm, x = build(5, torch.float64), draw(0, 7, 5)
    for a, b in zip(run(norm, x.T.contiguous().T), run(norm, x), strict=True):
        near(a, b)
    x.requires_grad_()
    norm(x).sum().backward()  # the gradient of a sum is one number expanded
    assert x.grad is not None and bool(torch.isfinite(x.grad).all())


def test_the_gain_starts_at_one_and_does_not_decay() -> None:
    spec = RMSNorm(RMSNormConfig(eps=1e-6), 9, place=place(torch.bfloat16)).specs()["weight"]
    assert (spec.shape, spec.init, spec.decay, spec.trained) == ((9,), Constant(value=1.0), False, True)
