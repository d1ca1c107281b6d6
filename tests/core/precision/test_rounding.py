"""Stochastic rounding: unbiased, between neighbours, and with the same bits however a tensor is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from core.precision.elements import E2M1, E4M3, E5M2, Element, decode, encode
from core.precision.formats import MXFP8, NVFP4_ROWS, quantise
from core.precision.rounding import rounding_noise, rounding_noise_rows
from core.state.box import Box, cut, whole
from core.state.seed import uniform
from tests.core.precision.test_elements import true_values

NAME = "layers.3.mlp.experts.down"
DRAWS = 1_000_000


@pytest.fixture(scope="module")
def noise() -> Tensor:
    """A million numbers, as rounding draws them."""
    return rounding_noise(5, NAME, whole((1000, 1000)), step=17).flatten()


# Normal and subnormal ones, next to a neighbour, half way, of either sign, and just below the largest.
CASES = [
    (E4M3, 0.3),
    (E4M3, -209.7),
    (E4M3, 0.0013),
    (E4M3, 447.9),
    (E5M2, 1.1),
    (E5M2, -3e-5),
    (E2M1, 0.1),
    (E2M1, -0.01),
    (E2M1, 2.5),
    (E2M1, -5.9),
]


@pytest.mark.parametrize(("element", "number"), CASES)
def test_a_million_roundings_have_the_number_as_their_mean(noise: Tensor, element: Element, number: float) -> None:
    x = torch.full((DRAWS,), number)
    exact = float(x[0])
    values = np.unique(true_values(element)[np.isfinite(true_values(element))])
    low, high = values[values < exact].max(), values[values > exact].min()
    rounded = decode(encode(x, element, noise=noise), element, torch.float64)
    assert set(rounded.unique().tolist()) == {low, high}
    share = (exact - low) / (high - low)
    standard_error = (high - low) * (share * (1 - share) / DRAWS) ** 0.5
    assert abs(rounded.mean().item() - exact) < 4 * standard_error


def test_many_roundings_of_a_tensor_of_four_bits_have_its_values_as_their_mean() -> None:
    """A quantiser that rounds everything to zero, or to the nearest, is off by far more than one in a hundred of the whole."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    draws = 400
    total = torch.zeros_like(x)
    for step in range(draws):
        total += quantise(x, NVFP4_ROWS, noise=rounding_noise(1, NAME, whole((8, 64)), step=step)).dequantise()
    below_top = x.abs() < 0.9 * x.view(8, 4, 16).abs().amax(-1).repeat_interleave(
        16, 1
    )  # what rounding of scales cannot cut
    nearest = quantise(x, NVFP4_ROWS).dequantise()
    off, off_nearest = ((y - x)[below_top].norm() / x[below_top].norm() for y in (total / draws, nearest))
    assert off < 0.01 < off_nearest


def test_the_bits_are_the_same_however_a_tensor_is_cut() -> None:
    shape = (3, 7, 34)
    everything = rounding_noise(2, NAME, whole(shape), step=9)
    assert everything.shape == shape and everything.min() > 0 and everything.max() < 1
    for dimension, count in [(0, 3), (1, 4), (2, 5), (2, 34)]:
        for index in range(count):
            box = cut(whole(shape), dimension, index, count)
            assert torch.equal(rounding_noise(2, NAME, box, step=9), everything[box.slices])
    inner = Box(offset=(1, 2, 5), shape=(2, 4, 11))
    assert torch.equal(rounding_noise(2, NAME, inner, step=9), everything[inner.slices])


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_pieces_of_whole_blocks_are_quantised_to_the_codes_of_the_whole(pieces: int) -> None:
    x = torch.randn(10, 96, generator=torch.Generator().manual_seed(1))
    truth = quantise(x, MXFP8, noise=rounding_noise(4, NAME, whole((10, 96)), step=3)).codes
    assert not torch.equal(truth, quantise(x, MXFP8).codes)
    for index in range(pieces):
        box = cut(whole((10, 96)), 0, index, pieces)
        part = quantise(x[box.slices], MXFP8, noise=rounding_noise(4, NAME, box, step=3))
        assert torch.equal(part.codes, truth[box.slices])


def test_rows_in_any_order_have_the_bits_of_their_places() -> None:
    everything = rounding_noise(2, NAME, whole((11, 6)), step=1)
    rows = torch.tensor([7, 0, 10, 3])
    assert torch.equal(rounding_noise_rows(2, NAME, rows, 6, step=1), everything[rows])
    assert rounding_noise_rows(2, NAME, rows[:0], 6, step=1).shape == (0, 6)


def test_other_seeds_names_and_steps_have_other_bits_and_so_have_the_initial_weights() -> None:
    box = whole((4, 8))
    drawn = [
        rounding_noise(1, NAME, box, step=0),
        rounding_noise(2, NAME, box, step=0),
        rounding_noise(1, "layers.4.mlp.experts.down", box, step=0),
        rounding_noise(1, NAME, box, step=1),
        uniform(1, NAME, box, step=0),
    ]
    assert len({tuple(d.flatten().tolist()) for d in drawn}) == len(drawn)
