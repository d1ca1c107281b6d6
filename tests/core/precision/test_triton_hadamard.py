"""Rotated rows in Triton, measured and rounded without being written, bit for bit as torch's rotation and `quantise` make them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from core.precision.formats import NVFP4_ROWS, Quantised, quantise
from core.precision.hadamard import hadamard
from core.precision.rotated import Along, quantise_rotated, quantise_rotated_columns, rotated, rotated_amax
from core.precision.rounding import content_noise
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


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize(("rows", "summed"), SIZES)
def test_the_rotation_alone_has_the_bits_of_torchs(device: torch.device, rows: int, summed: int, along: Along) -> None:
    x = spread(rows, summed).bfloat16()
    with kernels("triton"):
        same(rotated(lying(x, along).to(device), SIGNS, along=along), hadamard(x, SIGNS))


def check(got: Quantised, truth: Quantised) -> None:
    """The same codes and scales; under a scale that is no number only that, for then codes mean nothing."""
    assert got.shape == truth.shape and got.format == truth.format
    assert got.tensor_scale is not None and truth.tensor_scale is not None
    same(got.tensor_scale, truth.tensor_scale)
    same(got.scales.float(), truth.scales.float())
    known = truth.scales.float().isfinite().repeat_interleave(16, dim=1)
    assert torch.equal(got.codes.cpu()[known], truth.codes[known])


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize(("rows", "summed"), SIZES)
def test_codes_and_scales_are_those_of_rotating_and_quantising(
    device: torch.device, rows: int, summed: int, along: Along, dtype: torch.dtype, stochastic: bool
) -> None:
    x = spread(rows, summed, seed=1).to(dtype)
    noise = lying(content_noise(3, "rows", x), along) if stochastic else None
    amax = None if stochastic else torch.tensor([[4321.0]])
    turned = hadamard(x, SIGNS)
    truth = quantise(turned, NVFP4_ROWS, amax=amax, noise=noise if noise is None or along == 1 else noise.T)
    for name, place in (("reference", torch.device("cpu")), ("triton", device)):
        given = None if noise is None else noise.to(place) if along == 1 else noise.to(place).T
        with kernels(name):
            got = quantise_rotated(
                lying(x, along).to(place),
                SIGNS,
                along=along,
                amax=None if amax is None else amax.to(place),
                noise=given,
            )
        check(got, truth)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("number", [0.5, math.inf, math.nan])
def test_every_expert_is_rounded_as_if_it_were_alone(device: torch.device, stochastic: bool, number: float) -> None:
    """One that is not finite leaves the others as they were; sizes of experts differ by much."""
    counts_E = torch.tensor(COUNTS)
    x = spread(sum(COUNTS), 37) * torch.tensor([1e-3, 1.0, 1e3, 1.0, 1.0]).repeat_interleave(counts_E)[:, None]
    x[5, 3] = number
    noise = content_noise(3, "columns", x) if stochastic else None
    for name, place in (("reference", torch.device("cpu")), ("triton", device)):
        with kernels(name):
            got = quantise_rotated_columns(
                x.to(place), counts_E.to(place), SIGNS, noise=None if noise is None else noise.to(place).T
            )
        pieces = x.split(COUNTS)
        noises = [None] * len(COUNTS) if noise is None else [n.T for n in noise.split(COUNTS)]
        for e, (piece, of_piece) in enumerate(zip(pieces, noises, strict=True)):
            check(got.expert(e), quantise(hadamard(piece.T.contiguous(), SIGNS), NVFP4_ROWS, noise=of_piece))


def test_groups_of_zeros_beside_others_stay_zeros(device: torch.device) -> None:
    x = torch.zeros(3, 64)
    x[1, 16:32] = spread(1, 16)[0]
    x[2, 33] = 1e-12
    with kernels("triton"):
        got = quantise_rotated(x.to(device), SIGNS, along=1)
        nothing = quantise_rotated(torch.zeros(2, 16, device=device), SIGNS, along=1)
    check(got, quantise(hadamard(x, SIGNS), NVFP4_ROWS))
    check(nothing, quantise(torch.zeros(2, 16), NVFP4_ROWS))
    assert not nothing.dequantise().any()


@pytest.mark.parametrize("counts", [[16, 24], [16, 16], [48, 0]])
def test_counts_that_break_groups_or_do_not_cover_the_rows_are_refused(device: torch.device, counts: list[int]) -> None:
    # The kernels let counts be that a GPU holds.
    for name in ("reference", "triton") if device.type == "cpu" else ("reference",):
        with kernels(name), pytest.raises(ValueError, match="multiples of 16 that sum to 40"):
            quantise_rotated_columns(torch.zeros(40, 3), torch.tensor(counts), SIGNS)


def test_noise_and_an_amax_of_other_shapes_are_refused(device: torch.device) -> None:
    for name in ("reference", "triton"):
        with kernels(name):
            x = torch.ones(3, 32, device=device)
            with pytest.raises(ValueError, match="noise of shape"):
                quantise_rotated(x, SIGNS, along=1, noise=torch.full((32, 3), 0.5, device=device))
            with pytest.raises(ValueError, match="an amax of shape"):
                quantise_rotated(x, SIGNS, along=1, amax=torch.ones(2, 1, device=device))
