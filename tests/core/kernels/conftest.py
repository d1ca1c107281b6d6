"""Where the tests of kernels run: here on the CPU, in tests/gpu on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors; where there is a GPU, Triton's kernels run on no other."""
    if torch.cuda.is_available():
        pytest.skip("the GPU runs the kernels here: tests/gpu has the same tests")
    return torch.device("cpu")
