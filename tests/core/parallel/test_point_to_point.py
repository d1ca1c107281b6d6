"""Messages between ranks of a group: who gets what, what is counted, and what nobody waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.groups import Group, one_rank
from core.parallel.meter import Meter
from core.parallel.point_to_point import Exchange, Hop, start_hops
from tests.ranks import Ranks

SIZES: dict[int, list[tuple[int, ...]]] = {
    2: [(3, 5), (0, 2), (0, 0)],
    3: [(1, 0, 4), (2, 2, 2)],
    4: [(7, 1, 0, 0), (0, 0, 3, 0)],
}


def _group(rank: int, world: int, meter: Meter | None = None) -> Group:
    return Group(ranks=tuple(range(world)), position=rank, handle=dist.group.WORLD, axis="ring", meter=meter)


def _content(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(size).add(10 * rank).to(dtype)


def _up(x: Tensor, elements: int, group: Group, tag: int = 0) -> Exchange:
    """Round the ring by one."""
    return start_hops([Hop(x=x, to=group.position + 1, elements=elements, source=group.position - 1)], group, tag=tag)


def _shifted(rank: int, world: int, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[list[float], int]:
    meter = Meter()
    (received,) = _up(_content(rank, sizes[rank], dtype), sizes[rank - 1], _group(rank, world, meter)).wait()
    return received.tolist(), meter.sent_bytes["ring", "send"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_gets_what_the_one_before_it_sends(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    for sizes in SIZES[world]:
        for rank, (received, sent) in enumerate(ranks.run(_shifted, world, sizes, dtype, timeout_seconds=10)):
            before = (rank - 1) % world
            assert received == _content(before, sizes[before], dtype).tolist()
            assert sent == sizes[rank] * dtype.itemsize


def _two_at_once(rank: int, world: int) -> list[list[float]]:
    """Two shifts under way together, the later one waited for first."""
    group = _group(rank, world)
    first, second = (
        _up(torch.full((size,), float(10 * tag + rank)), size, group, tag=tag) for tag, size in ((0, 2), (1, 2))
    )
    (late,), (early,) = second.wait(), first.wait()
    return [early.tolist(), late.tolist()]


@pytest.mark.parametrize("world", [2, 3])
def test_shifts_that_are_under_way_together_are_told_apart_by_their_tags(ranks: Ranks, world: int) -> None:
    for rank, (first, second) in enumerate(ranks.run(_two_at_once, world)):
        before = (rank - 1) % world
        assert (first, second) == ([before] * 2, [10 + before] * 2)


def _three_ways(rank: int, world: int) -> tuple[list[list[float]], int]:
    """At once one up, one down but not from the first rank, and one from the first rank to the last."""
    meter, last = Meter(), world - 1
    x = [torch.full((2,), float(10 * way + rank)) for way in range(3)]
    hops = [
        Hop(x=x[0], to=rank + 1, elements=2, source=rank - 1),
        Hop(x=x[1] if rank else x[1][:0], to=rank - 1, elements=2 if rank < last else 0, source=rank + 1),
        Hop(x=x[2] if not rank else x[2][:0], to=last, elements=2 if rank == last else 0, source=0),
    ]
    received = start_hops(hops, _group(rank, world, meter)).wait()
    return [part.tolist() for part in received], meter.sent_bytes["ring", "send"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_hops_in_all_directions_are_under_way_together_and_only_whoever_has_a_part_sends(
    ranks: Ranks, world: int
) -> None:
    last = world - 1
    for rank, (received, sent) in enumerate(ranks.run(_three_ways, world, timeout_seconds=10)):
        down = [10.0 + rank + 1] * 2 if rank < last else []
        assert received == [[float((rank - 1) % world)] * 2, down, [20.0] * 2 if rank == last else []]
        assert (
            sent == 2 * 2 * 4
        )  # every rank has two parts of two float32: the first rank sends the last message, not the middle one


def _in_pairs(rank: int, world: int) -> list[float]:
    """Two rings at once, {0, 2} and {1, 3}: a position in a ring is not a rank in the world."""
    handles = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
    group = replace(_group(rank, world), ranks=(rank % 2, rank % 2 + 2), position=rank // 2, handle=handles[rank % 2])
    return _up(torch.full((2,), float(rank)), 2, group).wait()[0].tolist()


def test_rings_inside_a_world_shift_apart(ranks: Ranks) -> None:
    assert ranks.run(_in_pairs, 4) == [[2.0] * 2, [3.0] * 2, [0.0] * 2, [1.0] * 2]


def test_a_rank_alone_keeps_what_it_has_and_a_tensor_of_another_shape_is_refused() -> None:
    alone, x = one_rank().ring, torch.ones(3)
    assert _up(x, 3, alone).wait()[0] is x
    with pytest.raises(ValueError, match="sends itself 3 elements and cannot receive 2"):
        _up(x, 2, alone)
    for wrong in (torch.ones(2, 3), torch.ones(6)[::2], torch.tensor(1.0)):
        with pytest.raises(ValueError, match="one contiguous dimension, not shape"):
            _up(wrong, 3, alone)
