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
from core.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward


def expert_mlp(rows_RH: Tensor, weight_R: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int]) -> Tensor:
    """Every row through its expert's SwiGLU MLP, times the row's router weight: [R, H].

    rows_RH: [R, H] sorted by expert. weight_R: [R] float32, applied between activation and second product, so that no
    expert output must be kept for its gradient. gate_up: [e, 2, F, H]; down: [e, H, F]; counts: rows of each of the e experts.
    Raises ValueError where the counts do not add up to R.
    """
    if sum(counts) != rows_RH.shape[0]:
        raise ValueError(f"{sum(counts)} rows are counted for the experts, but there are {rows_RH.shape[0]}")
    if experts_backend(rows_RH.dtype, rows_RH.device, *down.shape[1:]) == "grouped_mm":
        return expert_mlp_grouped_mm(rows_RH, weight_R, gate_up, down, counts)
    return _FusedLoop.apply(rows_RH, weight_R, gate_up, down, tuple(counts))


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
        ctx: Any, rows: Tensor, weight_R: Tensor, gate_up: Tensor, down: Tensor, counts: tuple[int, ...]
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
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        rows, weight_R, gate_up, down, hidden = ctx.saved_tensors
        grad_rows, grad_weight = torch.empty_like(rows), torch.empty_like(weight_R)
        # Contiguous whatever the weight is: an expert's piece must flatten to a view, or what is written to it is lost.
        grad_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        grad_down = torch.empty_like(down)
        of_rows = (grads[0], rows, weight_R, hidden, grad_rows, grad_weight)
        of_experts = (gate_up.flatten(1, 2), down, grad_gate_up.flatten(1, 2), grad_down)
        for grad, x, weight, kept, *outs, first, second, grad_first, grad_second in zip(
            *(tensor.split(ctx.counts) for tensor in of_rows), *of_experts, strict=True
        ):
            if x.shape[0]:
                _expert_backward((grad, x, weight, first, second, kept), (*outs, grad_first, grad_second))
            else:
                grad_first.zero_()
                grad_second.zero_()
        return grad_rows, grad_weight, grad_gate_up, grad_down, None


def _expert_backward(saved: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> None:
    """One expert's gradients, written to `out` (rows, weights, gate_up [2F, H], down [H, F])."""
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
    _product(grad.T, act.to(work), out[3])
    _product(grad_hidden.to(work), gate_up, out[0])
    _product(grad_hidden.to(work).T, rows, out[2])


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a @ b, rounded to out's dtype; returns the product as it was before rounding."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    product = a @ b
    out.copy_(product)
    return product
