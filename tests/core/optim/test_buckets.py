"""Sums over ranks in buckets: every tensor whole, in place, whatever its size."""

from __future__ import annotations

import pytest
import torch

from core.config.mapping import ParallelConfig
from core.optim import buckets
from core.optim.buckets import sum_over_replicas
from core.parallel.groups import groups_for, one_rank
from tests.ranks import Ranks

SIZES = ((3,), (0,), (5, 2), (1,), (17,), (4, 4), ())


def _sum(rank: int, world: int, bucket_bytes: int) -> tuple[list[torch.Tensor], int]:
    """The summed tensors, and how many collectives it took."""
    calls, original, size = 0, buckets.all_reduce_sum, buckets.BUCKET_BYTES

    def counted(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(*args)  # type: ignore[arg-type]

    tensors = [torch.full(shape, float((i + 1) * 10**rank)) for i, shape in enumerate(SIZES)]
    tensors[5] = tensors[5].T
    buckets.BUCKET_BYTES, buckets.all_reduce_sum = bucket_bytes, counted
    try:
        sum_over_replicas(tensors, groups_for(ParallelConfig()).replicas)
    finally:
        buckets.BUCKET_BYTES, buckets.all_reduce_sum = size, original
    return tensors, calls


@pytest.mark.parametrize(("bucket_bytes", "calls"), [(1 << 20, 1), (64, 3), (4, 6)])
def test_tensors_are_summed_in_place_whatever_the_bucket(ranks: Ranks, bucket_bytes: int, calls: int) -> None:
    for tensors, counted in ranks.run(_sum, 2, bucket_bytes):
        assert counted <= calls + 1 and (counted == 1) == (calls == 1)
        for i, (tensor, shape) in enumerate(zip(tensors, SIZES, strict=True)):
            assert torch.equal(tensor, torch.full(shape, 11.0 * (i + 1)))


def test_one_rank_alone_and_no_tensors_need_no_collective() -> None:
    tensor = torch.ones(3)
    sum_over_replicas([tensor], one_rank().replicas)
    assert tensor.tolist() == [1.0] * 3
    assert list(buckets._buckets([])) == []
