"""Rows of a table by index, with a gradient that is added up in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(tokens_T: Tensor, table_VH: Tensor, *, first: int = 0, vocab: int | None = None) -> Tensor:
    """table[tokens]: [T, H] in the table's dtype. The gradient of a row is the sum over its tokens, rounded once.

    first, vocab: the table is the rows from `first` on of a whole one of `vocab` rows; tokens of other rows give zeros, and
    no gradient to any row. None: it is whole. A token outside the whole table is an IndexError or RuntimeError.
    """
    if vocab is None or vocab == table_VH.shape[0]:
        return _lookup(tokens_T, table_VH)
    refuse_outside(tokens_T, vocab)
    elsewhere = (tokens_T < first) | (tokens_T >= first + table_VH.shape[0])
    # A stretch of no rows still has to answer with a tensor that leads to the table: every rank takes part in backward.
    table = table_VH if table_VH.shape[0] else F.pad(table_VH, (0, 0, 0, 1))
    # The row that stands in for those elsewhere gets, through masked_fill, exact zeros from them.
    return _lookup((tokens_T - first).masked_fill(elsewhere, 0), table).masked_fill(elsewhere[:, None], 0)


def refuse_outside(index_T: Tensor, size: int) -> None:
    """RuntimeError (on a GPU its asynchronous kind) if an index is not in [0, size): no piece of a cut matrix would notice."""
    # One element seen `size` times: gather tests the bounds, and the host does not wait for a GPU.
    index_T.new_zeros(1).expand(size).gather(0, index_T)


def _lookup(tokens: Tensor, table: Tensor) -> Tensor:
    if table.device.type == "cpu" and table.dtype in (torch.float16, torch.bfloat16):
        return _Lookup.apply(tokens, table)
    return F.embedding(tokens, table)


class _Lookup(torch.autograd.Function):
    """On a CPU torch adds up the gradient of a bfloat16 table in bfloat16, where 256 + 1 is 256: frequent tokens lose most of it."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = table.shape[0]
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        total = torch.zeros(ctx.rows, grads[0].shape[1], dtype=torch.float32)
        return None, total.index_add_(0, tokens, grads[0].float()).to(grads[0].dtype)
