"""Process groups made from a mesh, on real ranks: each group reduces over exactly the ranks that it says."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from core.config.mapping import ParallelConfig
from core.parallel.groups import Group, Groups, groups_for, make_groups, one_rank
from core.parallel.mesh import fold
from tests.ranks import Ranks

NAMES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp", "replicas", "tokens", "world", "sequence", "experts")


def _by_name(groups: Groups) -> dict[str, Group]:
    listed = (groups.tp, groups.cp, groups.dp, groups.pp, groups.etp, groups.ep, groups.edp)
    wider = (groups.replicas, groups.tokens, groups.world, groups.sequence, groups.experts)
    return dict(zip(NAMES, (*listed, *wider), strict=True))


def _copies(rank: int, world: int, parallel: ParallelConfig, stages: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The ranks of the groups that no single set of axes names."""
    groups = groups_for(parallel, embedding_stages=stages)
    told = {"heads": groups.heads.ranks, "ring": groups.ring.ranks, "embedding": groups.embedding.ranks}
    return told | {f"adjacent {n}": group.ranks for n, group in groups.adjacent.items()}


def _reduce_over_each(rank: int, world: int, parallel: ParallelConfig) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Per group: its ranks, my position, and the sum of 10 ** rank that a real collective over it gives."""
    told = {}
    for name, group in _by_name(groups_for(parallel)).items():
        x = torch.tensor([10**rank])
        if group.handle is not None:
            dist.all_reduce(x, group=group.handle)
        told[name] = (group.ranks, group.position, int(x))
    return told


def _shared_handles(rank: int, world: int) -> tuple[bool, bool, bool]:
    groups = groups_for(ParallelConfig(ep=2))
    return groups.dp.handle is groups.world.handle, groups.ep.handle is groups.edp.handle, groups.tp.handle is None


def _out_of_order(rank: int, world: int) -> tuple[list[int], int]:
    """A gather in the background and a sum in front, which each rank starts in another order."""
    groups = groups_for(ParallelConfig())
    gathered: list[int] = [0] * world
    total = torch.tensor([10**rank])

    def gather() -> None:
        dist.all_gather_object(gathered, rank, group=groups.checkpoint.handle)

    thread = threading.Thread(target=gather)
    if rank % 2:
        thread.start()
        time.sleep(0.1)
    dist.all_reduce(total, group=groups.world.handle)
    if not rank % 2:
        thread.start()
    thread.join()
    return gathered, int(total)


def _wait_alone(rank: int, world: int) -> tuple[float, str]:
    """How long a collective that the other rank never joins waits, and what it says."""
    groups = make_groups(fold(ParallelConfig(ep=2), world), rank, timeout=timedelta(seconds=1))
    start, said = time.monotonic(), ""
    if rank == 0:
        with pytest.raises(RuntimeError) as e:
            dist.all_reduce(torch.zeros(1), group=groups.ep.handle)
        said = str(e.value)
    else:
        time.sleep(3)
    return time.monotonic() - start, said


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(ep=2), 2),
        (ParallelConfig(pp=3), 3),
        (ParallelConfig(tp=2, ep=4), 4),
        (ParallelConfig(tp=2, pp=2, ep=2), 4),
        (ParallelConfig(cp=2, etp=2, ep=2), 4),
        (ParallelConfig(ep=2), 4),
    ],
)
def test_a_collective_over_each_group_reaches_exactly_its_ranks(
    ranks: Ranks, parallel: ParallelConfig, world: int
) -> None:
    mesh = fold(parallel, world)
    axes = {"replicas": ("cp", "dp"), "tokens": ("tp", "cp", "dp"), "world": ("tp", "cp", "dp", "pp")}
    axes |= {"sequence": ("tp", "cp"), "experts": ("etp", "ep")}
    for rank, told in enumerate(ranks.run(_reduce_over_each, world, parallel)):
        for name in NAMES:
            folding = mesh.expert if name in ("etp", "ep", "edp", "experts") else mesh.dense
            expected = folding.members(rank, axes.get(name, (name,)))
            assert told[name] == (expected, expected.index(rank), sum(10**r for r in expected)), name


def test_neighbours_along_tp_and_cp_form_groups_of_their_own(ranks: Ranks) -> None:
    told = ranks.run(_copies, 4, ParallelConfig(tp=4), (0,))
    assert [t["adjacent 2"] for t in told] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [t["adjacent 1"] for t in told] == [(0,), (1,), (2,), (3,)]
    assert [t["adjacent 4"] for t in told] == [(0, 1, 2, 3)] * 4
    told = ranks.run(_copies, 4, ParallelConfig(cp=4, cp_alltoall=2), (0,))
    assert [t["heads"] for t in told] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [t["ring"] for t in told] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_the_embedding_is_shared_by_the_stages_that_hold_it_at_one_place_along_tp(ranks: Ranks) -> None:
    told = ranks.run(_copies, 4, ParallelConfig(pp=4), (0, 3))
    assert [t["embedding"] for t in told] == [(0, 3), (1,), (2,), (0, 3)]
    told = ranks.run(_copies, 4, ParallelConfig(tp=2, pp=2), (0, 1))
    assert [t["embedding"] for t in told] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    told = ranks.run(_copies, 4, ParallelConfig(pp=2), (1,))
    assert [t["embedding"] for t in told] == [(0,), (1,), (2, 3), (2, 3)]


def test_groups_of_equal_ranks_share_one_process_group(ranks: Ranks) -> None:
    assert ranks.run(_shared_handles, 4) == [(True, False, True)] * 4


def test_checkpoints_have_a_channel_of_their_own_over_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(_out_of_order, 3) == [([0, 1, 2], 111)] * 3


def test_a_collective_that_a_rank_never_joins_raises_after_the_timeout(ranks: Ranks) -> None:
    (waited, said), _ = ranks.run(_wait_alone, 2)
    assert 0.5 < waited < 3
    assert "timed out" in said.lower()


def test_one_rank_without_torch_distributed_has_groups_without_handles() -> None:
    assert not dist.is_initialized()
    for name, group in _by_name(groups_for(ParallelConfig())).items():
        assert group == Group(ranks=(0,), position=0, handle=None, axis=name)
        assert group.size == 1
    assert groups_for(ParallelConfig()) == one_rank()
