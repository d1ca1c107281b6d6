"""The router's three kernels in Triton against torch's pieces: the same experts, ties included, and weights and gradients to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from core.attention.packing import packing_of
from core.config.architecture import AuxLoss, ExpertBias, Groups, MoE, Router, Score
from core.config.mapping import ParallelConfig
from core.kernels.routing import (
    auxiliary_loss,
    auxiliary_loss_reference,
    balance_choices,
    balance_choices_reference,
    choose,
    highest,
    occurrences,
    route,
    route_reference,
)
from core.layers.place import Place
from core.moe.balance import BalanceScope
from core.moe.router import Router as RouterModule
from core.moe.router import RouterInputs
from core.parallel.groups import one_rank
from tests.core.kernels.triton_case import kernels
from tests.core.numbers import draw, leaf, near

pytest.importorskip("triton", minversion="3.7")

SCORES: tuple[Score, ...] = ("softmax", "softmax_after_top_k", "sigmoid", "sqrt_softplus")
# Experts, top-k and groups: one expert, all experts, primes, groups of three, a group of fewer than it is judged by, powers of two.
SIZES = [
    (1, 1, None),
    (7, 7, None),
    (13, 3, None),
    (64, 8, None),
    (12, 3, Groups(total=3, kept=2)),
    (15, 4, Groups(total=5, kept=4, best=4)),
    (32, 5, Groups(total=8, kept=3, best=1)),
    (300, 32, None),
]


def coarse(seed: int, *shape: int) -> Tensor:
    """float32 multiples of a quarter, of which many are equal, so far apart that no rounding makes or breaks a tie."""
    return (draw(seed, *shape, dtype=torch.float32) * 8).round() / 4


def padding(tokens: int) -> Tensor:
    return torch.arange(tokens) % 3 != 1


def within(actual: Tensor, truth: Tensor, units: float = 8.0) -> None:
    """Each number by itself within so many roundings of float32, above the smallest normal one."""
    assert actual.shape == truth.shape and actual.dtype == torch.float32
    bound = units * torch.finfo(torch.float32).eps * truth.abs() + torch.finfo(torch.float32).tiny
    assert bool(((actual.double() - truth).abs() <= bound).all()), float(((actual - truth).abs() / bound).max())


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("experts", "top_k", "groups"), SIZES)
def test_routing_is_that_of_the_pieces(
    device: torch.device, experts: int, top_k: int, groups: Groups | None, score: Score, biased: bool
) -> None:
    tokens = 3 if experts > 100 else 19
    logits, bias = coarse(0, tokens, experts), coarse(1, experts) / 2 if biased else None
    valid = None if biased else padding(tokens)
    router = Router(score=score, normalise=biased, groups=groups, scale=2.5)
    on = [None if x is None else x.to(device) for x in (bias, valid)]
    expected, _ = route_reference(logits, router, top_k, bias_E=bias, valid_T=valid)
    x, x64 = leaf(logits.to(device)), leaf(logits.double())
    with kernels("triton"):
        chosen, weights = route(x, router, top_k, bias_E=on[0], valid_T=on[1])
        upstream = draw(2, tokens, top_k)
        weights.backward(upstream.to(weights))
    assert torch.equal(chosen.cpu(), expected) and chosen.dtype == torch.int64
    same, truth = route_reference(x64, router, top_k, bias_E=bias, valid_T=valid)
    assert torch.equal(same, expected)
    truth.backward(upstream.float().double())
    within(weights.detach().cpu(), truth.detach())
    assert x.grad is not None and x64.grad is not None
    near(x.grad.cpu(), x64.grad, least=0.1)


@pytest.mark.parametrize("score", SCORES)
def test_scores_over_many_magnitudes_keep_their_roundings(device: torch.device, score: Score) -> None:
    """Logits from -60 to 60: where plain exponentials, log(1 + x) and 1 - exp(-x) lose their digits."""
    logits = torch.linspace(-60, 60, 61)[:, None] + torch.tensor([0.0, -7.3, -29.1])
    router = Router(score=score, normalise=False)
    x, x64 = leaf(logits.to(device)), leaf(logits.double())
    with kernels("triton"):
        _, weights = route(x, router, 3)
        weights[:, 2].sum().backward()
    _, truth = route_reference(x64, router, 3)
    truth[:, 2].sum().backward()
    within(weights.detach().cpu(), truth.detach())
    assert x.grad is not None and x64.grad is not None
    if score == "sqrt_softplus":
        within(x.grad.cpu(), x64.grad)
    else:
        near(x.grad.cpu(), x64.grad)


@pytest.mark.parametrize("score", SCORES)
def test_logits_without_measure_give_finite_weights_and_experts_that_exist(device: torch.device, score: Score) -> None:
    logits = torch.tensor([[-1e4] * 5, [1e4] * 5, [1e4, -1e4, 0, 1e4, -1e4], [-200.0, -150, -120, -104, -90]])
    for normalise in (True, False):
        router = Router(score=score, normalise=normalise, groups=Groups(total=5, kept=3))
        x = leaf(logits.to(device))
        with kernels("triton"):
            chosen, weights = route(x, router, 2)
            weights.sum().backward()
        # Ties of underflown scores depend on where a format ends; those of equal logits do not.
        assert chosen[:3].tolist() == [[0, 1], [0, 1], [0, 3]]
        assert x.grad is not None and bool(torch.isfinite(weights).all() and torch.isfinite(x.grad).all())
    broken = torch.full((2, 5), torch.nan, device=device)
    with kernels("triton"):
        chosen, _ = route(broken, Router(score=score, normalise=True), 3)
    assert chosen.tolist() == [[0, 1, 2]] * 2


def test_both_zeros_are_equal(device: torch.device) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0], [0.0, -0.0, 0.0, 1.0]])
    with kernels("triton"):
        chosen, _ = route(logits.to(device), Router(score="softmax_after_top_k", normalise=False), 3)
    assert chosen.tolist() == [[0, 1, 2], [3, 0, 1]]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (7, 7), (13, 3), (64, 8)])
def test_choices_for_the_balance_are_those_of_the_pieces(
    device: torch.device, experts: int, top_k: int, score: Score, masked: bool
) -> None:
    logits = coarse(3, 17, experts)
    valid = padding(17) if masked else None
    x, x64 = leaf(logits.to(device)), leaf(logits.double())
    with kernels("triton"):
        scores, chosen = balance_choices(x, score, top_k, None if valid is None else valid.to(device))
        upstream = draw(4, 17, experts)
        scores.backward(upstream.to(scores))
    truth, picked = balance_choices_reference(x64, score, top_k, valid)
    truth.backward(upstream.float().double())
    assert torch.equal(chosen.cpu().double(), picked) and not chosen.requires_grad
    within(scores.detach().cpu(), truth.detach())
    assert x.grad is not None and x64.grad is not None
    near(x.grad.cpu(), x64.grad, least=0.1)


# More tokens than one program takes, of pieces of which one is empty.
@pytest.mark.parametrize(("tokens", "experts", "pieces"), [(0, 3, 1), (1, 1, 1), (301, 5, 1), (301, 5, 4), (37, 70, 2)])
def test_the_auxiliary_loss_is_its_formula(device: torch.device, tokens: int, experts: int, pieces: int) -> None:
    """sum over pieces of factor * sum_i c_i sum_x q_i(x), written out in numpy; its gradient by the scores is factor * c_i."""
    scores = draw(5, tokens, experts, dtype=torch.float32).abs()
    counts, factor = torch.arange(pieces * experts).view(pieces, experts) % 7, draw(6, pieces, dtype=torch.float32)
    piece = (torch.arange(tokens) * 5) % max(1, pieces - 1) if pieces > 1 else None
    q, of = scores.double().numpy(), np.zeros(tokens, int) if piece is None else piece.numpy()
    c, f = counts.double().numpy(), factor.double().numpy()
    truth = sum(f[s] * sum(c[s, i] * q[of == s, i].sum() for i in range(experts)) for s in range(pieces))
    x = leaf(scores.to(device))
    with kernels("triton"):
        loss = auxiliary_loss(
            x, *(t.to(device) for t in (counts.float(), factor)), None if piece is None else piece.to(device)
        )
        (loss * 3).backward()
    near(loss.cpu(), torch.tensor(float(truth), dtype=torch.float64), units=32, least=float(np.abs(c).max() * q.sum()))
    assert x.grad is not None and loss.shape == ()
    near(x.grad.cpu(), torch.from_numpy(3 * (f[:, None] * c)[of]), units=4)
    plain = auxiliary_loss_reference(scores.double(), counts.double(), factor.double(), piece)
    near(plain, torch.tensor(float(truth), dtype=torch.float64), units=32, least=1e3)


@pytest.mark.parametrize("experts", [2, 37, 256])
def test_the_highest_come_in_order_on_every_device(device: torch.device, experts: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scores = coarse(7, 23, experts).to(dtype)
        truth = np.argsort(-scores.double().numpy(), axis=1, kind="stable")
        for count in (1, 2, min(9, experts), experts):
            assert highest(scores.to(device), count).tolist() == truth[:, :count].tolist()
    index = torch.tensor([[3, 0], [3, 5]], device=device)
    assert occurrences(index, 7).tolist() == [1, 0, 0, 2, 0, 1, 0]


def test_no_piece_asks_the_device_for_numbers() -> None:
    """On the meta device, where there are none to ask for."""
    logits = torch.empty(5, 12, device="meta")
    chosen = choose(logits, 3, Groups(total=3, kept=2), torch.empty(12, device="meta"))
    assert chosen.shape == (5, 3) and occurrences(chosen + 1, 13).shape == (13,)
    router = Router(score="sigmoid", normalise=True)
    assert [x.shape for x in route(logits, router, 3)] == [(5, 3)] * 2
    assert [x.shape for x in balance_choices(logits, "softmax", 3)] == [(5, 12)] * 2


def test_no_tokens_are_routed_nowhere(device: torch.device) -> None:
    x = torch.zeros(0, 5, device=device, requires_grad=True)
    with kernels("triton"):
        chosen, weights = route(x, Router(score="softmax", normalise=True), 2)
        scores, picked = balance_choices(x, "sigmoid", 2)
        (weights.sum() + scores.sum()).backward()
    assert chosen.shape == weights.shape == (0, 2) and scores.shape == picked.shape == (0, 5)
    assert x.grad is not None and x.grad.shape == (0, 5)


def test_more_experts_than_a_tile_holds_and_float64_run_in_pieces(device: torch.device) -> None:
    router = Router(score="sigmoid", normalise=True)
    for logits in (coarse(8, 3, 1500), coarse(8, 3, 9).double()):
        with kernels("triton"):
            chosen, weights = route(logits.to(device), router, 4)
        expected, truth = route_reference(logits, router, 4)
        assert torch.equal(chosen.cpu(), expected) and weights.dtype == logits.dtype
        near(weights.cpu(), truth)


@pytest.mark.parametrize("prescribed", [True, False])
@pytest.mark.parametrize("score", SCORES)
def test_a_router_gives_the_same_with_kernels(device: torch.device, score: Score, prescribed: bool) -> None:
    """Experts, weights, every auxiliary loss and the gradient of the router's weight, with a bias, groups and padding."""
    scopes = [AuxLoss(scope=scope, coefficient=0.1) for scope in ("microbatch", "sequence", "global_batch")]
    config = Router(
        score=score,
        normalise=True,
        scale=1.5,
        groups=Groups(total=3, kept=2),
        balance=(ExpertBias(rate=1e-3), *scopes),
    )
    hidden, weight, bias = draw(9, 14, 6, dtype=torch.float32), draw(10, 12, 6, dtype=torch.float32), coarse(11, 12) / 8
    found = {}
    for name in ("reference", "triton"):
        groups = one_rank()
        router = RouterModule(
            MoE(experts=12, top_k=3, expert_ffn=8, router=config),
            6,
            init_std=1.0,
            place=Place(groups=groups, parallel=ParallelConfig(), dtype=torch.float32, device=device),
        )
        with torch.no_grad():
            router.weight.copy_(weight)
            assert router.bias is not None
            router.bias.copy_(bias)
        valid = padding(14).to(device)
        scope = BalanceScope(
            sequence_T=(torch.arange(14, device=device) // 5), sequences=3, valid_T=valid, global_tokens=20, seen=None,
            sequence=groups.sequence, tokens=groups.tokens,
        )  # fmt: skip
        given = torch.stack([torch.arange(14) % 12, (torch.arange(14) + 5) % 12, torch.full((14,), -1)], 1).to(device)
        inputs = RouterInputs(
            packing=packing_of(None, 14, device),
            scope=scope,
            valid_T=valid,
            prescribed_TK=given if prescribed else None,
        )
        with kernels(name):
            routing = router(hidden.to(device), inputs)
            assert routing.balance is not None
            losses = torch.stack(list(routing.balance.by_name.values()))
            (losses.sum() + (routing.weights_TK * draw(12, 14, 3).to(routing.weights_TK)).sum()).backward()
        assert router.weight.grad is not None
        found[name] = [routing.experts_TK, routing.counts_E, routing.weights_TK, losses, router.weight.grad]
    for plain, fused in zip(found["reference"][:2], found["triton"][:2], strict=True):
        assert torch.equal(plain, fused)
    for plain, fused in zip(found["reference"][2:], found["triton"][2:], strict=True):
        near(fused.cpu(), plain.cpu(), units=16, least=1.0)
