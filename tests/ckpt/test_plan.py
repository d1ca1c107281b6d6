"""Who writes what: refusals before anything is written, no chunk shared, bytes spread."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan import Held, plan_save
from ckpt.save import describe
from ckpt.store.zarr import ZarrStore
from core.errors import CheckpointError
from core.state.box import Box, part, shifted, stretch, tiling_fault, whole
from tests.ckpt.pieces import cut
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


@given(st.data(), st.lists(st.integers(0, 9), max_size=4).map(tuple))
def test_each_piece_is_written_once_and_no_two_writers_touch_one_file(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    boxes = split(whole(shape), data.draw)
    ranks = [[held("w", shape, box)] for box in boxes]
    plan = plan_save(ranks)
    assert tiling_fault(whole(shape), [write.box for write in plan.writes]) is None
    files = [
        file
        for write in plan.writes
        for file in ZarrStore().files(write.array, shifted(write.box, write.array_box.offset), write.first)
    ]
    assert len(files) == len(set(files)) <= 3 * len(boxes)
    assert plan.bytes <= 1.25 * 4 * whole(shape).elements


def test_uneven_rows_share_one_array_and_ragged_pieces_get_one_each() -> None:
    # 10 rows over 4 ranks as 3, 3, 3, 1: a grid of 3 separates them.
    rows = [Box(offset=(3 * i, 0), shape=(min(3, 10 - 3 * i), 7)) for i in range(4)]
    even = plan_save([[held("w", (10, 7), box)] for box in rows])
    assert {(write.array.path, write.array.chunk) for write in even.writes} == {("tensors/w", (3, 7))}
    # A flat shard of a matrix: a row's end, whole rows, a row's beginning.
    flat = [Box(offset=(0, 0), shape=(1, 3)), Box(offset=(0, 3), shape=(1, 4)), Box(offset=(1, 0), shape=(9, 7))]
    ragged = plan_save([[held("w", (10, 7), box)] for box in flat])
    assert [write.array.path for write in ragged.writes] == ["tensors/w/0", "tensors/w/1", "tensors/w/2"]


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
