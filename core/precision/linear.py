"""A linear layer whose products are quantised, and that keeps its input in low precision alone (report sections 4.1.3 and 5.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.config.recipe import Operand
from core.kernels.deferred import Deferred
from core.precision.formats import Quantised
from core.precision.matmul import linear
from core.precision.quantiser import Quantiser


class Once:
    """The copies of one x that several weights of one recipe read, each made by the first that asks, kept for all of them at once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Operand], tuple[Quantised, Quantiser]] = {}

    def get(self, which: str, operand: Operand, quantiser: Quantiser, make: Callable[[], Quantised]) -> Quantised:
        """The copy of this kind, made by `quantiser` or by one before it."""
        if (which, operand) not in self._made:
            self._made[which, operand] = make(), quantiser
        found, first = self._made[which, operand]
        quantiser.read_with(first)
        return found


def quantised_linear(
    x_TK: Tensor, weight: Tensor, quantiser: Quantiser, later: Deferred | None = None, once: Once | None = None
) -> Tensor:
    """x times the rows of a weight [N, K] or [halves, N / halves, K]: [T, N] in x's dtype, by the recipe of the weight.

    Kept for the backward are x as the weight gradient reads it, one byte or half of one for each element, and the weight. Gradients
    are in x's and the weight's dtype. later: where the weight's gradient may be put off; the weight is a parameter then. once: shared with
    the other weights that read this very x.
    """
    return _QuantisedLinear.apply(x_TK, weight, _Plan(quantiser=quantiser.here(), later=later), once or Once())


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What of a product is no tensor."""

    quantiser: Quantiser
    later: Deferred | None


class _QuantisedLinear(torch.autograd.Function):
    """Three products, each of its own operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: _Plan, once: Once) -> Tensor:
        quantiser, recipe = plan.quantiser, plan.quantiser.recipe
        matrix = as_rows(weight)
        of_input, of_weight = recipe.forward.input, recipe.forward.weight
        if of_input is None or of_weight is None:
            out = linear(x, matrix)
        else:
            rows = once.get("rows", of_input, quantiser, lambda: quantiser.rows(x, of_input, "input"))
            out = quantiser.backend.product(rows, quantiser.weight(matrix, of_weight, transposed=False), x.dtype)
        kept = recipe.weight_gradient.input
        columns = None
        if kept is not None:
            columns = once.get("columns", kept, quantiser, lambda: quantiser.columns(x, kept, "input"))
        ctx.columns = without_tensors(columns)
        ctx.save_for_backward(weight, *((x,) if columns is None else tensors_of(columns)))
        # The parameter itself, not what autograd saves of it: a gradient that comes later is added to it by hand.
        ctx.plan, ctx.parameter, ctx.dtype = plan, weight if plan.later is not None else None, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        grad = grads[0].contiguous()
        grad_x = _of_input(grad, weight, plan.quantiser, ctx.dtype) if ctx.needs_input_grad[0] else None
        columns = with_tensors(ctx.columns, kept)

        def of_weight() -> Tensor:
            return _of_weight(grad, columns, kept, plan.quantiser, weight)

        if plan.later is not None and plan.later.collecting:
            assert isinstance(ctx.parameter, nn.Parameter)
            plan.later.put(ctx.parameter, of_weight)
            return grad_x, None, None, None
        return grad_x, of_weight() if ctx.needs_input_grad[1] else None, None, None


def _of_input(grad_TN: Tensor, weight: Tensor, quantiser: Quantiser, dtype: torch.dtype) -> Tensor:
    matrix, operands = as_rows(weight), quantiser.recipe.input_gradient
    if operands.gradient is None or operands.weight is None:
        return linear(grad_TN, matrix.T)
    rows = quantiser.rows(grad_TN, operands.gradient, "gradient")
    return quantiser.backend.product(rows, quantiser.weight(matrix, operands.weight, transposed=True), dtype)


def _of_weight(
    grad_TN: Tensor, columns: Quantised | None, kept: list[Tensor], quantiser: Quantiser, weight: Tensor
) -> Tensor:
    operand = quantiser.recipe.weight_gradient.gradient
    if columns is None or operand is None:
        return linear(grad_TN.T, kept[0].T).view(weight.shape)
    gradient = quantiser.columns(grad_TN, operand, "gradient")
    return quantiser.backend.product(gradient, columns, weight.dtype).view(weight.shape)


def as_rows(weight: Tensor) -> Tensor:
    """A weight [N, K], or [halves, N / halves, K], as the matrix [N, K]."""
    return weight.detach().reshape(-1, weight.shape[-1])


def tensors_of(quantised: Quantised) -> tuple[Tensor, ...]:
    """What autograd is given to keep."""
    scale = quantised.tensor_scale
    return (quantised.data, quantised.scales, *(() if scale is None else (scale,)))


def without_tensors(quantised: Quantised | None) -> Quantised | None:
    """The rest of it, which holds no memory."""
    if quantised is None:
        return None
    nothing = quantised.data.new_empty(0)
    return replace(quantised, data=nothing, scales=nothing, tensor_scale=None)


def with_tensors(rest: Quantised | None, tensors: list[Tensor]) -> Quantised | None:
    """The two together again."""
    if rest is None:
        return None
    return replace(rest, data=tensors[0], scales=tensors[1], tensor_scale=tensors[2] if len(tensors) > 2 else None)
