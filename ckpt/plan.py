"""Who writes which piece where: a pure function of what every rank holds, so that all ranks come to the same plan alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt.dtype import ITEM_BYTES, item_bytes
from core.errors import CheckpointError
from core.state.box import Box, cut, tiling_fault, whole

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
# The most that is written in one piece, and so in one file of a Zarr array.
PIECE_BYTES = 512 << 20
# A piece that several ranks hold is divided among them as long as each gets this much.
LEAST_SHARE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank says about one piece that it holds: a ShardedTensor without its data. dtype: as in ckpt/dtype.py."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    copy: int
    copies: int

    @property
    def bytes(self) -> int:
        """The size of the piece."""
        return self.box.elements * item_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Write:
    """`rank` writes the piece `box` of tensor `name`."""

    name: str
    box: Box
    rank: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every tensor of the checkpoint (shape, dtype by name, in the order of names) and every write, each piece once.

    A tensor without elements has no writes: its name, shape and type are all there is.
    """

    tensors: dict[str, tuple[tuple[int, ...], str]]
    writes: tuple[Write, ...]

    @property
    def bytes(self) -> int:
        """The values of all tensors, which is what the checkpoint takes but for descriptions and padding."""
        return sum(math.prod(shape) * item_bytes(dtype) for shape, dtype in self.tensors.values())


def plan_save(held: Sequence[Sequence[Held]], piece_bytes: int = PIECE_BYTES) -> Plan:
    """The writes of a checkpoint of what every rank holds (`held[rank]`), none of more than `piece_bytes` but of one row.

    Raises CheckpointError, naming every tensor at fault, unless the pieces tile each tensor exactly once.
    """
    faults = holding_faults(held, with_copies=True)
    if faults:
        raise CheckpointError("\n".join(["the state cannot be saved:", *(f"  {fault}" for fault in faults)]))
    holders = _holders(held)
    tensors = {}
    for name, boxes in sorted(holders.items()):
        sample = next(iter(boxes.values()))[0][1]
        tensors[name] = (sample.shape, sample.dtype)
    return Plan(
        tensors=tensors, writes=tuple(sorted(_spread(holders, piece_bytes), key=lambda w: (w.name, w.box.offset)))
    )


def holding_faults(held: Sequence[Sequence[Held]], *, with_copies: bool) -> list[str]:
    """What is wrong with the pieces of all ranks taken together, one line per tensor; nothing where they fit.

    They must agree on shape and type, and tile each tensor; with_copies: also hold every copy that they speak of, once.
    """
    faults = []
    for name, boxes in sorted(_holders(held).items()):
        holders = [holder for holding in boxes.values() for holder in holding]
        fault = _form_fault(name, holders) or tiling_fault_of(holders[0][1], tuple(boxes))
        if not fault and with_copies:
            # Empty pieces of ranks that cut a short dimension look like copies; nothing of them is stored.
            filled = (holding for box, holding in boxes.items() if box.elements)
            fault = next((f for holding in filled if (f := _copy_fault(holding))), None)
        if fault:
            faults.append(f"{name}: {fault}")
    return faults


def tiling_fault_of(sample: Held, boxes: tuple[Box, ...]) -> str | None:
    """Why distinct boxes do not tile the tensor of `sample`, or None."""
    return tiling_fault(whole(sample.shape), boxes)


def _holders(held: Sequence[Sequence[Held]]) -> dict[str, dict[Box, list[tuple[int, Held]]]]:
    """Name -> box -> (rank, what it says), ranks ascending."""
    found: dict[str, dict[Box, list[tuple[int, Held]]]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            found.setdefault(piece.name, {}).setdefault(piece.box, []).append((rank, piece))
    return found


def _form_fault(name: str, holders: list[tuple[int, Held]]) -> str | None:
    if not NAME.fullmatch(name):
        return "a canonical name has only letters, digits, '_', '-' and '.', and does not begin with '.' or '-'"
    first_rank, first = holders[0]
    for rank, piece in holders:
        if (piece.shape, piece.dtype) != (first.shape, first.dtype):
            mine, other = f"{first.dtype} {first.shape}", f"{piece.dtype} {piece.shape}"
            return f"is {mine} on rank {first_rank} but {other} on rank {rank}"
    return (
        None if first.dtype in ITEM_BYTES else f"dtype {first.dtype} cannot be stored; works: {', '.join(ITEM_BYTES)}"
    )


def _copy_fault(holding: list[tuple[int, Held]]) -> str | None:
    """Whether the holders of one box are its copies 0, 1, …, each once."""
    box = holding[0][1].box
    said = {piece.copies for _, piece in holding}
    if said == {len(holding)} and sorted(piece.copy for _, piece in holding) == list(range(len(holding))):
        return None
    claims = ", ".join(f"rank {rank} copy {piece.copy} of {piece.copies}" for rank, piece in holding)
    return f"the piece at offset {box.offset} shape {box.shape} is not held once per copy: {claims}"


def _spread(holders: dict[str, dict[Box, list[tuple[int, Held]]]], piece_bytes: int) -> Iterator[Write]:
    """Who writes what: the largest pieces first, each to the holder with the fewest bytes so far.

    A piece that several ranks hold is divided among them, unless it is small.
    """
    load: dict[int, int] = {}
    pieces = [(name, box, holding) for name, boxes in holders.items() for box, holding in boxes.items() if box.elements]
    for name, box, holding in sorted(pieces, key=lambda p: (-p[2][0][1].bytes, p[0], p[1].offset)):
        ranks, whole_bytes = [rank for rank, _ in holding], holding[0][1].bytes
        parts = max(-(-whole_bytes // piece_bytes), min(len(ranks), whole_bytes // LEAST_SHARE_BYTES), 1)
        for part in divided(box, parts):
            rank = min(ranks, key=lambda rank: (load.get(rank, 0), rank))
            load[rank] = load.get(rank, 0) + whole_bytes * part.elements // box.elements
            yield Write(name=name, box=part, rank=rank)


def divided(box: Box, parts: int) -> list[Box]:
    """A box in about `parts` pieces that are each contiguous in it: cut along its first dimensions, equal where they can be."""
    if parts <= 1:
        return [box]
    for d, size in enumerate(box.shape):
        if size == 1:
            continue
        count = next((n for n in range(parts, min(2 * parts, size + 1)) if size % n == 0), min(parts, size))
        cuts = [cut(box, d, i, count) for i in range(count)]
        return [piece for one in cuts for piece in divided(one, parts // count)]
    return [box]
