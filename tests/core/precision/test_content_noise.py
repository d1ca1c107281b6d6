"""Noise that follows from a row's own bits: unbiased, the same in any order and company, and other for other rows, weights and seeds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from core.precision.elements import E2M1, E4M3, E5M2, Element, decode, encode
from core.precision.rounding import column_factors, content_noise, row_keys
from tests.core.precision.test_elements import true_values

NAME = "layers.3.mlp.experts.down:gradient.rows"
ROWS, COLUMNS = 10_000, 101


def rows(count: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.fixture(scope="module")
def noise() -> Tensor:
    """A million numbers, of rows that begin alike and end otherwise."""
    x = rows()
    x[:, 1:] = 0.3
    return content_noise(5, NAME, x)[:, 1:].flatten()


@pytest.mark.parametrize(
    ("element", "number"), [(E4M3, 0.3), (E4M3, -209.7), (E5M2, -3e-5), (E2M1, 0.1), (E2M1, 2.5), (E2M1, -5.9)]
)
def test_a_million_roundings_of_a_number_have_it_as_their_mean(noise: Tensor, element: Element, number: float) -> None:
    x = torch.full(noise.shape, number)
    exact = float(x[0])
    values = np.unique(true_values(element)[np.isfinite(true_values(element))])
    low, high = values[values < exact].max(), values[values > exact].min()
    rounded = decode(encode(x, element, noise=noise), element, torch.float64)
    assert noise.numel() == 1_000_000 and set(rounded.unique().tolist()) == {low, high}
    share = (exact - low) / (high - low)
    standard_error = (high - low) * (share * (1 - share) / noise.numel()) ** 0.5
    assert abs(rounded.mean().item() - exact) < 4 * standard_error


def test_noise_is_uniform_and_neighbours_know_nothing_of_each_other() -> None:
    """Of four standard errors: the counts of a hundred equal parts, and correlations along rows, columns and between names."""
    x = rows()
    drawn, other = (content_noise(5, name, x) for name in (NAME, NAME.replace("rows", "columns")))
    counts = np.histogram(drawn.numpy(), bins=100, range=(0.0, 1.0))[0]
    expected = drawn.numel() / 100
    assert ((counts - expected) ** 2 / expected).sum() < 99 + 4 * (2 * 99) ** 0.5
    pairs = ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1]), (drawn, other))
    for one, two in pairs:
        a, b = ((side.double() - 0.5).flatten() * 12**0.5 for side in (one, two))
        assert abs((a * b).mean()) < 4 / a.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_same_row_has_the_same_bits_in_any_order_and_company(dtype: torch.dtype) -> None:
    x = rows(37, 13, dtype)
    whole = content_noise(2, NAME, x)
    assert whole.dtype == torch.float64 and whole.min() > 0 and whole.max() < 1
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    assert torch.equal(content_noise(2, NAME, x[order]), whole[order])
    for start, end in pairwise((0, 0, 1, 5, 36, 37)):
        assert torch.equal(content_noise(2, NAME, x[start:end]), whole[start:end])
    assert torch.equal(content_noise(2, NAME, x.T.contiguous().T), whole)
    assert torch.equal(content_noise(2, NAME, x.view(1, 37, 13))[0], whole)


def test_equal_rows_draw_alike_and_rows_that_differ_in_one_bit_do_not() -> None:
    x = rows(3, 8)
    x[1] = x[0]
    x[2] = x[0]
    x[2, 5] = torch.nextafter(x[0, 5], torch.tensor(torch.inf))
    drawn = content_noise(2, NAME, x)
    assert torch.equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).all()


def test_places_of_a_row_are_told_apart() -> None:
    """Two columns changed by opposite amounts, or swapped, must not cancel."""
    base = torch.arange(1.0, 7.0).repeat(31, 1)
    seen = [base[0].clone()]
    for i in range(6):
        for j in range(i):
            row = base[0].clone()
            row[[i, j]] = row[[j, i]]
            seen.append(row)
            row = base[0].clone().view(torch.int32)
            row[i] += 1
            row[j] -= 1
            seen.append(row.view(torch.float32))
    assert len(set(row_keys(torch.stack(seen)).tolist())) == len(seen)


def test_factors_of_columns_are_those_of_splitmix64() -> None:
    """Vectors of the published generator seeded with zero; the last bit set."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
    factors = column_factors(4, torch.device("cpu")).tolist()
    assert [factor % 2**64 for factor in factors] == [number | 1 for number in published]


def test_other_seeds_and_names_draw_other_noise() -> None:
    x = rows(4, 8)
    drawn = [content_noise(seed, name, x) for seed, name in ((1, NAME), (2, NAME), (1, NAME.replace("3", "4")))]
    assert len({tuple(noise.flatten().tolist()) for noise in drawn}) == 3


def test_no_rows_and_no_columns_draw_nothing() -> None:
    assert content_noise(1, NAME, torch.zeros(0, 5)).shape == (0, 5)
    assert content_noise(1, NAME, torch.zeros(3, 0)).shape == (3, 0)
