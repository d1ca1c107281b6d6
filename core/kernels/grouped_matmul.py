"""The experts' MLPs: one function over all experts, in several forms of one definition (report section 4.3.2).

Rows lie sorted by expert, counts[e] of them for expert e, so that expert e's rows are one contiguous piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.architecture import SWIGLU, Activation
from core.kernels.activation import activate_backward, activate_forward, activate_loop
from core.kernels.backend import experts_backend, product_dtype, wide_dtype
from core.kernels.deferred import Deferred
from core.kernels.grouped_products import Biases, Form, expert_mlp_grouped, products_of


def expert_mlp(
    rows_RH: Tensor,
    weight_R: Tensor,
    gate_up: Tensor,
    down: Tensor,
    counts: Sequence[int] | Tensor,
    later: Deferred | None = None,
    *,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """Every row through its expert's MLP, times the row's router weight: [R, H].

    rows_RH: [R, H] sorted by expert. weight_R: [R] float32, applied between activation and second product, so that no
    expert output must be kept for its gradient; the bias of the second product is multiplied by it too.
    gate_up: [e, N, F, H], N as the activation needs; down: [e, H, F].
    counts: rows of each of the e experts. As int64 tensor [e] on the rows' device the host need not know them, and they may add up to
    less than R: further rows give zeros. (The fused loop and Transformer Engine wait for them all the same.)
    later: where the gradients of gate_up and down, which are parameters then, may be put off.
    Raises ValueError where counts that the host knows do not add up to R.
    """
    rows = rows_RH.shape[0]
    name = experts_backend(rows_RH.dtype, rows_RH.device, *down.shape[1:])
    if isinstance(counts, Tensor) and name in ("fused_loop", "transformer_engine"):
        counts = counts.tolist()
        live = sum(counts)
        if live < rows:
            out = expert_mlp(
                rows_RH[:live], weight_R[:live], gate_up, down, counts, later, activation=activation, biases=biases
            )
            return F.pad(out, (0, 0, 0, rows - live))
    if not isinstance(counts, Tensor) and sum(counts) != rows:
        raise ValueError(f"{sum(counts)} rows are counted for the experts, but there are {rows}")
    if name != "fused_loop":
        products = products_of(name)
        form = Form(activation=activation, first=products, second=products, later=later)
        return expert_mlp_grouped(rows_RH, weight_R, gate_up, down, counts, biases, form)
    assert not isinstance(counts, Tensor), "the loop runs on the host"
    plan = _Plan(counts=tuple(counts), activation=activation, first=biases.first if biases else 0, later=later)
    both = (biases.gate_up, biases.down) if biases else (None, None)
    return _FusedLoop.apply(rows_RH, weight_R, gate_up, down, *both, plan)


def expert_mlp_loop(
    rows_RH: Tensor,
    weight_R: Tensor,
    gate_up: Tensor,
    down: Tensor,
    counts: Sequence[int],
    *,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """The definition of `expert_mlp`: a plain loop over experts, differentiated by autograd, in any float dtype."""
    outputs = []
    for e, (rows, weights) in enumerate(zip(rows_RH.split(list(counts)), weight_R.split(list(counts)), strict=True)):
        of_first = None if biases is None else biases.gate_up[e].flatten()
        act = activate_loop(F.linear(rows, gate_up[e].flatten(0, 1), of_first), activation, weights)
        out = F.linear(act, down[e])
        if biases is not None:
            added = weights.to(out.dtype)[:, None] * biases.down[e]
            before, after = biases.first, out.shape[1] - biases.first - added.shape[1]
            out = out + F.pad(added, (before, after))
        outputs.append(out)
    return torch.cat(outputs) if outputs else rows_RH.new_zeros(0, down.shape[1])


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What of a fused loop is no tensor: rows of each expert, and the column at which the second bias begins."""

    counts: tuple[int, ...]
    activation: Activation
    first: int
    later: Deferred | None


class _FusedLoop(torch.autograd.Function):
    """`expert_mlp_loop` with every expert's piece taken through both products while it is in the cache.

    Gradients of the weights are written straight into one tensor per weight: indexing an expert under autograd would build a
    zero tensor of all experts' size for each of them. Kept for the backward: the rows and the first product, not the
    activation.
    """

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
        work, wide = product_dtype(rows.dtype, rows.device), wide_dtype(rows.dtype)
        hidden = rows.new_empty(rows.shape[0], gate_up.shape[1] * gate_up.shape[2])
        out = rows.new_empty(rows.shape[0], down.shape[1])
        split = [tensor.split(plan.counts) for tensor in (rows, weight_R, hidden, out)]
        for e, (x, weight, kept, y, first, second) in enumerate(zip(*split, gate_up.flatten(1, 2), down, strict=True)):
            if not x.shape[0]:
                continue
            # Element by element in float32: of 16-bit floats only the products' operands are rounded.
            of_first = None if gate_up_bias is None else gate_up_bias[e].flatten().to(work)
            product = _product(x.to(work), first.to(work).T, kept, of_first).to(wide)
            act = activate_forward(product, plan.activation, weight.to(product.dtype)).to(work)
            if down_bias is None:
                _product(act, second.to(work).T, y)
            else:
                _weighted(act, second.to(work).T, y, _Added(weight=weight, bias=down_bias[e], first=plan.first))
        ctx.save_for_backward(rows, weight_R, gate_up, down, hidden, gate_up_bias, down_bias)
        # The parameters themselves, not what autograd saves of them: a gradient that comes later is added to them by hand.
        ctx.plan, ctx.parameters = plan, None if plan.later is None else (gate_up, down)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_R, gate_up, down, hidden, gate_up_bias, down_bias = ctx.saved_tensors
        plan: _Plan = ctx.plan
        put_off = plan.later is not None and plan.later.collecting
        grad_rows, grad_weight = torch.empty_like(rows), torch.empty_like(weight_R)
        of_weights = [] if put_off else [_empty(gate_up), _empty(down)]
        of_biases = [
            None if bias is None else torch.zeros_like(bias, memory_format=torch.contiguous_format)
            for bias in (gate_up_bias, down_bias)
        ]
        kept: list[_Kept] = []
        of_rows = (grads[0], rows, weight_R, hidden, grad_rows, grad_weight)
        of_experts = (gate_up.flatten(1, 2), down)
        for e, (grad, x, weight, product, *outs, first, second) in enumerate(
            zip(*(tensor.split(plan.counts) for tensor in of_rows), *of_experts, strict=True)
        ):
            operands = (grad, x, weight, first, second, product)
            left = _of_inputs(operands, outs, plan.activation) if x.shape[0] else None
            if left is not None and of_biases[0] is not None and of_biases[1] is not None:
                of_biases[0][e].view(-1).copy_(left[2].sum(0, dtype=wide_dtype(rows.dtype)))
                columns = grad[:, plan.first : plan.first + down_bias.shape[1]]
                of_biases[1][e].copy_(_of_added(columns, weight, down_bias[e], outs[1]))
            if put_off:
                kept.append(left)
            else:
                _of_weights(left, of_weights[0][e].flatten(0, 1), of_weights[1][e])
        if plan.later is None or not put_off:
            return grad_rows, grad_weight, *of_weights, *of_biases, None
        for parameter, which in zip(ctx.parameters, (0, 1), strict=True):
            plan.later.put(parameter, partial(_put_off, parameter, kept, which))
        return grad_rows, grad_weight, None, None, *of_biases, None


# What one expert's weight gradients need, in the products' dtype: the output's gradient and the activation, the first product's
# gradient and the rows. None without rows.
_Kept = tuple[Tensor, Tensor, Tensor, Tensor] | None


def _empty(weight: Tensor) -> Tensor:
    """Contiguous whatever the weight is: an expert's piece must flatten to a view, or what is written to it is lost."""
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _of_inputs(saved: tuple[Tensor, ...], out: list[Tensor], activation: Activation) -> _Kept:
    """One expert's gradients of its rows and of their weights, written to `out`."""
    work, wide = product_dtype(saved[0].dtype, saved[0].device), wide_dtype(saved[0].dtype)
    grad, rows, gate_up, down = (saved[i].to(work) for i in (0, 1, 3, 4))
    hidden = saved[5].to(wide)
    grad_hidden = torch.empty_like(hidden)
    weight = saved[2].to(hidden.dtype)
    act, grad_weight = activate_backward((grad @ down).to(wide), hidden, activation, weight, out=grad_hidden)
    assert grad_weight is not None, "a weight was given"
    out[1].copy_(grad_weight)
    of_product = grad_hidden.to(work)
    _product(of_product, gate_up, out[0])
    return grad, act.to(work), of_product, rows


def _of_weights(kept: _Kept, gate_up: Tensor | None, down: Tensor | None) -> None:
    """One expert's weight gradients, written to gate_up [2F, H] and down [H, F] where given; zero without rows."""
    if kept is None:
        for out in (gate_up, down):
            if out is not None:
                out.zero_()
        return
    grad, act, of_product, rows = kept
    if down is not None:
        _product(grad.T, act, down)
    if gate_up is not None:
        _product(of_product.T, rows, gate_up)


def _put_off(parameter: Tensor, kept: list[_Kept], which: int) -> Tensor:
    """The gradient of gate_up (which=0) or of down (which=1) of all experts, from what the backward kept."""
    total = _empty(parameter)
    for out, of_expert in zip(total, kept, strict=True):
        _of_weights(of_expert, None if which else out.flatten(0, 1), out if which else None)
    return total


def _product(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """out = a @ b + bias, rounded to out's dtype; returns the product as it was before rounding."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    product = a @ b if bias is None else torch.addmm(bias, a, b)
    out.copy_(product)
    return product


@dataclass(frozen=True, kw_only=True)
class _Added:
    """A bias [h] times the weight [r] of each row, which begins at the column `first`."""

    weight: Tensor
    bias: Tensor
    first: int


def _weighted(a: Tensor, b: Tensor, out: Tensor, added: _Added) -> None:
    """out = a @ b plus what is added, rounded once to out's dtype."""
    product = torch.mm(a, b, out=out) if out.dtype == a.dtype else a @ b
    columns = product[:, added.first : added.first + len(added.bias)]
    columns.addcmul_(added.weight.to(product.dtype)[:, None], added.bias.to(product.dtype))
    if product is not out:
        out.copy_(product)


def _of_added(grad: Tensor, weight: Tensor, bias: Tensor, of_weight: Tensor) -> Tensor:
    """The gradient of an `_Added` bias, given that [r, h] of its columns; its part of the weights' is added to of_weight."""
    wide = wide_dtype(grad.dtype)
    grad = grad.to(wide)
    of_weight.add_(grad @ bias.to(wide))
    return weight.to(wide) @ grad
