"""Experts that take only so many rows: which choices of a microbatch are dropped, whatever ranks it lies on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.attention.packing import Packing
from core.config.architecture import Capacity
from core.kernels.routing import within_capacity
from core.parallel.collectives import all_gather_rows
from core.parallel.groups import Group


@torch.no_grad()
def kept_choices(
    experts_TK: Tensor, weights_TK: Tensor, packing: Packing, *, experts: int, capacity: Capacity, sequence: Group
) -> Tensor:
    """Which of my tokens' choices their experts keep: [T, K] bool.

    experts_TK: -1 for padding. All ranks of the microbatch see all its choices and weights (16 bytes a choice, three all-gathers
    over `sequence`), so that they come to one answer: the one that a single rank would give. The host reads the number of tokens
    that are not padding.
    """
    chosen, weights, order = (
        all_gather_rows(x.contiguous(), packing.shares, sequence) for x in (experts_TK, weights_TK, packing.mine_T)
    )
    top_k = experts_TK.shape[1]
    routed = int((chosen[:, 0] >= 0).sum()) if top_k else 0
    kept = within_capacity(
        chosen,
        weights,
        order,
        experts=experts,
        capacity=math.ceil(capacity.factor * top_k * routed / experts),
        by_weight=capacity.drop == "weight",
    )
    first = sum(packing.shares[: sequence.position])
    return kept[first : first + experts_TK.shape[0]]
