"""Rotations against complex numbers, YaRN against the published implementation, at positions above zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.attention.rope import Rotation, frequencies, rotate_halves, rotate_neighbours, rotation, softmax_scale
from core.config.architecture import Rope, Yarn
from tests.core.numbers import draw, gradients, near

POSITIONS = torch.tensor([0, 1, 2, 17, 4095, 4096, 100_003])


def yarn(**changes: float) -> Yarn:
    return Yarn(**{"theta": 1e4, "factor": 40.0, "trained_tokens": 4096, **changes})


def turned(x_TAD: np.ndarray, angles: np.ndarray, neighbours: bool) -> np.ndarray:
    """Pairs as complex numbers times e^(i * angle), put back where they came from."""
    half = x_TAD.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(0, half), slice(half, None))
    z = (x_TAD[..., first] + 1j * x_TAD[..., second]) * np.exp(1j * angles)[:, None, :]
    out = np.empty_like(x_TAD)
    out[..., first], out[..., second] = z.real, z.imag
    return out


def exact(angles: Tensor, scale: float = 1.0) -> Rotation:
    """A rotation whose cosines are float64, for comparisons in float64."""
    return Rotation(cos=angles.cos() * scale, sin=angles.sin() * scale)


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 2), (7, 3, 10)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pairs_turn_like_complex_numbers(neighbours: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    turn = rotate_neighbours if neighbours else rotate_halves
    x, angles = draw(0, *shape, dtype=dtype), draw(1, shape[0], shape[-1] // 2) * 9
    got = gradients(lambda v: turn(v, exact(angles)), [x])
    near(got[0], torch.from_numpy(turned(x.double().numpy(), angles.numpy(), neighbours)), units=4)
    # The gradient turns back.
    grad = draw(99, *shape).to(dtype).double().numpy()
    near(got[1], torch.from_numpy(turned(grad, -angles.numpy(), neighbours)), units=4)


@pytest.mark.parametrize("turn", [rotate_halves, rotate_neighbours])
def test_gradients_equal_those_by_differences_also_where_the_rotation_scales(turn: object) -> None:
    rotation_ = exact(draw(1, 3, 2), scale=1.3)
    assert callable(turn)
    assert torch.autograd.gradcheck(lambda v: turn(v, rotation_), draw(0, 3, 2, 4).requires_grad_())


def test_only_distance_counts_in_products_of_queries_and_keys() -> None:
    q, k = draw(0, 1, 1, 8), draw(1, 1, 1, 8)
    for turn in (rotate_halves, rotate_neighbours):
        products = []
        for shift in (0, 3, 1000):
            here, there = (
                exact(torch.tensor([[float(p)]]).double() * frequencies(Rope(theta=1e4), 8)[None])
                for p in (shift + 7, shift + 2)
            )
            products.append(float((turn(q, here) * turn(k, there)).sum()))
        assert products[1:] == pytest.approx([products[0]] * 2, rel=1e-9)


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_are_those_of_the_published_rotation(interleaved: bool) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_interleave,
    )

    q, k = (draw(i, 7, 3, 10, dtype=torch.float32) for i in range(2))
    turn = rotation(Rope(theta=1e4), 10, POSITIONS)
    cos, sin = (torch.cat([x, x], -1)[None] for x in (turn.cos, turn.sin))
    apply = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    theirs = apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotate = rotate_neighbours if interleaved else rotate_halves
    ours = torch.einsum("tad,sad->ats", rotate(q, turn), rotate(k, turn))
    near(ours, torch.einsum("atd,asd->ats", theirs[0][0], theirs[1][0]), units=16)


def test_plain_frequencies_are_powers_of_theta() -> None:
    got = frequencies(Rope(theta=1e6), 64)
    near(got, torch.from_numpy(1e6 ** (-np.arange(32) / 32)))
    turn = rotation(Rope(theta=1e4), 2, POSITIONS)
    near(turn.cos[:, 0], POSITIONS.double().cos(), units=4)
    near(turn.sin[:, 0], POSITIONS.double().sin(), units=4)


def published(rope: Yarn, rotated: int) -> tuple[Tensor, float]:
    """transformers' frequencies and factor on cosine and sine."""
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "yarn", "rope_theta": rope.theta, "factor": rope.factor, "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim, "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow,
        "original_max_position_embeddings": rope.trained_tokens,
    }  # fmt: skip
    longest = int(rope.trained_tokens * rope.factor)
    config = DeepseekV3Config(qk_rope_head_dim=rotated, max_position_embeddings=longest, rope_parameters=parameters)
    config.head_dim = rotated
    return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))


CASES = [
    (yarn(mscale=1.0, mscale_all_dim=1.0), 64),
    (yarn(mscale=0.707, mscale_all_dim=0.707), 64),
    (yarn(mscale=1.0, mscale_all_dim=0.5), 32),
    (yarn(), 128),
    (yarn(factor=4.0, theta=1e6, trained_tokens=32768), 128),
    (yarn(factor=2.0, trained_tokens=256), 16),
    (yarn(factor=8.0, beta_fast=16.0, beta_slow=2.0), 10),
]


@pytest.mark.parametrize(("rope", "rotated"), CASES)
def test_yarn_is_the_published_one_at_positions_above_zero(rope: Yarn, rotated: int) -> None:
    theirs, factor = published(rope, rotated)
    near(frequencies(rope, rotated), theirs, units=4)
    turn = rotation(rope, rotated, POSITIONS)
    angles = POSITIONS[:, None].float() * theirs[None, :]
    # An angle of 1e5 turns is known to about 0.01 in float32 whoever computes it: compare where it is known.
    for ours, function in ((turn.cos, torch.cos), (turn.sin, torch.sin)):
        near(ours[:4], function(angles[:4]) * factor, units=64)
    size = (turn.cos.double().square() + turn.sin.double().square()).sqrt()
    near(size.float(), torch.full_like(size, factor), units=4)


@settings(max_examples=30)
@given(
    st.sampled_from([8, 22, 64]),
    st.floats(1.5, 64.0),
    st.sampled_from([64, 1000, 4096, 32768]),
    st.sampled_from([1e3, 1e4, 1e6]),
)
def test_yarn_frequencies_lie_between_plain_and_stretched_ones(
    rotated: int, factor: float, trained: int, theta: float
) -> None:
    rope = yarn(factor=factor, trained_tokens=trained, theta=theta)
    got, plain = frequencies(rope, rotated).double(), frequencies(Rope(theta=theta), rotated).double()
    assert bool((got <= plain * (1 + 1e-6)).all()) and bool((got >= plain / factor * (1 - 1e-6)).all())
    near(frequencies(rope, rotated), published(rope, rotated)[0], units=8)


def test_equal_mscales_leave_cosine_and_sine_alone_and_correct_the_softmax() -> None:
    rope = yarn(mscale=1.0, mscale_all_dim=1.0)
    turn = rotation(rope, 64, torch.arange(1, 300))
    size = turn.cos.double().square() + turn.sin.double().square()
    assert float((size - 1.0).abs().max()) < 1e-6
    assert torch.equal(turn.cos, (torch.arange(1, 300).float()[:, None] * frequencies(rope, 64)[None]).cos())
    assert softmax_scale(192, rope) == pytest.approx(192**-0.5 * (1 + 0.1 * math.log(40)) ** 2, rel=1e-12)


@pytest.mark.parametrize("mscale_all_dim", [0.0, 0.707, 1.0])
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_the_softmax_scale_is_the_published_one(mscale_all_dim: float, factor: float) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    parameters = {"rope_type": "yarn", "factor": factor, "mscale_all_dim": mscale_all_dim}
    rope = yarn(factor=factor, mscale_all_dim=mscale_all_dim)
    assert softmax_scale(24, rope) == pytest.approx(yarn_apply_mscale(parameters, 24**-0.5), rel=1e-12)
    assert softmax_scale(24, Rope(theta=1e4)) == pytest.approx(24**-0.5)


def test_without_an_mscale_for_all_dimensions_cosine_and_sine_carry_the_factor() -> None:
    turn = rotation(yarn(), 8, torch.tensor([5]))
    size = (turn.cos.double().square() + turn.sin.double().square()).sqrt()
    near(size.float(), torch.full((1, 4), 1 + 0.1 * math.log(40)))


def test_bfloat16_turns_are_rounded_once() -> None:
    x, turn = draw(0, 7, 2, 8, dtype=torch.bfloat16), rotation(Rope(theta=1e4), 8, POSITIONS)
    wide = Rotation(cos=turn.cos.double(), sin=turn.sin.double())
    for rotate in (rotate_halves, rotate_neighbours):
        near(rotate(x, turn), rotate(x.double(), wide), units=0.51)
