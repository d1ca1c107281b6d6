"""The tests of the router's and the cross-entropy's Triton kernels, on a GPU: the same functions with another `device`."""

from __future__ import annotations

import pytest
import torch

from core.config.architecture import Groups, Router
from core.kernels.routing import choose, route, scores_of
from tests.core.kernels.test_triton_cross_entropy import *  # noqa: F403
from tests.core.kernels.test_triton_routing import *  # noqa: F403
from tests.core.numbers import draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors."""
    return torch.device("cuda", torch.cuda.current_device())


def test_a_batch_of_many_tokens_is_routed_by_its_scores(device: torch.device) -> None:
    """DeepSeek-V3's router on as many tokens as a batch has, with few equal scores."""
    router = Router(score="sigmoid", normalise=True, groups=Groups(total=8, kept=4), scale=2.5)
    logits, bias = (
        draw(0, 4099, 256, dtype=torch.float32).to(device),
        draw(1, 256, dtype=torch.float32).to(device) * 0.1,
    )
    chosen, weights = route(logits, router, 8, bias_E=bias)
    expected = choose(scores_of(logits, "sigmoid"), 8, router.groups, bias)
    # Scores within a rounding of each other may change places.
    assert int((chosen != expected).any(1).sum()) <= 8
    assert bool(((weights.sum(1) - 2.5).abs() < 1e-5).all())
