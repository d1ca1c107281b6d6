"""The Zarr v3 layout, which plain `zarr.open` and tensorstore read.

`tensors/<name>` is one array where all pieces of the tensor are equal: a shard file per piece, its inner chunks our blocks, each
with the crc32c that Zarr checks. Small pieces, and pieces of odd shapes such as a flat optimizer shard's, lie one behind the other in
`pieces/<rank>.<number>.<dtype>`, 1-d arrays of one file whose attribute `tensors` says which piece begins where: so the number of
files grows with ranks and bytes, not with the number of tensors. Zarr for Python knows no bfloat16 or float8: those arrays are
declared as unsigned integers of the width, with the type in the attribute `dtype`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

from ckpt.blocks import ZSTD_LEVEL, block_boxes, block_shape, crc32c
from ckpt.dtype import item_bytes
from ckpt.files.protocol import Buffer
from ckpt.manifest import Codec, Entry, Manifest, Piece
from ckpt.plan import Plan, Write
from ckpt.store.protocol import OutFile, Read, Tape

# A piece smaller than this gets no file of its own: a large model has tens of thousands of such pieces.
SMALL_BYTES = 1 << 20
# The most in one file of many pieces (or one piece): a rank writes several files at the same time, which takes half as long.
FILE_BYTES = 128 << 20
TENSORS, PIECES = "tensors", "pieces"
_CRC: dict[str, Any] = {"name": "crc32c"}
_BYTES: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
_ZSTD: dict[str, Any] = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}
# What zarr for Python has no type for, by the integers that it is declared as.
_DECLARED = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
}


class ZarrStore:
    """Arrays as Zarr v3."""

    name = "zarr"
    codecs: tuple[Codec, ...] = ("raw", "zstd")

    def lay_out(self, plan: Plan) -> tuple[OutFile, ...]:
        """A file per piece of a tensor that Zarr can have as one array; files of many pieces per rank for the others."""
        files: list[OutFile] = []
        rest: list[Write] = []
        for name, group in groupby(plan.writes, key=lambda write: write.name):
            writes = list(group)
            if not _is_regular(writes, *plan.tensors[name]):
                rest += writes
                continue
            for write in writes:
                cell = (o // s for o, s in zip(write.box.offset, write.box.shape, strict=True))
                path = ".".join([f"{TENSORS}/{name}/c", *map(str, cell)])
                files.append(OutFile(path=path, rank=write.rank, writes=(write,)))
        return (*files, *_packed(plan, rest))

    def encode(self, plan: Plan, file: OutFile, tape: Tape, read: Read) -> Iterator[Buffer | Piece]:
        """A shard with its index, a chunk with its checksum, or pieces one behind the other."""
        own_array = file.path.startswith(f"{TENSORS}/")
        for write in file.writes:
            block = block_shape(write.box.shape, item_bytes(plan.tensors[write.name][1]))
            index: list[int] = []
            for box in block_boxes(write.box, block):
                content = tape.block(read(write.name, box))
                yield content
                if own_array:
                    yield tape.other(tape.blocks[-1].crc32c.to_bytes(4, "little"))
                    index += (tape.blocks[-1].offset, len(content) + 4)
            if len(index) > 2:
                entries = b"".join(number.to_bytes(8, "little") for number in index)
                yield tape.other(entries + crc32c(entries).to_bytes(4, "little"))
            yield Piece(box=write.box, rank=write.rank, block=block, blocks=tape.taken())

    def describe(self, manifest: Manifest) -> Mapping[str, bytes]:
        """The description of every group and array."""
        arrays: dict[str, dict[str, Any]] = {}
        for entry in manifest.entries:
            for piece in entry.pieces:
                path = str(PurePosixPath(piece.blocks[0].file).parent)
                if path.startswith(f"{TENSORS}/"):
                    arrays[path] = _tensor(entry, piece, manifest.codec)
                else:
                    bundle = arrays.setdefault(path, _bundle(path, manifest))
                    bundle["attributes"]["tensors"].append(_place(entry, piece, manifest.codec))
        groups = {"", *(str(parent) for path in arrays for parent in PurePosixPath(path).parents)} - {"."}
        described = {
            path: {"zarr_format": 3, "node_type": "group", "attributes": {}} for path in sorted(groups)
        } | arrays
        return {f"{path}/zarr.json".lstrip("/"): json.dumps(text).encode() for path, text in described.items()}


def _is_regular(writes: list[Write], shape: tuple[int, ...], dtype: str) -> bool:
    """Whether the pieces are the cells of one grid, each worth a file, and each divided evenly by its blocks."""
    first = writes[0].box
    block = block_shape(first.shape, item_bytes(dtype))
    return (
        first.elements * item_bytes(dtype) >= SMALL_BYTES
        and all(write.box.shape == first.shape for write in writes)
        and all(size % cell == 0 for size, cell in zip(shape, first.shape, strict=True))
        and all(size % part == 0 for size, part in zip(first.shape, block, strict=True))
    )


def _packed(plan: Plan, writes: list[Write]) -> Iterator[OutFile]:
    """Files of at most FILE_BYTES, each of one rank and one element type."""
    by_kind = sorted(writes, key=lambda write: (write.rank, plan.tensors[write.name][1], write.name, write.box.offset))
    for (rank, dtype), group in groupby(by_kind, key=lambda write: (write.rank, plan.tensors[write.name][1])):
        shelf: list[Write] = []
        number = filled = 0
        for write in group:
            size = write.box.elements * item_bytes(dtype)
            if shelf and filled + size > FILE_BYTES:
                yield OutFile(path=f"{PIECES}/{rank:05d}.{number}.{dtype}/c.0", rank=rank, writes=tuple(shelf))
                shelf, filled, number = [], 0, number + 1
            shelf.append(write)
            filled += size
        yield OutFile(path=f"{PIECES}/{rank:05d}.{number}.{dtype}/c.0", rank=rank, writes=tuple(shelf))


def _described(
    shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...], codecs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "attributes": {"dtype": dtype},
        "shape": list(shape),
        "data_type": _DECLARED.get(dtype, dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _fill(dtype),
        "codecs": codecs,
    }


def _fill(dtype: str) -> bool | int | str:
    """What others find where a file is missing: NaN, in a type that has it. (We find an error.)"""
    if dtype in _DECLARED:
        return (1 << 8 * item_bytes(dtype)) - 1  # all bits set
    return False if dtype == "bool" else "NaN" if "float" in dtype else 0


def _tensor(entry: Entry, piece: Piece, codec: Codec) -> dict[str, Any]:
    """The array of a tensor whose pieces are all as `piece` is."""
    inner = [_BYTES, *([_ZSTD] if codec == "zstd" else []), _CRC]
    sharded = {
        "chunk_shape": list(piece.block),
        "codecs": inner,
        "index_codecs": [_BYTES, _CRC],
        "index_location": "end",
    }
    codecs: list[dict[str, Any]] = (
        inner if len(piece.blocks) == 1 else [{"name": "sharding_indexed", "configuration": sharded}]
    )
    return _described(entry.shape, entry.dtype, piece.box.shape, codecs)


def _bundle(path: str, manifest: Manifest) -> dict[str, Any]:
    """The array of a file of many pieces."""
    dtype, size = path.rsplit(".", 1)[1], manifest.files[f"{path}/c.0"].size
    # Compressed pieces are bytes to Zarr, which has one way of compressing a whole array only.
    declared, length = (dtype, size // item_bytes(dtype)) if manifest.codec == "raw" else ("uint8", size)
    attributes = {"dtype": dtype, "codec": manifest.codec, "tensors": []}
    return _described((length,), declared, (length,), [_BYTES]) | {"attributes": attributes}


def _place(entry: Entry, piece: Piece, codec: Codec) -> dict[str, Any]:
    """Where a piece lies in such an array: its first element or, compressed, its first byte."""
    at = piece.blocks[0].offset
    return {
        "name": entry.name,
        "at": at // item_bytes(entry.dtype) if codec == "raw" else at,
        "offset": list(piece.box.offset),
        "shape": list(piece.box.shape),
    }
