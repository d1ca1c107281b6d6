"""Experts and ranks that take only so many rows: against plain loops, the same answer however a microbatch lies on ranks, and with rows
of zeros the same numbers in shapes that are known beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from core.attention.packing import packing_of
from core.config.architecture import AuxLoss, Capacity, ExpertChoice, ZLoss
from core.config.mapping import DispatcherName, ParallelConfig
from core.kernels.routing import within_capacity
from core.moe.capacity import kept_choices, within_budget
from core.moe.dispatch.make import make_dispatcher
from core.moe.experts import Experts
from core.moe.layer import MoELayer
from core.moe.router import RouterInputs, Routing
from core.parallel.groups import groups_for
from tests.core.moe.test_layer import inputs, scope_of
from tests.core.moe.test_layer_ranks import HIDDEN, MODEL, Job, check, run_all
from tests.core.numbers import draw
from tests.core.shares import fill, place_on
from tests.ranks import Ranks

EXPERTS, TOP_K = 5, 2


def drawn(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts of every token, some of them not routed, and weights of which some are equal."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    chosen[torch.rand(tokens, generator=generator) < 0.2] = -1
    return chosen, torch.randint(1, 4, (tokens, TOP_K), generator=generator).float() / 4


def by_hand(chosen: torch.Tensor, weights: torch.Tensor, order: list[int], capacity: int, by_weight: bool) -> list:
    """Expert by expert, its choices sorted, the first `capacity` kept."""
    kept = [[False] * TOP_K for _ in range(len(chosen))]
    for expert in range(EXPERTS):
        mine = [(t, k) for t in range(len(chosen)) for k in range(TOP_K) if chosen[t, k] == expert]
        mine.sort(key=lambda at: (-float(weights[at]) if by_weight else 0.0, order[at[0]]))
        for t, k in mine[:capacity]:
            kept[t][k] = True
    return kept


@given(st.integers(0, 23), st.integers(0, 9), st.booleans(), st.integers(0, 99))
def test_an_expert_keeps_its_best_or_its_first_choices_and_ties_go_to_the_first(
    tokens: int, capacity: int, by_weight: bool, seed: int
) -> None:
    chosen, weights = drawn(tokens, seed)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    found = within_capacity(chosen, weights, order, experts=EXPERTS, capacity=capacity, by_weight=by_weight)
    assert found.tolist() == by_hand(chosen, weights, order.tolist(), capacity, by_weight)


def spread(rank: int, world: int, parallel: ParallelConfig, lengths: list[int], capacity: Capacity) -> tuple:
    groups = groups_for(parallel)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    packing = packing_of(ends, sum(lengths), torch.device("cpu"), groups)
    chosen, weights = (x[packing.mine_T] for x in drawn(sum(lengths)))
    kept = kept_choices(chosen, weights, packing, experts=EXPERTS, capacity=capacity, sequence=groups.sequence)
    return packing.mine_T, kept


@pytest.mark.parametrize("drop", ["weight", "position"])
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, ParallelConfig(tp=2)),
        (2, ParallelConfig(cp=2)),
        (4, ParallelConfig(tp=2, cp=2)),
        (4, ParallelConfig(cp=4, cp_alltoall=2)),
    ],
)
def test_what_is_dropped_does_not_depend_on_how_a_microbatch_is_spread(
    ranks: Ranks, world: int, parallel: ParallelConfig, drop: str
) -> None:
    capacity = Capacity(factor=0.7, drop="weight" if drop == "weight" else "position")
    for lengths in ([13, 1, 7], [1], [2, 2]):
        ((_, truth),) = [spread(0, 1, ParallelConfig(), lengths, capacity)]
        chosen, _ = drawn(sum(lengths))
        routed = int((chosen[:, 0] >= 0).sum())
        room = math.ceil(0.7 * TOP_K * routed / EXPERTS)
        assert all(int((truth & (chosen == e)).sum()) <= room for e in range(EXPERTS))
        found = torch.zeros_like(truth)
        for mine, kept in ranks.run(spread, world, parallel, lengths, capacity):
            found[mine] = kept
        assert torch.equal(found, truth)


# ------------------------------------------------------------------------------------------ rows of zeros, static shapes

PADDED = replace(MODEL, capacity=Capacity(factor=0.75, pad=True))
# Microbatches of as many tokens, as training has them; 13 and 7 divide over no number of ranks.
THIRTEEN, SEVEN = ((5, 1, 7), (4, 9), (13,), (2, 10, 1)), ((7,), (3, 4), (1, 6), (2, 5))
SPREAD = {
    1: [ParallelConfig()],
    2: [ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2), ParallelConfig(cp=2, ep=2), ParallelConfig(etp=2)],
    4: [
        ParallelConfig(tp=2, ep=4),
        ParallelConfig(tp=2, cp=2, etp=2, ep=2),
        ParallelConfig(ep=2),
        ParallelConfig(ep=2, etp=2),
    ],
}


def padded_jobs(world: int) -> list[Job]:
    """Both kinds of microbatch under every mapping; experts of much room and of none to speak of; drops by either rule."""
    capacities = (
        Capacity(factor=0.75, pad=True),
        Capacity(factor=5.0, pad=True),
        Capacity(factor=0.01, drop="position", pad=True),
    )
    return [
        Job(
            parallel=parallel,
            microbatches=batches[: world // (parallel.tp * parallel.cp)],
            model=replace(MODEL, capacity=capacity),
        )
        for parallel in SPREAD[world]
        for batches in (THIRTEEN, SEVEN)
        for capacity in capacities
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_padding_to_capacity_changes_no_output_gradient_loss_or_drop_however_experts_and_tokens_lie(
    ranks: Ranks, world: int
) -> None:
    jobs = padded_jobs(world)
    found = ranks.run(run_all, world, jobs, timeout_seconds=60.0)
    for i, job in enumerate(jobs):
        assert job.model.capacity is not None
        unpadded = replace(job.model.capacity, pad=False)
        # The truth of `check` is one rank that pads nothing; its counts are those of the choices that were kept.
        check([rank[i] for rank in found], replace(job, model=replace(job.model, capacity=unpadded)))


class NoWaiting(TorchDispatchMode):
    """Fails where the host reads what a device has computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"), (
            f"the host waits at {name}"
        )
        return func(*args, **(kwargs or {}))


def pass_through(rank: int, world: int, parallel: ParallelConfig, skew: bool) -> tuple[list[tuple[int, ...]], int]:
    """All that a padded layer does after its router has chosen, forward and backward, without waiting: shapes, rows kept."""
    parallel = replace(parallel, dispatcher="alltoall")
    groups = groups_for(parallel)
    place, generator = place_on(groups, parallel), torch.Generator().manual_seed(rank)
    experts, dispatcher = Experts(PADDED, HIDDEN, init_std=1.0, place=place), make_dispatcher(PADDED, place)
    fill(experts)
    packing = packing_of(None, 14, torch.device("cpu"), groups)
    tokens = packing.mine_T.numel()
    scores = torch.rand(tokens, PADDED.experts, generator=generator)
    chosen = (torch.arange(12).expand(tokens, 12) if skew else scores.argsort(1))[:, : PADDED.top_k].contiguous()
    hidden = draw(rank, tokens, HIDDEN).requires_grad_()
    weights = draw(rank + 9, tokens, PADDED.top_k).requires_grad_()
    layer = MoELayer(PADDED, HIDDEN, 1.0, place)
    assert PADDED.capacity is not None
    shapes = []
    with NoWaiting():
        kept = kept_choices(chosen, weights, packing, experts=12, capacity=PADDED.capacity, sequence=groups.sequence)
        rows_per_expert = layer.router.static_rows(RouterInputs(packing=packing, scope=scope_of((14,))))
        routing = Routing(
            experts_TK=chosen.masked_fill(~kept, -1),
            weights_TK=weights * kept,
            counts_E=chosen.new_zeros(12),
            balance=None,
            static_rows=rows_per_expert,
        )
        rows, plan = dispatcher.dispatch_preprocess(hidden, routing)
        shapes += [tuple(rows.hidden.shape), tuple(rows.weights.shape)]
        arrived, plan = dispatcher.dispatch_postprocess(dispatcher.dispatch(rows, plan), plan)
        shapes += [tuple(arrived.hidden_RH.shape), arrived.counts]
        back = dispatcher.combine_preprocess(experts(arrived), plan)
        out = dispatcher.combine_postprocess(dispatcher.combine(back, plan), plan)
        out.sum().backward()
    return shapes, int(kept.sum())


@pytest.mark.parametrize(
    ("world", "parallel", "rows"),
    [
        # ceil(0.75 * 3 * 14 / 12) = 3 rows for each of 12 experts, whatever they lie on
        (1, ParallelConfig(), 3),
        (2, ParallelConfig(ep=2), 3),
        (2, ParallelConfig(tp=2, ep=2), 3),
        (4, ParallelConfig(etp=2, ep=2), 3),
        (4, ParallelConfig(tp=4, etp=4), 3),
        (8, ParallelConfig(tp=8, ep=4), 2),  # 14 tokens over 8 ranks: nobody has more than two
    ],
)
def test_the_host_waits_for_nothing_and_shapes_do_not_depend_on_the_routing(
    ranks: Ranks, world: int, parallel: ParallelConfig, rows: int
) -> None:
    even, skewed = (ranks.run(pass_through, world, parallel, skew) for skew in (False, True))
    peers, e = parallel.ep * parallel.etp, 12 // parallel.ep
    for (shapes, kept), (others, few) in zip(even, skewed, strict=True):
        assert shapes == others == [(12 * rows, HIDDEN), (12 * rows,), (e * rows * peers, HIDDEN), (rows * peers,) * e]
        assert few <= kept
    assert sum(few for _, few in skewed) < sum(kept for _, kept in even), "all tokens to three experts drop more"


def test_outside_training_nothing_is_padded_and_as_much_is_dropped() -> None:
    layer, job = MoELayer(PADDED, HIDDEN, 1.0, place_on()), (5, 8)
    fill(layer)
    hidden = draw(3, 13, HIDDEN)
    training, evaluation = (layer(hidden, inputs(*job, scope=scope)) for scope in (scope_of(job), None))
    assert training[1].static_rows == math.ceil(0.75 * 3 * 13 / 12)
    assert evaluation[1].static_rows is None
    assert torch.equal(training[1].experts_TK, evaluation[1].experts_TK)
    assert bool((training[1].experts_TK < 0).any())
    torch.testing.assert_close(training[0], evaluation[0], rtol=1e-12, atol=1e-12)


def test_b6_the_sequence_loss_of_a_skewed_router_is_that_without_padding() -> None:
    """A padded map would give every expert as many tokens as any other, and a loss of just its coefficient."""
    router = replace(MODEL.router, balance=(AuxLoss(scope="sequence", coefficient=1.0),))
    losses = []
    for capacity in (None, Capacity(factor=1.25, pad=True)):
        layer = MoELayer(replace(MODEL, router=router, capacity=capacity), HIDDEN, 1.0, place_on())
        fill(layer)
        with torch.no_grad():
            layer.router.weight[:3] += 10 * draw(1, HIDDEN)
        hidden = draw(1, HIDDEN) + 0.1 * draw(2, 13, HIDDEN)
        routing = layer(hidden, inputs(5, 8, scope=scope_of((5, 8))))[1]
        assert routing.balance is not None
        losses.append(routing.balance.by_name["aux_sequence"])
    assert torch.equal(losses[0], losses[1])
    assert float(losses[0].detach()) > 1.3


# --------------------------------------------------------------------------------------------------- the budget of a rank


def taken_by_hand(choices: Sequence[Sequence[Sequence[int]]], experts: int, top_k: int, budget: float) -> list:
    """Round after round each rank hands each destination its next choice, as long as that one takes any."""
    ep = len(choices)
    kept = [[[False] * len(row) for row in of_rank] for of_rank in choices]
    for to in range(ep):
        queues = [
            [
                (t, k)
                for t, row in enumerate(of_rank)
                for k, e in enumerate(row)
                if e >= 0 and e // (experts // ep) == to
            ]
            for of_rank in choices
        ]
        left = math.floor(len(choices[to]) * top_k * budget)
        while left and any(queues):
            for source in range(ep):
                if queues[source] and left:
                    t, k = queues[source].pop(0)
                    kept[source][t][k] = True
                    left -= 1
    return kept


def take(rank: int, world: int, choices: list[list[list[int]]], budget: float) -> torch.Tensor:
    mine = torch.tensor(choices[rank], dtype=torch.int64).reshape(-1, 3)
    return within_budget(mine, experts=8, top_k=3, budget=budget, ep=groups_for(ParallelConfig(ep=world)).ep)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_c8_a_rank_takes_at_most_its_budget_dealt_out_evenly_and_in_order(ranks: Ranks, world: int) -> None:
    generator = torch.Generator().manual_seed(world)
    for tokens, budget, only in [
        ((5, 3, 7, 1), 0.5, 8),
        ((5, 3, 7, 1), 1.0, 3),
        ((0, 13, 2, 1), 1.25, 8),
        ((4, 4, 4, 4), 100.0, 4),
        ((0, 0, 0, 0), 1.0, 8),
        ((9, 2, 3, 2), 0.1, 8),
    ]:
        choices = []
        for count in tokens[:world]:
            drawn_ = torch.rand(count, only, generator=generator).argsort(1)[:, :3]
            drawn_[torch.rand(count, 3, generator=generator) < 0.2] = -1
            choices.append(drawn_.tolist())
        found = ranks.run(take, world, choices, budget)
        assert [kept.tolist() for kept in found] == taken_by_hand(choices, 8, 3, budget)
        arriving = [0] * world
        for of_rank, kept in zip(choices, found, strict=True):
            for row, keeps in zip(of_rank, kept.tolist(), strict=True):
                for e, keep in zip(row, keeps, strict=True):
                    arriving[e // (8 // world)] += keep
        assert all(n <= math.floor(t * 3 * budget) for n, t in zip(arriving, tokens[:world], strict=True))


def with_budget(rank: int, world: int, dispatcher: DispatcherName, budget: float | None) -> tuple[torch.Tensor, ...]:
    """Output, its gradient, and what the layer says it moved, where all tokens like the experts of the first rank."""
    parallel = ParallelConfig(ep=world, dispatcher=dispatcher, expert_budget=budget)
    groups = groups_for(parallel)
    layer = MoELayer(MODEL, HIDDEN, 1.0, place_on(groups, parallel))
    fill(layer)
    assert layer.router.bias is not None
    layer.router.bias.zero_()
    with torch.no_grad():
        layer.router.weight[:3] += 10 * draw(1, HIDDEN)
    hidden = (draw(1, HIDDEN) + 0.1 * draw(2 + rank, 6 - rank, HIDDEN)).requires_grad_()
    out, routing = layer(hidden, inputs(6 - rank))
    out.sum().backward()
    assert hidden.grad is not None and routing.moved is not None
    kept = routing.experts_TK
    if budget is not None:
        assert routing.chosen_TK is not None
        assert bool(((kept == routing.chosen_TK) | (kept == -1)).all())
        assert torch.equal(routing.counts_E, torch.bincount(kept.flatten() + 1, minlength=13)[1:])
    moved = routing.moved
    return out, hidden.grad, torch.stack([moved.routed, moved.dropped, moved.saved])


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "flex"])
def test_c8_c10_a_layer_counts_what_was_routed_dropped_and_sent_once(ranks: Ranks, dispatcher: DispatcherName) -> None:
    everything, half = (ranks.run(with_budget, 2, dispatcher, budget) for budget in (None, 0.5))
    routed, dropped, saved = (sum(int(rank[2][i]) for rank in everything) for i in range(3))
    assert (routed, dropped) == (11 * 3, 0), "nothing is dropped: T * K rows"
    assert saved == (11 * 2 if dispatcher == "flex" else 0), "all three experts of a token lie on the first rank"
    routed, dropped, _ = (sum(int(rank[2][i]) for rank in half) for i in range(3))
    assert (routed, dropped) == (math.floor(6 * 3 * 0.5), 11 * 3 - math.floor(6 * 3 * 0.5))
    assert not torch.equal(everything[0][0], half[0][0])


def test_c8_every_dispatcher_drops_the_same(ranks: Ranks) -> None:
    first, *others = (ranks.run(with_budget, 2, name, 0.5) for name in ("allgather", "alltoall", "flex"))
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(mine[1], theirs[1], rtol=1e-12, atol=1e-12)


def chosen_with_budget(rank: int, world: int, dispatcher: DispatcherName) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Output of a layer whose experts choose, its gradient, and the rows that it sends to rank 0's experts."""
    parallel = ParallelConfig(ep=world, dispatcher=dispatcher, expert_budget=0.25)
    groups = groups_for(parallel)
    model = replace(MODEL, router=replace(MODEL.router, selection=ExpertChoice(), balance=(ZLoss(coefficient=0.1),)))
    layer = MoELayer(model, HIDDEN, 1.0, place_on(groups, parallel))
    fill(layer)
    hidden = (draw(2 + rank, 6, HIDDEN) * (1 + rank)).requires_grad_()
    given = replace(inputs(6), scope=scope_of((6,)))
    out, routing = layer(hidden, given)
    out.sum().backward()
    assert hidden.grad is not None
    return out.detach(), hidden.grad, int(routing.counts_E[: 12 // world].sum())


def test_ranks_with_a_budget_drop_what_experts_chose_and_every_dispatcher_the_same(ranks: Ranks) -> None:
    first, *others = (ranks.run(chosen_with_budget, 2, name) for name in ("allgather", "alltoall", "flex"))
    # Every expert chooses 2 of the 6 tokens of each rank, so that 24 rows want to go to each rank.
    assert sum(rows for _, _, rows in first) == math.floor(6 * 3 * 0.25), "rank 0 takes no more than its budget"
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(mine[1], theirs[1], rtol=1e-12, atol=1e-12)
