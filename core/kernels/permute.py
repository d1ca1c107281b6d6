"""Rows grouped by expert, and back: gather by index forward, sum of gathers backward (report section 4.3.3).

The router weights go with the rows, so that the experts apply them between activation and second product and no expert output
is kept for their gradient (report section 4.1.2); `unpermute` with weights is the plain form, which keeps it.

Shape letters: T tokens, K choices per token, R routed rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.backend import kernels_backend, wide_dtype
from core.kernels.routing import occurrences


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """Which token and which of its choices each row holds, and where each choice's row is.

    order_R: int64, position token * K + choice of every row, rows sorted by expert, equal experts by token; -1 for a row of zeros
    that only fills an expert's rows up, behind its others.
    row_TK: int64, the row of every choice; a choice that is not routed (expert -1) points at row R, which does not exist.
    counts_E: int64, rows per expert, those of zeros included.
    padded: whether there may be rows of zeros. complete: whether every choice certainly has a row; both are known to the host.
    """

    order_R: Tensor
    row_TK: Tensor
    counts_E: Tensor
    padded: bool = False
    complete: bool = False

    @property
    def rows(self) -> int:
        """The number of routed rows."""
        return self.order_R.numel()

    @property
    def token_R(self) -> Tensor:
        """int64, the token of every row; -1 for a row of zeros."""
        return torch.div(self.order_R, self.row_TK.shape[1], rounding_mode="floor")


def map_rows(experts_TK: Tensor, experts: int, *, multiple: int = 1, rows_per_expert: int | None = None) -> RowMap:
    """The row map of a routing: experts_TK int64 in [0, experts), or -1 for a choice that is not routed.

    multiple: rows of zeros fill those of every expert up to a multiple of it. rows_per_expert: up to just so many, whatever is routed,
    so that all shapes are known beforehand and the host waits for nothing; choices beyond find no row.
    The host waits for the number of rows, unless that is given.
    """
    flat = experts_TK.flatten()
    if flat.numel() and experts and kernels_backend(flat.device) == "triton":
        from core.kernels.triton.permute import place_rows

        padded = multiple > 1 or rows_per_expert is not None
        order, row, counts = place_rows(flat, experts, multiple=multiple, rows_per_expert=rows_per_expert)
        complete = not padded and order.numel() == flat.numel()
        row = row.view_as(experts_TK)
        return RowMap(order_R=order, row_TK=row, counts_E=counts, padded=padded, complete=complete)
    if rows_per_expert is not None or multiple > 1:
        return _padded_rows(flat, experts_TK.shape, experts, multiple, rows_per_expert)
    routed = flat >= 0
    key = torch.where(routed, flat, experts)
    counts = occurrences(key, experts + 1)[:experts]
    total = int(counts.sum()) if experts_TK.numel() else 0
    order = torch.argsort(key, stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=order.device)
    # Choices that are not routed sort behind all others; they share the row that does not exist.
    row = row.clamp_(max=total).view_as(experts_TK)
    return RowMap(order_R=order[:total], row_TK=row, counts_E=counts, complete=total == flat.numel())


def _padded_rows(flat: Tensor, shape: torch.Size, experts: int, multiple: int, rows_per_expert: int | None) -> RowMap:
    """`map_rows` with rows of zeros behind those of every expert."""
    key = torch.where(flat >= 0, flat, experts)
    routed = occurrences(key, experts + 1)
    if rows_per_expert is None:
        counts = torch.div(routed[:experts] + multiple - 1, multiple, rounding_mode="floor") * multiple
        total = int(counts.sum()) if experts else 0
    else:
        counts, total = torch.full_like(routed[:experts], rows_per_expert), experts * rows_per_expert
    order = torch.argsort(key, stable=True)
    place = torch.arange(order.numel(), device=order.device) - (routed.cumsum(0) - routed)[key[order]]
    # Choices that are not routed have no expert, and share the row that does not exist.
    starts = torch.cat([counts.cumsum(0) - counts, counts.new_full((1,), total)])
    room = torch.cat([counts, counts.new_zeros(1)])
    target = torch.where(place < room[key[order]], starts[key[order]] + place, total)
    row = torch.empty_like(order)
    row[order] = target
    filled = order.new_full((total + 1,), -1)
    filled[target] = order
    return RowMap(order_R=filled[:total], row_TK=row.view(shape), counts_E=counts, padded=True)


def permute(hidden_TH: Tensor, rows: RowMap) -> Tensor:
    """The rows of the tokens, sorted by expert: [R, H]. The gradient of a token is the sum over its rows in order of choice."""
    if kernels_backend(hidden_TH.device) == "triton":
        return _TritonPermute.apply(hidden_TH, None, rows.row_TK, rows.order_R, rows.padded)[0]
    return _Gather.apply(hidden_TH, rows.token_R, rows.row_TK, rows.padded, rows.complete)


def permute_weights(weights_TK: Tensor, rows: RowMap) -> Tensor:
    """The router weight of every row, rows sorted by expert: [R]. Choices that are not routed get no gradient."""
    column, row = weights_TK.reshape(-1, 1), rows.row_TK.reshape(-1, 1)
    if kernels_backend(column.device) == "triton":
        return _TritonPermute.apply(column, None, row, rows.order_R, rows.padded)[0][:, 0]
    return _Gather.apply(column, rows.order_R, row, rows.padded, rows.complete)[:, 0]


def permute_with_weights(hidden_TH: Tensor, weights_TK: Tensor, rows: RowMap) -> tuple[Tensor, Tensor]:
    """`permute` and `permute_weights`, by Triton in one launch forward and one backward."""
    if kernels_backend(hidden_TH.device) == "triton":
        return _TritonPermute.apply(hidden_TH, weights_TK, rows.row_TK, rows.order_R, rows.padded)
    return permute(hidden_TH, rows), permute_weights(weights_TK, rows)


def unpermute(rows_RH: Tensor, rows: RowMap, weights_TK: Tensor | None = None) -> Tensor:
    """The sum of every token's rows in order of choice: [T, H], summed in float32 (float64 for float64).

    weights_TK: what each row is multiplied by first, for experts that do not apply the router weights themselves. Its gradient
    needs the rows, which are kept for it: R * H numbers.
    """
    if kernels_backend(rows_RH.device) == "triton":
        return _TritonUnpermute.apply(rows_RH, weights_TK, rows.row_TK, rows.order_R, rows.padded)
    if weights_TK is None:
        return _SumOfRows.apply(rows_RH, rows.token_R, rows.row_TK, rows.padded, rows.complete)
    return _WeightedSum.apply(rows_RH, weights_TK, rows.order_R, rows.row_TK, rows.padded)


def sum_rows(rows_RH: Tensor, row_TK: Tensor, *, complete: bool = False) -> Tensor:
    """sum over k of rows[row_TK[:, k]], where an index of R adds nothing: [T, H]. No gradient. complete: there is no index of R."""
    tokens, hidden = row_TK.shape[0], rows_RH.shape[1]
    if rows_RH.shape[0] == 0 or tokens == 0:
        return rows_RH.new_zeros(tokens, hidden)
    if kernels_backend(rows_RH.device) == "triton":
        from core.kernels.triton.permute import sum_of_rows

        return sum_of_rows(rows_RH, row_TK)[0]
    wide = rows_RH.to(wide_dtype(rows_RH.dtype))
    weights = None if complete else (row_TK != rows_RH.shape[0]).to(wide.dtype)
    return _sum_in_bags(wide, row_TK, weights).to(rows_RH.dtype)


def _gathered(x_TH: Tensor, index_R: Tensor, padded: bool) -> Tensor:
    """x[index], zeros where the index is -1."""
    if not padded:
        return x_TH.index_select(0, index_R)
    if not x_TH.shape[0]:
        return x_TH.new_zeros(index_R.numel(), *x_TH.shape[1:])
    return x_TH.index_select(0, index_R.clamp(min=0)).masked_fill_((index_R < 0)[:, None], 0)


def _sum_in_bags(rows_RH: Tensor, row_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """The sum in the rows' own dtype: torch's embedding bag is a gather and a sum in one pass over memory.

    weights_TK: zero at an index of R; None where there is no such index and every weight is one.
    """
    if weights_TK is None:
        return F.embedding_bag(row_TK, rows_RH, mode="sum")
    index = row_TK.clamp(max=rows_RH.shape[0] - 1)
    return F.embedding_bag(index, rows_RH, mode="sum", per_sample_weights=weights_TK)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool, complete: bool) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.complete = complete
        return _gathered(hidden, token_R, padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return sum_rows(grads[0].contiguous(), ctx.saved_tensors[0], complete=ctx.complete), None, None, None, None


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool, complete: bool) -> Tensor:
        ctx.save_for_backward(token_R)
        ctx.padded = padded
        return sum_rows(rows.contiguous(), row_TK, complete=complete)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _gathered(grads[0], ctx.saved_tensors[0], ctx.padded), None, None, None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(rows, weights, order_R, row_TK)
        ctx.padded = padded
        if not rows.shape[0] or not row_TK.shape[0]:
            return rows.new_zeros(row_TK.shape[0], rows.shape[1])
        wide = rows.contiguous().to(wide_dtype(rows.dtype))
        used = weights.to(wide.dtype).masked_fill(row_TK == rows.shape[0], 0)
        return _sum_in_bags(wide, row_TK, used).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, order_R, row_TK = ctx.saved_tensors
        wide = wide_dtype(rows.dtype)
        token_R = torch.div(order_R, row_TK.shape[1], rounding_mode="floor")
        grad = _gathered(grads[0], token_R, ctx.padded).to(wide)
        of_row = torch.linalg.vecdot(grad, rows.to(wide))
        of_weights = torch.cat([of_row, of_row.new_zeros(1)])[row_TK].to(weights.dtype)
        weight_R = _gathered(weights.reshape(-1, 1).to(wide), order_R, ctx.padded)
        return grad.mul_(weight_R).to(rows.dtype), of_weights, None, None, None


class _TritonPermute(torch.autograd.Function):
    """Rows, and their weights where given. Forward scatters tokens, backward sums rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor | None, row_TK: Tensor, order_R: Tensor, padded: bool
    ) -> tuple[Tensor, Tensor | None]:
        from core.kernels.triton.permute import scatter_tokens

        ctx.save_for_backward(row_TK)
        ctx.weighted = weights is not None
        return scatter_tokens(hidden, row_TK, order_R if padded else None, order_R.numel(), weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        from core.kernels.triton.permute import sum_of_rows

        of_rows = grads[1] if ctx.weighted else None
        return *sum_of_rows(grads[0], ctx.saved_tensors[0], of_rows_R=of_rows), None, None, None


class _TritonUnpermute(torch.autograd.Function):
    """Sums of rows. Backward scatters; only with weights does it need the rows again."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, row_TK: Tensor, order_R: Tensor, padded: bool
    ) -> Tensor:
        from core.kernels.triton.permute import sum_of_rows

        ctx.rows = rows.shape[0]
        ctx.save_for_backward(row_TK, order_R if padded else None, *(() if weights is None else (rows, weights)))
        return sum_of_rows(rows, row_TK, weights_TK=weights)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        from core.kernels.triton.permute import scatter_tokens, weighted_sum_backward

        row_TK, order_R, *kept = ctx.saved_tensors
        if kept:
            rows, weights = kept
            return *weighted_sum_backward(grads[0], rows, row_TK, weights, order_R), None, None, None
        return scatter_tokens(grads[0], row_TK, order_R, ctx.rows)[0], None, None, None, None
