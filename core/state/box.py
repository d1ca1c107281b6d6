"""Boxes: the piece of a tensor that starts at `offset` and has `shape`, in the tensor's global coordinates (contract 5)."""

from __future__ import annotations

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


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None where they share no element."""
    low = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    high = tuple(min(x + m, y + n) for x, m, y, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    if any(h <= l for l, h in zip(low, high, strict=True)):
        return None
    return Box(offset=low, shape=tuple(h - l for l, h in zip(low, high, strict=True)))
