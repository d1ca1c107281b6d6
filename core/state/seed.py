"""Random numbers that depend on (seed, name, global index, step) only, so that a seed means the same model everywhere (contract 5).

The generator is Philox4x32-10 (Salmon et al., SC 2011), a counter-based one: number i of a stream needs no number before it.
A tensor is read as rows along its last dimension; row r and column c take word c % 4 of counter (c // 4, r, step). Row
numbers mix the leading indices by a fixed stride, so that no number depends on the tensor's other sizes either.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from core.state.box import Box

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Counters drawn at a time: the wide temporaries then stay in the processor's cache, and small beside the result; elsewhere so many
# that launches do not count.
_CHUNK = {"cpu": 1 << 14}
_LARGE_CHUNK = 1 << 20
# Leading indices are mixed by this many bits each: room for three of them in a row number of 64 bits.
_INDEX_BITS = 20


def stream_key(seed: int, name: str) -> tuple[int, int]:
    """The two 32-bit key words of the stream that belongs to `seed` and a canonical name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counters_N4: Tensor, key: tuple[int, int]) -> Tensor:
    """The random words of N counters: counters [N, 4] and result [N, 4], int64 holding 32 bits each."""
    a, b, c, d = counters_N4.unbind(1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        low_a, high_a = _multiply(a, _MULTIPLIERS[0])
        low_c, high_c = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((a, b, c, d), dim=1)


def normal(seed: int, name: str, box: Box, *, std: float = 1.0, step: int = 0) -> Tensor:
    """The piece `box` of a tensor of independent normal numbers, float32 on the CPU (Box-Muller over Philox words)."""
    return _draw(stream_key(seed, name), box, step, torch.float32, lambda words: _normal(words) * std)


def uniform(seed: int, name: str, box: Box, *, step: int = 0, device: torch.device | None = None) -> Tensor:
    """The piece `box` of a tensor of independent numbers, uniform in (0, 1), float64 on `device` (None: the CPU)."""
    rows = _row_numbers(box).to(device)
    return _draw_rows(stream_key(seed, name), rows, _columns(box), step, torch.float64, _uniform).view(box.shape)


def uniform_rows(seed: int, name: str, rows_N: Tensor, columns: int, *, step: int = 0) -> Tensor:
    """The whole rows `rows_N` (int64, any order) of a matrix of `uniform` numbers: [N, columns] float64 on the device of rows_N."""
    return _draw_rows(stream_key(seed, name), rows_N, (0, columns), step, torch.float64, _uniform)


def _uniform(words: Tensor) -> Tensor:
    """(w + 0.5) / 2^32, exact in float64 and strictly inside (0, 1)."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def _normal(words: Tensor) -> Tensor:
    """Two independent normal numbers from each pair of neighbouring words, float64."""
    inside = _uniform(words)
    radius = torch.sqrt(-2.0 * torch.log(inside[..., 0::2]))
    angle = 2.0 * math.pi * inside[..., 1::2]
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1).flatten(-2)


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of x * factor; int64 wraps, and the mask removes the sign that the shift would spread."""
    product = x * factor
    return product & _MASK, (product >> 32) & _MASK


def _draw(key: tuple[int, int], box: Box, step: int, dtype: torch.dtype, numbers: Callable[[Tensor], Tensor]) -> Tensor:
    """The piece `box`, where `numbers` makes words [rows, words] into numbers, one per word, that depend on its counter only."""
    return _draw_rows(key, _row_numbers(box), _columns(box), step, dtype, numbers).view(box.shape)


def _draw_rows(
    key: tuple[int, int],
    rows: Tensor,
    columns: tuple[int, int],
    step: int,
    dtype: torch.dtype,
    numbers: Callable[[Tensor], Tensor],
) -> Tensor:
    """Columns [first, last) of the rows of those numbers, on the device of `rows`."""
    first, last = columns
    device = rows.device
    # From the block of four columns that holds the first column to that of the last one.
    blocks = torch.arange(first // 4, -(-last // 4), dtype=torch.int64, device=device)
    crop = slice(first % 4, first % 4 + last - first)
    out = torch.empty(rows.numel(), last - first, dtype=dtype, device=device)
    step_rows = max(1, _CHUNK.get(device.type, _LARGE_CHUNK) // max(1, blocks.numel()))
    for start in range(0, rows.numel(), step_rows):
        some = rows[start : start + step_rows]
        counters = torch.empty(some.numel(), blocks.numel(), 4, dtype=torch.int64, device=device)
        counters[..., 0] = blocks
        counters[..., 1] = (some & _MASK)[:, None]
        counters[..., 2] = (some >> 32)[:, None]
        counters[..., 3] = step
        words = philox(counters.view(-1, 4), key).view(some.numel(), blocks.numel() * 4)
        out[start : start + step_rows] = numbers(words)[:, crop]
    return out


def _columns(box: Box) -> tuple[int, int]:
    """First and one past the last column of the box's last dimension; a 0-d tensor is one column."""
    return (box.offset[-1], box.offset[-1] + box.shape[-1]) if box.shape else (0, 1)


def _row_numbers(box: Box) -> Tensor:
    """The global number of each of the box's rows, int64."""
    leading = tuple(zip(box.offset[:-1], box.shape[:-1], strict=True))
    room = all(offset + size <= 1 << _INDEX_BITS for offset, size in leading[1:])
    assert len(leading) <= 3 and room, f"row numbers have no room for a box at {box.offset} of shape {box.shape}"
    rows = torch.zeros(1, dtype=torch.int64)
    for offset, size in leading:
        index = torch.arange(offset, offset + size, dtype=torch.int64)
        rows = ((rows << _INDEX_BITS)[:, None] + index[None, :]).flatten()
    return rows
