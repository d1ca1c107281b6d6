"""Rows of a table by index, with a gradient that is added up in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(tokens_T: Tensor, table_VH: Tensor) -> Tensor:
    """table[tokens]: [T, H] in the table's dtype. The gradient of a row is the sum over its tokens, rounded once."""
    if table_VH.device.type == "cpu" and table_VH.dtype in (torch.float16, torch.bfloat16):
        return _Lookup.apply(tokens_T, table_VH)
    return F.embedding(tokens_T, table_VH)


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
