"""What is in a checkpoint: every tensor, and for every block of it where it lies and its checksum. Written last, so it vouches for all."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckpt.dtype import item_bytes
from ckpt.files.protocol import Files
from core.errors import CheckpointError
from core.state.box import Box

SCHEMA = 2
MANIFEST = "manifest.json"
PARTIAL = ".partial"
Codec = Literal["raw", "zstd"]


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of the checkpoint: its size, and the crc32c of those of its bytes that belong to no block."""

    size: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """A few MiB of a tensor, row by row and little-endian: `size` bytes from byte `offset` of `file`, and their crc32c."""

    file: str
    offset: int
    size: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The piece `box` of a tensor, written by `rank`: its blocks, in row-major order, are of the shape `block` or less at its ends."""

    box: Box
    rank: int
    block: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One canonical tensor: its global shape, element type (ckpt/dtype.py) and the pieces that tile it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """The size of the tensor's values."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint. `sequence` counts the saves of a run: the largest is the newest, whatever its step.

    store: for whom the files are laid out besides us. codec: how the bytes of a block hold its values. files: every file but this
    manifest. extra: what the run keeps beside its tensors, as JSON values.
    """

    step: int
    sequence: int
    store: str
    codec: Codec
    files: Mapping[str, File]
    entries: tuple[Entry, ...]
    extra: Mapping[str, Any]


def manifest_bytes(manifest: Manifest) -> bytes:
    """The manifest as it is written."""
    content = _manifest_to_json(manifest)
    text = json.dumps({"schema": SCHEMA, "crc32": _crc32(content), "content": content}, separators=(",", ":"))
    return f"{text}\n".encode()


def read_manifest(files: Files) -> Manifest:
    """The manifest of a checkpoint.

    Raises CheckpointError where there is no checkpoint, or one that is half-written, damaged, or of a newer version.
    """
    where = files.address
    try:
        raw = files.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_why_no_manifest(files)) from None
    except OSError as error:
        raise CheckpointError(f"{where}/{MANIFEST}: cannot be read: {error.strerror or error}") from error
    damaged = f"{where}/{MANIFEST}: the manifest is damaged; use another checkpoint of this run"
    try:
        document = json.loads(raw)
        schema = document["schema"]
        if isinstance(schema, int) and schema != SCHEMA:
            raise CheckpointError(f"{where}: {_other_version(schema)}")
        content = document["content"]
        if document["crc32"] != _crc32(content):
            raise CheckpointError(f"{damaged}. Its checksum does not match its content.")
        return _manifest_from_json(content)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{damaged}. {type(error).__name__}: {error}") from error


def _other_version(schema: int) -> str:
    newer = schema > SCHEMA
    return (
        f"written in version {schema} of the format; this zoo reads version {SCHEMA}. "
        f"Use {'a newer' if newer else 'the older'} zoo{'' if newer else ' that wrote it'}."
    )


def require_json(value: object, where: str = "extra") -> None:
    """Raise CheckpointError unless `value` comes back from JSON as it is: dicts with text keys, lists, text, numbers, None.

    A tuple comes back as a list and is allowed; a number as a key would come back as text and is not.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: key {key!r} is not text and would not come back from JSON as it is")
            require_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(
            f"{where}: a {type(value).__name__} cannot be stored as JSON; store it as a tensor or as text"
        )


def file_faults(files: Files, manifest: Manifest) -> dict[str, str]:
    """What is wrong with the files of a checkpoint by their sizes alone: path -> missing, or of another size than was written.

    An object store may not tell sizes; there, an object is whole or missing.
    """
    sizes = _sizes(files)
    faults = {}
    for path, file in manifest.files.items():
        if path not in sizes:
            faults[path] = f"{path} is missing"
        elif sizes[path] not in (file.size, None):
            faults[path] = f"{path} has {sizes[path]} bytes instead of {file.size}"
    return faults


def _sizes(files: Files) -> Mapping[str, int | None]:
    try:
        return files.sizes()
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or files.address}: cannot be read: {error.strerror or error}"
        ) from error


def _why_no_manifest(files: Files) -> str:
    where, present = files.address, _sizes(files)
    if not present:
        return f"{where}: there is no such checkpoint"
    if where.endswith(PARTIAL):
        return f"{where}: this checkpoint is half-written (its save was interrupted); use an older one of the same run"
    if any(path.startswith("checkpoints/") for path in present):
        return f"{where}: this is a run folder; give one of the checkpoints in {where}/checkpoints"
    if ".metadata" in present:
        return (
            f"{where}: this has no {MANIFEST} with the checksums that loading needs. If torch.distributed.checkpoint wrote this, make a "
            "checkpoint of it with `ckpt convert`; if a run did, it is damaged, and another one of that run is to be used"
        )
    return f"{where}: this is not a checkpoint (it has no {MANIFEST})"


def _crc32(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _box_to_json(box: Box) -> list[list[int]]:
    return [list(box.offset), list(box.shape)]


def _box_from_json(value: Any) -> Box:
    return Box(offset=tuple(value[0]), shape=tuple(value[1]))


def piece_to_json(piece: Piece, number: Mapping[str, int]) -> list[Any]:
    """A piece with its files by number: a large checkpoint has millions of blocks."""
    blocks = [[number[block.file], block.offset, block.size, block.crc32c] for block in piece.blocks]
    return [*_box_to_json(piece.box), piece.rank, list(piece.block), blocks]


def piece_from_json(value: Any, paths: Sequence[str]) -> Piece:
    """The piece that `piece_to_json` wrote."""
    offset, shape, rank, block, blocks = value
    found = tuple(Block(file=paths[n], offset=at, size=size, crc32c=crc) for n, at, size, crc in blocks)
    return Piece(box=_box_from_json((offset, shape)), rank=rank, block=tuple(block), blocks=found)


def _manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    number = {path: i for i, path in enumerate(manifest.files)}
    return {
        "step": manifest.step,
        "sequence": manifest.sequence,
        "store": manifest.store,
        "codec": manifest.codec,
        "files": [[path, file.size, file.crc32c] for path, file in manifest.files.items()],
        "entries": [
            {
                "name": e.name,
                "shape": list(e.shape),
                "dtype": e.dtype,
                "pieces": [piece_to_json(p, number) for p in e.pieces],
            }
            for e in manifest.entries
        ],
        "extra": manifest.extra,
    }


def _manifest_from_json(content: Any) -> Manifest:
    paths = [path for path, _, _ in content["files"]]
    return Manifest(
        step=content["step"],
        sequence=content["sequence"],
        store=content["store"],
        codec=content["codec"],
        files={path: File(size=size, crc32c=crc) for path, size, crc in content["files"]},
        entries=tuple(
            Entry(
                name=e["name"],
                shape=tuple(e["shape"]),
                dtype=e["dtype"],
                pieces=tuple(piece_from_json(piece, paths) for piece in e["pieces"]),
            )
            for e in content["entries"]
        ),
        extra=content["extra"],
    )
