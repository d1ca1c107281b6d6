"""Products of rows that lie in pieces with one matrix per piece, by torch, Triton or Transformer Engine, and the experts' MLP
made of them (report section 4.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.architecture import SWIGLU, Activation
from core.kernels.activation import rounded_backward, rounded_forward
from core.kernels.backend import ExpertsBackend, wide_dtype
from core.kernels.deferred import Deferred
from core.kernels.pieces import Pieces


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What is kept of rows for the weight's gradient: the rows as they are, or fewer bits of them, of which `form` says how."""

    tensors: tuple[Tensor, ...]
    form: Any = None


def _as_they_are(rows: Tensor, pieces: Pieces) -> Kept:
    return Kept(tensors=(rows,))


@dataclass(frozen=True, kw_only=True)
class Products:
    """The three products of a grouped linear layer, in the operands' dtype and accumulated in float32 at least.

    forward: rows [R, K] and weight [E, N, K] give rows @ weight[piece].T [R, N]. of_rows: from the gradient [R, N] of that and the
    weight, that of the rows [R, K]. of_weight: from the gradient and what `keep` kept of the rows that of the weight [E, N, K], zero
    without rows. of_activation: `forward` of the rows that an activation makes of a product and a weight per row, [R], where that is more
    than one after the other.
    """

    forward: Callable[[Tensor, Tensor, Pieces], Tensor]
    of_rows: Callable[[Tensor, Tensor, Pieces], Tensor]
    of_weight: Callable[[Tensor, Kept, Pieces], Tensor]
    keep: Callable[[Tensor, Pieces], Kept] = _as_they_are
    of_activation: Callable[[Tensor, Activation, Tensor, Tensor, Pieces], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Biases:
    """Biases of both products: gate_up [e, N, F]; down [e, h], a stretch of the output's features that begins at `first`."""

    gate_up: Tensor
    down: Tensor
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class Form:
    """What of an MLP of experts is no tensor: the products of gate_up and of down. later: where their gradients may be put off."""

    first: Products
    second: Products
    activation: Activation = SWIGLU
    later: Deferred | None = None


def products_of(name: ExpertsBackend) -> Products:
    """The products that `experts_backend` names. Raises ConfigError where Transformer Engine is not as expected."""
    match name:
        case "grouped_mm":
            return Products(forward=_torch_forward, of_rows=_torch_of_rows, of_weight=_torch_of_weight)
        case "triton":
            return Products(forward=_triton_forward, of_rows=_triton_of_rows, of_weight=_triton_of_weight)
        case "transformer_engine":
            from core.kernels.transformer_engine import load

            engine = load()

            def of_weight(grad: Tensor, kept: Kept, pieces: Pieces) -> Tensor:
                return engine.of_weight(grad, kept.tensors[0], pieces)

            return Products(forward=engine.forward, of_rows=engine.of_rows, of_weight=of_weight)
        case "fused_loop":
            raise ValueError("the fused loop has no products of all experts at once")


def expert_mlp_grouped(
    rows_RH: Tensor,
    weight_R: Tensor,
    gate_up: Tensor,
    down: Tensor,
    counts: Sequence[int] | Tensor,
    biases: Biases | None,
    form: Form,
) -> Tensor:
    """`core.kernels.grouped_matmul.expert_mlp` by products of all experts at once."""
    if isinstance(counts, Tensor):
        pieces = Pieces(ends_E=counts.cumsum(0).to(torch.int32))
    else:
        ends = torch.tensor(counts, dtype=torch.int64).cumsum(0).to(torch.int32)
        pieces = Pieces(ends_E=ends.to(rows_RH.device, non_blocking=True), counts=tuple(counts))
    plan = _Plan(form=form, pieces=pieces, first=biases.first if biases else 0)
    both = (biases.gate_up, biases.down) if biases else (None, None)
    return _Grouped.apply(rows_RH, weight_R, gate_up, down, *both, plan)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The form, where the rows lie, and the column at which the second bias begins."""

    form: Form
    pieces: Pieces
    first: int

    def columns(self, x_RH: Tensor, bias: Tensor) -> Tensor:
        """Of rows of the output those features to which the second bias is added."""
        return x_RH[:, self.first : self.first + bias.shape[1]]


class _Grouped(torch.autograd.Function):
    """Both products and the activation between; kept for the backward are the rows, as their product keeps them, and its result."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight_R: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        plan: _Plan,
    ) -> Tensor:
        form, pieces = plan.form, plan.pieces
        hidden = form.first.forward(rows, gate_up.flatten(1, 2), pieces)
        if gate_up_bias is not None:
            hidden.add_(_of_pieces(gate_up_bias.flatten(1), pieces.owner(len(rows))))
        if form.second.of_activation is not None:
            out = form.second.of_activation(hidden, form.activation, weight_R, down, pieces)
        else:
            out = form.second.forward(rounded_forward(hidden, form.activation, weight_R), down, pieces)
        if down_bias is not None:
            added = _of_pieces(down_bias, pieces.owner(len(rows))) * weight_R[:, None]
            plan.columns(out, down_bias).add_(added)
        kept = form.first.keep(rows, pieces)
        ctx.save_for_backward(weight_R, gate_up, down, hidden, gate_up_bias, down_bias, *kept.tensors)
        ctx.form_of_rows = kept.form
        # The parameters themselves, not what autograd saves of them: a gradient that comes later is added to them by hand.
        ctx.plan, ctx.parameters = plan, None if form.later is None else (gate_up, down)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_R, gate_up, down, hidden, gate_up_bias, down_bias, *rows = ctx.saved_tensors
        plan: _Plan = ctx.plan
        form, pieces = plan.form, plan.pieces
        kept = Kept(tensors=tuple(rows), form=ctx.form_of_rows)
        grad = grads[0].contiguous()
        of_act = form.second.of_rows(grad, down, pieces)
        of_hidden, act, grad_weight = rounded_backward(of_act, hidden, form.activation, weight_R)
        assert grad_weight is not None, "a weight was given"
        grad_rows = form.first.of_rows(of_hidden, gate_up.flatten(1, 2), pieces)
        of_biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if gate_up_bias is not None:
            of_first = _sums(of_hidden, pieces).view_as(gate_up_bias).to(gate_up_bias.dtype)
            of_added = plan.columns(grad, down_bias).to(grad_weight.dtype)
            added = _of_pieces(down_bias, pieces.owner(len(grad))).to(grad_weight.dtype)
            grad_weight = grad_weight + torch.linalg.vecdot(of_added, added)
            of_biases = of_first, _sums(of_added * weight_R[:, None], pieces).to(down_bias.dtype)

        def of_gate_up() -> Tensor:
            return form.first.of_weight(of_hidden, kept, pieces).view(gate_up.shape)

        def of_down() -> Tensor:
            return form.second.of_weight(grad, form.second.keep(act, pieces), pieces)

        if form.later is None or not form.later.collecting:
            return grad_rows, grad_weight, of_gate_up(), of_down(), *of_biases, None
        for parameter, gradient in zip(ctx.parameters, (of_gate_up, of_down), strict=True):
            form.later.put(parameter, gradient)
        return grad_rows, grad_weight, None, None, *of_biases, None


def _of_pieces(bias_EN: Tensor, owner_R: Tensor) -> Tensor:
    """Each row's bias [R, N]; zero for rows of no piece."""
    return F.pad(bias_EN, (0, 0, 0, 1))[owner_R]


def _sums(x_RN: Tensor, pieces: Pieces) -> Tensor:
    """The sum of each piece's rows [E, N], in float32 at least and in one fixed order: a product with ones and zeros."""
    wide, experts = wide_dtype(x_RN.dtype), len(pieces.ends_E)
    owner = pieces.owner(len(x_RN))
    mine = owner == torch.arange(experts, device=owner.device)[:, None]
    return mine.to(wide) @ x_RN.to(wide)


def _torch_forward(rows: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    return _torch_product(rows, weight.transpose(1, 2), pieces)


def _torch_of_rows(grad: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    return _torch_product(grad, weight, pieces)


def _torch_product(x: Tensor, matrices: Tensor, pieces: Pieces) -> Tensor:
    """Torch's grouped product; what it leaves behind the last end is not defined."""
    if not x.shape[0]:
        return x.new_zeros(0, matrices.shape[2])
    out = F.grouped_mm(x, matrices, offs=pieces.ends_E)
    if pieces.counts is None:
        out.masked_fill_((pieces.owner(len(x)) == len(pieces.ends_E))[:, None], 0)
    return out


def _torch_of_weight(grad: Tensor, kept: Kept, pieces: Pieces) -> Tensor:
    (rows,) = kept.tensors
    if not rows.shape[0]:
        return rows.new_zeros(len(pieces.ends_E), grad.shape[1], rows.shape[1])
    out = F.grouped_mm(grad.T, rows, offs=pieces.ends_E)
    # What a sum over no rows leaves is not defined either.
    if pieces.counts is None:
        empty = pieces.ends_E.diff(prepend=pieces.ends_E.new_zeros(1)) == 0
        return out.masked_fill_(empty[:, None, None], 0)
    for of_piece, count in zip(out, pieces.counts, strict=True):
        if not count:
            of_piece.zero_()
    return out


def _triton_forward(rows: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    from core.kernels.triton.grouped_matmul import product

    return product(rows, weight.transpose(1, 2), pieces.ends_E)


def _triton_of_rows(grad: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    from core.kernels.triton.grouped_matmul import product

    return product(grad, weight, pieces.ends_E)


def _triton_of_weight(grad: Tensor, kept: Kept, pieces: Pieces) -> Tensor:
    from core.kernels.triton.grouped_matmul import weight_gradient

    return weight_gradient(grad, kept.tensors[0], pieces.ends_E)
