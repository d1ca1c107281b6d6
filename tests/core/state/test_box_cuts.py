"""Uneven cuts: as equal as can be, in order, and together exactly what was cut, against numpy's own index arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.state.box import Box, cut, ends, part, stretch, whole

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


def filled(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape))).reshape(shape)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_pieces_begin_where_the_one_before_ends_and_differ_by_at_most_one(size: int, count: int) -> None:
    found = ends(size, count)
    sizes = np.diff(found)
    assert len(found) == count + 1 and found[0] == 0 and found[-1] == size
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1
    # Whoever asks for one place's bounds and for all of them gets the same: index i begins at floor(i * size / count).
    assert all(low <= i * size / count < low + 1 for i, low in enumerate(found))


@pytest.mark.parametrize(
    ("size", "count", "expected"),
    [
        (7, 2, (0, 3, 7)),
        (7, 3, (0, 2, 4, 7)),
        (0, 3, (0, 0, 0, 0)),
        (1, 3, (0, 0, 0, 1)),
        (2, 3, (0, 0, 1, 2)),
        (5, 1, (0, 5)),
    ],
)
def test_ends_by_hand(size: int, count: int, expected: tuple[int, ...]) -> None:
    assert ends(size, count) == expected


def test_a_vocabulary_beyond_32_bits_of_elements_is_cut_exactly() -> None:
    size = 3 * 2**40 + 1
    assert ends(size, 3) == (0, 2**40, 2**41, size)


@given(st.data(), shapes, st.integers(1, 9))
def test_stretches_laid_behind_one_another_are_the_tensor(
    data: st.DataObject, shape: tuple[int, ...], count: int
) -> None:
    dimension = data.draw(st.integers(0, len(shape) - 1))
    tensor = filled(shape)
    pieces = [stretch(shape, dimension, i, count) for i in range(count)]
    assert np.array_equal(np.concatenate([tensor[piece.slices] for piece in pieces], axis=dimension), tensor)
    sizes = [piece.shape[dimension] for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert all(piece.shape[d] == shape[d] for piece in pieces for d in range(len(shape)) if d != dimension)


@given(st.data(), shapes, st.integers(1, 4), st.integers(1, 5))
def test_a_cut_of_a_cut_lies_inside_it(data: st.DataObject, shape: tuple[int, ...], outer: int, inner: int) -> None:
    """As experts are: dealt out along one dimension, then cut along another or the same."""
    first, second = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    tensor = filled(shape)
    for i in range(outer):
        box = stretch(shape, first, i, outer)
        pieces = [cut(box, second, j, inner) for j in range(inner)]
        together = np.concatenate([tensor[piece.slices] for piece in pieces], axis=second)
        assert np.array_equal(together, tensor[box.slices])


@given(shapes, st.integers(1, 5))
def test_where_the_size_divides_a_stretch_is_an_equal_part(shape: tuple[int, ...], count: int) -> None:
    even = (shape[0] * count, *shape[1:])
    for i in range(count):
        assert stretch(even, 0, i, count) == part(even, 0, i, count)


def test_a_cut_keeps_the_offset_of_what_it_cuts() -> None:
    box = Box(offset=(4, 1, 0), shape=(3, 7, 5))
    assert cut(box, 1, 0, 2) == Box(offset=(4, 1, 0), shape=(3, 3, 5))
    assert cut(box, 1, 1, 2) == Box(offset=(4, 4, 0), shape=(3, 4, 5))
    assert cut(box, 0, 0, 1) == box == cut(box, 2, 0, 1)
    assert stretch((2, 7), 1, 4, 8) == Box(offset=(0, 3), shape=(2, 1)) and stretch((2, 7), 1, 0, 8).elements == 0


def test_one_piece_is_everything() -> None:
    assert stretch((3, 5), 1, 0, 1) == whole((3, 5))
