"""Boxes: the piece of a tensor that starts at `offset` and has `shape`, in the tensor's global coordinates (contract 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Box:
    """An axis-aligned piece of a global tensor; `offset` and `shape` have one entry per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"a box needs one offset per dimension, got offset {self.offset} and shape {self.shape}")

    @property
    def elements(self) -> int:
        """The number of elements inside."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the entire tensor."""
    return Box(offset=(0,) * len(shape), shape=shape)


def part(shape: tuple[int, ...], dimension: int, index: int, count: int) -> Box:
    """Piece `index` of `count` equal pieces of a tensor along `dimension`. Raises ValueError where they do not divide it."""
    if shape[dimension] % count:
        raise ValueError(f"dimension {dimension} of {shape} does not divide into {count} equal pieces")
    size = shape[dimension] // count
    offset = tuple(index * size if d == dimension else 0 for d in range(len(shape)))
    return Box(offset=offset, shape=tuple(size if d == dimension else s for d, s in enumerate(shape)))


def ends(size: int, count: int) -> tuple[int, ...]:
    """Where `count` pieces of `size` elements begin and end, as equal as can be: count + 1 numbers from 0 to size."""
    return tuple(size * i // count for i in range(count + 1))


def stretch(shape: tuple[int, ...], dimension: int, index: int, count: int) -> Box:
    """Piece `index` of `count` pieces of a tensor along `dimension`, as equal as can be; some are empty where count > size."""
    return cut(whole(shape), dimension, index, count)


def cut(box: Box, dimension: int, index: int, count: int) -> Box:
    """Piece `index` of `count` pieces of a box along `dimension`, as equal as can be."""
    low, high = ends(box.shape[dimension], count)[index : index + 2]
    offset, shape = list(box.offset), list(box.shape)
    offset[dimension] += low
    shape[dimension] = high - low
    return Box(offset=tuple(offset), shape=tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None where they share no element."""
    low = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    high = tuple(min(x + m, y + n) for x, m, y, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    if any(h <= l for l, h in zip(low, high, strict=True)):
        return None
    return Box(offset=low, shape=tuple(h - l for l, h in zip(low, high, strict=True)))


def shifted(box: Box, origin: tuple[int, ...]) -> Box:
    """The same box in the coordinates of a piece that starts at `origin`."""
    return Box(offset=tuple(o - z for o, z in zip(box.offset, origin, strict=True)), shape=box.shape)


def flat_boxes(box: Box, start: int, stop: int) -> tuple[tuple[Box, int], ...]:
    """The elements [start, stop) of the piece `box`, counted row by row from its first one, as few boxes.

    Each comes with the number of its own first element, in ascending order, and is contiguous in the flat piece: the box `b` at
    `n` is `flat[n : n + b.elements].view(b.shape)`. At most 2 * dimensions - 1 boxes; none where the range is empty. Raises
    ValueError for a range that reaches outside the piece.
    """
    if not 0 <= start <= stop <= box.elements:
        raise ValueError(f"elements {start} to {stop} of a piece that has {box.elements}")
    if start == stop:
        return ()
    if stop - start == box.elements:
        return ((box, 0),)
    row = box.elements // box.shape[0]
    first, last = -(-start // row), stop // row  # the rows in [first, last) are whole
    if first > last:
        return _in_row(box, last, start, stop, row)
    middle = Box(offset=(box.offset[0] + first, *box.offset[1:]), shape=(last - first, *box.shape[1:]))
    whole_rows = ((middle, first * row),) if first < last else ()
    head, tail = _in_row(box, first - 1, start, first * row, row), _in_row(box, last, last * row, stop, row)
    return (*head, *whole_rows, *tail)


def _in_row(box: Box, index: int, start: int, stop: int, row: int) -> tuple[tuple[Box, int], ...]:
    """`flat_boxes` of a range that lies in the row `index`."""
    inner = Box(offset=box.offset[1:], shape=box.shape[1:])
    at = box.offset[0] + index
    return tuple(
        (Box(offset=(at, *inside.offset), shape=(1, *inside.shape)), n + index * row)
        for inside, n in flat_boxes(inner, start - index * row, stop - index * row)
    )


def tiling_fault(target: Box, boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not tile `target` (hold each of its elements exactly once and none outside), or None if they do.

    Empty boxes count for nothing. The message gives the first hole, overlap or excess in the tensor's coordinates.
    """
    filled = [box for box in boxes if box.elements]
    for box in filled:
        if len(box.offset) != len(target.offset) or intersect(box, target) != box:
            return f"offset {box.offset} shape {box.shape} reaches outside offset {target.offset} shape {target.shape}"
    return _first_fault(target, filled, ()) if target.elements else None


def _first_fault(target: Box, boxes: list[Box], corner: tuple[int, ...]) -> str | None:
    """The sweep behind `tiling_fault`: slab by slab along the next dimension, with the boxes that span each slab."""
    d = len(corner)
    if d == len(target.offset):
        if len(boxes) == 1:
            return None
        held = "by no piece" if not boxes else f"{len(boxes)} times"
        return f"the element at {corner} is held {held}"
    ends = {box.offset[d] + box.shape[d] for box in boxes}
    cuts = sorted(ends | {box.offset[d] for box in boxes} | {target.offset[d], target.offset[d] + target.shape[d]})
    coming = sorted(boxes, key=lambda box: box.offset[d], reverse=True)
    active: list[Box] = []
    for low in cuts[:-1]:
        active = [box for box in active if box.offset[d] + box.shape[d] > low]
        while coming and coming[-1].offset[d] <= low:
            active.append(coming.pop())
        fault = _first_fault(target, active, (*corner, low))
        if fault:
            return fault
    return None
