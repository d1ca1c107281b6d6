"""The experts' matrix products: one function over all experts, in three forms of one definition (report section 4.3.2).

Rows lie sorted by expert, counts[e] of them for expert e, so that expert e's rows are one contiguous piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.backend import experts_backend, product_dtype, wide_dtype
from core.kernels.deferred import Deferred
from core.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward


def expert_mlp(
    rows_RH: Tensor,
    weight_R: Tensor,
    gate_up: Tensor,
    down: Tensor,
    counts: Sequence[int],
    later: Deferred | None = None,
) -> Tensor:
    """Every row through its expert's SwiGLU MLP, times the row's router weight: [R, H].

    rows_RH: [R, H] sorted by expert. weight_R: [R] float32, applied between activation and second product, so that no
    expert output must be kept for its gradient. gate_up: [e, 2, F, H]; down: [e, H, F]; counts: rows of each of the e experts.
    later: where the gradients of gate_up and down, which are parameters then, may be put off.
    Raises ValueError where the counts do not add up to R.
    """
    if sum(counts) != rows_RH.shape[0]:
        raise ValueError(f"{sum(counts)} rows are counted for the experts, but there are {rows_RH.shape[0]}")
    if later is None and experts_backend(rows_RH.dtype, rows_RH.device, *down.shape[1:]) == "grouped_mm":
        return expert_mlp_grouped_mm(rows_RH, weight_R, gate_up, down, counts)
    return _FusedLoop.apply(rows_RH, weight_R, gate_up, down, tuple(counts), later)


def expert_mlp_loop(rows_RH: Tensor, weight_R: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int]) -> Tensor:
    """The definition of `expert_mlp`: a plain loop over experts, differentiated by autograd, in any float dtype."""
    outputs = []
    for e, (rows, weights) in enumerate(zip(rows_RH.split(list(counts)), weight_R.split(list(counts)), strict=True)):
        hidden = F.linear(rows, gate_up[e].flatten(0, 1))
        outputs.append(F.linear(swiglu(hidden, weights), down[e]))
    return torch.cat(outputs) if outputs else rows_RH.new_zeros(0, down.shape[1])


def expert_mlp_grouped_mm(
    rows_RH: Tensor, weight_R: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int]
) -> Tensor:
    """`expert_mlp` by torch's grouped product. Row sizes must be multiples of 16 bytes (torch's rule)."""
    ends = torch.tensor(counts, device=rows_RH.device).cumsum(0).to(torch.int32)
    hidden = F.grouped_mm(rows_RH, gate_up.flatten(1, 2).transpose(1, 2), offs=ends)
    return F.grouped_mm(swiglu(hidden, weight_R), down.transpose(1, 2), offs=ends)


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
        counts: tuple[int, ...],
        later: Deferred | None,
    ) -> Tensor:
        work, wide = product_dtype(rows.dtype, rows.device), wide_dtype(rows.dtype)
        hidden = rows.new_empty(rows.shape[0], 2 * down.shape[2])
        out = rows.new_empty(rows.shape[0], down.shape[1])
        split = [tensor.split(counts) for tensor in (rows, weight_R, hidden, out)]
        for x, weight, kept, y, first, second in zip(*split, gate_up.flatten(1, 2), down, strict=True):
            if not x.shape[0]:
                continue
            # Element by element in float32: of 16-bit floats only the products' operands are rounded.
            product = _product(x.to(work), first.to(work).T, kept).to(wide)
            gate, up = product.chunk(2, dim=1)
            _product(swiglu_forward(gate, up, weight.to(product.dtype)).to(work), second.to(work).T, y)
        ctx.save_for_backward(rows, weight_R, gate_up, down, hidden)
        # The parameters themselves, not what autograd saves of them: a gradient that comes later is added to them by hand.
        ctx.counts, ctx.later, ctx.parameters = counts, later, None if later is None else (gate_up, down)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_R, gate_up, down, hidden = ctx.saved_tensors
        put_off = ctx.later is not None and ctx.later.collecting
        grad_rows, grad_weight = torch.empty_like(rows), torch.empty_like(weight_R)
        of_weights = [] if put_off else [_empty(gate_up), _empty(down)]
        kept: list[_Kept] = []
        of_rows = (grads[0], rows, weight_R, hidden, grad_rows, grad_weight)
        of_experts = (gate_up.flatten(1, 2), down)
        for e, (grad, x, weight, product, *outs, first, second) in enumerate(
            zip(*(tensor.split(ctx.counts) for tensor in of_rows), *of_experts, strict=True)
        ):
            left = _of_inputs((grad, x, weight, first, second, product), outs) if x.shape[0] else None
            if put_off:
                kept.append(left)
            else:
                _of_weights(left, of_weights[0][e].flatten(0, 1), of_weights[1][e])
        if not put_off:
            return grad_rows, grad_weight, *of_weights, None, None
        for parameter, which in zip(ctx.parameters, (0, 1), strict=True):
            ctx.later.put(parameter, lambda p=parameter, w=which: _put_off(p, kept, w))
        return grad_rows, grad_weight, None, None, None, None


# What one expert's weight gradients need, in the products' dtype: the output's gradient and the activation, the first product's
# gradient and the rows. None without rows.
_Kept = tuple[Tensor, Tensor, Tensor, Tensor] | None


def _empty(weight: Tensor) -> Tensor:
    """Contiguous whatever the weight is: an expert's piece must flatten to a view, or what is written to it is lost."""
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _of_inputs(saved: tuple[Tensor, ...], out: list[Tensor]) -> _Kept:
    """One expert's gradients of its rows and of their weights, written to `out`."""
    work, wide = product_dtype(saved[0].dtype, saved[0].device), wide_dtype(saved[0].dtype)
    grad, rows, gate_up, down = (saved[i].to(work) for i in (0, 1, 3, 4))
    hidden = saved[5].to(wide)
    gate, up = hidden.chunk(2, dim=1)
    grad_hidden = torch.empty_like(hidden)
    grad_gate, grad_up = grad_hidden.chunk(2, dim=1)
    act, grad_weight = swiglu_backward(
        (grad @ down).to(wide), gate, up, saved[2].to(hidden.dtype), out_gate=grad_gate, out_up=grad_up
    )
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


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a @ b, rounded to out's dtype; returns the product as it was before rounding."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    product = a @ b
    out.copy_(product)
    return product
