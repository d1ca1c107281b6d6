"""Rotated rows in Triton, measured and rounded without being written, bit for bit as torch's rotation and `quantise` make them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from core.precision.hadamard import hadamard
from core.precision.rotated import Along, rotated_amax
from tests.core.kernels.triton_case import kernels
from tests.core.precision.recipe_case import SIGNS
from tests.core.precision.recipe_case import draw as spread

pytest.importorskip("triton", minversion="3.7")

ALONG: tuple[Along, ...] = (0, 1)
DTYPES = (torch.float32, torch.bfloat16)
# Rows and numbers along the groups: none, one, primes, more than a tile has.
SIZES = [(0, 16), (1, 16), (5, 0), (13, 48), (67, 80), (3, 1040)]
# Rows of experts, which lie along the groups where those lie along the rows; the last have none.
COUNTS = [16, 0, 48, 32, 0]


def lying(x_RS: Tensor, along: Along) -> Tensor:
    """The matrix as it lies in memory."""
    return x_RS if along == 1 else x_RS.T.contiguous()


def same(got: Tensor, truth: Tensor) -> None:
    """Every bit, but that what is no number has many."""
    assert got.dtype == truth.dtype and got.shape == truth.shape
    got, truth = got.cpu(), truth.cpu()
    assert torch.equal(got.isnan(), truth.isnan())
    assert torch.equal(got.nan_to_num(nan=0.0), truth.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize(("rows", "summed"), SIZES)
def test_the_largest_is_that_of_the_rotated_matrix(
    device: torch.device,
    rows: int,
    summed: int,
    along: Along,
    dtype: torch.dtype,
) -> None:
    x = spread(rows, summed).to(dtype)
    sizes = hadamard(x, SIGNS).abs()
    truth = sizes.amax().view(1, 1) if sizes.numel() else torch.zeros(1, 1)
    for name, place in (("reference", "cpu"), ("triton", device)):
        with kernels(name):
            same(rotated_amax(lying(x, along).to(place), SIGNS, along=along), truth)


@pytest.mark.parametrize("along", ALONG)
def test_each_expert_has_the_largest_of_its_own(device: torch.device, along: Along) -> None:
    counts_E = torch.tensor(COUNTS)
    x = spread(sum(COUNTS), 32).bfloat16()
    for name, place in (("reference", torch.device("cpu")), ("triton", device)):
        with kernels(name):
            got = rotated_amax(x.to(place), SIGNS, along=along, counts_E=counts_E.to(place))
        for piece, amax in zip(x.split(COUNTS), got, strict=True):
            turned = hadamard(piece if along == 1 else piece.T.contiguous(), SIGNS)
            same(amax, turned.abs().amax() if turned.numel() else torch.zeros(()))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("along", ALONG)
def test_what_is_not_finite_is_told_and_stays_with_its_expert(
    device: torch.device,
    along: Along,
    number: float,
) -> None:
    x = spread(sum(COUNTS), 32)
    x[20, 3] = number
    with kernels("triton"):
        got = rotated_amax(x.to(device), SIGNS, along=along, counts_E=torch.tensor(COUNTS, device=device))
        whole = rotated_amax(x.to(device), SIGNS, along=along)
    assert got.isfinite().tolist() == [True, True, False, True, True] and not whole.isfinite()
    with kernels("reference"):
        same(got, rotated_amax(x, SIGNS, along=along, counts_E=torch.tensor(COUNTS)))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
def test_two_infinities_of_a_group_give_no_number(device: torch.device) -> None:
    """Their difference, in some places of the group."""
    x = torch.zeros(1, 16)
    x[0, 2:4] = math.inf
    for name, place in (("reference", torch.device("cpu")), ("triton", device)):
        with kernels(name):
            assert rotated_amax(x.to(place), SIGNS, along=1).isnan()


def test_a_matrix_of_broken_groups_is_refused(device: torch.device) -> None:
    for name in ("reference", "triton"):
        with kernels(name), pytest.raises(ValueError, match="16 divides"):
            rotated_amax(torch.zeros(3, 24, device=device), SIGNS, along=1)
