"""Who writes which piece where: a pure function of what every rank holds, so that all ranks come to the same plan alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.dtype import ITEM_BYTES, item_bytes
from ckpt.store.protocol import Array
from core.errors import CheckpointError
from core.state.box import Box, tiling_fault

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
MOST_CELLS_PER_PIECE = 2
MOST_PADDING = 1.25


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
    """`rank` writes the piece `box` of tensor `name` into `array`, which holds the piece `array_box`.

    first: it also writes the array's description, being the first in it.
    """

    name: str
    box: Box
    rank: int
    array: Array
    array_box: Box
    first: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every tensor of the checkpoint (shape, dtype by name, in the order of names) and every write, each piece once.

    A tensor without elements has no writes: its name, shape and type are all there is.
    """

    tensors: dict[str, tuple[tuple[int, ...], str]]
    writes: tuple[Write, ...]

    @property
    def bytes(self) -> int:
        """What the chunks take on the disk, padding at the edges of tensors included, metadata not."""
        total = 0
        for write in self.writes:
            cells = math.prod(math.ceil(s / c) for s, c in zip(write.box.shape, write.array.chunk, strict=True))
            total += cells * math.prod(write.array.chunk) * item_bytes(write.array.dtype)
        return total


def plan_save(held: Sequence[Sequence[Held]]) -> Plan:
    """The writes of a checkpoint of what every rank holds (`held[rank]`).

    Raises CheckpointError, naming every tensor at fault, unless the pieces tile each tensor exactly once.
    """
    faults = holding_faults(held, with_copies=True)
    if faults:
        raise CheckpointError("\n".join(["the state cannot be saved:", *(f"  {fault}" for fault in faults)]))
    holders = _holders(held)
    owner = _spread(holders)
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    writes: list[Write] = []
    for name, boxes in sorted(holders.items()):
        sample = next(iter(boxes.values()))[0][1]
        tensors[name] = (sample.shape, sample.dtype)
        filled = sorted((box for box in boxes if box.elements), key=lambda box: box.offset)
        if filled:
            writes.extend(_writes(sample, filled, owner))
    return Plan(tensors=tensors, writes=tuple(writes))


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
    return tiling_fault(Box(offset=(0,) * len(sample.shape), shape=sample.shape), boxes)


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


def _spread(holders: dict[str, dict[Box, list[tuple[int, Held]]]]) -> dict[tuple[str, Box], int]:
    """The rank that writes each piece: the largest pieces first, each to the holder with the fewest bytes so far."""
    load: dict[int, int] = {}
    owner: dict[tuple[str, Box], int] = {}
    pieces = [(name, box, holding) for name, boxes in holders.items() for box, holding in boxes.items()]
    for name, box, holding in sorted(pieces, key=lambda p: (-p[2][0][1].bytes, p[0], p[1].offset)):
        rank = min((rank for rank, _ in holding), key=lambda rank: (load.get(rank, 0), rank))
        load[rank] = load.get(rank, 0) + holding[0][1].bytes
        owner[name, box] = rank
    return owner


def _writes(sample: Held, boxes: list[Box], owner: dict[tuple[str, Box], int]) -> list[Write]:
    """The writes of one tensor: into one array whose chunk grid separates the pieces, else into one array per piece."""
    chunk = _grid(sample.shape, boxes)
    path = f"tensors/{sample.name}"
    writes = []
    for index, box in enumerate(boxes):
        if chunk:
            array = Array(path=path, shape=sample.shape, dtype=sample.dtype, chunk=chunk)
            array_box = Box(offset=(0,) * len(sample.shape), shape=sample.shape)
        else:
            array = Array(path=f"{path}/{index}", shape=box.shape, dtype=sample.dtype, chunk=box.shape)
            array_box = box
        rank = owner[sample.name, box]
        first = chunk is None or index == 0
        writes.append(
            Write(name=sample.name, box=box, rank=rank, array=array, array_box=array_box, first=first),
        )
    return writes


def _grid(shape: tuple[int, ...], boxes: list[Box]) -> tuple[int, ...] | None:
    """The coarsest regular grid of chunks in which no two pieces share a chunk, or None where it would waste files or space.

    Along each dimension a chunk is the greatest common divisor of all inner boundaries; a scalar has the chunk ().
    """
    chunk = []
    for d, size in enumerate(shape):
        edges = {box.offset[d] for box in boxes} | {box.offset[d] + box.shape[d] for box in boxes}
        chunk.append(math.gcd(*(edges - {0, size})) or size)
    counts = [math.ceil(size / c) for size, c in zip(shape, chunk, strict=True)]
    if math.prod(counts) > MOST_CELLS_PER_PIECE * len(boxes):
        return None
    if math.prod(n * c for n, c in zip(counts, chunk, strict=True)) > MOST_PADDING * math.prod(shape):
        return None
    return tuple(chunk)
