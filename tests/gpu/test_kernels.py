"""The tests of tests/core/kernels whose kernels are Triton's, on a GPU: the same functions with another `device`."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.test_triton_permute import *  # noqa: F403
from tests.core.kernels.test_triton_permute import check_map, routing
from tests.core.kernels.test_triton_swiglu import *  # noqa: F403

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors."""
    return torch.device("cuda", torch.cuda.current_device())


def test_a_map_of_many_choices_is_right(device: torch.device) -> None:
    """As many as a batch has; the interpreter would take an hour."""
    for experts in (3, 256):
        chosen = routing(40_009, experts, 8)
        check_map(chosen, experts, device)
        check_map(chosen, experts, device, multiple=128)
        check_map(chosen, experts, device, rows_per_expert=1250)
