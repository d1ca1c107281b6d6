"""The ranks of both foldings as arithmetic (contract 2): no process is started, 100,000 ranks take a moment."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.mapping import ParallelConfig

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True)
class Folding:
    """A world folded into named axes, the first of which varies fastest over the ranks."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        product = 1
        for size in self.sizes:
            product *= size
        return product

    def size(self, axis: str) -> int:
        """The number of ranks along `axis`."""
        return self.sizes[self.axes.index(axis)]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The position of `rank` along every axis. Raises ValueError outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        position = []
        for size in self.sizes:
            position.append(rank % size)
            rank //= size
        return tuple(position)

    def rank_at(self, coordinates: tuple[int, ...]) -> int:
        """The rank at a position: the inverse of `coordinates`."""
        rank = 0
        for size, position in zip(reversed(self.sizes), reversed(coordinates), strict=True):
            rank = rank * size + position
        return rank

    def first(self, rank: int, axes: tuple[str, ...]) -> int:
        """The lowest rank of `rank`'s group over `axes`: what tells the groups apart."""
        fixed = zip(self.axes, self.coordinates(rank), strict=True)
        return self.rank_at(tuple(0 if axis in axes else c for axis, c in fixed))

    def members(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, ascending: `rank`'s group over those axes."""
        found, stride = [self.first(rank, axes)], 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis in axes:
                found = [r + step for step in range(0, stride * size, stride) for r in found]
            stride *= size
        return tuple(found)

    def split(self, axis: str, inner: int) -> Folding:
        """The same ranks with `axis` folded once more: `axis.inner` of `inner` neighbours varies faster than `axis.outer`.

        Raises ValueError if `inner` does not divide the axis.
        """
        at = self.axes.index(axis)
        if self.sizes[at] % inner:
            raise ValueError(f"{axis} of {self.sizes[at]} ranks does not fold into groups of {inner}")
        axes = (*self.axes[:at], f"{axis}.inner", f"{axis}.outer", *self.axes[at + 1 :])
        return Folding(axes=axes, sizes=(*self.sizes[:at], inner, self.sizes[at] // inner, *self.sizes[at + 1 :]))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Every group over `axes`, by first rank: together they hold each rank once."""
        fixed = tuple(axis for axis in self.axes if axis not in axes)
        return tuple(self.members(first, axes) for first in self.members(0, fixed))


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Both foldings of one world; only `pp` is common to them."""

    dense: Folding
    expert: Folding

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dense.world


@dataclass(frozen=True, kw_only=True)
class Division:
    """All ranks divided into groups: those that differ only along `axes` of `folding` belong together.

    stages: where given, ascending places along pp, of `axes` too: only the ranks there belong together, every other one is alone.
    """

    folding: Folding
    axes: tuple[str, ...]
    stages: tuple[int, ...] | None = None

    def first(self, rank: int) -> int:
        """A rank that tells `rank`'s group from the others."""
        if self.stages is None or self.stage(rank) in self.stages:
            return self.folding.first(rank, self.axes)
        return rank

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group, ascending."""
        if self.stages is None:
            return self.folding.members(rank, self.axes)
        if self.stage(rank) not in self.stages:
            return (rank,)
        inner = tuple(axis for axis in self.axes if axis != "pp")
        return tuple(r for stage in self.stages for r in self.folding.members(self._moved(rank, stage), inner))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every group in one order that all ranks agree on, without the ranks that `stages` leaves alone."""
        groups = self.folding.groups(self.axes)
        if self.stages is None:
            return groups
        return tuple(self.members(self._moved(ranks[0], self.stages[0])) for ranks in groups) if self.stages else ()

    def stage(self, rank: int) -> int:
        """The place of `rank` along pp."""
        return self.folding.coordinates(rank)[self.folding.axes.index("pp")]

    def _moved(self, rank: int, stage: int) -> int:
        """The rank at `rank`'s place of another stage."""
        at = self.folding.axes.index("pp")
        coordinates = self.folding.coordinates(rank)
        return self.folding.rank_at((*coordinates[:at], stage, *coordinates[at + 1 :]))


def fold(parallel: ParallelConfig, ranks: int) -> Mesh:
    """The mesh of `ranks` ranks. Raises ValueError if a folding does not divide them (core/check.py says it to users)."""
    per_dense = parallel.tp * parallel.cp * parallel.pp
    per_expert = parallel.etp * parallel.ep * parallel.pp
    if ranks % per_dense or ranks % per_expert:
        raise ValueError(f"{ranks} ranks do not fold into tp*cp*pp={per_dense} and etp*ep*pp={per_expert}")
    return Mesh(
        dense=Folding(axes=DENSE_AXES, sizes=(parallel.tp, parallel.cp, ranks // per_dense, parallel.pp)),
        expert=Folding(axes=EXPERT_AXES, sizes=(parallel.etp, parallel.ep, ranks // per_expert, parallel.pp)),
    )
