"""Random numbers that depend on (seed, name, global index, step) only, so that a seed means the same model everywhere (contract 5).

The generator is Philox4x32-10 (Salmon et al., SC 2011), a counter-based one: number i of a stream needs no number before it.
A tensor is read as rows along its last dimension; row r and column c take word c % 4 of counter (c // 4, r, step).
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from core.state.box import Box

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Counters drawn at a time: the int64 temporaries then stay in the processor's cache.
_CHUNK = 1 << 16


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
    words = _words(seed, name, box, step)
    # (w + 0.5) / 2^32 lies strictly inside (0, 1), so the logarithm is finite.
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    radius = torch.sqrt(-2.0 * torch.log(uniform[..., 0::2]))
    angle = 2.0 * math.pi * uniform[..., 1::2]
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return (_crop(pairs.flatten(-2), box) * std).to(torch.float32)


def uniform(seed: int, name: str, box: Box, *, step: int = 0) -> Tensor:
    """The piece `box` of a tensor of independent numbers, uniform in (0, 1), float64 on the CPU."""
    words = _crop(_words(seed, name, box, step), box)
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of x * factor; int64 wraps, and the mask removes the sign that the shift would spread."""
    product = x * factor
    return product & _MASK, (product >> 32) & _MASK


def _words(seed: int, name: str, box: Box, step: int) -> Tensor:
    """Random words of the box's rows, from the block of four columns that holds its first column to the last: [rows, words]."""
    first, last = _columns(box)
    rows = _row_numbers(box)
    blocks = torch.arange(first // 4, -(-last // 4), dtype=torch.int64)
    key = stream_key(seed, name)
    words = torch.empty(rows.numel(), blocks.numel() * 4, dtype=torch.int64)
    step_rows = max(1, _CHUNK // max(1, blocks.numel()))
    for start in range(0, rows.numel(), step_rows):
        some = rows[start : start + step_rows]
        counters = torch.empty(some.numel(), blocks.numel(), 4, dtype=torch.int64)
        counters[..., 0] = blocks
        counters[..., 1] = (some & _MASK)[:, None]
        counters[..., 2] = (some >> 32)[:, None]
        counters[..., 3] = step
        words[start : start + step_rows] = philox(counters.view(-1, 4), key).view(some.numel(), -1)
    return words


def _columns(box: Box) -> tuple[int, int]:
    """First and one past the last column of the box's last dimension; a 0-d tensor is one column."""
    return (box.offset[-1], box.offset[-1] + box.shape[-1]) if box.shape else (0, 1)


def _row_numbers(box: Box) -> Tensor:
    """The global row numbers of the box's rows, which need the leading sizes only through their strides in `box`.

    Leading dimensions are mixed by a fixed stride of 2^20 (three at most beside the last), so that a row number does not
    depend on the tensor's other sizes either.
    """
    rows = torch.zeros(1, dtype=torch.int64)
    for offset, size in zip(box.offset[:-1], box.shape[:-1], strict=True):
        index = torch.arange(offset, offset + size, dtype=torch.int64)
        rows = ((rows << 20)[:, None] + index[None, :]).flatten()
    return rows


def _crop(values: Tensor, box: Box) -> Tensor:
    """Cut [rows, words] to the box's columns and give it the box's shape."""
    first, last = _columns(box)
    start = first - first // 4 * 4
    return values[:, start : start + last - first].reshape(box.shape)
