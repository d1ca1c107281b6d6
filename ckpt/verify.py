"""Read a whole checkpoint against its checksums: every flipped bit and every missing file, and whom it hits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckpt.blocks import crc32c
from ckpt.files.address import open_files
from ckpt.files.protocol import Address, Files
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
    damages, around, at = [], 0, 0
    try:
        for one in owned:
            around, at = _around(files, path, at, one.block.offset, around), one.block.offset + one.block.size
            if crc32c(_bytes(files, path, one.block.offset, one.block.size)) != one.block.crc32c:
                what = f"is not what was written in its {one.block.size} bytes from byte {one.block.offset}"
                damages.append(Damage(file=path, what=what, tensor=one.tensor, rank=one.rank))
        if _around(files, path, at, file.size, around) != file.crc32c:
            damages.append(Damage(file=path, what="is not what was written in the bytes that describe its content"))
    except OSError as error:
        damages.append(Damage(file=path, what=f"cannot be read: {error.strerror or error}"))
    return damages


def _around(files: Files, path: str, start: int, stop: int, before: int) -> int:
    """The checksum of all bytes around blocks up to `stop`, where `before` is that up to `start`."""
    for content in _parts(files, path, start, stop):
        before = crc32c(content, before)
    return before


def _parts(files: Files, path: str, start: int, stop: int) -> Iterator[np.ndarray]:
    for at in range(start, stop, PART_BYTES):
        yield _bytes(files, path, at, min(PART_BYTES, stop - at))


def _bytes(files: Files, path: str, offset: int, size: int) -> np.ndarray:
    content = np.empty(size, np.uint8)
    files.read_into(path, offset, [content])
    return content
