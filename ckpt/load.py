"""Load a checkpoint into the pieces of any mapping: every rank reads only what its boxes share with the stored pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt.agree import each, together
from ckpt.dtype import loads_into
from ckpt.host import checksum, to_torch
from ckpt.manifest import Entry, Manifest, Piece, piece_file_faults, read_manifest
from ckpt.plan import Held, holding_faults
from ckpt.save import describe
from ckpt.store.protocol import Request, Store
from ckpt.store.zarr import ZarrStore
from core.errors import CheckpointError
from core.parallel.groups import Group
from core.state.box import Box, intersect, shifted, tiling_fault
from core.state.sharded import ShardedTensor


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The part `box` (in the tensor's coordinates) of a stored piece, which goes into `target`."""

    target: ShardedTensor
    entry: Entry
    piece: Piece
    box: Box


def load(folder: Path, tensors: Iterable[ShardedTensor], world: Group, skip: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """Fill `data` of every tensor from the checkpoint `folder`; returns its `extra`. Collective over `world`.

    The mapping may differ from the one that saved. Together the ranks must hold all of every tensor, and exactly the
    checkpoint's tensors but for those whose names begin with one of `skip` (`optimizer.` to read a model alone). A target
    of another floating type than was stored is converted by value.

    Raises CheckpointError on every rank: with everything missing, unexpected or of another shape or kind before any
    tensor is touched; or naming the tensor and file at a missing or damaged chunk.
    """
    mine = tuple(tensors)
    manifest = each(world, lambda: read_manifest(folder))
    faults = load_faults(manifest, together(world, lambda: describe(mine)), skip)
    if faults:
        head = f"{folder}: does not fit what is to be loaded (nothing was changed):"
        raise CheckpointError("\n".join([head, *(f"  {fault}" for fault in faults)]))
    reads = each(world, lambda: _plan(folder, manifest, mine))
    each(world, lambda: _fill(folder, manifest, reads))
    return manifest.extra


def load_faults(manifest: Manifest, held: Sequence[Sequence[Held]], skip: tuple[str, ...]) -> list[str]:
    """Everything that keeps the checkpoint from filling exactly what all ranks hold, one line each."""
    stored = {entry.name: entry for entry in manifest.entries}
    wanted = {piece.name: piece for pieces in held for piece in pieces}
    faults = [f"{name}: missing in the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
    unread = sorted(name for name in stored.keys() - wanted.keys() if not name.startswith(skip))
    faults += [f"{name}: in the checkpoint, but nothing to load it into" for name in unread]
    for name in sorted(wanted.keys() & stored.keys()):
        entry, target = stored[name], wanted[name]
        if entry.shape != target.shape:
            faults.append(f"{name}: has shape {entry.shape} in the checkpoint, but {target.shape} is wanted")
        elif not loads_into(entry.dtype, target.dtype):
            faults.append(f"{name}: is {entry.dtype} in the checkpoint, which cannot fill {target.dtype}")
    return faults + holding_faults(held, with_copies=False)


def read_into(folder: Path, manifest: Manifest, tensors: Iterable[ShardedTensor]) -> None:
    """Fill every tensor, of whatever boxes, from the stored pieces that it meets; no other rank is involved.

    Each element of each target is written exactly once, or CheckpointError is raised before any is touched.
    """
    _fill(folder, manifest, _plan(folder, manifest, tuple(tensors)))


def piece_fault(piece: Piece, array: np.ndarray) -> str | None:
    """Why the data of a whole piece are not what was written, or None."""
    found = checksum(array)
    return None if found == piece.crc32 else f"checksum is {found:08x} instead of {piece.crc32:08x}"


def whole_piece(entry: Entry, piece: Piece) -> Request:
    """The request for everything that a piece holds."""
    box = shifted(piece.box, piece.array_box.offset)
    return Request(path=piece.array, shape=piece.array_box.shape, dtype=entry.dtype, box=box)


def _plan(folder: Path, manifest: Manifest, tensors: tuple[ShardedTensor, ...]) -> list[_Read]:
    """The reads that fill `tensors`. Raises CheckpointError, naming all, if files of theirs are missing or cut short."""
    entries = {entry.name: entry for entry in manifest.entries}
    reads = [read for tensor in tensors for read in _reads(folder, tensor, entries[tensor.name])]
    needed = {read.piece: read.entry.name for read in reads}
    faults = [f"{name}: {fault}" for piece, name in needed.items() for fault in piece_file_faults(folder, piece)]
    if faults:
        head = f"{folder}: this checkpoint is damaged; use another one of the same run. Files at fault:"
        raise CheckpointError("\n".join([head, *(f"  {fault}" for fault in faults)]))
    return reads


@torch.no_grad()
def _fill(folder: Path, manifest: Manifest, reads: list[_Read]) -> None:
    store = store_of(folder, manifest)
    for read, array in zip(reads, store.read(folder, (_request(read) for read in reads)), strict=True):
        _check_piece(folder, read, array)
        local = shifted(read.box, read.target.box.offset)
        read.target.data[local.slices].copy_(to_torch(array))


def _reads(folder: Path, target: ShardedTensor, entry: Entry) -> Iterator[_Read]:
    """What fills `target`, proved to hold each of its elements exactly once."""
    met = [(piece, shared) for piece in entry.pieces if (shared := intersect(piece.box, target.box))]
    fault = tiling_fault(target.box, [shared for _, shared in met])
    if fault:
        raise CheckpointError(f"{folder}: {entry.name}: the stored pieces do not fill it: {fault}")
    for piece, shared in met:
        yield _Read(target=target, entry=entry, piece=piece, box=shared)


def _request(read: _Read) -> Request:
    box = shifted(read.box, read.piece.array_box.offset)
    return Request(path=read.piece.array, shape=read.piece.array_box.shape, dtype=read.entry.dtype, box=box)


def _check_piece(folder: Path, read: _Read, array: np.ndarray) -> None:
    """Hold a piece that was read whole against its checksum; parts of pieces are guarded by those of their chunks."""
    fault = piece_fault(read.piece, array) if read.box == read.piece.box else None
    if fault:
        where = folder / read.piece.array
        raise CheckpointError(f"{where}: {read.entry.name} is damaged ({fault}); use another checkpoint of this run")


def store_of(folder: Path, manifest: Manifest) -> Store:
    """The store that wrote a checkpoint."""
    store = ZarrStore()
    if manifest.store != store.name:
        raise CheckpointError(f"{folder}: written by the store {manifest.store}, which this zoo does not know")
    return store
