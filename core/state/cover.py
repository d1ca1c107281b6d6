"""Whether the pieces that the ranks of a world hold make up the canonical state: nothing missing, nothing twice (contract 5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from core.state.box import Box, tiling_fault, whole
from core.state.sharded import ShardedTensor

# So many ranks stand in a sentence; the rest are counted.
MOST_RANKS = 8


@dataclass(kw_only=True)
class _Holders:
    """The ranks with the same piece of a tensor, the copy that each says it is, and the numbers of copies that they say there are."""

    ranks: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)

    def fault(self) -> str | None:
        """Why these are not all copies of the piece once each, or None if they are."""
        number = next(iter(self.numbers))
        if len(self.numbers) == 1 and sorted(self.copies) == list(range(number)):
            return None
        said = " or ".join(str(number) for number in sorted(self.numbers))
        copies = _some([str(copy) for copy in self.copies])
        return f"lies on {_ranks(self.ranks)} as copy {copies} of {said}, where every copy from 0 has to be on one rank"


def cover_faults(shapes: Mapping[str, tuple[int, ...]], held: Iterable[tuple[int, ShardedTensor]]) -> tuple[str, ...]:
    """Every way in which the pieces of all ranks, as (rank, piece), are not the tensors `shapes`; empty where they are.

    Of each tensor, the different pieces must tile its shape, and each piece must lie on as many ranks as it says it has copies,
    as copy 0, 1, … once each. Pieces without elements count for nothing. A fault is a sentence that names tensor and ranks, the
    first of each kind for a tensor; data are not read.
    """
    found: dict[str, dict[Box, _Holders]] = {name: {} for name in shapes}
    faults: list[str] = []
    for rank, piece in held:
        if piece.name not in found:
            faults.append(f"{piece.name}: rank {rank} holds it, and there is no such tensor")
        elif piece.shape != shapes[piece.name]:
            faults.append(f"{piece.name}: rank {rank} takes it for {piece.shape}, and it is {shapes[piece.name]}")
        elif piece.box.elements:
            holders = found[piece.name].setdefault(piece.box, _Holders())
            holders.ranks.append(rank)
            holders.copies.append(piece.copy)
            holders.numbers.add(piece.copies)
    for name, boxes in found.items():
        faults += (f"{name}: {fault}" for fault in _tensor_faults(shapes[name], boxes))
    return tuple(faults)


def _tensor_faults(shape: tuple[int, ...], boxes: Mapping[Box, _Holders]) -> Iterator[str]:
    """The first hole or overlap of a tensor, and the first piece whose copies are not there once each."""
    fault = tiling_fault(whole(shape), list(boxes))
    if fault:
        ranks = sorted({rank for holders in boxes.values() for rank in holders.ranks})
        yield f"{fault}, and its pieces lie on {_ranks(ranks)}" if ranks else "lies on no rank"
    for box, holders in boxes.items():
        fault = holders.fault()
        if fault:
            yield f"the piece at {box.offset} of shape {box.shape} {fault}"
            return


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_some([str(rank) for rank in ranks])}"


def _some(words: list[str]) -> str:
    rest = f" and {len(words) - MOST_RANKS} more" if len(words) > MOST_RANKS else ""
    return ", ".join(words[:MOST_RANKS]) + rest
