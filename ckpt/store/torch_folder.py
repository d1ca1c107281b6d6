"""A folder that torch.distributed.checkpoint wrote itself, as a manifest: with that it is read like any checkpoint of ours.

Such a folder has no checksums: they are taken of what is there now, by reading everything once, so that nothing changes unseen between
then and the reading to come. What was damaged before cannot be known.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.serialization import skip_data

from ckpt.blocks import block_boxes, block_shape, crc32c
from ckpt.dtype import ITEM_BYTES, item_bytes
from ckpt.files.protocol import Files
from ckpt.host import dtype_name, empty_bytes
from ckpt.manifest import Block, Entry, File, Manifest, Piece
from ckpt.store.torch_dist import METADATA
from core.errors import CheckpointError
from core.state.box import Box, tiling_fault, whole

# What a description is made of. Nothing else is loaded from it: a pickle can name any function of this machine.
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
# What is read at a time of the end and the headers of an archive, which are asked for in a few bytes each.
_AHEAD_BYTES = 16 << 10
# What is read at a time of bytes that are only checked.
_PART_BYTES = 4 << 20
# What a local header of a zip archive takes before its name, and where the lengths of name and extra field stand in it.
_HEADER_BYTES, _NAME_AT, _EXTRA_AT = 30, 26, 28


def is_torch_folder(files: Files) -> bool:
    """Whether torch.distributed.checkpoint wrote what is here, at least its description."""
    try:
        files.read(METADATA)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def manifest_of_torch_dist(files: Files) -> Manifest:
    """The manifest of a folder of `torch.distributed.checkpoint` in its format of torch.save.

    step: 0. extra["left_out"]: the names of what is no tensor, which is not read. Every byte of every file is read once.
    Raises CheckpointError where the description or an item is damaged, or of a kind that cannot be read in place.
    """
    found = _description(files)
    tensors = {n: m for n, m in found.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in found.storage_data.items()}
    _refuse_types(files, tensors)
    with ThreadPoolExecutor(files.reads_at_once) as pool:
        entries = tuple(pool.map(lambda name: _entry(files, name, tensors[name], places), sorted(tensors)))
        ends = _ends(files, found)
        blocks = _blocks_of(entries)
        held = pool.map(lambda path: _around(files, path, blocks.get(path, []), ends[path]), ends)
        described = dict(zip(ends, held, strict=True))
    left_out = sorted(found.state_dict_metadata.keys() - tensors.keys())
    return Manifest(
        step=0,
        sequence=0,
        store="torch_dist",
        codec="raw",
        files=described,
        entries=entries,
        extra={"left_out": left_out},
    )


class _Description(pickle.Unpickler):
    """Reads a description and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Only what a description is made of, and element types."""
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors does")


def _description(files: Files) -> Metadata:
    where = f"{files.address}/{METADATA}"
    try:
        found = _Description(io.BytesIO(files.read(METADATA))).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{files.address}: is no folder of torch.distributed.checkpoint (it has no {METADATA})"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(f"{where}: is damaged or not by torch: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{where}: describes a {type(found).__name__}, not a checkpoint")
    return found


def _refuse_types(files: Files, tensors: dict[str, TensorStorageMetadata]) -> None:
    named = {name: str(found.properties.dtype).removeprefix("torch.") for name, found in tensors.items()}
    unknown = [f"{name} is {dtype}" for name, dtype in sorted(named.items()) if dtype not in ITEM_BYTES]
    if unknown:
        raise CheckpointError(
            f"{files.address}: has element types that no checkpoint holds: {', '.join(unknown)}. Works: {', '.join(ITEM_BYTES)}."
        )


def _entry(files: Files, name: str, found: TensorStorageMetadata, places: dict[tuple, Any]) -> Entry:
    shape, dtype = tuple(found.size), str(found.properties.dtype).removeprefix("torch.")
    boxes = [Box(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes)) for chunk in found.chunks]
    filled = sorted((box for box in boxes if box.elements), key=lambda box: box.offset)
    fault = tiling_fault(whole(shape), filled)
    if fault:
        raise CheckpointError(f"{files.address}: {name}: the stored pieces do not fill it: {fault}")
    pieces = []
    for box in filled:
        info = places.get((name, box.offset))
        if info is None:
            raise CheckpointError(
                f"{files.address}/{METADATA}: does not say where the piece of {name} at {box.offset} lies"
            )
        pieces.append(_piece(files, name, dtype, box, info))
    return Entry(name=name, shape=shape, dtype=dtype, pieces=tuple(pieces))


def _piece(files: Files, name: str, dtype: str, box: Box, info: Any) -> Piece:
    """The blocks of one item, with the checksums of what is there."""
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{files.address}/{info.relative_path}: {name} is compressed; save it without extensions")
    block = block_shape(box.shape, item_bytes(dtype))
    blocks, at = [], _values_at(files, name, dtype, box, info)
    for one in block_boxes(box, block):
        size = one.elements * item_bytes(dtype)
        content = _bytes(files, info.relative_path, at, size)
        blocks.append(Block(file=info.relative_path, offset=at, size=size, crc32c=crc32c(content)))
        at += size
    return Piece(box=box, rank=0, block=block, blocks=tuple(blocks))


def _values_at(files: Files, name: str, dtype: str, box: Box, info: Any) -> int:
    """Where the values of an item begin in its file."""
    item = io.BufferedReader(_Item(files, info), _AHEAD_BYTES)
    where = f"{files.address}/{info.relative_path}: {name}"
    try:
        archive = zipfile.ZipFile(item)
        record = next(one for one in archive.infolist() if one.filename.endswith("/data/0"))
        item.seek(record.header_offset)
        header = item.read(_HEADER_BYTES)
        lengths = [int.from_bytes(header[start : start + 2], "little") for start in (_NAME_AT, _EXTRA_AT)]
        item.seek(0)
        with skip_data():
            # Only its form: the values stay where they are.
            tensor = torch.load(item, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged archive or pickle leads to
        raise CheckpointError(f"{where}: is not an item of torch.save: {error}") from error
    if (tuple(tensor.shape), dtype_name(tensor)) != (box.shape, dtype):
        raise CheckpointError(
            f"{where}: is {dtype_name(tensor)} {tuple(tensor.shape)} where {METADATA} says {dtype} {box.shape}"
        )
    if not tensor.is_contiguous():
        raise CheckpointError(
            f"{where}: its values are not stored row by row (strides {tensor.stride()}). "
            "Load it with torch, make its tensors contiguous, and save it again."
        )
    begin = record.header_offset + _HEADER_BYTES + sum(lengths) + tensor.storage_offset() * item_bytes(dtype)
    return int(info.offset + begin)


class _Item(io.RawIOBase):
    """An item of a file as a file of its own."""

    def __init__(self, files: Files, info: Any) -> None:
        super().__init__()
        self._files, self._info, self._at = files, info, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = np.frombuffer(buffer, np.uint8)
        size = max(min(len(view), self._info.length - self._at), 0)
        if size:
            self._files.read_into(self._info.relative_path, self._info.offset + self._at, [view[:size]])
        self._at += size
        return size


def _ends(files: Files, found: Metadata) -> dict[str, int]:
    """The size of every file, by path: of the others that of what is known to lie in them."""
    ends = {METADATA: len(files.read(METADATA))}
    for info in found.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return ends


def _blocks_of(entries: tuple[Entry, ...]) -> dict[str, list[Block]]:
    """The blocks of every file, in order."""
    found: dict[str, list[Block]] = {}
    for entry in entries:
        for piece in entry.pieces:
            for block in piece.blocks:
                found.setdefault(block.file, []).append(block)
    return {path: sorted(blocks, key=lambda block: block.offset) for path, blocks in found.items()}


def _around(files: Files, path: str, blocks: list[Block], end: int) -> File:
    """A file's size, and the checksum of what lies around its blocks."""
    total = 0
    for start, stop in _gaps(blocks, end):
        for begin in range(start, stop, _PART_BYTES):
            total = crc32c(_bytes(files, path, begin, min(_PART_BYTES, stop - begin)), total)
    return File(size=end, crc32c=total)


def _gaps(blocks: list[Block], end: int) -> Iterator[tuple[int, int]]:
    at = 0
    for block in blocks:
        yield at, block.offset
        at = block.offset + block.size
    yield at, end


def _bytes(files: Files, path: str, offset: int, size: int) -> np.ndarray:
    content = empty_bytes(size)
    try:
        files.read_into(path, offset, [content])
    except OSError as error:
        raise CheckpointError(f"{files.address}/{path}: cannot be read: {error.strerror or error}") from error
    return content
