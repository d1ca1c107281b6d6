"""What a store does: lay pieces out in files so that, besides us, one other program can read them.

The manifest says where every block lies, so all reading is ours and the same for every store (ckpt/read.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ckpt.blocks import crc32c, encode
from ckpt.files.protocol import Buffer
from ckpt.manifest import Block, Codec, Entry, File, Manifest, Piece, piece_from_json, piece_to_json
from ckpt.plan import Plan, Write
from core.state.box import Box

# read(name, box): the values of a box of a tensor, row by row.
Read = Callable[[str, Box], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class OutFile:
    """One file of the checkpoint, which `rank` makes of `writes`, in this order."""

    path: str
    rank: int
    writes: tuple[Write, ...]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of an OutFile: the file, and its pieces by tensor."""

    path: str
    file: File
    pieces: tuple[tuple[str, Piece], ...]


@dataclass(kw_only=True)
class Tape:
    """Keeps the account of a file while its bytes go out: where blocks lie, and the checksum of what lies around them."""

    path: str
    codec: Codec
    offset: int = 0
    around: int = 0
    blocks: list[Block] = field(default_factory=list)

    def block(self, values: np.ndarray) -> Buffer:
        """The next bytes, which are a block's."""
        return self.stored(encode(values, self.codec))

    def stored(self, content: Buffer) -> Buffer:
        """The next bytes, which are a block's as they are to be read."""
        self.blocks.append(Block(file=self.path, offset=self.offset, size=len(content), crc32c=crc32c(content)))
        self.offset += len(content)
        return content

    def other(self, content: bytes) -> Buffer:
        """The next bytes, which are in no block."""
        self.around = crc32c(content, self.around)
        self.offset += len(content)
        return content

    def taken(self) -> tuple[Block, ...]:
        """The blocks since the last call."""
        found = tuple(self.blocks)
        self.blocks.clear()
        return found


def written_to_json(written: Written) -> Any:
    """As JSON values."""
    file = written.file
    pieces = [[name, piece_to_json(piece, {written.path: 0})] for name, piece in written.pieces]
    return [written.path, file.size, file.crc32c, pieces]


def written_from_json(value: Any) -> Written:
    """What `written_to_json` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    path, size, crc, pieces = value
    named = tuple((name, piece_from_json(piece, (path,))) for name, piece in pieces)
    return Written(path=path, file=File(size=size, crc32c=crc), pieces=named)


class Store(Protocol):
    """A layout of files."""

    @property
    def name(self) -> str:
        """How the manifest and the user name it."""
        ...

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """What its files can hold."""
        ...

    def lay_out(self, plan: Plan) -> tuple[OutFile, ...]:
        """The files of a plan, each write in exactly one; a pure function, so that all ranks know all files."""
        ...

    def encode(self, plan: Plan, file: OutFile, tape: Tape, read: Read) -> Iterator[Buffer | Piece]:
        """The bytes of a file in order, each through the tape, and after those of a write the piece that it became."""
        ...

    def describe(self, manifest: Manifest) -> Mapping[str, bytes]:
        """The files beside those of `lay_out`, by path, that other programs need. `manifest` does not hold them yet."""
        ...


def write_file(
    store: Store, plan: Plan, file: OutFile, codec: Codec, read: Read, write: Callable[[str, Iterator[Buffer]], int]
) -> Written:
    """Make one file; `write(path, buffers)` puts it where it belongs."""
    tape = Tape(path=file.path, codec=codec)
    pieces: list[Piece] = []

    def buffers() -> Iterator[Buffer]:
        for made in store.encode(plan, file, tape, read):
            if isinstance(made, Piece):
                pieces.append(made)
            else:
                yield made

    size = write(file.path, buffers())
    assert size == tape.offset, f"{file.path}: {size} bytes written, {tape.offset} accounted for"
    named = tuple(zip((write.name for write in file.writes), pieces, strict=True))
    return Written(path=file.path, file=File(size=size, crc32c=tape.around), pieces=named)


def entries_of(plan: Plan, written: list[Written]) -> tuple[Entry, ...]:
    """The tensors of a plan with the pieces that were written of them."""
    of: dict[str, list[Piece]] = {name: [] for name in plan.tensors}
    for file in written:
        for name, piece in file.pieces:
            of[name].append(piece)
    return tuple(
        Entry(name=name, shape=shape, dtype=dtype, pieces=tuple(sorted(of[name], key=lambda piece: piece.box.offset)))
        for name, (shape, dtype) in plan.tensors.items()
    )
