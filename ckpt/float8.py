"""Matrices in float8 blocks as DeepSeek-V3 ships them: what they stand for, and the same bytes again from what they stand for.

A matrix is float8 (e4m3) numbers and one scale for each block of 128 x 128; blocks at the right and bottom edge are cut. It
stands for number * scale, rounded to float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 128
SCALE = "_scale_inv"
LARGEST = 448.0  # of the numbers that e4m3 has
# As `quantization_config` of config.json says it.
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
# The largest number of a block whose scale uses the whole range: one for each mantissa, in (224, 448].
_TOPS = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)
_MANTISSAS = 8
_SAMPLE = 64


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many blocks a matrix of `shape` has in each dimension."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantise(numbers: Tensor, scale: Tensor, *, skip: tuple[int, ...] = (0, 0)) -> Tensor:
    """numbers [rows, columns] float8 times the scale of its 128 x 128 block, in float32.

    scale: [row blocks, column blocks] of the blocks that `numbers` touches; `skip`: rows and columns by which it starts inside
    its first block.
    """
    rows, columns = numbers.shape
    column_block = (torch.arange(columns) + skip[1]) // BLOCK
    out = numbers.to(torch.float32)
    for block in range(scale.shape[0]):
        band = slice(max(0, block * BLOCK - skip[0]), min(rows, (block + 1) * BLOCK - skip[0]))
        out[band] *= scale[block].to(torch.float32)[column_block]
    return out


def quantise(matrix: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(numbers [rows, columns] float8 e4m3, scale [row blocks, column blocks] float32) of a matrix of any floating dtype.

    Where a block is what some numbers and a scale stand for exactly, they are these, so that a float8 matrix that was dequantised
    to float32 is quantised to the same bytes: with the scale that `known` has for the block (it is tried, not trusted), else with
    the one that makes the largest number exceed 224, as every scale does that comes from the largest value. Any other block has
    the scale (largest value) / 448. A block of zeros has the known scale, or 1.
    """
    rows, columns = matrix.shape
    high, wide = scale_shape((rows, columns))
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=matrix.device)
    scale = torch.empty(high, wide, dtype=torch.float32, device=matrix.device)
    whole = columns // BLOCK
    for block in range(high):  # band by band, for the memory; the block that is cut at the right by itself
        for first, last in ((0, whole), (whole, wide)):
            if first == last:
                continue
            place = slice(block * BLOCK, (block + 1) * BLOCK), slice(first * BLOCK, min(last * BLOCK, columns))
            band = matrix[place].to(torch.float32)
            count, height = last - first, band.shape[0]
            flat = band.reshape(height, count, -1).transpose(0, 1).reshape(count, -1)
            found, scale[block, first:last] = _quantise_blocks(
                flat, None if known is None else known[block, first:last]
            )
            numbers[place] = found.view(count, height, -1).transpose(0, 1).reshape(band.shape)
    return numbers, scale


def _quantise_blocks(blocks: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """numbers and scales [blocks] of blocks [blocks, elements] float32."""
    largest = blocks.abs().amax(1)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    open_blocks = torch.arange(blocks.shape[0], device=blocks.device)
    if known is not None:
        scale[open_blocks], open_blocks = _settle(blocks, scale, open_blocks, known.to(scale))
    open_blocks = open_blocks[(largest > 0)[open_blocks] & _few_mantissas(blocks[open_blocks])]
    candidates = _candidates(largest)
    while len(open_blocks) and (candidate := next(candidates, None)) is not None:
        scale[open_blocks], open_blocks = _settle(blocks, scale, open_blocks, candidate)
    return (blocks / scale[:, None]).to(torch.float8_e4m3fn), scale


def _settle(blocks: Tensor, scale: Tensor, open_blocks: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of the open blocks, the candidate's where it gives a block exactly; and which blocks are still open."""
    tried = candidate[open_blocks]
    settled = _exact(_sample(blocks[open_blocks]), tried)  # a wrong scale is almost always seen from few elements
    settled[settled.clone()] = _exact(blocks[open_blocks[settled]], tried[settled])
    return torch.where(settled, tried, scale[open_blocks]), open_blocks[~settled]


def _exact(blocks: Tensor, scale: Tensor) -> Tensor:
    """Which blocks some float8 numbers and these scales stand for exactly."""
    numbers = (blocks / scale[:, None]).to(torch.float8_e4m3fn).to(torch.float32)
    return (numbers * scale[:, None] == blocks).all(1) & scale.isfinite() & (scale != 0)


def _sample(blocks: Tensor) -> Tensor:
    return blocks[:, :: max(1, blocks.shape[1] // _SAMPLE)]


def _candidates(largest: Tensor) -> Iterator[Tensor]:
    """The scales with which one of the largest numbers may stand for the largest value: for each at most two, near the quotient."""
    for top in _TOPS:
        # A scale made from a bfloat16 weight is the likeliest of several that a small block allows.
        yield largest.to(torch.bfloat16).to(torch.float32) / top
        bits = (largest / top).view(torch.int32)
        yield from ((bits + step).view(torch.float32) for step in (0, 1, -1, 2, -2))


def _few_mantissas(blocks: Tensor) -> Tensor:
    """Whether blocks can be products of float8 numbers and one scale: of their mantissas there are no more than eight.

    Of some elements: trained weights, which no scale gives exactly, are known by them at once.
    """
    sample = _sample(blocks)
    mantissas = torch.where(sample == 0, -1, sample.view(torch.int32) & 0x7FFFFF).sort(1).values
    different = (mantissas[:, 1:] != mantissas[:, :-1]).sum(1) + 1
    return different <= _MANTISSAS + 1  # and zero
