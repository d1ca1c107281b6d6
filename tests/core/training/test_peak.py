"""The measured rate of matrix products is a positive number of FLOP per second that a processor can have."""

from __future__ import annotations

import pytest
import torch

from core.training.peak import measure_matmul_rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_is_that_of_a_machine(dtype: torch.dtype) -> None:
    assert 1e8 < measure_matmul_rate(dtype, torch.device("cpu")) < 1e14
