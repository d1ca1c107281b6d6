"""Which tokens the places of a ring hold of every sequence, and which scores that leaves to each: nothing but arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from torch import Tensor

from core.attention.packing import held_pieces

Half = Literal["front", "back"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Of `count` sequences behind one another, `length` tokens of each held from row `begin` on: those `inside` each."""

    begin: int
    count: int
    length: int
    inside: slice

    @property
    def tokens(self) -> int:
        """How many of each sequence."""
        return len(range(*self.inside.indices(self.length)))

    def of(self, x: Tensor) -> Tensor:
        """A view of them in a tensor of tokens: [T, …] -> [count, tokens, …]."""
        return x[self.begin : self.begin + self.count * self.length].unflatten(0, (self.count, self.length))[
            :, self.inside
        ]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A rectangle of scores, or a triangle, in each of some sequences of one length: queries of one place, keys of one place."""

    queries: Rows
    keys: Rows
    causal: bool


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What every place of a ring of `size` holds. runs: for each run of sequences of one length their number, and by place the
    (front, back) tokens held of each."""

    size: int
    runs: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    def tokens(self, place: int, half: Half) -> int:
        """How many a place holds of all front or back chunks."""
        return sum(count * held[place][half == "back"] for count, held in self.runs)

    def home(self, place: int) -> Iterator[Block]:
        """What the queries of a place need of its own keys, run by run; empty blocks left out."""
        for rows in self._held(place):
            if rows.tokens:
                yield Block(queries=rows, keys=rows, causal=True)

    def blocks(self, place: int, source: int, half: Half) -> Iterator[Block]:
        """What the queries of `place` need of a chunk of another place, run by run; empty blocks left out.

        Keys are rows of that chunk of all sequences, as it travels. Back chunks are needed at earlier places alone.
        """
        assert source > place or (source < place and half == "front"), f"{place} needs no {half} of {source}"
        all_queries = self._held(place) if source < place else self.chunk(place, "back")
        for queries, keys in zip(all_queries, self.travelling(source, half), strict=True):
            if queries.tokens and keys.tokens:
                yield Block(queries=queries, keys=keys, causal=False)

    def chunk(self, place: int, half: Half) -> Iterator[Rows]:
        """A chunk among all that its place holds, run by run."""
        for rows, (_, held) in zip(self._held(place), self.runs, strict=True):
            front = held[place][0]
            inside = slice(0, front) if half == "front" else slice(front, rows.length)
            yield Rows(begin=rows.begin, count=rows.count, length=rows.length, inside=inside)

    def travelling(self, place: int, half: Half) -> Iterator[Rows]:
        """A chunk of a place as it travels, run by run."""
        begin = 0
        for count, held in self.runs:
            length = held[place][half == "back"]
            yield Rows(begin=begin, count=count, length=length, inside=slice(0, length))
            begin += count * length

    def _held(self, place: int) -> Iterator[Rows]:
        """All that a place holds, run by run."""
        begin = 0
        for count, held in self.runs:
            length = sum(held[place])
            yield Rows(begin=begin, count=count, length=length, inside=slice(0, length))
            begin += count * length


def cut_for_ring(lengths: Sequence[int], size: int) -> Cut:
    """How a ring of `size` places cuts sequences of these lengths; every place knows it of all others."""
    runs = []
    for length, same in groupby(lengths):
        runs.append((len(tuple(same)), tuple(_front_and_back(length, place, size) for place in range(size))))
    return Cut(size=size, runs=tuple(runs))


def _front_and_back(length: int, place: int, size: int) -> tuple[int, int]:
    """The tokens that a place holds of a sequence: of its first half, and of its second."""
    pieces = held_pieces(length, (place, size), (0, 1))
    front = sum(stop - start for start, stop in pieces if stop <= length // 2)
    return front, sum(stop - start for start, stop in pieces) - front
