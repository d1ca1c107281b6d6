"""The arithmetic of both foldings, against layouts written out by hand and properties that any folding has."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.config.mapping import ParallelConfig
from core.parallel.mesh import DENSE_AXES, EXPERT_AXES, Folding, Mesh, fold

DEGREE = st.sampled_from([1, 2, 3])
LARGEST = 60  # ranks; the properties below are checked rank by rank, axis set by axis set


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of degrees with primes among them, in which both foldings fit."""
    tp, cp, etp, ep = (draw(DEGREE) for _ in range(4))
    pp, spare = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([1, 2, 7]))
    ranks = int(np.lcm(tp * cp, etp * ep)) * pp * spare
    assume(ranks <= LARGEST)
    return fold(ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp), ranks)


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]


def test_eight_ranks_fold_as_written_out_by_hand() -> None:
    mesh = fold(ParallelConfig(tp=2, pp=2, ep=4), 8)
    assert mesh.dense == Folding(axes=DENSE_AXES, sizes=(2, 1, 2, 2))
    assert mesh.expert == Folding(axes=EXPERT_AXES, sizes=(1, 4, 1, 2))
    assert mesh.dense.groups(("tp",)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.dense.groups(("dp",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.dense.groups(("pp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.dense.groups(("tp", "cp", "dp")) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.expert.groups(("ep",)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.expert.groups(("edp",)) == tuple((rank,) for rank in range(8))


def test_experts_spread_over_more_ranks_than_data_parallelism_has() -> None:
    mesh = fold(ParallelConfig(tp=2, cp=2, ep=8), 8)
    assert mesh.dense.size("dp") == 2
    assert mesh.expert.groups(("ep",)) == (tuple(range(8)),)


def test_a_context_parallel_group_strides_over_the_tensor_parallel_one() -> None:
    mesh = fold(ParallelConfig(tp=3, cp=2), 12)
    assert mesh.dense.members(4, ("cp",)) == (1, 4)
    assert mesh.dense.members(4, ("tp",)) == (3, 4, 5)
    assert mesh.dense.members(4, ("dp",)) == (4, 10)
    assert mesh.dense.members(4, ()) == (4,)


@given(meshes())
def test_coordinates_number_the_ranks_as_a_fortran_ordered_array_does(mesh: Mesh) -> None:
    for folding in (mesh.dense, mesh.expert):
        order = np.arange(mesh.world).reshape(folding.sizes, order="F")
        for rank in range(mesh.world):
            assert order[folding.coordinates(rank)] == rank
            assert folding.rank_at(folding.coordinates(rank)) == rank


@given(meshes())
def test_groups_over_any_axes_hold_each_rank_once_and_are_what_each_member_sees(mesh: Mesh) -> None:
    for folding in (mesh.dense, mesh.expert):
        for axes in _subsets(folding.axes):
            groups = folding.groups(axes)
            size = int(np.prod([folding.size(axis) for axis in axes]))
            assert sorted(itertools.chain(*groups)) == list(range(mesh.world))
            assert {len(group) for group in groups} == {size}
            assert all(folding.members(rank, axes) == group for group in groups for rank in group)
            assert list(groups) == sorted(groups)


@given(meshes())
def test_both_foldings_cut_the_world_into_the_same_pipeline_stages(mesh: Mesh) -> None:
    stages = mesh.dense.groups(("tp", "cp", "dp"))
    assert stages == mesh.expert.groups(("etp", "ep", "edp"))
    assert mesh.dense.groups(("pp",)) == mesh.expert.groups(("pp",))
    assert all(stage == tuple(range(stage[0], stage[0] + len(stage))) for stage in stages)


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [(ParallelConfig(tp=2), 3), (ParallelConfig(ep=2), 5), (ParallelConfig(cp=2, pp=3), 8), (ParallelConfig(ep=8), 4)],
)
def test_degrees_that_do_not_divide_the_ranks_are_refused(parallel: ParallelConfig, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"^{ranks} ranks do not fold"):
        fold(parallel, ranks)


@pytest.mark.parametrize("rank", [-1, 12])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 12"):
        fold(ParallelConfig(tp=3), 12).dense.coordinates(rank)


def test_a_hundred_thousand_ranks_take_a_moment() -> None:
    start = time.monotonic()
    mesh = fold(ParallelConfig(tp=8, cp=2, pp=16, ep=64), 102_400)
    assert mesh.dense.coordinates(102_399) == (7, 1, 399, 15)
    assert mesh.expert.members(70_000, ("ep",)) == tuple(range(69_952, 70_016))
    assert len(mesh.expert.groups(("ep",))) == 1600
    assert time.monotonic() - start < 30  # a moment is under a second; a quadratic algorithm would take an hour


@given(meshes(), st.data())
def test_splitting_an_axis_numbers_its_places_by_their_inner_one_first(mesh: Mesh, data: st.DataObject) -> None:
    for folding in (mesh.dense, mesh.expert):
        axis = data.draw(st.sampled_from(folding.axes))
        size = folding.size(axis)
        inner = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        split = folding.split(axis, inner)
        assert split.world == folding.world
        at = folding.axes.index(axis)
        for rank in range(folding.world):
            whole, parts = folding.coordinates(rank), split.coordinates(rank)
            assert parts[at] == whole[at] % inner and parts[at + 1] == whole[at] // inner
            assert parts[:at] + parts[at + 2 :] == whole[:at] + whole[at + 1 :]
            assert split.rank_at(parts) == rank
        assert (split.size(f"{axis}.inner"), split.size(f"{axis}.outer")) == (inner, size // inner)
        both = (f"{axis}.inner", f"{axis}.outer")
        assert split.groups(both) == folding.groups((axis,))
        others = tuple(name for name in folding.axes if name != axis)
        assert split.groups(others) == folding.groups(others)


def test_neighbours_of_a_split_axis_stride_over_the_axes_that_vary_faster() -> None:
    dense = fold(ParallelConfig(tp=2, cp=4), 16).dense.split("cp", 2)
    assert dense.axes == ("tp", "cp.inner", "cp.outer", "dp", "pp") and dense.sizes == (2, 2, 2, 2, 1)
    assert dense.members(5, ("cp.inner",)) == (5, 7)
    assert dense.members(5, ("cp.outer",)) == (1, 5)
    assert dense.groups(("cp.outer",))[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    twice = fold(ParallelConfig(tp=8), 8).dense.split("tp", 4).split("tp.inner", 2)
    assert twice.members(6, ("tp.inner.inner",)) == (6, 7) and twice.members(6, ("tp.inner.outer",)) == (4, 6)


@pytest.mark.parametrize(("size", "inner"), [(4, 3), (3, 2), (1, 2), (2, 4)])
def test_an_axis_that_does_not_fold_into_such_groups_is_refused(size: int, inner: int) -> None:
    with pytest.raises(ValueError, match=f"^tp of {size} ranks does not fold into groups of {inner}$"):
        fold(ParallelConfig(tp=size), size).dense.split("tp", inner)
