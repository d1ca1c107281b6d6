"""The experts' MLP with quantised products, and rows kept in low precision alone (report section 5.4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from core.config.architecture import SWIGLU, Activation, SwiGLU
from core.config.recipe import Operand
from core.kernels.activation import rounded_forward
from core.kernels.backend import product_dtype
from core.kernels.deferred import Deferred
from core.kernels.grouped_products import Biases, Form, Kept, Products, expert_mlp_grouped
from core.kernels.pieces import Pieces
from core.precision.grouped import Grouped
from core.precision.quantiser import Quantiser


def quantised_expert_mlp(
    rows_RH: Tensor,
    weight_R: Tensor,
    gate_up: Tensor,
    down: Tensor,
    counts: Sequence[int],
    quantisers: Mapping[str, Quantiser],
    *,
    later: Deferred | None = None,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """`core.kernels.grouped_matmul.expert_mlp` whose products of `gate_up` and `down` go by the recipes of `quantisers`, by name.

    A weight without one is multiplied in the run's dtype. counts: rows of each expert, multiples of the recipe's `align`: rows of zeros
    fill them beforehand. Kept for the backward are rows as the weight gradient of gate_up reads them, and its result in the run's
    dtype, of which the activation is made again. Raises ValueError for counts that are no such multiples, or do not add up to R.
    """
    form = Form(
        activation=activation,
        first=products_of(quantisers.get("gate_up")),
        second=products_of(quantisers.get("down")),
        later=later,
    )
    if sum(counts) != rows_RH.shape[0]:
        raise ValueError(f"{sum(counts)} rows are counted for the experts, but there are {rows_RH.shape[0]}")
    return expert_mlp_grouped(rows_RH, weight_R, gate_up, down, counts, biases, form)


def products_of(quantiser: Quantiser | None) -> Products:
    """The products of one weight of all experts, by its recipe; in the rows' dtype without one."""
    if quantiser is None:
        return Products(forward=_plain_forward, of_rows=_plain_of_rows, of_weight=_plain_of_weight)
    one = _Recipe(quantiser.here())
    return Products(
        forward=one.forward,
        of_rows=one.of_rows,
        of_weight=one.of_weight,
        keep=one.keep,
        of_activation=one.of_activation,
    )


class _Recipe:
    """The products of a weight by its recipe."""

    def __init__(self, quantiser: Quantiser) -> None:
        self.quantiser, self.recipe = quantiser, quantiser.recipe

    def forward(self, rows: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
        """[R, K] by [E, N, K] to [R, N]."""
        operands = self.recipe.forward
        if operands.input is None or operands.weight is None:
            return _plain_forward(rows, weight, pieces)
        return self._of_rows(rows, weight, pieces, operands.input, operands.weight, transposed=False)

    def of_activation(
        self, product: Tensor, activation: Activation, weight_R: Tensor, weight: Tensor, pieces: Pieces
    ) -> Tensor:
        """The forward product of an activation that is not written where it need not be."""
        operands = self.recipe.forward
        if operands.input is None or operands.weight is None or not isinstance(activation, SwiGLU):
            return self.forward(rounded_forward(product, activation, weight_R), weight, pieces)
        rows = self.quantiser.rows_of_swiglu(product, weight_R, _counts(pieces), operands.input, "input")
        matrices = self.quantiser.weight(weight.detach(), operands.weight, transposed=False)
        return self.quantiser.backend.of_rows(rows, matrices, product.dtype)

    def of_rows(self, grad: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
        """[R, N] by [E, N, K] to [R, K]."""
        operands = self.recipe.input_gradient
        if operands.gradient is None or operands.weight is None:
            return _plain_of_rows(grad, weight, pieces)
        return self._of_rows(grad, weight, pieces, operands.gradient, operands.weight, transposed=True)

    def keep(self, rows: Tensor, pieces: Pieces) -> Kept:
        """The rows as the weight gradient reads them."""
        operand = self.recipe.weight_gradient.input
        if operand is None:
            return Kept(tensors=(rows,))
        made = self.quantiser.columns_of_experts(rows, _counts(pieces), operand, "input")
        scale = () if made.tensor_scale_E is None else (made.tensor_scale_E,)
        nothing = made.data.new_empty(0)
        form = replace(made, data=nothing, scales=nothing, tensor_scale_E=None)
        return Kept(tensors=(made.data, made.scales, *scale), form=form)

    def of_weight(self, grad: Tensor, kept: Kept, pieces: Pieces) -> Tensor:
        """[R, N] and the rows [R, K] to [E, N, K]."""
        operand = self.recipe.weight_gradient.gradient
        if operand is None or kept.form is None:
            return _plain_of_weight(grad, kept, pieces)
        data, scales, *scale = kept.tensors
        columns: Grouped = replace(kept.form, data=data, scales=scales, tensor_scale_E=scale[0] if scale else None)
        gradient = self.quantiser.columns_of_experts(grad, _counts(pieces), operand, "gradient")
        return self.quantiser.backend.of_weights(gradient, columns, grad.dtype)

    def _of_rows(
        self, x: Tensor, weight: Tensor, pieces: Pieces, of_x: Operand, of_weight: Operand, *, transposed: bool
    ) -> Tensor:
        rows = self.quantiser.rows_of_experts(x, _counts(pieces), of_x, "gradient" if transposed else "input")
        matrices = self.quantiser.weight(weight.detach(), of_weight, transposed=transposed)
        return self.quantiser.backend.of_rows(rows, matrices, x.dtype)


def _counts(pieces: Pieces) -> Tensor:
    """Rows of each expert [E] int64."""
    return pieces.ends_E.diff(prepend=pieces.ends_E.new_zeros(1)).to(torch.int64)


def _plain_forward(rows: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    return _plain(rows, weight.mT, pieces)


def _plain_of_rows(grad: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    return _plain(grad, weight, pieces)


def _plain(x: Tensor, matrices: Tensor, pieces: Pieces) -> Tensor:
    """Every expert's rows by its matrix, one after another."""
    work = product_dtype(x.dtype, x.device)
    out = x.new_empty(x.shape[0], matrices.shape[2])
    if x.device.type == "meta":
        return out
    counts = _counts(pieces).tolist()
    for piece, matrix, y in zip(x.split(counts), matrices, out.split(counts), strict=True):
        y.copy_(piece.to(work) @ matrix.to(work))
    return out


def _plain_of_weight(grad: Tensor, kept: Kept, pieces: Pieces) -> Tensor:
    (rows,) = kept.tensors
    work = product_dtype(grad.dtype, grad.device)
    out = grad.new_empty(len(pieces.ends_E), grad.shape[1], rows.shape[1])
    if grad.device.type == "meta":
        return out
    counts = _counts(pieces).tolist()
    for of_piece, piece, y in zip(grad.split(counts), rows.split(counts), out, strict=True):
        y.copy_(of_piece.to(work).T @ piece.to(work))
    return out
