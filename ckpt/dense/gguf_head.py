"""The head of a GGUF file: its metadata, and where each tensor lies. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The package `gguf` has a reader, which takes seconds over the hundred thousand strings of a tokenizer; every process would pay that again.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
# Type numbers of values: formats of struct; 7 is a bool, 8 a string, 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor lies: `kind` is the number of its type, `shape` slowest dimension first, `start` its first byte in the file."""

    kind: int
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, kw_only=True)
class Head:
    """metadata: by key; 32-bit floats as the shortest decimal numbers that round to them. content: the file's bytes, read on use."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Place]
    content: np.ndarray


def read_head(path: Path) -> Head:
    """The head of the file at `path`. Raises CheckpointError where it is damaged, cut short, or of a version that is not read."""
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(content)
        magic, version = cursor.take("4s")[0], cursor.number("I")
        if magic != MAGIC or version not in _VERSIONS:
            raise ValueError(f"it begins with {magic!r} of version {version}, not {MAGIC!r} of version 2 or 3")
        num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
        metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_values)}
        tensors = [_tensor(cursor) for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        data = -(-cursor.at // alignment) * alignment
    except (OSError, ValueError, KeyError, TypeError, struct.error, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is damaged or cut short ({error}); fetch it again") from error
    places = {name: Place(kind=kind, shape=shape, start=data + start) for name, kind, shape, start in tensors}
    return Head(metadata=metadata, tensors=places, content=np.frombuffer(content, dtype=np.uint8))


class _Cursor:
    """Reads one value after the other; beyond the end, struct.error."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = 0

    def take(self, form: str) -> tuple[Any, ...]:
        """Values of a struct format, little-endian without gaps."""
        found = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def number(self, form: str) -> int:
        """One whole number."""
        return int(self.take(form)[0])

    def text(self) -> str:
        """A string: its bytes, after how many they are."""
        size = self.number("Q")
        found = self.content[self.at : self.at + size]
        if len(found) < size:
            raise ValueError("it ends inside a string")
        self.at += size
        return found.decode("utf-8")

    def value(self, kind: int) -> Any:
        """A value of the metadata."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in _NUMBERS:
                return [_plain(value, inner) for value in self.take(f"{count}{_NUMBERS[inner]}")]
            return [self.value(inner) for _ in range(count)]
        return _plain(self.take(_NUMBERS[kind])[0], kind)


def _tensor(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, type, shape and first byte behind the head. A file states the fastest dimension first."""
    name, dimensions = cursor.text(), cursor.number("I")
    shape = cursor.take(f"{dimensions}Q")[::-1]
    return name, cursor.number("I"), shape, cursor.number("Q")


def _plain(value: Any, kind: int) -> Any:
    """A 32-bit float as the decimal number that it was rounded from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if kind == _FLOAT32 else value
