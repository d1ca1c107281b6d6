"""Read a whole checkpoint against its checksums: every flipped bit and every missing file, and whom it hits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckpt.blocks import crc32c
from ckpt.files.address import open_files
from ckpt.files.protocol import Address, Files
from ckpt.host import empty_bytes
from ckpt.manifest import Block, File, Manifest, file_faults, read_manifest

# What is read at a time of the bytes around blocks.
PART_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What is not as it was written. tensor, rank: whose block it is, and who wrote it; None for bytes that hold no tensor's values."""

    file: str
    what: str
    tensor: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        whose = "" if self.tensor is None else f"{self.tensor} (written by rank {self.rank}): "
        return f"{whose}{self.file} {self.what}"


@dataclass(frozen=True, kw_only=True)
class _Owned:
    block: Block
    tensor: str
    rank: int


def bytes_to_verify(checkpoint: Address) -> int:
    """How much `verify` will read at most. Raises CheckpointError without a readable manifest."""
    return sum(file.size for file in read_manifest(open_files(checkpoint)).files.values())


def verify(checkpoint: Address, progress: Callable[[int], None] | None = None) -> tuple[Damage, ...]:
    """Every damage of a checkpoint; () if all is as written. Raises CheckpointError without a readable manifest.

    A few MiB per reader are in memory at a time. progress: called with the bytes of each file that has been read.
    """
    files = open_files(checkpoint)
    manifest = read_manifest(files)
    wrong = file_faults(files, manifest)
    owned = _owned(manifest)
    found: list[Damage] = []
    for path, what in wrong.items():
        said = what.removeprefix(f"{path} ")
        hit = sorted({(o.tensor, o.rank) for o in owned.get(path, [])})
        found += [Damage(file=path, what=said, tensor=tensor, rank=rank) for tensor, rank in hit]
        found += [] if hit else [Damage(file=path, what=said)]
    whole = [path for path in manifest.files if path not in wrong]
    with ThreadPoolExecutor(files.reads_at_once) as pool:
        for path, damages in zip(
            whole, pool.map(lambda p: _file_damage(files, p, manifest.files[p], owned.get(p, [])), whole), strict=True
        ):
            found += damages
            if progress:
                progress(manifest.files[path].size)
    return tuple(found)


def _owned(manifest: Manifest) -> dict[str, list[_Owned]]:
    """The blocks of every file, in order, with whose they are."""
    found: dict[str, list[_Owned]] = {}
    for entry in manifest.entries:
        for piece in entry.pieces:
            for block in piece.blocks:
                found.setdefault(block.file, []).append(_Owned(block=block, tensor=entry.name, rank=piece.rank))
    for blocks in found.values():
        blocks.sort(key=lambda o: o.block.offset)
    return found


def _file_damage(files: Files, path: str, file: File, owned: list[_Owned]) -> list[Damage]:
    """Read one file from front to end."""
    damages: dict[Damage, None] = {}
    around, at, unread = 0, 0, ""
    for one in [*owned, None]:
        block = one.block if one else None
        try:
            around = _around(files, path, at, block.offset if block else file.size, around)
        except OSError as error:
            unread = f"cannot be read: {error.strerror or error}"
        if one and block:
            at = block.offset + block.size
            what = _block_damage(files, block)
            # Of a file that cannot be read, one line for a tensor is enough, however many blocks of it lie there.
            damages |= {Damage(file=path, what=what, tensor=one.tensor, rank=one.rank): None} if what else {}
    if unread and not damages:
        damages[Damage(file=path, what=unread)] = None
    elif not unread and around != file.crc32c:
        damages[Damage(file=path, what="is not what was written in the bytes that describe its content")] = None
    return list(damages)


def _block_damage(files: Files, block: Block) -> str | None:
    try:
        if crc32c(_bytes(files, block.file, block.offset, block.size)) == block.crc32c:
            return None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return f"is not what was written in its {block.size} bytes from byte {block.offset}"


def _around(files: Files, path: str, start: int, stop: int, before: int) -> int:
    """The checksum of all bytes around blocks up to `stop`, where `before` is that up to `start`."""
    for at in range(start, stop, PART_BYTES):
        before = crc32c(_bytes(files, path, at, min(PART_BYTES, stop - at)), before)
    return before


def _bytes(files: Files, path: str, offset: int, size: int) -> np.ndarray:
    content = empty_bytes(size)
    files.read_into(path, offset, [content])
    return content
