"""Collectives over groups that are not there, against what real ranks that all hold the same would get and count."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.collectives import (
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    all_to_all,
    all_to_all_equal,
    reduce_scatter_rows,
)
from core.parallel.groups import Group
from core.parallel.meter import Meter
from core.parallel.point_to_point import Hop, start_hops
from tests.ranks import Ranks

# Rows from every rank, for a group of three: as many everywhere, so that all ranks can hold the same.
EVEN = (2, 2, 2)


def _everything(x: Tensor, group: Group) -> list[Tensor]:
    """What every collective makes of x, [6, 2] on each rank, forward, and what comes back of it."""
    own = x[:2].clone().requires_grad_(x.is_floating_point())
    gathered = all_gather_rows(own, EVEN, group)
    summed = reduce_scatter_rows(x, EVEN, group)
    # Rank p sends p + 1 rows to everyone's position p, itself included: what it gets from each is what it sends to itself.
    sends, receives = (1, 2, 3), (group.position + 1,) * 3
    travelled = all_to_all(x, sends, receives, group)
    found = [
        gathered,
        summed,
        travelled,
        all_to_all_equal(x, group),
        all_reduce_sum(x, group),
        all_reduce_max(x, group),
    ]
    if own.requires_grad:
        gathered.sum().backward()
        found.append(own.grad)
    return [each.detach() for each in found]


def _real(rank: int, world: int) -> tuple[list[list[Tensor]], dict[tuple[str, str], int]]:
    meter = Meter()
    group = Group(ranks=(0, 1, 2), position=rank, handle=dist.group.WORLD, axis="ep", meter=meter)
    return [_everything(x, group) for x in _operands()], dict(meter.sent_bytes)


def _operands() -> list[Tensor]:
    numbers = torch.arange(12).view(6, 2)
    return [numbers, numbers.float()]


def test_what_has_data_comes_out_as_on_ranks_that_all_hold_the_same_and_as_many_bytes_are_counted(ranks: Ranks) -> None:
    for rank, (results, sent) in enumerate(ranks.run(_real, 3)):
        meter = Meter()
        group = Group(ranks=(0, 1, 2), position=rank, handle=None, axis="ep", meter=meter, imagined=True)
        for real, x in zip(results, _operands(), strict=True):
            for number, (a, b) in enumerate(zip(real, _everything(x, group), strict=True)):
                assert torch.equal(a, b), (rank, number, a, b)
        assert dict(meter.sent_bytes) == sent


def test_what_has_no_data_keeps_shape_and_bytes() -> None:
    meters = Meter(), Meter()
    for position in range(3):
        groups = [
            Group(ranks=(0, 1, 2), position=position, handle=None, axis="ep", meter=meter, imagined=True)
            for meter in meters
        ]
        x = torch.arange(12.0).view(6, 2)
        there, not_there = _everything(x, groups[0]), _everything(x.to("meta"), groups[1])
        assert [each.shape for each in there] == [each.shape for each in not_there]
        assert all(each.is_meta for each in not_there)
    assert meters[0].sent_bytes == meters[1].sent_bytes


def test_uneven_rows_are_mine_over_and_over() -> None:
    group = Group(ranks=(0, 1), position=0, handle=None, imagined=True)
    assert all_gather_rows(torch.tensor([5, 6]), (2, 5), group).tolist() == [5, 6, 5, 6, 5, 6, 5]
    assert all_gather_rows(torch.tensor([], dtype=torch.int64), (0, 2), group).tolist() == [0, 0]


def test_hops_of_an_imagined_group_receive_what_is_expected_and_send_nothing() -> None:
    meter = Meter()
    group = Group(ranks=(4, 7), position=0, handle=None, axis="ring", meter=meter, imagined=True)
    hop = Hop(x=torch.empty(3, device="meta"), to=1, elements=5, source=1)
    (received,) = start_hops([hop], group).wait()
    assert received.shape == (5,) and dict(meter.sent_bytes) == {("ring", "send"): 12}


def test_a_planned_group_that_is_not_imagined_communicates_nothing() -> None:
    group = Group(ranks=(0, 1), position=0, handle=None)
    assert group.alone and not Group(ranks=(0, 1), position=0, handle=None, imagined=True).alone
