"""The router against loops in plain Python: choice, ties, groups, bias and weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.attention.packing import Packing, packing_of
from core.config.architecture import AuxLoss, ExpertBias, Groups, MoE, Score
from core.config.architecture import Router as RouterConfig
from core.config.mapping import ParallelConfig
from core.kernels.routing import choose, highest, scores_of
from core.layers.place import Place
from core.moe.router import Router, RouterInputs
from core.parallel.groups import one_rank
from tests.core.numbers import near


def naive_choice(scores: list[float], top_k: int, groups: Groups | None, bias: list[float]) -> list[int]:
    """The definition: best selection score first, equal ones by lowest id; only inside the best groups where there are any."""
    selection = [s + b for s, b in zip(scores, bias, strict=True)]
    allowed = list(range(len(scores)))
    if groups is not None:
        size = len(scores) // groups.total
        of_group = []
        for g in range(groups.total):
            inside = sorted(selection[g * size : (g + 1) * size], reverse=True)
            of_group.append(sum(inside[: groups.best]))
        kept = sorted(range(groups.total), key=lambda g: (-of_group[g], g))[: groups.kept]
        allowed = [e for e in allowed if e // size in kept]
    return sorted(allowed, key=lambda e: (-selection[e], e))[:top_k]


def router_of(config: RouterConfig, experts: int, top_k: int, hidden: int, seed: int = 0) -> Router:
    place = Place(groups=one_rank(), parallel=ParallelConfig(), dtype=torch.float64, device=torch.device("cpu"))
    moe = MoE(experts=experts, top_k=top_k, expert_ffn=8, router=config)
    router = Router(moe, hidden, init_std=1.0, place=place)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(torch.randn(experts, hidden, generator=generator, dtype=torch.float64))
    return router


def packed(tokens: int) -> Packing:
    """One sequence on one rank."""
    return packing_of(None, tokens, torch.device("cpu"))


@pytest.mark.parametrize("top_k", [4, 8])
@pytest.mark.parametrize("levels", [2, 5, 10**6])
def test_b16_groups_count_their_best_k_over_kept_as_in_a_brute_force_reference(top_k: int, levels: int) -> None:
    """E=16 in 4 groups of which 2 are kept. Few levels of scores make ties, of experts and of groups, the rule."""
    groups = Groups(total=4, kept=2, best=top_k // 2)
    generator = torch.Generator().manual_seed(levels)
    # multiples of 1/64 so that sums of them are exact and ties are ties in any order of summation
    scores = torch.randint(0, levels, (211, 16), generator=generator).double() / 64
    bias = torch.randint(-2, 3, (16,), generator=generator).double() / 64
    found = choose(scores, top_k, groups, bias)
    expected = [naive_choice(row, top_k, groups, bias.tolist()) for row in scores.tolist()]
    assert found.tolist() == expected


def test_b16_the_number_of_scores_that_make_a_group_matters() -> None:
    """One group has the best expert, the other the best two and the best four: best=1, 2, 4 must not agree."""
    scores = torch.tensor([[9.0, 0, 0, 0, 5, 5, 0, 0, 4, 4, 4, 4, 1, 1, 1, 1]])
    kept = {b: int(choose(scores, 4, Groups(total=4, kept=1, best=b), None)[0, 0]) // 4 for b in (1, 2, 4)}
    assert kept == {1: 0, 2: 1, 4: 2}


@settings(max_examples=60)
@given(st.data())
def test_choice_is_the_definition_for_any_sizes_with_many_ties(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(1, 5))
    experts = total * size
    kept = data.draw(st.integers(1, total))
    top_k = data.draw(st.integers(1, kept * size))
    best = data.draw(st.integers(1, size))
    groups = data.draw(st.sampled_from([None, Groups(total=total, kept=kept, best=best)]))
    tokens = data.draw(st.integers(0, 3))
    level = st.integers(-3, 3).map(float)
    scores = data.draw(st.lists(st.lists(level, min_size=experts, max_size=experts), min_size=tokens, max_size=tokens))
    bias = data.draw(st.lists(level, min_size=experts, max_size=experts))
    found = choose(torch.tensor(scores).reshape(tokens, experts), top_k, groups, torch.tensor(bias))
    assert found.tolist() == [naive_choice(row, top_k, groups, bias) for row in scores]


@pytest.mark.parametrize("experts", [1, 3, 8, 13, 64, 257])
def test_equal_scores_are_chosen_by_lowest_id_whatever_the_number_of_experts(experts: int) -> None:
    top_k = min(experts, 7)
    scores = torch.zeros(3, experts)
    scores[1, experts // 2] = 1.0
    scores[2, experts // 2 :] = 1.0
    expected = [naive_choice(row, top_k, None, [0.0] * experts) for row in scores.tolist()]
    assert highest(scores, top_k).tolist() == expected


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after_top_k"])
def test_b12_weights_are_the_published_formula_with_and_without_normalisation(score: Score, normalise: bool) -> None:
    router = router_of(RouterConfig(score=score, normalise=normalise, scale=2.5), experts=13, top_k=3, hidden=5)
    hidden = torch.randn(11, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = router(hidden, RouterInputs(packing=packed(len(hidden))))
    assert found.balance is None
    for t in range(11):
        logits = [sum(h * w for h, w in zip(hidden[t].tolist(), row, strict=True)) for row in router.weight.tolist()]
        chosen = sorted(range(13), key=lambda e: -logits[e])[:3]
        assert found.experts_TK[t].tolist() == chosen
        if score == "sigmoid":
            weights = [1 / (1 + math.exp(-logits[e])) for e in chosen]
        elif score == "softmax":
            weights = [math.exp(logits[e]) / sum(map(math.exp, logits)) for e in chosen]
        else:
            weights = [math.exp(logits[e]) / sum(math.exp(logits[c]) for c in chosen) for e in chosen]
        total = sum(weights) if normalise or score == "softmax_after_top_k" else 1.0
        assert found.weights_TK[t].tolist() == pytest.approx([2.5 * w / total for w in weights], rel=1e-9)


def test_the_bias_moves_the_choice_and_never_the_weights_and_has_no_gradient() -> None:
    config = RouterConfig(score="sigmoid", normalise=False, balance=(ExpertBias(rate=0.1),))
    router = router_of(config, experts=8, top_k=2, hidden=5)
    assert router.bias is not None and router.bias.dtype == torch.float32
    hidden = torch.randn(7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain = router(hidden, RouterInputs(packing=packed(len(hidden))))
    router.bias[3] = 50.0
    moved = router(hidden, RouterInputs(packing=packed(len(hidden))))
    assert (moved.experts_TK[:, 0] == 3).all() and not (plain.experts_TK[:, 0] == 3).all()
    scores = torch.sigmoid(hidden @ router.weight.T)
    torch.testing.assert_close(moved.weights_TK[:, 0], scores[:, 3], rtol=1e-12, atol=0)
    moved.weights_TK.sum().backward()
    assert router.weight.grad is not None and bool((router.weight.grad[3] != 0).any())
    assert "bias" not in dict(router.named_parameters())


def test_padding_is_routed_nowhere_counts_nowhere_and_gets_no_gradient() -> None:
    router = router_of(RouterConfig(score="softmax", normalise=True), experts=5, top_k=2, hidden=3)
    hidden = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    valid = torch.tensor([True, False, True, True, False, True])
    found = router(hidden, RouterInputs(packing=packed(len(hidden)), valid_T=valid))
    assert (found.experts_TK[~valid] == -1).all() and (found.experts_TK[valid] >= 0).all()
    assert (found.weights_TK[~valid] == 0).all()
    expected = [int((found.experts_TK == e).sum()) for e in range(5)]
    assert found.counts_E.tolist() == expected and sum(expected) == 4 * 2
    (found.weights_TK * torch.arange(12.0).view(6, 2)).sum().backward()
    assert hidden.grad is not None and not hidden.grad[~valid].any() and bool(hidden.grad[valid].any())


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token_are_routed(tokens: int) -> None:
    router = router_of(RouterConfig(score="sigmoid", normalise=True, groups=Groups(total=3, kept=2)), 9, 4, 5)
    found = router(torch.ones(tokens, 5, dtype=torch.float64), RouterInputs(packing=packed(tokens)))
    assert found.experts_TK.shape == found.weights_TK.shape == (tokens, 4)
    # C10: nothing is dropped
    assert found.counts_E.shape == (9,) and int(found.counts_E.sum()) == tokens * 4


def test_b17_there_is_no_balance_loss_outside_training() -> None:
    balance = (AuxLoss(scope="global_batch", coefficient=1.0),)
    router = router_of(RouterConfig(score="softmax", normalise=True, balance=balance), 5, 2, 3)
    assert router(torch.ones(1, 3, dtype=torch.float64), RouterInputs(packing=packed(1))).balance is None


def test_the_router_computes_in_float32_for_a_bfloat16_model() -> None:
    """Two experts whose logits differ by less than bfloat16 can show at their size are told apart."""
    config = MoE(experts=2, top_k=1, expert_ffn=8, router=RouterConfig(score="softmax", normalise=False))
    place = Place(groups=one_rank(), parallel=ParallelConfig(), dtype=torch.bfloat16, device=torch.device("cpu"))
    router = Router(config, 2, init_std=1.0, place=place)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[256.0, 0.0], [256.0, 0.5]]))
    found = router(torch.ones(1, 2, dtype=torch.bfloat16), RouterInputs(packing=packed(1)))
    assert found.experts_TK.tolist() == [[1]]
    assert found.weights_TK.dtype == torch.float32
    assert found.weights_TK.item() == pytest.approx(1 / (1 + math.exp(-0.5)), rel=1e-6)


def test_h1_prescribed_experts_get_weights_from_the_own_scores_and_their_gradients_reach_the_router() -> None:
    """Rollout and trainer may choose other experts: replayed ids that are not the own top-k still train the gate."""
    router = router_of(RouterConfig(score="softmax", normalise=True), experts=5, top_k=2, hidden=3)
    hidden = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = router(hidden, RouterInputs(packing=packed(4))).experts_TK
    other = torch.stack([(own[:, 0] + 1) % 5, (own[:, 0] + 3) % 5], dim=1)
    found = router(hidden, RouterInputs(packing=packed(4), prescribed_TK=other))
    assert torch.equal(found.experts_TK, other)
    scores = torch.softmax(hidden @ router.weight.T, dim=-1).gather(1, other)
    torch.testing.assert_close(found.weights_TK, scores / scores.sum(1, keepdim=True), rtol=1e-12, atol=0)
    (found.weights_TK[:, 0]).sum().backward()
    assert router.weight.grad is not None and router.weight.grad.abs().max() > 1e-3


def test_scores_in_float64_are_of_the_products_in_float64() -> None:
    """A float32 product of these operands loses the second expert's lead."""
    router = router_of(
        RouterConfig(score="sigmoid", normalise=False, dtype="float64"), experts=2, top_k=1, hidden=2
    ).float()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2.0**-12]]))
    found = router(torch.tensor([[1.0, 2.0**-13]]), RouterInputs(packing=packed(1)))
    assert found.weights_TK.dtype == torch.float64 and found.experts_TK.tolist() == [[1]]


def test_the_square_root_of_softplus_is_a_score() -> None:
    logits = torch.tensor([[-3.0, 0.5, 40.0]], dtype=torch.float64)
    expected = [math.sqrt(math.log1p(math.exp(z))) for z in logits[0].tolist()]
    near(scores_of(logits, "sqrt_softplus"), torch.tensor([expected], dtype=torch.float64))
