"""One safetensors file: any box of its tensors read without the rest, and bytes written into it piece by piece.

The library's own reader maps files into memory, where all that was ever read counts as this process's; here only what is asked for
is in memory. Format: eight bytes of length, a header in JSON, and the tensors one after the other without holes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ckpt.files.local import WRITE_BYTES
from core.errors import CheckpointError
from core.state.box import Box, whole

# In the order in which a file has them, so that each begins at a multiple of its size.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
_ALIGN = 8
_METADATA = "__metadata__"
# Pieces of rows shorter than this are cut out of whole rows, read in bands of about this size.
_SHORT_BYTES = 1 << 14
_BAND_BYTES = 1 << 22

Shape = tuple[int, ...]
Forms = Mapping[str, tuple[torch.dtype, Shape]]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A tensor of a file: its dtype as the header has it, its shape, and where its bytes begin in the file."""

    dtype: str
    shape: Shape
    start: int


class TensorFile:
    """An open file. `tensors`: by name; `metadata`: what its header says beside them; `close`: nothing can be read afterwards.

    Raises ValueError, with the reason, where the file is none of safetensors or is cut short; OSError where it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        # Whoever opens a source need not close it: it closes with the last reference.
        self.close = finalize(self, os.close, self._descriptor)
        try:
            self.metadata, self.tensors = _read_header(self._descriptor)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The piece `box` (None: all) of a tensor, contiguous, in its own dtype. Raises CheckpointError."""
        placed = self.tensors[name]
        box = box or whole(placed.shape)
        out = torch.empty(box.shape, dtype=DTYPES[placed.dtype])
        try:
            if out.numel():
                self._fill(out, placed, box)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error
        return out

    def _fill(self, out: Tensor, placed: Placed, box: Box) -> None:
        """Read run by run; a run is what lies together both in the box and in the tensor."""
        size, last = out.element_size(), len(box.shape) - 1
        while last > 0 and box.shape[last] == placed.shape[last]:
            last -= 1
        strides = [math.prod(placed.shape[d + 1 :]) for d in range(len(box.shape))]
        run = math.prod(box.shape[max(last, 0) :])
        bytes_of = out.view(-1).view(torch.uint8)
        if last > 0 and run * size < _SHORT_BYTES:
            self._fill_from_rows(out, placed, box, last)
            return
        for number, index in enumerate(product(*(range(s) for s in box.shape[: max(last, 0)]))):
            place = sum((i + o) * s for i, o, s in zip(index, box.offset, strides, strict=False))
            place += box.offset[last] * strides[last] if box.shape else 0
            self._read(bytes_of[number * run * size : (number + 1) * run * size], placed.start + place * size)

    def _fill_from_rows(self, out: Tensor, placed: Placed, box: Box, last: int) -> None:
        """Short runs: whole rows of dimension `last` - 1 are read, a band at a time, and the run cut out of each."""
        size, row = out.element_size(), math.prod(placed.shape[last:])
        inner = math.prod(placed.shape[last + 1 :])
        rows = out.view(-1, box.shape[last - 1], box.shape[last] * inner)
        left, right = box.offset[last] * inner, (box.offset[last] + box.shape[last]) * inner
        step = max(1, _BAND_BYTES // (row * size))
        strides = [math.prod(placed.shape[d + 1 :]) for d in range(last)]
        for number, index in enumerate(product(*(range(s) for s in box.shape[: last - 1]))):
            place = sum((i + o) * s for i, o, s in zip(index, box.offset, strides, strict=False))
            place += box.offset[last - 1] * strides[last - 1]
            for first in range(0, box.shape[last - 1], step):
                count = min(step, box.shape[last - 1] - first)
                band = torch.empty(count, row, dtype=out.dtype)
                self._read(band.view(-1).view(torch.uint8), placed.start + (place + first * row) * size)
                rows[number, first : first + count] = band[:, left:right]

    def _read(self, into: Tensor, offset: int) -> None:
        view = memoryview(into.numpy().data)
        while view:
            got = os.preadv(self._descriptor, [view], offset)
            if not got:
                raise EOFError(f"the file ends at byte {offset}")
            view, offset = view[got:], offset + got


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A file to be written: its header, where the bytes of each tensor begin, and its size. Made of forms alone."""

    header: bytes
    starts: Mapping[str, int]
    bytes: int


def plan_file(tensors: Forms, metadata: Mapping[str, str]) -> FilePlan:
    """The file that holds `tensors`, name -> (dtype, shape): byte for byte as the safetensors library lays it out."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    places: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (_RANKS[item[1][0]], item[0])):
        places[name], begin = end, end
        end += math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN)
    header = struct.pack("<Q", len(text)) + text
    return FilePlan(
        header=header,
        starts={name: len(header) + place for name, place in places.items()},
        bytes=len(header) + end,
    )


class TensorWriter:
    """A file under way at `path`: opened, at its full size, with its header. Raises OSError as its methods do."""

    def __init__(self, path: Path, plan: FilePlan, *, begin: bool = True) -> None:
        """begin: False joins a file that another process has begun."""
        self._plan = plan
        self._file = path.open("wb" if begin else "r+b", buffering=0)
        if begin:
            self._file.truncate(plan.bytes)
            self._write(memoryview(plan.header), 0)

    def write(self, name: str, first: int, data: Tensor) -> None:
        """Put `data`, on the CPU and of the tensor's dtype, behind the first `first` elements of tensor `name`."""
        if data.numel():
            start = self._plan.starts[name] + first * data.element_size()
            self._write(memoryview(data.contiguous().view(-1).view(torch.uint8).numpy().data), start)

    def close(self, *, sync: bool = True) -> None:
        """sync: have everything on the disk first."""
        try:
            if sync:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data[:WRITE_BYTES], offset)
            data, offset = data[written:], offset + written


def _read_header(descriptor: int) -> tuple[dict[str, str], dict[str, Placed]]:
    """What the header says, checked against the size of the file."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little") if size >= 8 else size
    if 8 + length > size:
        raise ValueError(f"its {size} bytes are fewer than its header says")
    try:
        entries = json.loads(os.pread(descriptor, length, 8).decode())
        metadata = dict(entries.pop(_METADATA, None) or {})
        placed = list(_entries(entries, 8 + length))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not one of safetensors: {error}") from error
    end = 8 + length
    for _, tensor, stop in sorted(placed, key=lambda entry: (entry[1].start, entry[2])):
        if tensor.start != end or stop < end:
            raise ValueError("its tensors overlap or leave holes")
        end = stop
    if end != size:
        raise ValueError(f"it has {size} bytes instead of {end}")
    return metadata, {name: tensor for name, tensor, _ in placed}


def _entries(entries: Mapping[str, Any], data: int) -> Iterator[tuple[str, Placed, int]]:
    """(name, tensor, where its bytes end) of each entry of a header, behind which the data begin at byte `data`."""
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        shape, dtype = tuple(int(size) for size in entry["shape"]), str(entry["dtype"])
        if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{name} has {stop - start} bytes for shape {list(shape)} of {dtype}")
        yield name, Placed(dtype=dtype, shape=shape, start=data + start), data + stop
