"""The experts in their three forms: fused loop = plain loop = grouped product = numpy, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.kernels.grouped_matmul import expert_mlp, expert_mlp_loop
from core.kernels.grouped_products import Form, expert_mlp_grouped, products_of
from tests.core.numbers import BACKENDS, draw, gradients, near, use_backend

# Rows of each expert: none at all, one, primes, experts without rows at both ends and between, more than nine experts.
COUNTS = [(0,), (0, 0, 0), (1,), (0, 1, 0), (3, 0, 7, 2), (2, 5), (0, 0, 1, 0, 2, 0, 3, 1, 0, 4, 5, 0)]
HIDDEN, FFN = 5, 7


def operands(
    counts: tuple[int, ...], hidden: int = HIDDEN, ffn: int = FFN, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """rows, weights, gate_up and down."""
    rows, experts = sum(counts), len(counts)
    weight = draw(1, rows).sigmoid().to(torch.float64 if dtype == torch.float64 else torch.float32)
    shapes = ((experts, 2, ffn, hidden), (experts, hidden, ffn))
    return [draw(0, rows, hidden, dtype=dtype), weight, *(draw(2 + i, *s, dtype=dtype) for i, s in enumerate(shapes))]


def expert_mlp_grouped_mm(*operands: Any) -> Tensor:
    return expert_mlp_grouped(*operands, None, Form(products=products_of("grouped_mm")))


def run(form: Callable[..., Tensor], counts: tuple[int, ...], tensors: list[Tensor]) -> list[Tensor]:
    return gradients(lambda *x: form(*x, counts), tensors)


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize("form", [expert_mlp, expert_mlp_loop])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_row_passes_its_own_expert(form: Callable[..., Tensor], counts: tuple[int, ...]) -> None:
    rows, weight, gate_up, down = (x.numpy() for x in operands(counts))
    owner = np.repeat(np.arange(len(counts)), counts)
    truth = np.zeros((len(owner), HIDDEN))
    for r, e in enumerate(owner):
        gate, up = gate_up[e, 0] @ rows[r], gate_up[e, 1] @ rows[r]
        truth[r] = down[e] @ (gate / (1 + np.exp(-gate)) * up) * weight[r]
    near(form(*operands(counts), counts), torch.from_numpy(truth), units=32)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_fused_loop_has_the_values_and_gradients_of_the_plain_loop(
    counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = operands(counts, dtype=dtype)
    for fused, plain in zip(
        run(expert_mlp, counts, tensors), run(expert_mlp_loop, counts, doubled(tensors)), strict=True
    ):
        near(fused, plain, units=32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [(3, 0, 7, 2), (0,), (1,)])
def test_bfloat16_stays_within_its_own_rounding(
    monkeypatch: pytest.MonkeyPatch, backend: str, counts: tuple[int, ...]
) -> None:
    use_backend(monkeypatch, backend)
    tensors = operands(counts, 13, 11, torch.bfloat16)
    got, truth = run(expert_mlp, counts, tensors), run(expert_mlp_loop, counts, doubled(tensors))
    assert got[0].dtype == torch.bfloat16
    for a, b in zip(got, truth, strict=True):
        # The gradient of the float32 router weights is as good as the bfloat16 products that it is made of.
        near(a if a.dtype == torch.bfloat16 else a.to(torch.bfloat16), b, units=4)


@pytest.mark.parametrize("counts", [counts for counts in COUNTS if sum(counts)])
def test_the_grouped_product_equals_the_loop(counts: tuple[int, ...]) -> None:
    # Torch wants rows of a multiple of 16 bytes: four float32 numbers.
    tensors = operands(counts, 8, 12, torch.float32)
    for grouped, plain in zip(
        run(expert_mlp_grouped_mm, counts, tensors), run(expert_mlp_loop, counts, doubled(tensors)), strict=True
    ):
        near(grouped, plain, units=32)


def test_the_fused_loop_passes_finite_differences() -> None:
    counts = (2, 0, 1)
    tensors = [x.requires_grad_() for x in operands(counts, 2, 3)]
    assert torch.autograd.gradcheck(lambda *x: expert_mlp(*x, counts), tensors)


@pytest.mark.parametrize("counts", [(0, 0), (0, 3)])
def test_experts_without_rows_get_zero_gradients_not_none(counts: tuple[int, ...]) -> None:
    _, _, _, of_gate_up, of_down = run(expert_mlp, counts, operands(counts, dtype=torch.float32))
    assert of_gate_up.shape == (2, 2, FFN, HIDDEN) and of_down.shape == (2, HIDDEN, FFN)
    assert not of_gate_up[0].any() and not of_down[0].any()
    assert bool(of_gate_up[1].any()) == bool(of_down[1].any()) == bool(counts[1])


def test_operands_in_any_memory_order_give_the_same_gradients() -> None:
    counts = (3, 0, 4)
    rows, weight, gate_up, down = operands(counts)
    transposed = [
        rows.T.contiguous().T,
        weight.repeat_interleave(2)[::2],
        gate_up.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        down.transpose(1, 2).contiguous().transpose(1, 2),
    ]
    pairs = zip(run(expert_mlp, counts, transposed), run(expert_mlp_loop, counts, operands(counts)), strict=True)
    for got, truth in pairs:
        near(got, truth, units=32)


def test_an_expanded_gradient_is_taken() -> None:
    counts = (3, 2)
    tensors = [x.requires_grad_() for x in operands(counts)]
    expert_mlp(*tensors, counts).sum().backward()
    twins = [x.requires_grad_() for x in operands(counts)]
    expert_mlp_loop(*twins, counts).sum().backward()
    for x, y in zip(tensors, twins, strict=True):
        near(x.grad, y.grad, units=32)


def test_counts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="6 rows are counted for the experts, but there are 5"):
        expert_mlp(*operands((3, 2)), (3, 3))
