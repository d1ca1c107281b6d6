"""Optimal transport, experts that choose and quantiles, against their formulas in plain loops, and what a router makes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from core.attention.packing import packing_of
from core.config.architecture import (
    ExpertChoice,
    MoE,
    QuantileBias,
    Router,
    Score,
    Selection,
    SharedExperts,
    Sinkhorn,
    TopK,
    ZLoss,
)
from core.config.mapping import DispatcherName, ParallelConfig
from core.moe.balance import BalanceScope, moved_thresholds
from core.moe.layer import MoELayer
from core.moe.router import Router as RouterModule
from core.moe.router import RouterInputs, Routing
from core.moe.selection import experts_that_take, quantiles, sinkhorn
from core.parallel.groups import one_rank
from tests.core.numbers import draw
from tests.core.shares import fill, place_on

HIDDEN = 5
SINKHORN = Sinkhorn(tolerance=1e-4)


def plain_sinkhorn(logits: np.ndarray, tolerance: float) -> tuple[np.ndarray, int]:
    """The formula as it is written, in loops; and how many rounds it took."""
    tokens, experts = logits.shape
    a = [[math.exp(z) for z in row] for row in logits.tolist()]
    v, rounds = [1.0] * experts, 0
    while True:
        u = [1 / tokens / (sum(v[e] * a[t][e] for e in range(experts)) + 1e-8) for t in range(tokens)]
        new = [1 / experts / (sum(u[t] * a[t][e] for t in range(tokens)) + 1e-8) for e in range(experts)]
        moved = sum(abs(x - y) for x, y in zip(new, v, strict=True)) / experts
        v, rounds = new, rounds + 1
        if moved <= tolerance or rounds == 1000:
            break
    return np.array([[u[t] * a[t][e] * v[e] for e in range(experts)] for t in range(tokens)]), rounds


@pytest.mark.parametrize(("tokens", "experts"), [(1, 3), (13, 4), (5, 11), (64, 2), (7, 7)])
@pytest.mark.parametrize("tolerance", [0.3, 1e-4, 1e-8])
def test_sinkhorn_scores_are_the_formula_in_plain_loops(tokens: int, experts: int, tolerance: float) -> None:
    logits = draw(3, tokens, experts)
    expected, rounds = plain_sinkhorn(logits.numpy(), tolerance)
    found = sinkhorn(logits, tolerance, 1000)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    if tolerance == 1e-8:
        np.testing.assert_allclose(found.sum(0).numpy(), 1 / experts, rtol=1e-6)
        np.testing.assert_allclose(found.sum(1).numpy(), 1 / tokens, rtol=1e-6)
    # the bound on rounds ends it where it says, and not before
    torch.testing.assert_close(sinkhorn(logits, tolerance, rounds), found, rtol=0, atol=0)
    if rounds > 2:
        assert not torch.equal(sinkhorn(logits, tolerance, rounds - 1), found)


def test_sinkhorn_survives_logits_of_any_size_and_no_token() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [9e3, 8e3, -1e4], [-2e3, -1e4, -1e4]])
    found = sinkhorn(logits, 1e-4, 50)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.sum(0), torch.full((3,), 1 / 3, dtype=torch.float64), rtol=0, atol=1 / 3)
    assert sinkhorn(torch.zeros(0, 4), 1e-4, 50).shape == (0, 4)


def plain_expert_choice(scores: list[list[float]], top_k: int) -> list[list[int]]:
    tokens, experts = len(scores), len(scores[0])
    room = -(-top_k * tokens // experts)
    found = [[-1] * experts for _ in range(tokens)]
    for e in range(experts):
        for t in sorted(range(tokens), key=lambda t: (-scores[t][e], t))[:room]:
            found[t][e] = e
    return found


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 3, 2), (13, 4, 2), (5, 11, 3), (64, 7, 1), (6, 3, 3)])
@pytest.mark.parametrize("levels", [None, 2])
def test_every_expert_takes_its_best_tokens_and_of_equal_ones_the_earliest(
    tokens: int, experts: int, top_k: int, levels: int | None
) -> None:
    scores = draw(4, tokens, experts)
    if levels is not None:
        scores = scores.sign() * levels
    assert experts_that_take(scores, top_k).tolist() == plain_expert_choice(scores.tolist(), top_k)


def test_no_expert_takes_a_token_where_there_is_none() -> None:
    assert experts_that_take(torch.zeros(0, 4), 2).shape == (0, 4)


def plain_quantiles(logits: list[list[float]], bias: list[float], top_k: int) -> list[float]:
    tokens, experts = len(logits), len(logits[0])
    a = [sorted((z + b for z, b in zip(row, bias, strict=True)), reverse=True)[top_k] for row in logits]
    place = tokens * top_k // experts
    return [sorted((logits[t][e] - a[t] for t in range(tokens)), reverse=True)[place] for e in range(experts)]


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 3, 2), (12, 4, 2), (13, 5, 3), (5, 11, 1), (30, 6, 5)])
def test_quantiles_are_the_formula_in_plain_loops_also_where_tokens_do_not_divide(
    tokens: int, experts: int, top_k: int
) -> None:
    logits, bias = draw(5, tokens, experts), draw(6, experts)
    expected = plain_quantiles(logits.tolist(), bias.tolist(), top_k)
    np.testing.assert_allclose(quantiles(logits, bias, top_k).numpy(), expected, rtol=1e-13)


def test_quantiles_of_no_token_are_zeros_and_move_no_bias() -> None:
    assert quantiles(torch.zeros(0, 4), torch.zeros(4), 2).tolist() == [0.0] * 4
    bias = torch.tensor([0.5, -0.25, 1.0])
    assert torch.equal(moved_thresholds(bias, torch.zeros(4, dtype=torch.float64), 0.3), bias)


def test_thresholds_blend_with_the_mean_of_the_quantiles_and_add_up_to_zero() -> None:
    """beta <- ema beta + (1 - ema) q, less its mean: by hand, of two microbatches."""
    first, second = [1.0, 2.0, 6.0], [3.0, 4.0, 2.0]
    summed = torch.tensor([a + b for a, b in zip(first, second, strict=True)] + [2.0], dtype=torch.float64)
    bias = torch.tensor([1.0, 0.0, -1.0])
    # beta = (-1, 0, 1), q = (2, 3, 4): 0.25 beta + 0.75 q = (1.25, 2.25, 3.25), of mean 2.25
    assert moved_thresholds(bias, summed, 0.25).tolist() == [1.0, 0.0, -1.0]
    # without memory q alone: (2, 3, 4) less 3
    assert moved_thresholds(torch.tensor([5.0, 0.0, 0.0]), summed, 0.0).tolist() == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("top_k", [1, 3])
def test_thresholds_even_out_a_lopsided_router_within_a_few_steps(top_k: int) -> None:
    logits = draw(7, 240, 8) + torch.arange(8) * 0.7
    bias = torch.zeros(8)

    def counts() -> Tensor:
        return torch.bincount((logits + bias).topk(top_k).indices.flatten(), minlength=8)

    assert int((counts() - 30 * top_k).abs().max()) > 100
    for _ in range(12):
        found = torch.cat([quantiles(logits, bias, top_k), torch.ones(1, dtype=torch.float64)])
        bias = moved_thresholds(bias, found, 0.0)
    assert int((counts() - 30 * top_k).abs().max()) <= 10


def moe(
    selection: Selection, *, top_k: int = 2, score: Score = "softmax", experts: int = 7, quantile: bool = False
) -> MoE:
    balance = (QuantileBias(ema=0.5),) if quantile else (ZLoss(coefficient=0.1),)
    router = Router(score=score, normalise=False, scale=1.5, selection=selection, balance=balance)
    return MoE(experts=experts, top_k=top_k, expert_ffn=3, router=router)


def scope_of(tokens: int, valid: Tensor | None = None) -> BalanceScope:
    alone = one_rank()
    return BalanceScope(
        sequence_T=torch.zeros(tokens, dtype=torch.int64),
        sequences=1,
        valid_T=valid,
        global_tokens=tokens,
        seen=None,
        sequence=alone.sequence,
        tokens=alone.tokens,
    )


def route(
    config: MoE, x: Tensor, *, training: bool = True, valid: Tensor | None = None
) -> tuple[RouterModule, Routing]:
    router = RouterModule(config, HIDDEN, init_std=1.0, place=place_on())
    fill(router)
    packing = packing_of(None, len(x), torch.device("cpu"))
    scope = scope_of(len(x), valid) if training else None
    return router, router(x, RouterInputs(packing=packing, scope=scope, valid_T=valid))


def logits_of(router: RouterModule, x: Tensor) -> Tensor:
    return (x @ router.weight.T).detach()


@pytest.mark.parametrize(("top_k", "score"), [(1, "sigmoid"), (2, "softmax"), (3, "softmax")])
def test_a_sinkhorn_router_takes_the_best_of_the_transport_with_weights_of_the_score(top_k: int, score: Score) -> None:
    x = draw(8, 19, HIDDEN)
    router, found = route(moe(SINKHORN, top_k=top_k, score=score), x)
    logits = logits_of(router, x).numpy()
    transport, _ = plain_sinkhorn(logits, 1e-4)
    assert found.experts_TK.tolist() == np.argsort(-transport, axis=1, kind="stable")[:, :top_k].tolist()
    dense = 1 / (1 + np.exp(-logits)) if top_k == 1 else np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = 1.5 * np.take_along_axis(dense, found.experts_TK.numpy(), 1)
    np.testing.assert_allclose(found.weights_TK.detach().numpy(), expected, rtol=1e-12)
    assert (found.experts_TK.numpy() != np.argsort(-logits, axis=1)[:, :top_k]).any(), "transport changed no choice"


def test_transport_evens_out_a_lopsided_router() -> None:
    logits = draw(7, 240, 8) + torch.arange(8) * 0.7
    loads = [torch.bincount(scores.argmax(-1), minlength=8) for scores in (logits, sinkhorn(logits, 1e-4, 1000))]
    assert int(loads[0].max()) > 120 and int(loads[1].max()) < 45


def test_an_expert_choice_router_takes_what_experts_take_with_the_softmax_as_weights() -> None:
    x = draw(9, 17, HIDDEN)
    router, found = route(moe(ExpertChoice()), x)
    scores = torch.softmax(logits_of(router, x), -1)
    expected = torch.tensor(plain_expert_choice(scores.tolist(), 2))
    assert found.experts_TK.tolist() == expected.tolist()
    torch.testing.assert_close(found.weights_TK.detach(), 1.5 * scores * (expected >= 0), rtol=1e-12, atol=0)
    assert found.counts_E.tolist() == [math.ceil(2 * 17 / 7)] * 7
    assert len({int((row >= 0).sum()) for row in found.experts_TK}) > 2, "tokens have different numbers of experts"


@pytest.mark.parametrize("selection", [SINKHORN, ExpertChoice()])
def test_padding_is_never_taken_and_does_not_change_who_is(selection: Selection) -> None:
    x = draw(10, 23, HIDDEN)
    valid = torch.arange(23) % 4 != 2
    _, alone = route(moe(selection), x[valid])
    _, found = route(moe(selection), x, valid=valid)
    assert torch.equal(found.experts_TK[valid], alone.experts_TK)
    torch.testing.assert_close(found.weights_TK[valid], alone.weights_TK, rtol=1e-12, atol=0)
    assert bool((found.experts_TK[~valid] == -1).all()) and not bool(found.weights_TK[~valid].any())
    assert torch.equal(found.counts_E, alone.counts_E)


@pytest.mark.parametrize("selection", [SINKHORN, ExpertChoice()])
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_one_token_and_nothing_but_padding_are_routed(selection: Selection, tokens: int) -> None:
    x = draw(11, tokens, HIDDEN)
    _, found = route(moe(selection), x)
    columns = 7 if isinstance(selection, ExpertChoice) else 2
    assert found.experts_TK.shape == (tokens, columns)
    # one token: every expert has room for one, and takes it
    assert int(found.counts_E.sum()) == tokens * columns
    _, found = route(moe(selection), draw(11, 3, HIDDEN), valid=torch.zeros(3, dtype=torch.bool))
    assert found.experts_TK.tolist() == [[-1] * columns] * 3


@pytest.mark.parametrize("selection", [SINKHORN, ExpertChoice()])
@pytest.mark.parametrize("tokens", [1, 9])
def test_b17_evaluation_is_plain_top_k_looks_at_no_other_token_and_has_no_losses(
    selection: Selection, tokens: int
) -> None:
    x = draw(12, tokens, HIDDEN)
    _, found = route(moe(selection), x, training=False)
    _, plain = route(moe(TopK()), x, training=False)
    assert torch.equal(found.experts_TK, plain.experts_TK)
    torch.testing.assert_close(found.weights_TK, plain.weights_TK, rtol=0, atol=0)
    assert found.balance is None
    _, later = route(moe(selection), torch.cat([x, draw(13, 4, HIDDEN)]), training=False)
    assert torch.equal(later.experts_TK[:tokens], found.experts_TK)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus", "softmax_after_top_k"])
@pytest.mark.parametrize("training", [True, False])
def test_thresholds_choose_by_logits_and_leave_the_weights_alone(score: Score, training: bool) -> None:
    config = moe(TopK(), score=score, quantile=True)
    router = RouterModule(config, HIDDEN, init_std=1.0, place=place_on())
    fill(router)
    assert router.bias is not None and router.bias.dtype == torch.float32
    x = draw(14, 15, HIDDEN)
    inputs = RouterInputs(packing=packing_of(None, 15, torch.device("cpu")), scope=scope_of(15) if training else None)
    found = router(x, inputs)
    logits = logits_of(router, x)
    assert torch.equal(found.experts_TK, (logits + router.bias).argsort(-1, descending=True)[:, :2])
    assert not torch.equal(found.experts_TK, logits.argsort(-1, descending=True)[:, :2])
    picked = logits.gather(1, found.experts_TK)
    expected = {
        "softmax": torch.softmax(logits, -1).gather(1, found.experts_TK),
        "sigmoid": torch.sigmoid(picked),
        "sqrt_softplus": torch.log1p(picked.exp()).sqrt(),
        "softmax_after_top_k": picked.exp() / picked.exp().sum(-1, keepdim=True),
    }[score]
    torch.testing.assert_close(found.weights_TK.detach(), 1.5 * expected, rtol=1e-10, atol=0)
    if training:
        assert found.balance is not None and found.balance.quantiles is not None
        assert found.balance.quantiles[-1] == 1 and not found.balance.quantiles.requires_grad
        wanted = plain_quantiles(logits.tolist(), router.bias.double().tolist(), 2)
        np.testing.assert_allclose(found.balance.quantiles[:-1].numpy(), wanted, rtol=1e-12)
    else:
        assert found.balance is None


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_a_layer_sums_for_each_token_the_experts_that_took_it(dispatcher: DispatcherName) -> None:
    """A token that no expert took has the shared expert alone."""
    config = replace(moe(ExpertChoice(), top_k=1, experts=4), shared=SharedExperts(count=1))
    layer = MoELayer(config, HIDDEN, 1.0, place_on(parallel=ParallelConfig(dispatcher=dispatcher)))
    fill(layer)
    x = draw(15, 13, HIDDEN).requires_grad_()
    packing = packing_of(None, 13, torch.device("cpu"))
    out, routing = layer(x, RouterInputs(packing=packing, scope=scope_of(13)))
    parts = dict(layer.named_parameters())
    scores = torch.softmax(x @ parts["router.weight"].T, -1)
    taken = plain_expert_choice(scores.tolist(), 1)
    assert any(max(row) < 0 for row in taken) and any(sum(e >= 0 for e in row) > 1 for row in taken)
    expected = []
    for t in range(13):
        row = mlp(x[t], parts["shared.gate_up"], parts["shared.down"])
        for e in taken[t]:
            if e >= 0:
                weight = 1.5 * scores[t, e]
                row = row + weight * mlp(x[t], parts["experts.gate_up"][e], parts["experts.down"][e])
        expected.append(row)
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-10, atol=1e-12)
    arrives = draw(16, 13, HIDDEN)
    found = torch.autograd.grad((out * arrives).sum(), [x, *parts.values()])
    truth = torch.autograd.grad((torch.stack(expected) * arrives).sum(), [x, *parts.values()])
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert routing.counts_E.tolist() == [4] * 4


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = gate_up[0] @ x, gate_up[1] @ x
    return down @ (gate / (1 + (-gate).exp()) * up)
