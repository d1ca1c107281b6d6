"""Blocks: the contiguous sub-boxes of a few MiB in which a piece is written, checked and read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import crc32c as _crc32c
import numpy as np
import zstandard

from ckpt.manifest import Codec
from core.errors import CheckpointError
from core.state.box import Box

# Large enough that a system call costs nothing beside it, small enough that a slice reads little more than itself.
BLOCK_BYTES = 8 << 20
ZSTD_LEVEL = 3


def block_shape(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """The largest block of at most BLOCK_BYTES (or one row) that is contiguous in a piece of `shape`; those at the ends may be less.

    Leading dimensions have size 1, then one is cut, and those behind it are whole.
    """
    block = list(shape)
    for d, size in enumerate(shape):
        rest = math.prod(shape[d + 1 :]) * item_bytes
        if size * rest <= BLOCK_BYTES:
            break
        block[d] = max(1, BLOCK_BYTES // rest)
        if block[d] > 1:
            block[d] = _even(size, -(-size // block[d]))
            break
    return tuple(block)


def _even(size: int, count: int) -> int:
    """The length of `count` pieces of `size`, or of somewhat more if they can then be equal: Zarr has equal ones only."""
    return next((size // n for n in range(count, 2 * count) if size % n == 0), -(-size // count))


def block_boxes(piece: Box, block: tuple[int, ...]) -> Iterator[Box]:
    """The boxes of a piece's blocks, in row-major order."""
    ranges = [range(o, o + s, b or 1) for o, s, b in zip(piece.offset, piece.shape, block, strict=True)]
    ends = [o + s for o, s in zip(piece.offset, piece.shape, strict=True)]
    for corner in product(*ranges):
        shape = tuple(min(b, end - at) for b, end, at in zip(block, ends, corner, strict=True))
        yield Box(offset=corner, shape=shape)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, row by row; its own memory where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def crc32c(content: bytes | np.ndarray, before: int = 0) -> int:
    """The crc32c of bytes, or of all that a sequence of them has come to, where `before` is that of those in front."""
    return _crc32c.crc32c(content if isinstance(content, bytes) else content.data, before)


def encode(values: np.ndarray, codec: Codec) -> bytes | np.ndarray:
    """The bytes that stand for values in a file."""
    plain = as_bytes(values)
    return plain if codec == "raw" else zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plain.data)


def decode(content: np.ndarray, codec: Codec, size: int) -> np.ndarray:
    """The `size` bytes of values that `content` stands for. Raises CheckpointError where it does not."""
    if codec == "zstd":
        try:
            content = np.frombuffer(
                zstandard.ZstdDecompressor().decompress(content.data, max_output_size=size), np.uint8
            )
        except zstandard.ZstdError as error:
            raise CheckpointError(f"cannot be decompressed: {error}") from error
    if len(content) != size:
        raise CheckpointError(f"holds {len(content)} bytes of values instead of {size}")
    return content
