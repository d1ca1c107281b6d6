"""A linear layer is x times its weight transposed, and says what its weight is."""

from __future__ import annotations

import pytest
import torch

from core.layers.linear import Linear
from core.state.spec import Normal
from tests.core.layers.places import place
from tests.core.numbers import draw, near


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_multiplies_by_the_transposed_weight(tokens: int, dtype: torch.dtype) -> None:
    layer = Linear(5, 11, init_std=0.1, place=place(dtype))
    layer.weight.data.copy_(draw(0, 11, 5))
    x = draw(1, tokens, 5, dtype=dtype)
    near(layer(x).detach(), torch.einsum("tk,nk->tn", x.double(), layer.weight.detach().double()))


def test_the_weight_is_declared_as_outputs_by_inputs() -> None:
    spec = Linear(5, 11, init_std=0.006, place=place()).specs()["weight"]
    assert spec.shape == (11, 5) and spec.init == Normal(std=0.006) and spec.decay and spec.replicas == "dense"
