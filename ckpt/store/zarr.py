"""The Zarr v3 store, through tensorstore: one file per chunk, a checksum per inner chunk, many files under way at once."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import tensorstore as ts

from ckpt.dtype import item_bytes
from ckpt.store.protocol import Array, Block, Request
from core.errors import CheckpointError
from core.state.box import Box

# A chunk file larger than this is divided into inner chunks that can be read, and are checked, one by one.
INNER_BYTES = 4 << 20
# Bytes and operations that one process keeps under way: enough to keep a disk busy, little beside a model.
WINDOW_BYTES = 256 << 20
WINDOW_COUNT = 512


class ZarrStore:
    """Arrays as Zarr v3: `<path>/zarr.json` and one file `<path>/c.i.j` per chunk; plain `zarr.open` reads them."""

    name = "zarr"

    def begin(self, folder: Path, arrays: Iterable[Array]) -> None:
        """Write the description of every Zarr group above the arrays."""
        groups = {str(parent) for array in arrays for parent in PurePosixPath(array.path).parents} - {"."}
        text = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
        files = _files(folder)
        futures = [(group, files.write(f"{group}/zarr.json", text)) for group in sorted(groups)]
        for group, future in futures:
            _finish(future, folder / group / "zarr.json")

    def write(self, folder: Path, blocks: Iterable[Block]) -> None:
        """Write every block; each file is pushed to the disk before this returns. Raises CheckpointError."""
        files = _files(folder)
        window = _Window()
        try:
            for block in blocks:
                for future in self._start(folder, files, block):
                    window.add(future, folder / block.array.path, block.data.nbytes)
            window.drain()
        except BaseException:
            # The folder is about to be removed: nothing may still be writing into it.
            window.abandon()
            raise

    def _start(self, folder: Path, files: ts.KvStore, block: Block) -> Iterator[ts.Future | ts.WriteFutures]:
        metadata = _metadata(block.array)
        if block.first:
            described = {"zarr_format": 3, "node_type": "array", "attributes": {}} | metadata
            yield files.write(f"{block.array.path}/zarr.json", json.dumps(described).encode())
        spec = _spec(folder, block.array.path) | {"metadata": metadata, "store_data_equal_to_fill_value": True}
        # The description is ours and known: no rank has to wait for the one that writes it.
        array = ts.open(spec, open=True, assume_metadata=True).result()
        yield array[block.box.slices].write(block.data, can_reference_source_data_indefinitely=True)

    def files(self, array: Array, box: Box, first: bool) -> tuple[str, ...]:
        """The chunk files of a block, and the array's description with the first of them."""
        spans = [
            range(offset // chunk, math.ceil((offset + size) / chunk))
            for offset, size, chunk in zip(box.offset, box.shape, array.chunk, strict=True)
        ]
        chunks = [".".join(["c", *map(str, cell)]) for cell in itertools.product(*spans)]
        return tuple(f"{array.path}/{name}" for name in (["zarr.json"] if first else []) + chunks)

    def read(self, folder: Path, requests: Iterable[Request]) -> Iterator[np.ndarray]:
        """The data of every request, in order. Raises CheckpointError on a missing or damaged chunk or description."""
        window = _Window()
        for request in requests:
            where = folder / request.path
            try:
                array = ts.open(_spec(folder, request.path), open=True).result()
            except Exception as error:
                raise CheckpointError(f"{where}: cannot be read: {_short(error)}") from error
            if tuple(array.shape) != request.shape or array.dtype.name != request.dtype:
                found, said = f"{array.dtype.name} {tuple(array.shape)}", f"{request.dtype} {request.shape}"
                raise CheckpointError(f"{where}: is {found} where the manifest says {said}: the checkpoint is damaged")
            size = request.box.elements * item_bytes(request.dtype)
            yield from window.add(array[request.box.slices].read(), where, size)
        yield from window.drain()


class _Window:
    """Operations under way, oldest first, bounded in bytes and number."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[ts.Future | ts.WriteFutures, Path, int]] = deque()
        self._bytes = 0

    def add(self, future: ts.Future | ts.WriteFutures, where: Path, size: int) -> list[Any]:
        """Take in an operation; the results of those that had to end to make room, in order."""
        self._waiting.append((future, where, size))
        self._bytes += size
        done = []
        while len(self._waiting) > 1 and (self._bytes > WINDOW_BYTES or len(self._waiting) > WINDOW_COUNT):
            done.append(self._next())
        return done

    def drain(self) -> list[Any]:
        """The results of all that is left."""
        return [self._next() for _ in range(len(self._waiting))]

    def abandon(self) -> None:
        """Wait until nothing is under way, whatever became of it."""
        for future, _, _ in self._waiting:
            future.exception()
        self._waiting.clear()

    def _next(self) -> Any:
        future, where, size = self._waiting.popleft()
        self._bytes -= size
        return _finish(future, where)


def _finish(future: ts.Future | ts.WriteFutures, where: Path) -> Any:
    try:
        return future.result()
    except Exception as error:
        raise CheckpointError(f"{where}: {_short(error)}") from error


def _short(error: Exception) -> str:
    """tensorstore's message without the specification and source lines that it appends."""
    return str(error).split(" [", 1)[0] if "[OS error" not in str(error) else str(error).split(" [source", 1)[0]


def _files(folder: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()


def _spec(folder: Path, path: str) -> dict[str, Any]:
    kvstore = {"driver": "file", "path": f"{folder / path}/"}
    return {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}


def _metadata(array: Array) -> dict[str, Any]:
    """The Zarr v3 description of an array. Every (inner) chunk carries its own crc32c, which any read of it checks."""
    checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    inner = _inner_chunk(array.chunk, item_bytes(array.dtype))
    sharded = {"chunk_shape": inner, "codecs": checked, "index_codecs": checked, "index_location": "end"}
    plain = tuple(inner) == array.chunk
    return {
        "shape": list(array.shape),
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": False if array.dtype == "bool" else 0.0 if "float" in array.dtype else 0,
        "codecs": checked if plain else [{"name": "sharding_indexed", "configuration": sharded}],
    }


def _inner_chunk(chunk: tuple[int, ...], bytes_each: int) -> list[int]:
    """`chunk` cut evenly, leading dimensions first (experts, then rows), until it has at most INNER_BYTES."""
    inner = list(chunk)
    for d, size in enumerate(chunk):
        excess = math.prod(inner) * bytes_each / INNER_BYTES
        if excess <= 1:
            break
        parts = next((n for n in range(math.ceil(excess), size) if size % n == 0), size)
        inner[d] = size // parts
    return inner
