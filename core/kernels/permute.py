"""Rows grouped by expert, and back: gather by index forward, sum of gathers backward (report section 4.3.3).

Shape letters: T tokens, K choices per token, R routed rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """Which token and which of its choices each row holds, and where each choice's row is.

    order_R: int64, position token * K + choice of every row, rows sorted by expert, equal experts by token.
    row_TK: int64, the row of every choice; a choice that is not routed (expert -1) points at row R, which does not exist.
    counts_E: int64, rows per expert.
    """

    order_R: Tensor
    row_TK: Tensor
    counts_E: Tensor

    @property
    def rows(self) -> int:
        """The number of routed rows."""
        return self.order_R.numel()

    @property
    def token_R(self) -> Tensor:
        """int64, the token of every row."""
        return self.order_R // self.row_TK.shape[1]


def map_rows(experts_TK: Tensor, experts: int) -> RowMap:
    """The row map of a routing: experts_TK int64 in [0, experts), or -1 for a choice that is not routed."""
    flat = experts_TK.flatten()
    routed = flat >= 0
    key = torch.where(routed, flat, experts)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    total = int(counts.sum()) if experts_TK.numel() else 0
    order = torch.argsort(key, stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=order.device)
    # Choices that are not routed sort behind all others; they share the row that does not exist.
    row = row.clamp_(max=total).view_as(experts_TK)
    return RowMap(order_R=order[:total], row_TK=row, counts_E=counts)


def permute(hidden_TH: Tensor, rows: RowMap) -> Tensor:
    """The rows of the tokens, sorted by expert: [R, H]. The gradient of a token is the sum over its rows in order of choice."""
    return _Gather.apply(hidden_TH, rows.token_R, rows.row_TK)


def permute_weights(weights_TK: Tensor, rows: RowMap) -> Tensor:
    """The router weight of every row, rows sorted by expert: [R]. Choices that are not routed get no gradient."""
    flat = _Gather.apply(weights_TK.reshape(-1, 1), rows.order_R, rows.row_TK.reshape(-1, 1))
    return flat[:, 0]


def unpermute(rows_RH: Tensor, rows: RowMap) -> Tensor:
    """The sum of every token's rows in order of choice: [T, H], summed in float32."""
    return _SumOfRows.apply(rows_RH, rows.token_R, rows.row_TK)


def sum_rows(rows_RH: Tensor, row_TK: Tensor) -> Tensor:
    """sum over k of rows[row_TK[:, k]], where an index of R adds nothing: [T, H]. No gradient.

    In a row map each row belongs to one choice, so as many rows as choices means that every choice has one: the host learns from
    shapes, without waiting for the device, whether an index of R can be there.
    """
    tokens, hidden = row_TK.shape[0], rows_RH.shape[1]
    if rows_RH.shape[0] == 0 or tokens == 0:
        return rows_RH.new_zeros(tokens, hidden)
    if rows_RH.dtype in (torch.float16, torch.bfloat16):
        return _sum_rows_plain(rows_RH.float(), row_TK).to(rows_RH.dtype)
    return _sum_rows_plain(rows_RH, row_TK)


def _sum_rows_plain(rows_RH: Tensor, row_TK: Tensor) -> Tensor:
    """`sum_rows` in the rows' own dtype: torch's embedding bag is a gather and a sum in one pass over memory."""
    total = rows_RH.shape[0]
    if total == row_TK.numel():
        return F.embedding_bag(row_TK, rows_RH, mode="sum")
    weights = (row_TK != total).to(rows_RH.dtype)
    return F.embedding_bag(row_TK.clamp(max=total - 1), rows_RH, mode="sum", per_sample_weights=weights)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return hidden.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(grads[0].contiguous(), ctx.saved_tensors[0]), None, None


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return sum_rows(rows.contiguous(), row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None
