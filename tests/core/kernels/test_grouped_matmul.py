"""The experts in their three forms: fused loop = plain loop = grouped product = numpy, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from core.config.architecture import SWIGLU, Activation, GeGLU, SquaredReLU, num_halves
from core.kernels.deferred import Deferred
from core.kernels.grouped_matmul import expert_mlp, expert_mlp_loop
from core.kernels.grouped_products import Biases, Form, expert_mlp_grouped, products_of
from tests.core.kernels.test_activation import CLAMPED, formula
from tests.core.numbers import BACKENDS, draw, gradients, leaf, near, use_backend

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
    products = products_of("grouped_mm")
    return expert_mlp_grouped(*operands, None, Form(first=products, second=products))


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


ACTIVATIONS: tuple[Activation, ...] = (SWIGLU, GeGLU(tanh=True), CLAMPED, SquaredReLU())
# Rounded to another side of a limit, a number has another gradient; so in bfloat16 the limit is where none is.
SMOOTH = (SWIGLU, GeGLU(tanh=True), replace(CLAMPED, limit=64.0), SquaredReLU())
# Of an output of HIDDEN features the second bias has all, a stretch of two that begins at 3, or none.
STRETCHES = [(0, HIDDEN), (3, 2), (2, 0)]


def biased(
    activation: Activation,
    counts: tuple[int, ...],
    stretch: tuple[int, int],
    dtype: torch.dtype,
    hidden: int = HIDDEN,
    ffn: int = FFN,
) -> list[Tensor]:
    """rows, weights, gate_up, down and both biases."""
    halves, experts = num_halves(activation), len(counts)
    rows, weight, _, down = operands(counts, hidden, ffn, dtype)
    gate_up = draw(2, experts, halves, ffn, hidden, dtype=dtype)
    biases = draw(4, experts, halves, ffn, dtype=dtype), draw(5, experts, stretch[1], dtype=dtype)
    return [rows, weight, gate_up, down, *biases]


def with_biases(form: Callable[..., Tensor], activation: Activation, first: int, counts: Any) -> Callable[..., Tensor]:
    def function(*x: Tensor) -> Tensor:
        biases = Biases(gate_up=x[4], down=x[5], first=first)
        return form(*x[:4], counts, activation=activation, biases=biases)

    return function


def defined(tensors: list[Tensor], activation: Activation, first: int, counts: tuple[int, ...]) -> list[Tensor]:
    """The definition in float64, on the operands as they were rounded."""
    return gradients(with_biases(expert_mlp_loop, activation, first, counts), doubled(tensors))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_definition_adds_the_second_bias_times_the_routers_weight(activation: Activation) -> None:
    counts, first, width = (3, 0, 2), 1, 3
    tensors = biased(activation, counts, (first, width), torch.float64)
    rows, weight, gate_up, down, of_first, of_second = (x.numpy() for x in tensors)
    truth = np.zeros((5, HIDDEN))
    for r, e in enumerate(np.repeat(np.arange(3), counts)):
        product = np.concatenate([half @ rows[r] + b for half, b in zip(gate_up[e], of_first[e], strict=True)])
        act = formula(torch.from_numpy(product)[None], activation)[0]
        y = down[e] @ act
        y[first : first + width] += of_second[e]
        truth[r] = weight[r] * y
    near(with_biases(expert_mlp_loop, activation, first, counts)(*tensors), torch.from_numpy(truth), units=32)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("stretch", STRETCHES)
def test_the_fused_loop_has_every_activation_and_any_stretch_of_biases(
    activation: Activation, counts: tuple[int, ...], stretch: tuple[int, int]
) -> None:
    for dtype in (torch.float64, torch.float32):
        tensors = biased(activation, counts, stretch, dtype)
        got = gradients(with_biases(expert_mlp, activation, stretch[0], counts), tensors)
        for a, b in zip(got, defined(tensors, activation, stretch[0], counts), strict=True):
            near(a, b, units=64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", SMOOTH, ids=str)
def test_bfloat16_experts_with_biases_stay_within_their_rounding(
    monkeypatch: pytest.MonkeyPatch, backend: str, activation: Activation
) -> None:
    use_backend(monkeypatch, backend)
    counts = (3, 0, 7, 2)
    tensors = biased(activation, counts, (3, 2), torch.bfloat16)
    got = gradients(with_biases(expert_mlp, activation, 3, counts), tensors)
    for a, b in zip(got, defined(tensors, activation, 3, counts), strict=True):
        near(a if a.dtype == torch.bfloat16 else a.to(torch.bfloat16), b, units=4)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("stretch", [(0, 8), (3, 4), (2, 0)])
def test_torchs_grouped_product_has_every_activation_and_any_stretch_of_biases(
    monkeypatch: pytest.MonkeyPatch, activation: Activation, counts: tuple[int, ...], stretch: tuple[int, int]
) -> None:
    monkeypatch.setenv("ZOO_EXPERTS", "grouped_mm")
    tensors = biased(activation, counts, stretch, torch.float32, 8, 12)
    got = gradients(with_biases(expert_mlp, activation, stretch[0], counts), tensors)
    for a, b in zip(got, defined(tensors, activation, stretch[0], counts), strict=True):
        near(a, b, units=64)


@pytest.mark.parametrize("name", ["fused_loop", "grouped_mm"])
@pytest.mark.parametrize("counts", [(3, 0, 2), (0, 0), (4,)])
def test_counts_that_the_host_does_not_know_may_leave_rows_over_which_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, counts: tuple[int, ...]
) -> None:
    monkeypatch.setenv("ZOO_EXPERTS", name)
    over, live = 3, sum(counts)
    tensors = biased(CLAMPED, (*counts[:-1], counts[-1] + over), (0, 8), torch.float32, 8, 12)
    tensors[0][live:] = torch.nan
    got = gradients(with_biases(expert_mlp, CLAMPED, 0, torch.tensor(counts)), tensors)
    for rest in (got[0][live:], got[1][live:], got[2][live:]):
        assert rest.shape[0] == over and not rest.any()
    alone = [x[:live] if i < 2 else x for i, x in enumerate(tensors)]
    # The numbers that the gradient is taken with are drawn for the rows that are there, in their order.
    truth = gradients(with_biases(expert_mlp_loop, CLAMPED, 0, counts), doubled(alone))
    near(got[0][:live], truth[0], units=64)
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.parametrize("name", ["fused_loop", "grouped_mm"])
def test_gradients_that_are_put_off_come_out_bit_for_bit_with_biases_too(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ZOO_EXPERTS", name)
    counts, found = (3, 0, 2), []
    for collecting in (False, True):
        later = Deferred(collecting=collecting)
        x, weight, *parameters = biased(CLAMPED, counts, (1, 4), torch.float32, 8, 12)
        leaves = [leaf(x), leaf(weight), *map(nn.Parameter, parameters)]
        biases = Biases(gate_up=leaves[4], down=leaves[5], first=1)
        expert_mlp(*leaves[:4], counts, later, activation=CLAMPED, biases=biases).sum().backward()
        assert [x.grad is None for x in leaves] == [False, False, collecting, collecting, False, False]
        for work in later.take():
            work()
        found.append([x.grad for x in leaves])
    for now, then in zip(*found, strict=True):
        assert torch.equal(now, then)


def test_all_forms_pass_finite_differences_with_biases() -> None:
    counts = (2, 0, 1)
    for activation in ACTIVATIONS:
        tensors = [leaf(x) for x in biased(activation, counts, (1, 1), torch.float64, 2, 3)]
        assert torch.autograd.gradcheck(with_biases(expert_mlp, activation, 1, counts), tensors)
