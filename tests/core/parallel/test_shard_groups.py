"""Who holds shards, and who holds copies of them: by arithmetic, for every rank of drawn worlds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config.mapping import ParallelConfig
from core.parallel.groups import Channel, Group, Groups, divide, one_rank
from core.parallel.mesh import Division, Mesh, fold


def groups_of(mesh: Mesh, rank: int, fsdp_replicas: int | None, stages: tuple[int, ...] = (0,)) -> Groups:
    """A rank's groups without process groups."""

    def make(name: str, division: Division, channel: Channel) -> Group:
        ranks = division.members(rank)
        return Group(ranks=ranks, position=ranks.index(rank), handle=None, axis=name)

    return divide(mesh, embedding_stages=stages, fsdp_replicas=fsdp_replicas).assemble(make)


def holders(mesh: Mesh, rank: int, replicas: int, stages: tuple[int, ...]) -> dict[str, tuple[Group, Group, Group]]:
    """By kind of piece: those that would hold it whole, those that hold its shards, those that hold my shard."""
    groups = groups_of(mesh, rank, replicas, stages)
    shards = groups.shards
    assert shards is not None
    found = {f"{n} neighbours": (groups.adjacent[n], shards.dense, shards.copies[n]) for n in groups.adjacent}
    found["expert"] = (groups.edp, shards.expert, shards.expert_copies)
    if groups.pp.position in stages:
        found["embedding"] = (groups.embedding, shards.dense, shards.embedding_copies)
    return found


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ParallelConfig, int, int]:
    """A mapping of up to 64 ranks and a number of copies that divides dp."""
    tp, cp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2), (1, 2), (1, 2, 3, 4)))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in (1, 2, 3) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    replicas = draw(st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0]))
    return ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp), stage * pp, replicas


@settings(max_examples=40)
@given(worlds(), st.data())
def test_shards_times_their_copies_are_the_copies_of_the_piece(
    world: tuple[ParallelConfig, int, int], data: st.DataObject
) -> None:
    parallel, ranks, replicas = world
    mesh = fold(parallel, ranks)
    stages = tuple(sorted(data.draw(st.sets(st.integers(0, parallel.pp - 1), min_size=1))))
    rank = data.draw(st.integers(0, ranks - 1))
    for kind, (whole, shards, copies) in holders(mesh, rank, replicas, stages).items():
        assert shards.size * copies.size == whole.size
        reached: set[int] = set()
        for other in copies.ranks:
            its_whole, its_shards, its_copies = holders(mesh, other, replicas, stages)[kind]
            assert (its_whole.ranks, its_copies.ranks) == (whole.ranks, copies.ranks)
            assert its_shards.position == shards.position  # it holds the same shard
            reached.update(its_shards.ranks)
        assert reached == set(whole.ranks)


def test_copies_lie_along_dp_and_experts_have_as_many_as_their_own_ranks_allow() -> None:
    mesh = fold(ParallelConfig(tp=2, ep=4), 16)  # dp 8, edp 4
    shards = groups_of(mesh, 0, 2).shards
    assert shards is not None
    assert shards.dense.ranks == (0, 2, 4, 6) and shards.copies[1].ranks == (0, 8)
    assert shards.copies[2].ranks == (0, 1, 8, 9)
    assert shards.expert.ranks == (0, 4) and shards.expert_copies.ranks == (0, 8)
    shards = groups_of(mesh, 5, 8).shards
    assert shards is not None
    assert shards.dense.ranks == (5,) and shards.copies[1].ranks == tuple(range(1, 16, 2))
    assert (shards.expert.size, shards.expert_copies.size) == (1, 4) == (1, math.gcd(8, 4))


def test_copies_that_do_not_divide_dp_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="dp of 4 ranks does not hold 3 whole copies"):
        groups_of(fold(ParallelConfig(), 4), 0, 3)


def test_without_fsdp_no_groups_are_made_for_shards_and_one_rank_always_has_them() -> None:
    assert groups_of(fold(ParallelConfig(), 4), 0, None).shards is None
    assert one_rank().shards is not None
