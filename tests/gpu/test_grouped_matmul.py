"""The tests of Triton's grouped products on a GPU: the same functions with another `device`; and what only a GPU can show."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.test_triton_grouped_matmul import *  # noqa: F403
from tests.core.numbers import draw, near

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_of_several_tiles_agree_with_a_product_for_each_piece(device: torch.device, dtype: torch.dtype) -> None:
    from core.kernels.triton.grouped_matmul import product, weight_gradient

    counts, width, depth = [700, 0, 129, 1], 384, 520
    x, grad = (draw(i, sum(counts), n, dtype=dtype).to(device) for i, n in ((0, depth), (1, width)))
    weight = draw(2, len(counts), width, depth, dtype=dtype).to(device)
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    found = product(x, weight.transpose(1, 2), ends), product(grad, weight, ends)
    of_weight = weight_gradient(grad, x, ends)
    pieces = zip(x.double().split(counts), grad.double().split(counts), weight.double(), strict=True)
    for e, (xs, gs, w) in enumerate(pieces):
        near(found[0].split(counts)[e], xs @ w.T, units=32)
        near(found[1].split(counts)[e], gs @ w, units=32)
        near(of_weight[e], gs.T @ xs, units=32)


def test_the_host_does_not_wait_for_the_sizes(device: torch.device) -> None:
    from core.kernels.triton.grouped_matmul import product, weight_gradient

    x, weight = draw(0, 40, 32, dtype=torch.bfloat16).to(device), draw(1, 3, 64, 32, dtype=torch.bfloat16).to(device)
    ends = torch.tensor([7, 7, 33], dtype=torch.int32, device=device)
    for _ in range(2):  # the first call tries tiles out, for which it does wait
        y = product(x, weight.transpose(1, 2), ends)
        weight_gradient(y, x, ends)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = product(x, weight.transpose(1, 2), ends)
        weight_gradient(y, x, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
