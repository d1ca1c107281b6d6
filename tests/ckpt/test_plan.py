"""Who writes what: refusals before anything is written, no file shared, bytes spread."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt.plan
from ckpt.plan import Held, divided, plan_save
from ckpt.save import describe
from ckpt.store.zarr import ZarrStore
from core.errors import CheckpointError
from core.state.box import Box, intersect, part, stretch, tiling_fault, whole
from tests.ckpt.pieces import cut, make_small
from tests.core.state.test_box import split


def held(name: str, shape: tuple[int, ...], box: Box, copy: int = 0, copies: int = 1, dtype: str = "float32") -> Held:
    return Held(name=name, shape=shape, dtype=dtype, box=box, copy=copy, copies=copies)


def refusal(ranks: list[list[Held]]) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan_save(ranks)
    return str(caught.value)


def test_an_expert_piece_that_no_rank_calls_its_own_is_a_hole() -> None:
    # Expert-tensor-parallel rank 1 forgotten: its halves of the experts are on no rank (Megatron-LM#1836).
    shape = (4, 16)
    ranks = [[held("experts", shape, Box(offset=(2 * ep, 0), shape=(2, 8)))] for ep in range(2) for _ in range(1)]
    assert "experts: the element at (0, 8) is held by no piece" in refusal(ranks)


def test_local_expert_numbers_in_place_of_global_ones_are_an_overlap() -> None:
    ranks = [[held("experts", (4, 3), Box(offset=(0, 0), shape=(2, 3)))] for _ in range(2)]
    assert "rank 0 copy 0 of 1, rank 1 copy 0 of 1" in refusal(
        [*ranks, [held("experts", (4, 3), part((4, 3), 0, 1, 2))]]
    )


def test_partly_overlapping_pieces_are_refused() -> None:
    ranks = [[held("w", (5,), Box(offset=(0,), shape=(3,)))], [held("w", (5,), Box(offset=(2,), shape=(3,)))]]
    assert "w: the element at (2,) is held 2 times" in refusal(ranks)


def test_a_copy_that_is_spoken_of_but_held_by_nobody_is_refused() -> None:
    assert "rank 0 copy 0 of 2" in refusal([[held("w", (5,), whole((5,)), 0, 2)], []])


def test_every_tensor_at_fault_is_listed() -> None:
    bad = [held(name, (4,), Box(offset=(0,), shape=(3,))) for name in ("b", "a")]
    message = refusal([[*bad, held("good", (1,), whole((1,)))]])
    assert "a: " in message and "b: " in message and "good" not in message


def test_ranks_that_differ_about_shape_or_type_are_named() -> None:
    ranks = [[held("w", (4,), whole((4,)), 0, 2)], [held("w", (4,), whole((4,)), 1, 2, "bfloat16")]]
    assert "w: is float32 (4,) on rank 0 but bfloat16 (4,) on rank 1" in refusal(ranks)


@pytest.mark.parametrize("name", ["../escape", "", ".hidden", "a/b", "a b"])
def test_a_name_that_is_no_safe_file_name_is_refused(name: str) -> None:
    assert "canonical name" in refusal([[held(name, (1,), whole((1,)))]])


def test_a_type_that_cannot_be_stored_is_refused_by_name() -> None:
    assert "w: dtype complex64 cannot be stored" in refusal([[held("w", (1,), whole((1,)), dtype="complex64")]])


@given(
    st.data(), st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 3), st.sampled_from([1, 9, 64, 400])
)
def test_each_element_is_written_once_by_a_rank_that_holds_it_and_each_file_by_one_rank(
    data: st.DataObject, shape: tuple[int, ...], copies: int, piece_bytes: int
) -> None:
    boxes = split(whole(shape), data.draw)
    ranks: list[list[Held]] = [[] for _ in range(len(boxes) + copies - 1)]
    for first, box in enumerate(boxes):
        for copy in range(copies):
            ranks[first + copy].append(held("w", shape, box, copy, copies))
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, block_bytes=32, own_file_bytes=16, share_bytes=8)
        plan = plan_save(ranks, piece_bytes)
        files = ZarrStore().lay_out(plan)
    assert tiling_fault(whole(shape), [write.box for write in plan.writes]) is None
    for write in plan.writes:
        assert any(intersect(piece.box, write.box) == write.box for piece in ranks[write.rank])
    assert sorted(plan.writes, key=repr) == sorted((write for file in files for write in file.writes), key=repr)
    assert len({file.path for file in files}) == len(files)
    assert all(write.rank == file.rank for file in files for write in file.writes)
    assert plan.bytes == 4 * whole(shape).elements


def test_pieces_of_one_grid_get_files_of_one_array_and_others_lie_one_behind_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_small(monkeypatch, block_bytes=64, own_file_bytes=16, share_bytes=1 << 20)

    def paths(boxes: list[Box]) -> list[str]:
        return [file.path for file in ZarrStore().lay_out(plan_save([[held("w", (10, 7), box)] for box in boxes]))]

    halves = [part((10, 7), 0, i, 2) for i in range(2)]
    assert paths(halves) == ["tensors/w/c.0.0", "tensors/w/c.1.0"]
    # 10 rows over 4 ranks as 3, 3, 3, 1: no grid of equal cells.
    uneven = [Box(offset=(3 * i, 0), shape=(min(3, 10 - 3 * i), 7)) for i in range(4)]
    assert paths(uneven) == [f"pieces/{rank:05d}.0.float32/c.0" for rank in range(4)]
    # A flat shard of a matrix: a row's end, whole rows, a row's beginning.
    flat = [Box(offset=(0, 0), shape=(1, 3)), Box(offset=(0, 3), shape=(1, 4)), Box(offset=(1, 0), shape=(9, 7))]
    assert paths(flat) == [f"pieces/{rank:05d}.0.float32/c.0" for rank in range(3)]


@given(st.data(), st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), st.integers(1, 30))
def test_a_divided_box_is_tiled_by_boxes_that_are_contiguous_in_it(
    data: st.DataObject, shape: tuple[int, ...], parts: int
) -> None:
    box = Box(offset=tuple(data.draw(st.integers(0, 5)) for _ in shape), shape=shape)
    found = divided(box, parts)
    assert tiling_fault(box, found) is None
    assert len(found) <= 2 * parts
    for piece in found:
        # Row by row: what lies before the first dimension that is not whole has one row.
        cut_at = next((d for d, size in enumerate(piece.shape) if size > 1), len(shape))
        assert piece.shape[cut_at + 1 :] == shape[cut_at + 1 :]


def test_a_piece_larger_than_a_file_may_be_is_written_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_save([[held("w", (6, 2, 8), whole((6, 2, 8)))]], piece_bytes=130)
    assert [write.box.shape for write in plan.writes] == [(2, 2, 8)] * 3
    # One row is the least, and a scalar cannot be divided at all.
    rows = plan_save([[held("w", (3, 8), whole((3, 8))), held("x", (), whole(()))]], piece_bytes=1)
    assert [write.box.elements for write in rows.writes][-1:] == [1]
    assert max(write.box.elements for write in rows.writes) <= 8


def test_a_large_piece_that_several_ranks_hold_is_divided_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt.plan, "LEAST_SHARE_BYTES", 40)
    ranks = [
        [held("w", (12, 5), whole((12, 5)), rank, 4), held("small", (7,), whole((7,)), rank, 4)] for rank in range(4)
    ]
    writes = plan_save(ranks).writes
    load = Counter(write.rank for write in writes if write.name == "w")
    assert load == {0: 1, 1: 1, 2: 1, 3: 1}
    assert {write.box.shape for write in writes if write.name == "w"} == {(3, 5)}
    assert len([write for write in writes if write.name == "small"]) == 1


def test_copies_share_the_writing_evenly_by_bytes() -> None:
    sizes = [1000, 3, 500, 500, 1, 250, 250, 250, 250, 7]
    ranks = [[held(f"w{i}", (n,), whole((n,)), rank, 4) for i, n in enumerate(sizes)] for rank in range(4)]
    load = Counter()
    for write in plan_save(ranks).writes:
        load[write.rank] += write.box.elements
    assert sum(load.values()) == sum(sizes)
    assert max(load.values()) == 1000 and min(load.values()) >= 500


def test_the_plan_does_not_depend_on_the_order_of_a_ranks_tensors() -> None:
    ranks = [[held(f"w{i}", (i + 1,), whole((i + 1,)), rank, 2) for i in range(12)] for rank in range(2)]
    assert plan_save(ranks) == plan_save([list(reversed(rank)) for rank in ranks])


def test_experts_of_every_expert_rank_are_saved_each_by_one_of_its_replicas() -> None:
    # TP2 EP4: "only data rank 0 saves" would lose experts (verl-project/verl#2086).
    ranks = cut("experts", torch.zeros(8, 5), (4, 1), copies=2)
    writes = plan_save([describe(rank) for rank in ranks]).writes
    assert sorted(write.box.offset[0] for write in writes) == [0, 2, 4, 6]
    assert [write.rank // 2 for write in sorted(writes, key=lambda w: w.box.offset)] == [0, 1, 2, 3]


def test_ranks_that_cut_a_short_dimension_may_hold_the_same_nothing() -> None:
    """One row over three ranks: two empty pieces of equal box, which are no copies of one another."""
    held = [
        [Held(name="a", shape=(1, 3), dtype="float32", box=stretch((1, 3), 0, i, 3), copy=0, copies=1)]
        for i in range(3)
    ]
    assert [(write.rank, write.box) for write in plan_save(held).writes] == [(2, whole((1, 3)))]
