"""Balance losses against sums written out in loops, and what must hold of them however the batch is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from core.attention.packing import packing_of
from core.config.architecture import AuxLoss, AuxScope, Balance, Capacity, MoE, Router, Score, ZLoss
from core.config.mapping import ParallelConfig
from core.kernels.routing import choose
from core.moe.balance import BalanceLosses, BalanceScope, Load, balance_losses, moved_bias
from core.moe.router import Router as RouterModule
from core.moe.router import RouterInputs
from core.parallel.groups import Group, groups_for, one_rank
from tests.core.shares import fill, place_on
from tests.ranks import Ranks

SCOPES: tuple[AuxScope, ...] = ("microbatch", "sequence", "global_batch")
ALONE = one_rank().tokens


def router(*balance: Balance, score: Score = "softmax") -> Router:
    return Router(score=score, normalise=False, balance=balance)


def scope_of(
    lengths: Sequence[int],
    total: int,
    *,
    valid: Sequence[bool] | None = None,
    seen: Load | None = None,
    group: Group = ALONE,
) -> BalanceScope:
    """The scope of a rank that holds whole sequences of these lengths; group: the ranks of the global batch."""
    return BalanceScope(
        sequence_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        sequences=len(lengths),
        valid_T=None if valid is None else torch.tensor(valid, dtype=torch.bool),
        global_tokens=total,
        seen=seen,
        sequence=ALONE,
        tokens=group,
    )


def random_logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator, dtype=torch.float64) * 2


def scores_of_row(logits: list[float], score: Score) -> list[float]:
    values = [1 / (1 + math.exp(-z)) if score == "sigmoid" else math.exp(z) for z in logits]
    return [v / sum(values) for v in values]


def naive_counts(logits: Tensor, top_k: int) -> list[int]:
    counts = [0] * logits.shape[1]
    for row in logits.tolist():
        for e in sorted(range(len(row)), key=lambda e: -row[e])[:top_k]:
            counts[e] += 1
    return counts


def naive_aux(pieces: Sequence[Tensor], top_k: int, total: int, score: Score = "softmax") -> float:
    """sum over pieces of (its tokens / all tokens) * E * sum_i f_i P_i, with f and P of the piece."""
    value = 0.0
    for logits in pieces:
        tokens, experts = logits.shape
        if not tokens:
            continue
        f = [count / (top_k * tokens) for count in naive_counts(logits, top_k)]
        rows = [scores_of_row(row, score) for row in logits.tolist()]
        p = [sum(row[e] for row in rows) / tokens for e in range(experts)]
        value += tokens / total * experts * sum(a * b for a, b in zip(f, p, strict=True))
    return value


def pieces_of(logits: Tensor, lengths: Sequence[int], valid: Sequence[bool] | None = None) -> list[Tensor]:
    keep = torch.ones(len(logits), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return [logits[a:b][keep[a:b]] for a, b in pairwise((0, *accumulate(lengths)))]


def value_of(losses: BalanceLosses, name: str) -> float:
    assert set(losses.by_name) == {name}
    return float(losses.by_name[name].detach())


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after_top_k"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("lengths", [(7, 7, 7), (1, 13, 5, 2), (21,)])
def test_every_scope_is_its_formula(scope: AuxScope, score: Score, lengths: tuple[int, ...]) -> None:
    logits = random_logits(21, 6)
    found = balance_losses(logits, router(AuxLoss(scope=scope, coefficient=0.3), score=score), 2, scope_of(lengths, 50))
    pieces = pieces_of(logits, lengths) if scope == "sequence" else [logits]
    # global_batch: f of what this microbatch has seen, P over the 50 tokens of the whole batch
    expected = naive_aux(pieces, 2, 50, score)
    assert value_of(found, f"aux_{scope}") == pytest.approx(0.3 * expected, rel=1e-12)


@pytest.mark.parametrize("scope", SCOPES)
def test_padding_takes_no_part_in_any_scope(scope: AuxScope) -> None:
    lengths, valid = (5, 4, 3), [True] * 3 + [False] * 2 + [True] * 3 + [False] * 4
    logits = random_logits(12, 5).requires_grad_()
    found = balance_losses(logits, router(AuxLoss(scope=scope, coefficient=1.0)), 2, scope_of(lengths, 6, valid=valid))
    pieces = pieces_of(logits.detach(), lengths, valid)
    pieces = pieces if scope == "sequence" else [torch.cat(pieces)]
    assert value_of(found, f"aux_{scope}") == pytest.approx(naive_aux(pieces, 2, 6), rel=1e-12)
    (gradient,) = torch.autograd.grad(found.by_name[f"aux_{scope}"], logits)
    assert not gradient[~torch.tensor(valid)].any() and bool(gradient[torch.tensor(valid)].any())


@pytest.mark.parametrize(("experts", "top_k"), [(2, 1), (5, 2), (8, 2), (12, 5), (7, 7), (64, 8)])
@pytest.mark.parametrize("scope", SCOPES)
def test_b9_balanced_routing_gives_exactly_the_coefficient_for_every_e_and_k(
    scope: AuxScope, experts: int, top_k: int
) -> None:
    """Token t prefers experts t, t + 1, …, t + K - 1 (mod E): in E tokens every expert has the same load and score."""
    t, e = torch.arange(experts)[:, None], torch.arange(experts)[None, :]
    logits = (((e - t) % experts) < top_k).double() * 3 - ((e - t) % experts).double() * 1e-3
    # three microbatches of two sequences each, and padding that is as unbalanced as can be
    padded = torch.cat([logits, torch.eye(experts)[:1].double() * 9, logits])
    lengths, valid = (experts + 1, experts), [True] * experts + [False] + [True] * experts
    total, seen = 0.0, None
    for _ in range(3):
        scope_ = scope_of(lengths, 6 * experts, valid=valid, seen=seen)
        losses = balance_losses(padded, router(AuxLoss(scope=scope, coefficient=0.7)), top_k, scope_)
        total, seen = total + value_of(losses, f"aux_{scope}"), losses.load
    assert total == pytest.approx(0.7, rel=1e-12)


def test_b9_collapse_on_different_experts_in_two_layers_does_not_cancel() -> None:
    """Each layer alone has its loss; a layer with one expert that takes all has nearly E."""
    for hot in (0, 3):
        logits = torch.zeros(10, 4, dtype=torch.float64)
        logits[:, hot] = 5.0
        found = balance_losses(logits, router(AuxLoss(scope="microbatch", coefficient=1.0)), 1, scope_of([10], 10))
        share = math.exp(5) / (math.exp(5) + 3)
        assert value_of(found, "aux_microbatch") == pytest.approx(4 * share, rel=1e-12)
        assert 4 * share > 3.9


def test_b8_the_loss_sees_logits_and_not_probabilities() -> None:
    """Logits of 5 and -5, two experts, three tokens on the first and one on the second: the value by hand."""
    logits = torch.tensor([[5.0, -5.0], [5.0, -5.0], [5.0, -5.0], [-5.0, 5.0]], dtype=torch.float64)
    high = 1 / (1 + math.exp(-10))
    p = [(3 * high + (1 - high)) / 4, (high + 3 * (1 - high)) / 4]
    found = balance_losses(logits, router(AuxLoss(scope="microbatch", coefficient=1.0)), 1, scope_of([4], 4))
    assert value_of(found, "aux_microbatch") == pytest.approx(2 * (0.75 * p[0] + 0.25 * p[1]), rel=1e-12)
    # through a second softmax it would be 1.12 instead of 1.25
    assert value_of(found, "aux_microbatch") > 1.24


@pytest.mark.parametrize("first", [12, 4])
def test_b3_global_balance_uses_the_true_counts_of_uneven_microbatches_in_both_orders(first: int) -> None:
    logits = random_logits(16, 4, seed=first)
    aux = router(AuxLoss(scope="global_batch", coefficient=0.5))
    one = balance_losses(logits[:first], aux, 2, scope_of([first], 16))
    two = balance_losses(logits[first:], aux, 2, scope_of([16 - first], 16, seen=one.load))
    expected = 0.0
    for start, end in ((0, first), (first, 16)):
        f = [count / (2 * end) for count in naive_counts(logits[:end], 2)]
        rows = [scores_of_row(row, "softmax") for row in logits[start:end].tolist()]
        expected += 4 * sum(f[e] * sum(row[e] for row in rows) / 16 for e in range(4))
    found = sum(value_of(losses, "aux_global_batch") for losses in (one, two))
    assert found == pytest.approx(0.5 * expected, rel=1e-12)
    assert two.load is not None and two.load.tokens == 16
    assert two.load.counts_E.tolist() == naive_counts(logits, 2)


def test_b4_packed_documents_of_unequal_length_equal_the_same_documents_one_by_one() -> None:
    lengths = (3, 11, 5)
    logits = random_logits(19, 6).requires_grad_()
    aux = router(AuxLoss(scope="sequence", coefficient=1.0))
    packed = balance_losses(logits, aux, 2, scope_of(lengths, 19)).by_name["aux_sequence"]
    alone = sum(
        balance_losses(piece, aux, 2, scope_of([len(piece)], 19)).by_name["aux_sequence"]
        for piece in logits.split(lengths)
    )
    assert isinstance(alone, Tensor)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (packed, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("capacity", [Capacity(factor=1.25), Capacity(factor=1.25, pad=True), Capacity(factor=0.3)])
@pytest.mark.parametrize("scope", SCOPES)
def test_b6_capacity_and_padding_to_it_do_not_enter_the_loss(scope: AuxScope, capacity: Capacity) -> None:
    """A skewed router: counted after drops or padding, its load would look balanced and the loss be one."""
    config = router(AuxLoss(scope=scope, coefficient=1.0))
    hidden = random_logits(23, 5)
    packing = packing_of(torch.tensor([0, 9, 23]), 23, torch.device("cpu"))
    found = []
    for limit in (None, capacity):
        moe = MoE(experts=6, top_k=2, expert_ffn=3, router=config, capacity=limit)
        made = RouterModule(moe, 5, init_std=1.0, place=place_on())
        fill(made)
        with torch.no_grad():
            made.weight[0] = 3.0 * hidden.mean(0)
        routing = made(hidden, RouterInputs(packing=packing, scope=scope_of((9, 14), 23)))
        assert routing.balance is not None
        found.append(value_of(routing.balance, f"aux_{scope}"))
        dropped = int((routing.experts_TK < 0).sum())
        assert (dropped > 0) == (limit is not None)
    assert found[0] == found[1] > 1.1


def test_the_gradient_is_that_of_the_formula_with_the_counts_held_fixed() -> None:
    logits = random_logits(9, 5).requires_grad_()
    loss = balance_losses(logits, router(AuxLoss(scope="microbatch", coefficient=1.0)), 2, scope_of([9], 9))
    (found,) = torch.autograd.grad(loss.by_name["aux_microbatch"], logits)
    f = torch.tensor(naive_counts(logits.detach(), 2), dtype=torch.float64) / 18
    p = torch.softmax(logits.detach(), -1)
    # d/dz of 5/9 * sum_i f_i softmax_i(z), from the softmax's Jacobian
    expected = 5 / 9 * p * (f - (p * f).sum(-1, keepdim=True))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-15)


def test_z_loss_is_the_mean_square_of_logsumexp_over_the_tokens_that_count() -> None:
    logits = random_logits(4, 3)
    valid = [True, False, True, True]
    found = balance_losses(logits, router(ZLoss(coefficient=0.1)), 1, scope_of([4], 10, valid=valid))
    rows = [row for row, keep in zip(logits.tolist(), valid, strict=True) if keep]
    expected = sum(math.log(sum(map(math.exp, row))) ** 2 for row in rows) / 10
    assert value_of(found, "z") == pytest.approx(0.1 * expected, rel=1e-12)


@pytest.mark.parametrize("balance", [*(AuxLoss(scope=s, coefficient=1.0) for s in SCOPES), ZLoss(coefficient=1.0)])
@pytest.mark.parametrize("lengths", [(), (1,)])
def test_no_token_and_one_token_give_finite_losses_with_a_gradient(balance: Balance, lengths: tuple[int, ...]) -> None:
    logits = random_logits(sum(lengths), 4).requires_grad_()
    losses = balance_losses(logits, router(balance), 2, scope_of(lengths, sum(lengths)))
    (loss,) = losses.by_name.values()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())
    assert lengths or float(loss.detach()) == 0.0


def shares(rank: int, world: int, scope: AuxScope, cuts: Sequence[int]) -> tuple[float, Tensor]:
    """The loss and the gradient of this rank's tokens; `cuts`: how many tokens each rank has."""
    groups = groups_for(ParallelConfig())
    start = sum(cuts[:rank])
    logits = random_logits(sum(cuts), 6)[start : start + cuts[rank]].clone().requires_grad_()
    lengths = [cuts[rank]] if cuts[rank] else []
    scope_ = scope_of(lengths, sum(cuts), group=groups.tokens)
    loss = balance_losses(logits, router(AuxLoss(scope=scope, coefficient=1.0)), 2, scope_).by_name[f"aux_{scope}"]
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient


@pytest.mark.parametrize("cuts", [(6, 7), (0, 5, 1, 7)])
def test_b2_global_balance_is_as_strong_over_many_ranks_as_on_one(ranks: Ranks, cuts: tuple[int, ...]) -> None:
    loss, gradient = shares(0, 1, "global_batch", (13,))
    found = ranks.run(shares, len(cuts), "global_batch", cuts)
    assert sum(value for value, _ in found) == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(torch.cat([g for _, g in found]), gradient, rtol=1e-10, atol=1e-15)
    assert loss == pytest.approx(naive_aux([random_logits(13, 6)], 2, 13), rel=1e-12)


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_other_scopes_over_ranks_are_the_sum_over_the_ranks_pieces(ranks: Ranks, scope: AuxScope) -> None:
    found = ranks.run(shares, 3, scope, (6, 0, 5))
    expected = naive_aux(random_logits(11, 6).split([6, 5]), 2, 11)
    assert sum(value for value, _ in found) == pytest.approx(expected, rel=1e-12)


def test_the_bias_rises_below_the_mean_load_falls_above_it_and_stays_at_it() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5, 0.5])
    moved = moved_bias(bias, torch.tensor([4, 2, 3, 3]), 0.25)
    assert moved.tolist() == [0.25, 0.75, 0.5, 0.5]
    assert moved.dtype == torch.float32


def test_a_load_too_large_for_float32_is_still_told_from_the_mean() -> None:
    """2^27 choices per expert: float32 would see 2^27 + 1 as the mean."""
    counts = torch.tensor([2**27 + 1, 2**27 - 1, 2**27, 2**27], dtype=torch.float64)
    assert moved_bias(torch.zeros(4), counts, 1.0).tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_b15_the_bias_is_not_recentred_and_recentring_would_choose_the_same_experts() -> None:
    """100 steps of both: same choices in each; the documented mean is the sum of the moves, not zero."""
    generator = torch.Generator().manual_seed(5)
    plain, centred, drift = torch.zeros(6), torch.zeros(6), 0.0
    for _ in range(100):
        # steps of 1/64 and scores of multiples of 1/1024 keep every number exact but the recentred bias
        scores = (torch.rand(50, 6, generator=generator) + torch.arange(6) * 0.3).mul(1024).round() / 1024
        chosen = choose(scores, 2, None, plain)
        assert torch.equal(chosen, choose(scores, 2, None, centred)) or _only_ties_differ(scores, plain, centred)
        counts = torch.bincount(chosen.flatten(), minlength=6)
        drift += float(torch.sign(counts.double().mean() - counts).sum()) / 64 / 6
        plain, centred = moved_bias(plain, counts, 1 / 64), moved_bias(centred, counts, 1 / 64)
        centred = centred - centred.mean()
    assert float(plain.mean()) == pytest.approx(drift, abs=1e-6)
    assert abs(drift) > 1e-3 and abs(float(centred.mean())) < 1e-6
    torch.testing.assert_close(plain - plain.mean(), centred, rtol=0, atol=1e-5)


def _only_ties_differ(scores: Tensor, plain: Tensor, centred: Tensor) -> bool:
    """Where the choices differ, the second and third best are equal but for the rounding of the recentred bias."""
    differ = (choose(scores, 2, None, plain) != choose(scores, 2, None, centred)).any(-1)
    best = (scores + plain)[differ].sort(-1, descending=True).values
    return bool(((best[:, :-1] - best[:, 1:]).amin(-1) < 1e-5).all())
