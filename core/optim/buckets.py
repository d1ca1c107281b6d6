"""Sums of many gradients over replicas, few collectives: tensors travel in buckets (report section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Group

# Large enough that latency does not matter, small enough to stay out of the way of memory.
BUCKET_BYTES = 32 << 20


@torch.no_grad()
def sum_over_replicas(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace each tensor by its sum over `group`; all of one dtype, in the same order on every rank."""
    if group.size == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        summed = all_reduce_sum(flat, group)
        for tensor, piece in zip(bucket, summed.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(piece.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbouring tensors together, up to BUCKET_BYTES; a larger tensor is a bucket of its own."""
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        yield bucket
