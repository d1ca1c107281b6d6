"""Worlds that are not there: planned groups against real ones and against plain indexing, and a process group without partners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config.mapping import ParallelConfig
from core.parallel.collectives import (
    all_gather,
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    all_to_all,
    reduce_scatter_rows,
)
from core.parallel.fake import fake_world, plan_world, planned_groups
from core.parallel.groups import Group, groups_for
from core.parallel.mesh import fold
from core.parallel.pending import start_all_gather, start_reduce_scatter
from core.parallel.point_to_point import Hop, start_hops
from tests.ranks import Ranks

Told = dict[str, tuple[tuple[int, ...], int, str]]

LARGE = ParallelConfig(tp=8, cp=4, pp=16, ep=64, etp=2, cp_alltoall=2)
LARGEST_WORLD = 65_536


def told(value: Any, path: str = "") -> Told:
    """Ranks, position and axis of every group that lies in `value`, whatever fields and keys lead to it."""
    if isinstance(value, Group):
        return {path: (value.ranks, value.position, value.axis)}
    if value is None:
        return {}
    held = value if isinstance(value, Mapping) else {field.name: getattr(value, field.name) for field in fields(value)}
    return {p: t for name, inner in held.items() for p, t in told(inner, f"{path}/{name}").items()}


def _real(rank: int, world: int, parallel: ParallelConfig, stages: tuple[int, ...]) -> Told:
    return told(groups_for(parallel, embedding_stages=stages))


def _planned(rank: int, world: int, parallel: ParallelConfig, stages: tuple[int, ...]) -> Told:
    mesh, fsdp = fold(parallel, world), parallel.sharding == "fsdp"
    replicas = parallel.fsdp_replicas if fsdp else None
    groups = planned_groups(mesh, rank, heads=parallel.cp_alltoall, embedding_stages=stages, fsdp_replicas=replicas)
    assert (groups.shards is not None) == fsdp
    return told(groups)


@pytest.mark.parametrize(
    ("parallel", "world", "stages"),
    [
        (ParallelConfig(), 1, (0,)),
        (ParallelConfig(pp=2), 2, (0, 1)),
        (ParallelConfig(tp=2, etp=2), 2, ()),
        (ParallelConfig(tp=4, ep=4), 4, (0,)),
        (ParallelConfig(cp=4, cp_alltoall=2, etp=2, ep=2), 4, (0,)),
        (ParallelConfig(pp=4), 4, (0, 3)),
        (ParallelConfig(tp=2, pp=2, ep=2), 4, (1,)),
        (ParallelConfig(ep=2, sharding="fsdp", fsdp_replicas=2), 4, (0,)),
    ],
)
def test_planned_groups_are_those_that_real_ranks_make(
    ranks: Ranks, parallel: ParallelConfig, world: int, stages: tuple[int, ...]
) -> None:
    assert ranks.run(_real, world, parallel, stages) == [_planned(r, world, parallel, stages) for r in range(world)]


@pytest.mark.parametrize(
    ("parallel", "world", "stages"),
    [
        (ParallelConfig(tp=2, pp=2, ep=4), 8, (0, 1)),
        (ParallelConfig(cp=4, cp_alltoall=2, etp=2, ep=2, pp=2), 8, (0,)),
        (ParallelConfig(tp=2, cp=2, pp=4, etp=4, ep=3), 48, (1, 3)),
        (ParallelConfig(tp=6, pp=2, ep=8, etp=3), 48, (0,)),
        (ParallelConfig(tp=3, pp=2, ep=2, etp=2, sharding="fsdp", fsdp_replicas=4), 48, (0, 1)),
    ],
)
def test_planned_groups_are_those_that_fake_worlds_make(
    parallel: ParallelConfig, world: int, stages: tuple[int, ...]
) -> None:
    for rank in range(world):
        with fake_world(rank, world):
            made = _real(rank, world, parallel, stages)
        assert made == _planned(rank, world, parallel, stages)


@settings(max_examples=30)
@given(rank=st.integers(0, LARGEST_WORLD - 1))
def test_groups_of_a_large_world_are_the_lines_of_its_two_arrays_of_ranks(rank: int) -> None:
    groups = planned_groups(fold(LARGE, LARGEST_WORLD), rank, heads=2, embedding_stages=(0, 13))
    # Slowest axis first, as numpy counts: pp, dp, ring, heads, and tp as so many neighbours of two; pp, edp, ep, etp.
    dense = np.arange(LARGEST_WORLD).reshape(16, 128, 2, 2, 4, 2)
    expert = np.arange(LARGEST_WORLD).reshape(16, 32, 64, 2)
    p, d, r, h, t, n = np.argwhere(dense == rank)[0]
    q, f, e, i = np.argwhere(expert == rank)[0]
    lines = {
        groups.tp: dense[p, d, r, h],
        groups.cp: dense[p, d, :, :, t, n],
        groups.heads: dense[p, d, r, :, t, n],
        groups.ring: dense[p, d, :, h, t, n],
        groups.dp: dense[p, :, r, h, t, n],
        groups.pp: dense[:, d, r, h, t, n],
        groups.sequence: dense[p, d],
        groups.replicas: dense[p, :, :, :, t, n],
        groups.adjacent[1]: dense[p, :, :, :, t, n],
        groups.adjacent[2]: dense[p, :, :, :, t, :],
        groups.adjacent[8]: dense[p],
        groups.tokens: dense[p],
        groups.world: dense,
        groups.embedding: dense[[0, 13]][:, :, :, :, t, n] if p in (0, 13) else dense[p, d, r, h, t, n],
        groups.etp: expert[q, f, e],
        groups.ep: expert[q, f, :, i],
        groups.edp: expert[q, :, e, i],
        groups.experts: expert[q, f],
    }
    for group, line in lines.items():
        assert group.ranks == tuple(sorted(line.flatten().tolist())), group.axis
        assert group.ranks[group.position] == rank


def test_ranks_of_a_planned_world_share_the_members_of_their_groups() -> None:
    world = plan_world(fold(LARGE, LARGEST_WORLD))
    first, second = world.groups(40_000), world.groups(40_001)
    assert first.world.ranks is second.world.ranks and first.tokens.ranks is second.tokens.ranks
    assert first.tp.ranks is second.tp.ranks and first.cp.ranks is not second.cp.ranks
    with pytest.raises(ValueError, match="rank 65536 is outside a world of 65536"):
        world.groups(LARGEST_WORLD)


def test_planned_groups_have_no_handles() -> None:
    groups = planned_groups(fold(ParallelConfig(tp=2), 4), 3)
    assert groups.tp.size == 2 and groups.world.size == 4
    assert all(group.handle is None for group in (groups.tp, groups.dp, groups.world, *groups.pipes.values()))


def test_a_rank_of_the_largest_fake_world_makes_its_own_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, new_group = [], dist.new_group

    def counted(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    with fake_world(54_321, LARGEST_WORLD):
        groups = groups_for(LARGE)
        assert all(group.handle is not None for group in (groups.tp, groups.edp, groups.world, groups.ring))
    assert len(made) < 25 and all(54_321 in ranks for ranks in made)


def test_every_kind_of_collective_returns_in_a_fake_world() -> None:
    with fake_world(37, 64):
        group = groups_for(ParallelConfig(tp=4)).tp
        x = torch.zeros(3, 2, requires_grad=True)
        everyone = all_gather_rows(x, (2, 3, 0, 1), group)
        assert everyone.shape == (6, 2) and all_gather(x, group).shape == (12, 2)
        assert reduce_scatter_rows(everyone, (2, 3, 0, 1), group).shape == (3, 2)
        sent = all_to_all(everyone, (1, 2, 3, 0), (0, 2, 1, 4), group)
        assert sent.shape == (7, 2)
        assert all_reduce_sum(x, group).shape == (3, 2) and all_reduce_max(x, group).shape == (3, 2)
        assert start_hops([Hop(x=torch.zeros(5), to=1, elements=4, source=2)], group).wait()[0].shape == (4,)
        assert start_reduce_scatter(torch.zeros(8), group).wait().shape == (2,)
        assert start_all_gather(torch.zeros(8), group).wait().shape == (8,)
        sent.sum().backward()
        assert x.grad is not None and x.grad.shape == (3, 2)


def test_a_fake_world_ends_with_its_block_and_never_begins_in_another() -> None:
    with pytest.raises(KeyError), fake_world(1, 3):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        with pytest.raises(RuntimeError, match="leave the other one first"), fake_world(0, 2):
            pass
        assert dist.get_world_size() == 3
        raise KeyError
    assert not dist.is_initialized()
