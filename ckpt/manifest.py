"""What is in a checkpoint: every tensor, every piece of it with checksum and files. Written last, so it vouches for all."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import CheckpointError
from core.state.box import Box

SCHEMA = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of the checkpoint, relative to its folder, and its size in bytes."""

    path: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The piece `box` of a tensor, written by `rank` into the array at `array`, which holds the piece `array_box`.

    crc32: of the piece's elements in row-major order, little-endian. files: those that only this piece needs.
    """

    box: Box
    rank: int
    array: str
    array_box: Box
    crc32: int
    files: tuple[File, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One canonical tensor: its global shape, element type (ckpt/dtype.py) and the pieces that tile it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint. `sequence` counts the saves of a run: the largest is the newest, whatever its step.

    extra: what the run keeps beside its tensors, as JSON values.
    """

    step: int
    sequence: int
    store: str
    entries: tuple[Entry, ...]
    extra: Mapping[str, Any]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and push it to the disk. Raises OSError."""
    content = {
        "step": manifest.step,
        "sequence": manifest.sequence,
        "store": manifest.store,
        "entries": [_entry_to_json(entry) for entry in manifest.entries],
        "extra": manifest.extra,
    }
    text = json.dumps({"schema": SCHEMA, "crc32": _crc32(content), "content": content}, separators=(",", ":"))
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises CheckpointError where the folder is not a checkpoint, is half-written, damaged, or of a newer version.
    """
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(_why_no_manifest(folder)) from None
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read: {error.strerror or error}") from error
    damaged = f"{folder / MANIFEST}: the manifest is damaged; use another checkpoint of this run"
    try:
        document = json.loads(raw)
        schema = document["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            raise CheckpointError(
                f"{folder}: written in version {schema} of the format; this zoo reads up to {SCHEMA}. Use a newer zoo."
            )
        content = document["content"]
        if schema != SCHEMA or document["crc32"] != _crc32(content):
            raise CheckpointError(f"{damaged}. Its checksum does not match its content.")
        return _manifest_from_json(content)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{damaged}. {type(error).__name__}: {error}") from error


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


def file_faults(folder: Path, manifest: Manifest) -> Iterator[tuple[Entry, Piece, str]]:
    """Every listed file that is missing or of another size than was written, with the tensor and piece that it hits."""
    for entry in manifest.entries:
        for piece in entry.pieces:
            for fault in piece_file_faults(folder, piece):
                yield entry, piece, fault


def piece_file_faults(folder: Path, piece: Piece) -> Iterator[str]:
    """What is wrong with the files of one piece, by their metadata alone."""
    for file in piece.files:
        try:
            size = (folder / file.path).stat().st_size
        except OSError:
            yield f"{file.path} is missing"
            continue
        if size != file.size:
            yield f"{file.path} has {size} bytes instead of {file.size}"


def _why_no_manifest(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: there is no such checkpoint folder"
    if folder.name.endswith(".partial"):
        return f"{folder}: this checkpoint is half-written (its save was interrupted); use an older one of the same run"
    if (folder / "checkpoints").is_dir():
        return f"{folder}: this is a run folder; give one of the checkpoints in {folder / 'checkpoints'}"
    return f"{folder}: this is not a checkpoint (it has no {MANIFEST})"


def _crc32(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _box_to_json(box: Box) -> list[list[int]]:
    return [list(box.offset), list(box.shape)]


def _box_from_json(value: Any) -> Box:
    return Box(offset=tuple(value[0]), shape=tuple(value[1]))


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    pieces = [
        {
            "box": _box_to_json(piece.box),
            "rank": piece.rank,
            "array": piece.array,
            "array_box": _box_to_json(piece.array_box),
            "crc32": piece.crc32,
            "files": [[file.path, file.size] for file in piece.files],
        }
        for piece in entry.pieces
    ]
    return {"name": entry.name, "shape": list(entry.shape), "dtype": entry.dtype, "pieces": pieces}


def _entry_from_json(value: Any) -> Entry:
    pieces = tuple(
        Piece(
            box=_box_from_json(piece["box"]),
            rank=piece["rank"],
            array=piece["array"],
            array_box=_box_from_json(piece["array_box"]),
            crc32=piece["crc32"],
            files=tuple(File(path=path, size=size) for path, size in piece["files"]),
        )
        for piece in value["pieces"]
    )
    return Entry(name=value["name"], shape=tuple(value["shape"]), dtype=value["dtype"], pieces=pieces)


def _manifest_from_json(content: Any) -> Manifest:
    return Manifest(
        step=content["step"],
        sequence=content["sequence"],
        store=content["store"],
        entries=tuple(_entry_from_json(entry) for entry in content["entries"]),
        extra=content["extra"],
    )
