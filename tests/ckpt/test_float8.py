"""Float8 blocks: what they stand for gives the same bytes again, and other values those of the published recipe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckpt.float8 import BLOCK, dequantise, quantise, scale_shape

# Blocks cut at both edges, whole ones, single rows, columns and elements.
SHAPES = [(200, 300), (128, 128), (256, 257), (3, 130), (130, 1), (1, 5), (1, 1)]


def spread(scale: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of every element, by numpy."""
    return np.kron(scale.double().numpy(), np.ones((BLOCK, BLOCK)))[: shape[0], : shape[1]]


def largest(matrix: Tensor) -> Tensor:
    """The largest value of every block, by a loop."""
    high, wide = scale_shape(tuple(matrix.shape))
    blocks = [[matrix[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] for j in range(wide)] for i in range(high)]
    return torch.tensor([[float(block.abs().max()) for block in row] for row in blocks])


def published(matrix: Tensor, scale: Tensor) -> Tensor:
    """The numbers of a matrix under scales."""
    wide = torch.from_numpy(spread(scale, tuple(matrix.shape))).float()
    return (matrix / wide).to(torch.float8_e4m3fn)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@settings(max_examples=60, database=None)
@given(st.sampled_from(SHAPES), st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0, 10**6))
def test_what_was_quantised_by_its_largest_values_gives_the_same_bytes_again(
    shape: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = (
        (torch.randn(shape, generator=generator) * 10 ** float(torch.randn((), generator=generator))).to(dtype).float()
    )
    scale = largest(matrix) / 448
    numbers = published(matrix, scale)
    again, scale_again = quantise(dequantise(numbers, scale))
    assert same(numbers, again)
    assert same(scale, scale_again)


@settings(max_examples=40, database=None)
@given(st.sampled_from(SHAPES), st.integers(0, 10**6))
def test_any_block_gives_the_same_bytes_again_with_the_scale_that_is_known(shape: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    numbers[(numbers & 0x7F) == 0x7F] = 0x80  # not a number -> minus zero, whose sign is kept too
    numbers = numbers.view(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape(shape), generator=generator) * 10 ** float(torch.randn((), generator=generator))
    again, scale_again = quantise(dequantise(numbers, scale), known=scale)
    assert same(numbers, again)
    assert same(scale, scale_again)


@pytest.mark.parametrize("top", [448.0, 416.0, 352.0, 256.0, 240.0])
@pytest.mark.parametrize("scale", [2.0**-9, 0.37, 3.1e-5])
def test_blocks_whose_largest_number_is_not_448_are_found_without_help(top: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(int(top))
    values = torch.randn(200, 300, generator=generator).clamp(-3, 3) * (top / 3)
    values[0, ::128] = values[128, ::128] = top
    numbers = values.to(torch.float8_e4m3fn)
    assert numbers.float().abs().max() == top
    scales = torch.full((2, 3), scale)
    again, scales_again = quantise(dequantise(numbers, scales))
    assert same(numbers, again)
    assert same(scales, scales_again)


def test_blocks_of_zeros_have_a_scale_of_one_or_the_known_one() -> None:
    matrix = torch.zeros(130, 260)
    matrix[129, 259] = 7.0
    numbers, scale = quantise(matrix)
    assert torch.equal(scale, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 7 / 448]]))
    assert torch.equal(dequantise(numbers, scale), matrix)
    known = torch.full((2, 3), 0.25)
    assert torch.equal(quantise(matrix, known)[1], torch.tensor([[0.25, 0.25, 0.25], [0.25, 0.25, 0.25]]))


def test_trained_values_have_the_published_scale_whatever_scale_is_known() -> None:
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    for known in (None, torch.full((2, 3), 0.1), torch.full((2, 3), torch.nan), torch.zeros(2, 3)):
        numbers, scale = quantise(matrix, known)
        assert torch.equal(scale, largest(matrix) / 448)
        assert same(numbers, published(matrix, scale))
        # A number of three bits behind the point is off by a sixteenth of itself, or half the smallest one.
        error = np.abs(numbers.double().numpy() * spread(scale, (200, 300)) - matrix.double().numpy())
        assert (error <= np.abs(matrix.double().numpy()) / 16 + spread(scale, (200, 300)) * 2.0**-10).all()


def test_narrow_matrices_are_quantised_by_their_values() -> None:
    matrix = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    numbers, scale = quantise(matrix)
    assert same(numbers, quantise(matrix.float())[0]) and same(scale, quantise(matrix.float())[1])
