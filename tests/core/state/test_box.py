"""Boxes against the plainest truth: an array of counters, one per element."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.state.box import Box, flat_boxes, intersect, part, shifted, tiling_fault, whole


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Boxes inside `shape`, empty ones too."""

    @st.composite
    def draw_box(draw: st.DrawFn) -> Box:
        ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        return Box(offset=tuple(low for low, _ in ends), shape=tuple(high - low for low, high in ends))

    return draw_box()


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def marks(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


@given(st.data(), shapes)
def test_two_boxes_share_exactly_the_elements_that_lie_in_both(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    shared = intersect(a, b)
    in_both = marks(shape, [a]) * marks(shape, [b])
    assert np.array_equal(in_both, marks(shape, [shared] if shared else []))


@given(st.data(), shapes)
def test_boxes_tile_a_target_exactly_if_each_element_is_counted_once(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    target = data.draw(boxes_in(shape))
    # Pieces of a true tiling, of which some are dropped and some foreign ones added: both outcomes are common.
    pieces = split(target, data.draw)
    if pieces and data.draw(st.booleans()):
        pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
    if data.draw(st.booleans()):
        pieces.append(data.draw(boxes_in(shape)))
    exact = np.array_equal(marks(shape, [target]), marks(shape, pieces))
    assert (tiling_fault(target, pieces) is None) == exact


@given(st.data(), shapes)
def test_sharing_does_not_depend_on_order_or_grouping(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b, c = (data.draw(boxes_in(shape)) for _ in range(3))
    assert intersect(a, b) == intersect(b, a)
    assert intersect(a, a) == (a if a.elements else None)
    left, right = intersect(a, b), intersect(b, c)
    assert (left and intersect(left, c)) == (right and intersect(a, right))


@given(st.data(), shapes)
def test_what_two_tilings_share_is_a_tiling_again(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Why any mapping can read what any other wrote: each piece of one is tiled by what it shares with those of the other."""
    target = data.draw(boxes_in(shape))
    written, wanted = split(target, data.draw), split(target, data.draw)
    for piece in wanted:
        shared = [found for box in written if (found := intersect(box, piece))]
        assert tiling_fault(piece, shared) is None
    assert tiling_fault(target, [f for a in written for b in wanted if (f := intersect(a, b))]) is None


@given(st.data(), shapes)
def test_a_fault_of_a_tiling_names_an_element_that_is_held_as_often_as_it_says(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    target, boxes = whole(shape), data.draw(st.lists(boxes_in(shape), max_size=4))
    fault = tiling_fault(target, boxes)
    counts = marks(shape, boxes)
    if fault is None:
        assert (counts == 1).all()
        return
    said = re.fullmatch(r"the element at (\(.*\)) is held (?:(by no piece)|(\d+) times)", fault)
    assert said is not None
    assert counts[ast.literal_eval(said[1])] == (0 if said[2] else int(said[3]))


@given(st.data(), shapes, st.lists(st.integers(-9, 9), min_size=4, max_size=4))
def test_shifting_moves_boxes_and_what_they_share_alike(
    data: st.DataObject, shape: tuple[int, ...], by: list[int]
) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    origin = tuple(by[: len(shape)])
    shared, moved = intersect(a, b), intersect(shifted(a, origin), shifted(b, origin))
    assert moved == (shared and shifted(shared, origin))
    assert shifted(shifted(a, origin), tuple(-o for o in origin)) == a


def split(box: Box, draw: st.DrawFn) -> list[Box]:
    """A tiling of `box` by cuts in drawn places."""
    cuttable = [d for d, size in enumerate(box.shape) if size > 1]
    if not cuttable or not box.elements or not draw(st.booleans()):
        return [box]
    d = draw(st.sampled_from(cuttable))
    at = draw(st.integers(1, box.shape[d] - 1))
    low = Box(offset=box.offset, shape=(*box.shape[:d], at, *box.shape[d + 1 :]))
    offset = (*box.offset[:d], box.offset[d] + at, *box.offset[d + 1 :])
    high = Box(offset=offset, shape=(*box.shape[:d], box.shape[d] - at, *box.shape[d + 1 :]))
    return split(low, draw) + split(high, draw)


def test_a_hole_an_overlap_and_an_excess_are_told_apart_and_placed() -> None:
    target = whole((5, 3))
    upper, lower = Box(offset=(0, 0), shape=(2, 3)), Box(offset=(2, 0), shape=(3, 3))
    assert tiling_fault(target, [lower, upper]) is None
    assert tiling_fault(target, [upper]) == "the element at (2, 0) is held by no piece"
    assert (
        tiling_fault(target, [upper, lower, Box(offset=(4, 2), shape=(1, 1))])
        == "the element at (4, 2) is held 2 times"
    )
    assert "reaches outside" in str(tiling_fault(target, [upper, Box(offset=(2, 0), shape=(4, 3))]))


def test_a_scalar_is_tiled_by_one_scalar_box_and_an_empty_tensor_by_nothing() -> None:
    scalar = whole(())
    assert tiling_fault(scalar, [scalar]) is None
    assert tiling_fault(scalar, []) == "the element at () is held by no piece"
    assert tiling_fault(scalar, [scalar, scalar]) == "the element at () is held 2 times"
    assert tiling_fault(whole((0, 7)), []) is None


def test_many_row_pieces_are_checked_in_a_moment() -> None:
    rows = [Box(offset=(i, 0), shape=(1, 4)) for i in range(20_000)]
    assert tiling_fault(whole((20_000, 4)), rows) is None
    del rows[12_345]
    assert tiling_fault(whole((20_000, 4)), rows) == "the element at (12345, 0) is held by no piece"


def test_equal_parts_tile_their_tensor_and_a_size_that_does_not_divide_is_refused() -> None:
    assert tiling_fault(whole((6, 5)), [part((6, 5), 0, i, 3) for i in range(3)]) is None
    with pytest.raises(ValueError, match="does not divide"):
        part((6, 5), 1, 0, 2)


def test_a_shifted_box_points_at_the_same_elements_of_the_piece() -> None:
    tensor = np.arange(35).reshape(5, 7)
    outer, inner = Box(offset=(1, 2), shape=(4, 5)), Box(offset=(3, 4), shape=(2, 2))
    assert np.array_equal(tensor[outer.slices][shifted(inner, outer.offset).slices], tensor[inner.slices])


@given(st.data(), st.lists(st.integers(0, 4), max_size=5).map(tuple), st.integers(0, 9))
def test_a_flat_range_is_few_boxes_that_hold_its_elements_once_in_order(
    data: st.DataObject, shape: tuple[int, ...], shift: int
) -> None:
    elements = int(np.prod(shape))
    start, stop = sorted((data.draw(st.integers(0, elements)), data.draw(st.integers(0, elements))))
    box = Box(offset=tuple(shift + d for d in range(len(shape))), shape=shape)
    piece = np.arange(elements)
    found = flat_boxes(box, start, stop)
    following = start
    for inner, number in found:
        assert number == following and inner.elements > 0
        following += inner.elements
        # the elements that the box names in the piece are those that lie there in the flat data
        named = piece.reshape(shape)[shifted(inner, box.offset).slices]
        assert np.array_equal(named, piece[number : number + inner.elements].reshape(inner.shape))
    assert following == stop or (start == stop and not found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data(), st.lists(st.integers(1, 5), max_size=4).map(tuple), st.integers(1, 6))
def test_flat_shards_of_any_ranks_tile_the_piece_and_each_box_is_contiguous_in_it(
    data: st.DataObject, shape: tuple[int, ...], ranks: int
) -> None:
    """As ZeRO-1 deals out a buffer: the ranges of the ranks lie one behind the other, wherever they are cut."""
    box = Box(offset=tuple(data.draw(st.integers(0, 3)) for _ in shape), shape=shape)
    ends = sorted(data.draw(st.integers(0, box.elements)) for _ in range(ranks - 1))
    boxes = [
        (inner, number)
        for low, high in pairwise([0, *ends, box.elements])
        for inner, number in flat_boxes(box, low, high)
    ]
    assert tiling_fault(box, [inner for inner, _ in boxes]) is None
    numbers = np.arange(box.elements).reshape(shape)
    for inner, number in boxes:
        inside = numbers[shifted(inner, box.offset).slices].ravel()
        assert np.array_equal(inside, np.arange(number, number + inner.elements))


def test_flat_ranges_that_end_at_rows_are_single_boxes_and_others_have_ragged_ends() -> None:
    box = Box(offset=(10, 20), shape=(5, 3))
    assert flat_boxes(box, 0, 15) == ((box, 0),)
    assert flat_boxes(box, 3, 9) == ((Box(offset=(11, 20), shape=(2, 3)), 3),)
    assert flat_boxes(box, 4, 5) == ((Box(offset=(11, 21), shape=(1, 1)), 4),)
    assert flat_boxes(box, 1, 14) == (
        (Box(offset=(10, 21), shape=(1, 2)), 1),
        (Box(offset=(11, 20), shape=(3, 3)), 3),
        (Box(offset=(14, 20), shape=(1, 2)), 12),
    )
    assert flat_boxes(box, 7, 7) == ()
    assert flat_boxes(whole(()), 0, 1) == ((whole(()), 0),)


def test_the_largest_number_of_boxes_does_occur() -> None:
    assert len(flat_boxes(whole((3, 3, 3, 3)), 1, 80)) == 7


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 16)])
def test_a_range_outside_the_piece_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="piece that has 15"):
        flat_boxes(whole((5, 3)), start, stop)
