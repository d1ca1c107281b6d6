"""The router's arithmetic against brute force over experts and against the published models' routers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.config.architecture import Groups, Router, Score
from core.kernels.routing import (
    auxiliary_loss,
    balance_choices,
    balance_choices_reference,
    balance_scores,
    choose,
    highest,
    keep_groups,
    route,
    route_reference,
    scores_of,
    weights_of,
)
from tests.core.numbers import draw, near

DTYPES = (torch.float32, torch.float64)
SCORES: tuple[Score, ...] = ("softmax", "softmax_after_top_k", "sigmoid", "sqrt_softplus")


def numpy_scores(logits: Tensor, score: Score) -> np.ndarray:
    """Every expert's score in float64; of a softmax over the chosen ones too, whose shares are those of all."""
    z = logits.double().numpy()
    if score == "sigmoid":
        return 1 / (1 + np.exp(-z))
    if score == "sqrt_softplus":
        return np.sqrt(np.log1p(np.exp(z)))
    exponentials = np.exp(z - z.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def brute_choice(row: list[float], top_k: int, groups: Groups | None) -> list[int]:
    """The chosen experts of one token: whole groups first, then the best inside them, equal ones by lowest number."""
    allowed = list(range(len(row)))
    if groups is not None:
        size = len(row) // groups.total
        members = [allowed[g * size : (g + 1) * size] for g in range(groups.total)]
        score = [sum(sorted((row[e] for e in group), reverse=True)[: groups.best]) for group in members]
        kept = sorted(range(groups.total), key=lambda g: (-score[g], g))[: groups.kept]
        allowed = [e for g in sorted(kept) for e in members[g]]
    return sorted(allowed, key=lambda e: (-row[e], e))[:top_k]


@st.composite
def selections(draw_case: st.DrawFn) -> tuple[Tensor, int, Groups | None]:
    """Scores with many ties and both signs; top_k up to all experts that may be chosen."""
    total, size = draw_case(st.integers(1, 5)), draw_case(st.integers(1, 6))
    kept = draw_case(st.integers(1, total))
    limited = draw_case(st.booleans())
    top_k = draw_case(st.integers(1, (kept if limited else total) * size))
    number = st.integers(-4, 4).map(lambda n: n / 4)
    tokens = draw_case(st.integers(0, 4))
    rows = [[draw_case(number) for _ in range(total * size)] for _ in range(tokens)]
    groups = Groups(total=total, kept=kept, best=draw_case(st.integers(1, 3))) if limited else None
    return torch.tensor(rows, dtype=torch.float64).view(tokens, total * size), top_k, groups


@settings(max_examples=60)
@given(selections())
def test_the_choice_is_that_of_brute_force_ties_by_lowest_number(case: tuple[Tensor, int, Groups | None]) -> None:
    scores, top_k, groups = case
    chosen = choose(scores, top_k, groups, None)
    assert chosen.dtype == torch.int64 and chosen.shape == (scores.shape[0], top_k)
    assert chosen.tolist() == [brute_choice(row, top_k, groups) for row in scores.tolist()]


@pytest.mark.parametrize("top_k", [4, 8])
@pytest.mark.parametrize("best", [1, 2, 4])
def test_two_of_four_groups_of_sixteen_experts_equal_brute_force(top_k: int, best: int) -> None:
    groups, scores = Groups(total=4, kept=2, best=best), draw(0, 203, 16)
    assert choose(scores, top_k, groups, None).tolist() == [brute_choice(r, top_k, groups) for r in scores.tolist()]


@pytest.mark.parametrize("experts", [2, 16, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_are_taken_from_the_lowest_number_on(experts: int, dtype: torch.dtype) -> None:
    assert highest(torch.zeros(3, experts, dtype=dtype), 2).tolist() == [[0, 1]] * 3
    assert highest(torch.zeros(2, experts, dtype=dtype), experts).tolist() == [list(range(experts))] * 2


def test_a_bias_moves_the_choice_and_nothing_else() -> None:
    scores, bias = torch.tensor([[0.9, 0.8, 0.1, 0.2]]), torch.tensor([-0.5, 0.0, 0.0, 0.65])
    chosen = choose(scores, 2, None, bias)
    assert chosen.tolist() == [[3, 1]]
    weights = weights_of(scores, chosen, score="sigmoid", normalise=True, scale=2.5)
    near(weights, torch.tensor([[0.5, 2.0]], dtype=torch.float64))


def test_groups_are_compared_with_the_bias_too() -> None:
    scores, bias = torch.tensor([[0.5, 0.5, 0.4, 0.4]]), torch.tensor([0.0, 0.0, 0.2, 0.2])
    assert choose(scores, 2, Groups(total=2, kept=1), bias).tolist() == [[2, 3]]


def test_negative_scores_of_a_kept_group_win_over_a_dropped_one() -> None:
    # Masking dropped groups with 0 would let them in.
    scores = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    assert choose(scores, 2, Groups(total=2, kept=1), None).tolist() == [[0, 1]]
    masked = keep_groups(scores, Groups(total=2, kept=1))
    assert masked.tolist() == [[-1.0, -2.0, -math.inf, -math.inf]]


def test_a_group_smaller_than_the_experts_it_is_judged_by_counts_all_it_has() -> None:
    assert choose(torch.tensor([[0.1, 0.3, 0.2]]), 2, Groups(total=3, kept=2), None).tolist() == [[1, 2]]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_those_of_the_formulas(score: Score, normalise: bool, top_k: int, dtype: torch.dtype) -> None:
    logits = draw(0, 7, 11, dtype=dtype)
    scores = scores_of(logits, score)
    chosen = choose(scores, top_k, None, None)
    weights = weights_of(scores, chosen, score=score, normalise=normalise, scale=1.5)
    truth = np.take_along_axis(numpy_scores(logits, score), chosen.numpy(), 1)
    if normalise or score == "softmax_after_top_k":
        truth = truth / truth.sum(1, keepdims=True)
    near(weights, torch.from_numpy(1.5 * truth))
    assert weights.dtype == dtype and bool((weights[:, 1:] <= weights[:, :-1]).all())


@pytest.mark.parametrize("score", SCORES)
def test_gradients_reach_the_logits_through_the_weights(score: Score) -> None:
    logits = draw(1, 3, 5).requires_grad_()

    def weights(z: Tensor) -> Tensor:
        scores = scores_of(z, score)
        return weights_of(scores, choose(scores, 2, None, None), score=score, normalise=True, scale=2.0)

    assert torch.autograd.gradcheck(weights, logits)
    assert not choose(scores_of(logits, score), 2, None, torch.zeros(5)).requires_grad


def test_scores_so_small_that_their_sum_vanishes_give_finite_weights() -> None:
    scores = scores_of(torch.full((1, 4), -200.0), "sigmoid")
    chosen = choose(scores, 2, None, None)
    weights = weights_of(scores, chosen, score="sigmoid", normalise=True, scale=1.0)
    assert bool(torch.isfinite(weights).all()) and chosen.tolist() == [[0, 1]]


@pytest.mark.parametrize("score", SCORES)
def test_balance_scores_are_a_distribution_over_all_experts(score: Score) -> None:
    logits = draw(2, 13, 17)
    scores = balance_scores(logits, score)
    near(scores.sum(1), torch.ones(13))
    truth = numpy_scores(logits, score)
    near(scores, torch.from_numpy(truth / truth.sum(1, keepdims=True)))


@pytest.mark.parametrize("groups", [None, Groups(total=3, kept=2)])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("score", SCORES)
def test_the_gradient_of_routing_in_one_step_is_that_by_differences(
    score: Score, normalise: bool, groups: Groups | None
) -> None:
    router, valid = (
        Router(score=score, normalise=normalise, groups=groups, scale=1.7),
        torch.tensor([True, False, True]),
    )
    logits, bias = draw(3, 3, 6), torch.tensor([0.3, 0.0, -0.2, 0.0, 0.1, 0.0])

    def weights(z: Tensor) -> Tensor:
        return route(z, router, 3, bias_E=bias, valid_T=valid)[1]

    assert torch.autograd.gradcheck(weights, logits.clone().requires_grad_())
    for kwargs in ({}, {"bias_E": bias}, {"valid_T": valid}):
        for one, plain in zip(
            route(logits, router, 3, **kwargs), route_reference(logits, router, 3, **kwargs), strict=True
        ):
            assert torch.equal(one, plain) and one.dtype == plain.dtype


@pytest.mark.parametrize("valid", [None, torch.tensor([True, False, True])])
@pytest.mark.parametrize("score", SCORES)
def test_the_gradient_of_balance_scores_in_one_step_is_that_by_differences(score: Score, valid: Tensor | None) -> None:
    logits = draw(4, 3, 5)
    assert torch.autograd.gradcheck(lambda z: balance_choices(z, score, 2, valid)[0], logits.clone().requires_grad_())
    for one, plain in zip(
        balance_choices(logits, score, 2, valid), balance_choices_reference(logits, score, 2, valid), strict=True
    ):
        assert torch.equal(one, plain)
    assert not balance_choices(logits.requires_grad_(), score, 2, valid)[1].requires_grad


@pytest.mark.parametrize("piece", [None, torch.tensor([2, 0, 2, 2])])
def test_the_gradient_of_the_auxiliary_loss_is_that_by_differences(piece: Tensor | None) -> None:
    pieces = 1 if piece is None else 3
    counts, factor = draw(5, pieces, 5).abs().requires_grad_(), draw(6, pieces)
    assert torch.autograd.gradcheck(
        lambda q: auxiliary_loss(q, counts.detach(), factor, piece), draw(7, 4, 5).requires_grad_()
    )
    scores = draw(7, 4, 5).requires_grad_()
    auxiliary_loss(scores, counts, factor, piece).backward()
    assert counts.grad is None and scores.grad is not None


def test_balanced_counts_and_scores_have_an_auxiliary_loss_of_one() -> None:
    """E / (K T^2) * sum_i c_i sum_x q_i(x), with c_i = K T / E and q_i = 1 / E."""
    experts, top_k, tokens = 6, 2, 9
    scores, counts = torch.full((tokens, experts), 1 / experts), torch.full((1, experts), top_k * tokens / experts)
    factor = torch.tensor([experts / (top_k * tokens**2)])
    assert auxiliary_loss(scores, counts, factor).item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "top_k"), [((1, 1), 3), ((4, 2), 4), ((8, 3), 1)])
def test_deepseek_v3_routes_like_the_published_model(normalise: bool, groups: tuple[int, int], top_k: int) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    total, kept = groups
    config = DeepseekV3Config(
        hidden_size=7, n_routed_experts=16, num_experts_per_tok=top_k, n_group=total, topk_group=kept,
        norm_topk_prob=normalise, routed_scaling_factor=2.5,
    )  # fmt: skip
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.data.copy_(draw(0, 16, 7))
    theirs.e_score_correction_bias.copy_(draw(1, 16) * 0.1)
    x = draw(2, 101, 7, dtype=torch.float32)
    logits, weights, experts = theirs(x)
    scores = scores_of(logits, "sigmoid")
    chosen = choose(scores, top_k, Groups(total=total, kept=kept), theirs.e_score_correction_bias)
    ours = weights_of(scores, chosen, score="sigmoid", normalise=normalise, scale=2.5)
    _same_routing(chosen, ours, experts, weights)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 11])
def test_qwen3_routes_like_the_published_model(normalise: bool, top_k: int) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(hidden_size=7, num_experts=11, num_experts_per_tok=top_k, norm_topk_prob=normalise)
    theirs = Qwen3MoeTopKRouter(config)
    theirs.weight.data.copy_(draw(0, 11, 7))
    logits, weights, experts = theirs(draw(2, 101, 7, dtype=torch.float32))
    scores = scores_of(logits, "softmax")
    chosen = choose(scores, top_k, None, None)
    _same_routing(chosen, weights_of(scores, chosen, score="softmax", normalise=normalise, scale=1.0), experts, weights)


def _same_routing(chosen: Tensor, ours: Tensor, experts: Tensor, theirs: Tensor) -> None:
    """The same experts with the same weights, in whatever order."""
    order, other = chosen.argsort(1), experts.argsort(1)
    assert torch.equal(chosen.gather(1, order), experts.gather(1, other))
    near(ours.gather(1, order), theirs.detach().gather(1, other))
