"""The tests of fused casts on a GPU: the same functions with another `device`; and sizes that the interpreter would take hours for."""

from __future__ import annotations

import pytest
import torch

from core.config.architecture import SWIGLU
from core.kernels.activation import rounded_forward
from core.precision.activation import swiglu_quantised
from core.precision.elements import E4M3
from core.precision.formats import MX, NVFP4, Blocks, Format, PerTensor
from core.precision.grouped import quantise_grouped
from core.precision.rotated import quantise_rotated_columns
from tests.core.kernels.triton_case import kernels
from tests.core.numbers import draw
from tests.core.precision import test_triton_hadamard, test_triton_swiglu_quantise
from tests.core.precision.recipe_case import SIGNS
from tests.core.precision.test_triton_hadamard import *  # noqa: F403
from tests.core.precision.test_triton_swiglu_quantise import *  # noqa: F403

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)")

COUNTS_OF_MANY = [1024, 0, 16, 4080, 3072]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors."""
    return torch.device("cuda", torch.cuda.current_device())


def test_many_rows_of_experts_are_rotated_and_rounded_alike(device: torch.device) -> None:
    x, counts_E = draw(0, sum(COUNTS_OF_MANY), 1408).bfloat16(), torch.tensor(COUNTS_OF_MANY)
    with kernels("reference"):
        truth = quantise_rotated_columns(x, counts_E, SIGNS)
    with kernels("triton"):
        got = quantise_rotated_columns(x.to(device), counts_E.to(device), SIGNS)
    for e in range(len(COUNTS_OF_MANY)):
        test_triton_hadamard.check(got.expert(e), truth.expert(e))


@pytest.mark.parametrize(
    "format",
    [
        PerTensor(element=E4M3),
        Blocks(element=E4M3, block=(1, 128), power_of_two=True),
        MX(element=E4M3, rounding="up"),
        NVFP4(block=(1, 16)),
    ],
)
def test_many_rows_of_an_activation_are_rounded_alike(device: torch.device, format: Format) -> None:
    product = (draw(0, sum(COUNTS_OF_MANY), 2816) * 3).bfloat16().to(device)
    weight, counts_E = draw(1, len(product), dtype=torch.float32).to(device), torch.tensor(COUNTS_OF_MANY)
    with kernels("triton"):
        got = swiglu_quantised(product, weight, counts_E.to(device), format)
        act = rounded_forward(product, SWIGLU, weight)
    test_triton_swiglu_quantise.check(got, quantise_grouped(act.cpu(), counts_E, format))
