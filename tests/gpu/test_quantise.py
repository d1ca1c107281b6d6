"""The tests of tests/core/precision/test_triton_quantise.py on a GPU, and casts of the sizes of a layer."""

from __future__ import annotations

import pytest
import torch

from core.precision.self_check import self_check
from tests.core.kernels.triton_case import kernels
from tests.core.precision.test_formats import draw
from tests.core.precision.test_triton_quantise import *  # noqa: F403
from tests.core.precision.test_triton_quantise import KERNELS, OF_ROWS, check_both, check_grouped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("name", KERNELS)
def test_large_matrices_are_those_of_the_definition(device: torch.device, name: str) -> None:
    """Thousands of tiles; edges that no tile's size divides, and rows of whole vectors."""
    for shape in ((1031, 2053), (3, 640, 1536)):
        check_both(draw(*shape).to(torch.bfloat16), KERNELS[name], device)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", OF_ROWS)
def test_thousands_of_rows_of_experts_are_those_of_the_definition(
    device: torch.device, name: str, turned: bool
) -> None:
    check_grouped(name, [1024, 0, 128, 2304, 0, 640], turned, device)


@pytest.mark.parametrize("name", KERNELS)
def test_every_format_passes_its_trial(device: torch.device, name: str) -> None:
    self_check(KERNELS[name], device)


@pytest.mark.parametrize("name", ["tensor_e4m3", "rows_128", "mxfp8", "nvfp4"])
def test_torch_on_the_gpu_computes_the_definition_too(device: torch.device, name: str) -> None:
    """Its divisions and casts, that is: where there are no kernels its results stand."""
    with kernels("reference"):
        self_check(KERNELS[name], device)


def test_rows_of_experts_are_rounded_without_a_wait(device: torch.device) -> None:
    from core.precision.grouped import quantise_grouped, quantise_grouped_columns

    x, counts_E = draw(512, 256).to(device), torch.tensor([128, 0, 384], device=device)
    for name in OF_ROWS:
        quantise_grouped(x, counts_E, KERNELS[name])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name in OF_ROWS:
            quantise_grouped(x, counts_E, KERNELS[name])
            quantise_grouped_columns(x, counts_E, KERNELS[name])
    finally:
        torch.cuda.set_sync_debug_mode("default")
