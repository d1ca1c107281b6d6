"""The dense SwiGLU MLP against the published models' and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.layers.mlp import SwiGLU
from core.state.spec import Normal
from tests.core.layers.places import place
from tests.core.numbers import draw, near


def build(hidden: int, ffn: int, dtype: torch.dtype) -> SwiGLU:
    mlp = SwiGLU(hidden, ffn, init_std=0.1, place=place(dtype))
    mlp.gate_up.data.copy_(draw(0, 2, ffn, hidden))
    mlp.down.data.copy_(draw(1, hidden, ffn))
    return mlp


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(("hidden", "ffn"), [(5, 3), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gate_comes_first(tokens: int, hidden: int, ffn: int, dtype: torch.dtype) -> None:
    mlp, x = build(hidden, ffn, dtype), draw(2, tokens, hidden, dtype=dtype)
    wide = x.double().numpy()
    gate, up = (wide @ w.T for w in mlp.gate_up.detach().double().numpy())
    truth = gate / (1 + np.exp(-gate)) * up @ mlp.down.detach().double().numpy().T
    near(mlp(x).detach(), torch.from_numpy(truth), units=4 if dtype == torch.bfloat16 else 32)


def test_values_and_gradients_equal_the_published_models() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

    mlp, theirs = build(5, 7, torch.float32), DeepseekV3MLP(DeepseekV3Config(hidden_size=5), intermediate_size=7)
    theirs.gate_proj.weight.data.copy_(mlp.gate_up[0])
    theirs.up_proj.weight.data.copy_(mlp.gate_up[1])
    theirs.down_proj.weight.data.copy_(mlp.down)
    x, y = (draw(2, 11, 5, dtype=torch.float32).requires_grad_() for _ in range(2))
    grad = draw(3, 11, 5, dtype=torch.float32)
    mlp(x).backward(grad)
    theirs(y).backward(grad)
    assert mlp.gate_up.grad is not None
    near(mlp.gate_up.grad, torch.stack([theirs.gate_proj.weight.grad, theirs.up_proj.weight.grad]), units=16)
    near(mlp.down.grad, theirs.down_proj.weight.grad, units=16)
    near(x.grad, y.grad, units=16)


def test_both_weights_are_declared() -> None:
    specs = build(5, 7, torch.float32).specs()
    assert {name: spec.shape for name, spec in specs.items()} == {"gate_up": (2, 7, 5), "down": (5, 7)}
    assert all(spec.init == Normal(std=0.1) and spec.decay for spec in specs.values())
