"""What a rank does with tokens that have come to it once, each with the experts that it chose here: rows for the experts, and back.

Shape letters: P tokens that have arrived, K choices each.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from core.kernels.permute import RowMap, map_rows, permute_with_weights, unpermute
from core.moe.dispatch.protocol import ExpertRows, Rows


def map_arrived(experts_PK: Tensor, experts: int, *, multiple: int = 1, order_P: Tensor | None = None) -> RowMap:
    """The rows of my experts, from what has arrived: experts_PK local ids, -1 for a choice of another rank.

    order_P: int64, the order in which an expert sees the tokens, if not that in which they lie. The host waits for the number of rows.
    """
    if order_P is None:
        return map_rows(experts_PK.to(torch.int64), experts, multiple=multiple)
    found = map_rows(experts_PK[order_P].to(torch.int64), experts, multiple=multiple)
    top_k = experts_PK.shape[1]
    # The map speaks of tokens by their place in the order; those of zeros (-1) are nobody's.
    token, choice = found.token_R, found.order_R.clamp(min=0) % max(top_k, 1)
    order = torch.where(token >= 0, order_P[token.clamp(min=0)] * top_k + choice, -1) if len(order_P) else found.order_R
    row = torch.empty_like(found.row_TK)
    row[order_P] = found.row_TK
    return replace(found, order_R=order, row_TK=row)


def expand(rows: Rows, arrived: RowMap) -> ExpertRows:
    """A row for each choice of an expert of mine, sorted by expert. rows: hidden [P, H], weights [P, K]. The host reads the counts."""
    hidden, weights = permute_with_weights(rows.hidden, rows.weights, arrived)
    return ExpertRows(hidden_RH=hidden, weights_R=weights, counts=tuple(arrived.counts_E.tolist()))


def collect(rows_RH: Tensor, arrived: RowMap) -> Tensor:
    """The sum of every token's rows here, in order of choice: [P, H], summed in float32."""
    return unpermute(rows_RH, arrived)
