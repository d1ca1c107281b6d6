"""Where the tests of kernels run: here on the CPU, in tests/gpu on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors."""
    return torch.device("cpu")
