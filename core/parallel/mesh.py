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

    def members(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, ascending: `rank`'s group over those axes."""
        free = [axis in axes for axis in self.axes]
        base = [0 if is_free else c for is_free, c in zip(free, self.coordinates(rank), strict=True)]
        found = [tuple(base)]
        for i, size in enumerate(self.sizes):
            if free[i]:
                found = [c[:i] + (j,) + c[i + 1 :] for c in found for j in range(size)]
        return tuple(sorted(self.rank_at(c) for c in found))

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
        free = [axis in axes for axis in self.axes]
        firsts: list[tuple[int, ...]] = [()]
        for i, size in enumerate(self.sizes):
            firsts = [c + (j,) for c in firsts for j in (range(1) if free[i] else range(size))]
        return tuple(self.members(rank, axes) for rank in sorted(self.rank_at(c) for c in firsts))


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Both foldings of one world; only `pp` is common to them."""

    dense: Folding
    expert: Folding

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dense.world


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
