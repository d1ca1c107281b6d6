"""Every activation and its written-out backward against numpy, autograd in float64, and the published models' own."""

from __future__ import annotations

from math import erf

import numpy as np
import pytest
import torch
from torch import Tensor

from core.config.architecture import Activation, ClampedSwiGLU, GeGLU, SquaredReLU, SwiGLU, num_halves
from core.kernels.activation import activate, activate_backward, activate_forward, activate_loop
from tests.core.numbers import draw, gradients, leaf, near

# A limit that about one number in four goes beyond, so that both sides of it are met.
CLAMPED = ClampedSwiGLU(limit=1.1, alpha=1.702, shift=1.0)
ACTIVATIONS: tuple[Activation, ...] = (
    SwiGLU(),
    GeGLU(tanh=False),
    GeGLU(tanh=True),
    CLAMPED,
    ClampedSwiGLU(limit=0.7, alpha=0.5, shift=-0.3),
    SquaredReLU(),
)
SIZES = [(0, 3), (1, 1), (7, 5), (13, 8)]


def formula(product: Tensor, activation: Activation) -> np.ndarray:
    """Each activation as its paper writes it, in numpy."""
    x = product.double().numpy()
    if isinstance(activation, SquaredReLU):
        return np.maximum(x, 0) ** 2
    gate, up = np.split(x, 2, axis=1)
    match activation:
        case SwiGLU():
            return gate / (1 + np.exp(-gate)) * up
        case GeGLU(tanh=True):
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            return 0.5 * gate * (1 + np.tanh(inner)) * up
        case GeGLU():
            return 0.5 * gate * (1 + np.vectorize(erf, otypes=[float])(gate / np.sqrt(2))) * up
        case ClampedSwiGLU(limit=limit, alpha=alpha, shift=shift):
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            return (up + shift) * gate / (1 + np.exp(-alpha * gate))
    raise AssertionError(activation)


def operands(
    activation: Activation, rows: int, ffn: int, weighted: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = draw(1, rows).sigmoid().to(wide) if weighted else None
    return draw(0, rows, num_halves(activation) * ffn, dtype=dtype), weight


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("rows", "ffn"), SIZES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_form_is_the_formula(
    activation: Activation, rows: int, ffn: int, weighted: bool, dtype: torch.dtype
) -> None:
    product, weight = operands(activation, rows, ffn, weighted, dtype)
    truth = torch.from_numpy(formula(product, activation))
    if weight is not None:
        truth = truth * weight.double()[:, None]
    assert activate(product, activation, weight).dtype == dtype
    near(activate(product, activation, weight), truth)
    if dtype.itemsize > 2:
        near(activate_loop(product, activation, weight), truth)
        near(activate_forward(product, activation, weight), truth)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("rows", "ffn"), SIZES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_backward_is_autograds_and_makes_the_result_anew(
    activation: Activation, rows: int, ffn: int, weighted: bool, dtype: torch.dtype
) -> None:
    product, weight = operands(activation, rows, ffn, weighted, dtype)
    grad = draw(2, rows, ffn, dtype=dtype)
    wide, w = leaf(product.double()), None if weight is None else leaf(weight.double())
    truth = activate_loop(wide, activation, w)
    truth.backward(grad.double())
    out = torch.full_like(product, torch.nan)
    act, of_weight = activate_backward(grad.clone(), product, activation, weight, out=out)
    near(act, truth)
    near(out, wide.grad)
    if w is None:
        assert of_weight is None
    else:
        near(of_weight, w.grad)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_the_public_form_are_those_of_the_definition_in_every_dtype(
    activation: Activation, dtype: torch.dtype
) -> None:
    product, weight = operands(activation, 7, 5, True, dtype)
    assert weight is not None
    got = gradients(lambda x, w: activate(x, activation, w), [product, weight])
    truth = gradients(lambda x, w: activate_loop(x, activation, w), [product.double(), weight.double()])
    assert [x.dtype for x in got] == [dtype, dtype, weight.dtype]
    if dtype.itemsize == 2:
        # The weight's gradient is a sum over the arriving one, which was rounded to the product's dtype.
        got[2] = got[2].to(dtype)
    for a, b in zip(got, truth, strict=True):
        near(a, b)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_both_forms_pass_finite_differences(activation: Activation) -> None:
    product, weight = operands(activation, 3, 4, True, torch.float64)
    assert weight is not None
    leaves = [leaf(product), leaf(weight)]
    assert torch.autograd.gradcheck(lambda x, w: activate(x, activation, w), leaves)
    assert torch.autograd.gradcheck(lambda x, w: activate_loop(x, activation, w), leaves)
    assert torch.autograd.gradcheck(lambda x: activate(x, activation), leaves[:1])


def test_the_clamped_unit_is_gpt_osss() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    theirs = GptOssExperts(GptOssConfig(hidden_size=4, intermediate_size=6, num_local_experts=1))
    declared = ClampedSwiGLU(limit=theirs.limit, alpha=theirs.alpha, shift=1.0)
    product = draw(0, 11, 12) * 8
    # Its gate and up stand in turn.
    interleaved = product.view(11, 2, 6).transpose(1, 2).reshape(11, 12)
    near(activate(product, declared), theirs._apply_gate(interleaved))
    assert float(product.abs().max()) > theirs.limit


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_extreme_numbers_stay_finite(activation: Activation) -> None:
    line = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], dtype=torch.float32)
    product = line if num_halves(activation) == 1 else torch.cat([line, torch.ones_like(line)], 1)
    out, of_product = gradients(lambda x: activate(x, activation), [product])
    assert torch.isfinite(out).all() and torch.isfinite(of_product).all()


def test_a_clamped_number_has_no_gradient_and_one_at_the_limit_has() -> None:
    limit = CLAMPED.limit
    gates, ups = torch.tensor([[limit, 2 * limit, -2 * limit]]), torch.tensor([[limit, -2 * limit, 2 * limit]])
    product = leaf(torch.cat([gates, ups], 1))
    activate(product, CLAMPED).sum().backward()
    assert product.grad is not None
    assert (product.grad[0] != 0).tolist() == [True, False, True, True, False, False]


def test_nothing_is_kept_but_the_product_and_the_weight() -> None:
    product, weight = operands(CLAMPED, 7, 5, True, torch.float32)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        activate(leaf(product), CLAMPED, weight)
    assert sum(tensor.numel() for tensor in kept) == 7 * 10 + 7
