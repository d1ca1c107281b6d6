"""Collectives that run in the background: the same bits as those that wait, and what is sent for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.collectives import reduce_scatter
from core.parallel.groups import Group
from core.parallel.meter import Meter
from core.parallel.pending import own_part, start_all_gather, start_reduce_scatter
from tests.core.numbers import draw
from tests.ranks import Ranks

DTYPES = (torch.float32, torch.float64)


def group_of(rank: int, world: int, meter: Meter | None = None) -> Group:
    ranks = tuple(range(world))
    return Group(ranks=ranks, position=rank, handle=dist.group.WORLD if world > 1 else None, axis="copies", meter=meter)


def part_of(rank: int, world: int, each: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes, so that every order of summation rounds in its own way."""
    return (draw(rank, world * each) * 10.0 ** (3 * rank)).to(dtype)


def _reduce(rank: int, world: int, each: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int, bool]:
    """The sum, what the waiting collective gives, the buffer afterwards, bytes, and whether the result is part of the buffer."""
    meter = Meter()
    flat = part_of(rank, world, each, dtype)
    expected = reduce_scatter(flat.clone(), group_of(rank, world))
    pending = start_reduce_scatter(flat, group_of(rank, world, meter))
    mine = pending.wait()
    shared = mine.data_ptr() == own_part(flat, group_of(rank, world)).data_ptr()
    return mine.clone(), expected, flat, meter.sent_bytes["copies", "reduce_scatter"], shared


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_sum_is_taken_in_the_order_of_ranks_and_lands_in_the_buffer(ranks: Ranks, world: int) -> None:
    for dtype in (*DTYPES, torch.bfloat16):
        for each in (1, 37):
            parts = [part_of(rank, world, each, dtype).view(world, each) for rank in range(world)]
            told = ranks.run(_reduce, world, each, dtype)
            for rank, (mine, expected, flat, sent, shared) in enumerate(told):
                # What has 16 bits is added up in float32 and rounded once.
                total = parts[0][rank].to(torch.promote_types(dtype, torch.float32), copy=True)
                for part in parts[1:]:
                    total += part[rank]
                total = total.to(dtype)
                assert torch.equal(mine, total) and torch.equal(expected, total)
                others = [i for i in range(world) if i != rank]
                assert torch.equal(flat.view(world, each)[others], parts[rank][others])
                assert sent == (world - 1) * each * dtype.itemsize
                assert shared


def _gather(rank: int, world: int, each: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    meter = Meter()
    flat = torch.full((world * each,), torch.nan, dtype=dtype)
    own_part(flat, group_of(rank, world)).copy_(draw(rank, each))
    found = start_all_gather(flat, group_of(rank, world, meter)).wait()
    assert found is flat
    return flat, meter.sent_bytes["copies", "all_gather"]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_ends_with_all_parts(ranks: Ranks, world: int) -> None:
    for dtype in (*DTYPES, torch.bfloat16):
        truth = torch.cat([draw(rank, 5) for rank in range(world)]).to(dtype)
        for flat, sent in ranks.run(_gather, world, 5, dtype):
            assert torch.equal(flat, truth)
            assert sent == (world - 1) * 5 * dtype.itemsize


def _several(rank: int, world: int) -> list[Tensor]:
    """Many of both kinds under way at once over one group, waited for in another order than they were started in."""
    group = group_of(rank, world)
    flats = [torch.full((world * n,), float(10**rank + n)) for n in range(6)]
    kinds = (start_reduce_scatter, start_all_gather)
    pending = [kinds[n % 2](flat, group) for n, flat in enumerate(flats)]
    return [pending[i].wait().clone() for i in (5, 0, 3, 4, 1, 2)]


def test_several_may_be_under_way_and_be_waited_for_in_any_order(ranks: Ranks) -> None:
    for found in ranks.run(_several, 3):
        for n, result in zip((5, 0, 3, 4, 1, 2), found, strict=True):
            gathered = torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(n) + n
            assert torch.equal(result, gathered if n % 2 else torch.full((n,), 111.0 + 3 * n))


def _late(rank: int, world: int) -> tuple[bool, bool, list[float]]:
    """Rank 0 starts alone: is it kept, and is the sum said to be done before the other has joined?"""
    flat = torch.ones(4)
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
    pending = start_reduce_scatter(flat, group_of(rank, world))
    early = pending.done()
    if rank == 0:
        dist.send(torch.zeros(1), dst=1)  # only now the other joins: had the start waited, this would never be reached
    result = pending.wait().tolist()
    return early, pending.done(), result


def test_starting_does_not_wait_for_the_others(ranks: Ranks) -> None:
    (early, late, result), (_, _, other) = ranks.run(_late, 2)
    assert (early, late) == (False, True) and result == other == [2.0, 2.0]


def test_nothing_is_sent_for_an_empty_buffer() -> None:
    meter = Meter()
    group = replace(group_of(1, 1), ranks=(0, 1), position=1, meter=meter)
    assert start_reduce_scatter(torch.empty(0), group).wait().numel() == 0
    assert start_all_gather(torch.empty(0), group).wait().numel() == 0
    assert not meter.sent_bytes


@pytest.mark.parametrize("shape", [(5,), (2, 2), ()])
def test_a_buffer_that_does_not_divide_is_refused(shape: tuple[int, ...]) -> None:
    group = replace(group_of(0, 1), ranks=(0, 1))
    for start in (start_reduce_scatter, start_all_gather):
        with pytest.raises(ValueError, match="does not divide over 2 ranks"):
            start(torch.zeros(shape), group)
