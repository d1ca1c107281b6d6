"""Read a whole checkpoint against its checksums: every flipped bit and every missing file, and whom it hits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpt.load import piece_fault, store_of, whole_piece
from ckpt.manifest import Entry, Piece, file_faults, read_manifest
from ckpt.store.protocol import Store
from core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A stored piece that is not what was written: the tensor, the rank that wrote it, what was found where."""

    tensor: str
    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.tensor} (written by rank {self.rank}): {self.what}"


def verify(folder: Path) -> tuple[Damage, ...]:
    """Every damaged piece of a checkpoint; () if all is as written. Raises CheckpointError without a readable manifest.

    One piece is in memory at a time.
    """
    manifest = read_manifest(folder)
    store = store_of(folder, manifest)
    found = []
    hit: set[tuple[str, Piece]] = set()
    for entry, piece, what in file_faults(folder, manifest):
        found.append(Damage(tensor=entry.name, rank=piece.rank, what=what))
        hit.add((entry.name, piece))
    pieces = [(entry, piece) for entry in manifest.entries for piece in entry.pieces if (entry.name, piece) not in hit]
    for entry, piece in pieces:
        fault = _read_fault(folder, store, entry, piece)
        if fault:
            found.append(Damage(tensor=entry.name, rank=piece.rank, what=fault))
    return tuple(found)


def _read_fault(folder: Path, store: Store, entry: Entry, piece: Piece) -> str | None:
    try:
        (array,) = store.read(folder, [whole_piece(entry, piece)])
    except CheckpointError as error:
        return str(error)
    return piece_fault(piece, array)
