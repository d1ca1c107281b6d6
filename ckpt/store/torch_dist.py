"""The layout of PyTorch's distributed checkpoints, which plain `torch.distributed.checkpoint.load` reads.

Every rank has files `__<rank>_<number>.distcp`, in which items lie one behind the other; `.metadata` says which piece of which tensor
is where. An item is what `torch.save` makes of one piece: a zip archive whose record `data/0` holds the values as they are. Our
blocks are consecutive ranges of that record, so nothing is copied and no whole piece has to be in memory.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data

from ckpt.blocks import block_boxes, block_shape
from ckpt.dtype import item_bytes
from ckpt.files.protocol import Buffer
from ckpt.manifest import Codec, Entry, Manifest, Piece
from ckpt.plan import Plan, Write
from ckpt.store.protocol import OutFile, Read, Tape

METADATA = ".metadata"
# The most in one file (or one piece): a rank writes several files at the same time, which takes half as long.
FILE_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """What `torch.save` writes in front of a tensor's values and behind them."""

    front: bytes
    back: bytes


class TorchDistStore:
    """Files as `torch.distributed.checkpoint` has them. torch itself checks nothing when it reads them; our manifest does.

    The archives carry no crc32 of the values: torch does not look at it, and computing it takes longer than writing them.
    """

    name = "torch_dist"
    codecs: tuple[Codec, ...] = ("raw",)

    def __init__(self) -> None:
        # Most pieces of a model have the shape of another one's.
        self._frames: dict[tuple[tuple[int, ...], str], _Frame] = {}

    def lay_out(self, plan: Plan) -> tuple[OutFile, ...]:
        """Files of at most FILE_BYTES (or one piece), each of one rank."""
        return tuple(_packed(plan))

    def encode(self, plan: Plan, file: OutFile, tape: Tape, read: Read) -> Iterator[Buffer | Piece]:
        """One archive per piece."""
        for write in file.writes:
            dtype = plan.tensors[write.name][1]
            frame = self._frame(write.box.shape, dtype)
            block = block_shape(write.box.shape, item_bytes(dtype))
            yield tape.other(frame.front)
            for box in block_boxes(write.box, block):
                yield tape.block(read(write.name, box))
            yield tape.other(frame.back)
            yield Piece(box=write.box, rank=write.rank, block=block, blocks=tape.taken())

    def describe(self, manifest: Manifest) -> Mapping[str, bytes]:
        """The description of every tensor and item, which torch reads by pickle."""
        found = Metadata(
            state_dict_metadata={entry.name: _tensor(entry) for entry in manifest.entries},
            # How a nested state was made flat: here it was flat.
            planner_data={entry.name: (entry.name,) for entry in manifest.entries},
            storage_data=dict(pair for entry in manifest.entries for pair in self._items(entry)),
            version=CURRENT_DCP_VERSION,
        )
        return {METADATA: pickle.dumps(found)}

    def _items(self, entry: Entry) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
        """Where the archive of every piece lies."""
        for number, piece in enumerate(entry.pieces):
            frame, first = self._frame(piece.box.shape, entry.dtype), piece.blocks[0]
            length = len(frame.front) + sum(block.size for block in piece.blocks) + len(frame.back)
            place = _StorageInfo(relative_path=first.file, offset=first.offset - len(frame.front), length=length)
            yield MetadataIndex(entry.name, piece.box.offset, number), place

    def _frame(self, shape: tuple[int, ...], dtype: str) -> _Frame:
        """What surrounds the values of a piece, which depends on nothing else."""
        key = (shape, dtype)
        if key not in self._frames:
            self._frames[key] = _frame(shape, dtype)
        return self._frames[key]


class _Sink:
    """A file that keeps what `torch.save` writes, and where it leaves room for the values."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.rooms: list[tuple[int, int]] = []

    def write(self, content: memoryview) -> int:
        self.written += content
        return len(content)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == 1, f"torch.save moves by {offset} from {whence} where it should skip what comes next"
        self.rooms.append((len(self.written), offset))
        return offset

    def flush(self) -> None:
        """Nothing waits."""


def _frame(shape: tuple[int, ...], dtype: str) -> _Frame:
    """The archive of a piece without its values, as torch itself writes it: of this thread only, no other's saves are concerned."""
    sink = _Sink()
    with skip_data():
        # Its memory is neither read nor written, so that the system never provides it.
        torch.save(torch.empty(shape, dtype=getattr(torch, dtype)), cast(IO[bytes], sink))
    size = math.prod(shape) * item_bytes(dtype)
    assert [room for _, room in sink.rooms] == [size], f"{dtype} {shape}: torch.save leaves {sink.rooms} for {size}"
    at = sink.rooms[0][0]
    return _Frame(front=bytes(sink.written[:at]), back=bytes(sink.written[at:]))


def _tensor(entry: Entry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
        size=torch.Size(entry.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(piece.box.offset), sizes=torch.Size(piece.box.shape))
            for piece in entry.pieces
        ],
    )


def _packed(plan: Plan) -> Iterator[OutFile]:
    by_rank = sorted(plan.writes, key=lambda write: (write.rank, write.name, write.box.offset))
    for rank, writes in groupby(by_rank, key=lambda write: write.rank):
        for number, some in enumerate(_filled(plan, writes)):
            yield OutFile(path=f"__{rank}_{number}.distcp", rank=rank, writes=some)


def _filled(plan: Plan, writes: Iterator[Write]) -> Iterator[tuple[Write, ...]]:
    """Writes in groups of at most FILE_BYTES, or of one."""
    group: list[Write] = []
    filled = 0
    for write in writes:
        size = write.box.elements * item_bytes(plan.tensors[write.name][1])
        if group and filled + size > FILE_BYTES:
            yield tuple(group)
            group, filled = [], 0
        group.append(write)
        filled += size
    if group:
        yield tuple(group)
