"""Tokens that travel once: how many bytes that saves, counted from the routing token by token, and the same numbers on eight ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from core.config.mapping import DispatcherName, ParallelConfig
from core.moe.dispatch.make import make_dispatcher
from core.moe.router import Routing
from core.parallel.groups import groups_for
from core.parallel.meter import Meter
from tests.core.moe.test_dispatch import HIDDEN, TOP_K, Work, check, moe_of, move, work
from tests.core.shares import place_on
from tests.ranks import Ranks

# Of a token that is sent: its numbers there and back, and again in the backward; the weights of its choices and their gradients, all
# float64; which experts it chose and where it comes from, int32. Of a row of the all-to-all: the same with one weight.
PER_TOKEN = 4 * HIDDEN * 8 + 2 * TOP_K * 8 + (TOP_K + 1) * 4
PER_ROW = 4 * HIDDEN * 8 + 2 * 8


def sent_by(rank: int, world: int, job: Work, name: DispatcherName) -> dict[str, int]:
    """Bytes that leave this rank by axis, forward and backward."""
    meter = Meter()
    move(rank, job, name, groups_for(job.parallel, meter=meter))
    return meter.by_axis()


def total(ranks: Ranks, job: Work, name: DispatcherName) -> dict[str, int]:
    found: dict[str, int] = {}
    for by_axis in ranks.run(sent_by, len(job.cuts), job, name):
        for axis, sent in by_axis.items():
            found[axis] = found.get(axis, 0) + sent
    return {axis: sent for axis, sent in found.items() if sent}


def needs(job: Work) -> Iterator[tuple[int, set[int], int]]:
    """Of every token: its rank, the ranks that hold some of its experts, and how many of its experts are on other ranks."""
    ep = job.parallel.ep
    homes = [rank for rank, count in enumerate(job.cuts) for _ in range(count)]
    for home, choices in zip(homes, job.chosen, strict=True):
        ranks = [e // (job.experts // ep) for e in choices if e >= 0]
        yield home, set(ranks), sum(rank != home for rank in ranks)


@pytest.mark.parametrize(
    "job",
    [
        work(8, (7, 4)),
        work(12, (5, 0, 7, 3), padded=True),
        work(4, (5, 2, 7, 3)),
        work(12, (1, 2, 3, 4), only=range(4)),
    ],
)
def test_a_token_is_sent_once_to_each_rank_that_needs_it_where_rows_are_sent_once_for_each_expert(
    ranks: Ranks, job: Work
) -> None:
    ep = job.parallel.ep
    tokens = sum(len(to - {home}) for home, to, _ in needs(job))
    rows = sum(remote for _, _, remote in needs(job))
    once, each = (total(ranks, job, name)["ep"] for name in ("flex", "alltoall"))
    assert once == tokens * PER_TOKEN + ep * (ep - 1) * 8
    assert each == rows * PER_ROW + (ep - 1) * job.experts * 8
    assert tokens < rows or ep == job.experts


@pytest.mark.parametrize(
    "job",
    [
        work(8, (5, 0, 7, 3), parallel=ParallelConfig(ep=4, ep_per_node=2)),
        work(16, (3, 2, 0, 1, 4, 2, 2, 1), padded=True, parallel=ParallelConfig(ep=8, ep_per_node=2)),
        work(16, (3, 2, 0, 1, 4, 2, 2, 1), parallel=ParallelConfig(ep=8, ep_per_node=4)),
    ],
)
def test_between_nodes_a_token_is_sent_once_to_each_node_and_inside_once_to_each_rank(ranks: Ranks, job: Work) -> None:
    ep, size = job.parallel.ep, job.parallel.ep_per_node
    nodes = ep // size
    between = inside = 0
    for home, to, _ in needs(job):
        reached = {rank // size for rank in to}
        between += len(reached - {home // size})
        # The rank at the same place as home hands it on.
        inside += sum(rank % size != home % size for rank in to)
    found = total(ranks, job, "flex")
    assert found == {
        "nodes": between * PER_TOKEN + ep * (nodes - 1) * 8,
        "node": inside * PER_TOKEN + ep * (size - 1) * 8,
    }
    flat = total(
        ranks, Work(experts=job.experts, cuts=job.cuts, chosen=job.chosen, parallel=ParallelConfig(ep=ep)), "flex"
    )
    assert between < sum(len({rank for rank in to if rank // size != home // size}) for home, to, _ in needs(job))
    assert found["nodes"] < flat["ep"]


EIGHT = [
    work(16, (3, 2, 0, 1, 4, 2, 2, 1), padded=True, parallel=ParallelConfig(ep=8, ep_per_node=2)),
    work(16, (0, 2, 0, 1, 4, 2, 0, 1), parallel=ParallelConfig(ep=8, ep_per_node=4)),
    work(8, (3, 2, 0, 1, 4, 2, 2, 1), ffn=7, parallel=ParallelConfig(ep=4, ep_per_node=2, etp=2)),
    work(8, (1, 2, 0, 1, 1, 2, 2, 1), multiple=3, parallel=ParallelConfig(ep=4, ep_per_node=2)),
]


def move_on_nodes(rank: int, world: int) -> list:
    return [move(rank, job, "flex", groups_for(job.parallel)) for job in EIGHT]


def test_nodes_of_two_and_of_four_ranks_give_the_loop_over_tokens_and_choices(ranks: Ranks) -> None:
    found = ranks.run(move_on_nodes, 8, timeout_seconds=40.0)
    for i, job in enumerate(EIGHT):
        check([rank[i] for rank in found], job)


def whole_numbers(rank: int, world: int) -> torch.Tensor:
    """One token of ones in bfloat16 whose experts on four ranks multiply by 256, 1 and 1: 256 + 1 is 256 there."""
    job = work(4, (1, 1, 1, 1))
    dispatcher = make_dispatcher(moe_of(job), place_on(groups_for(job.parallel), ParallelConfig(dispatcher="flex")))
    routing = Routing(
        experts_TK=torch.tensor([[0, 2, 3]]),
        weights_TK=torch.tensor([[256.0, 1.0, 1.0]]),
        counts_E=torch.tensor([1, 0, 1, 1]),
        balance=None,
    )
    rows, plan = dispatcher.dispatch_preprocess(torch.ones(1, HIDDEN, dtype=torch.bfloat16), routing)
    arrived, plan = dispatcher.dispatch_postprocess(dispatcher.dispatch(rows, plan), plan)
    made = (arrived.hidden_RH * arrived.weights_R[:, None]).to(torch.bfloat16)
    back = dispatcher.combine(dispatcher.combine_preprocess(made, plan), plan)
    return dispatcher.combine_postprocess(back, plan)


def test_what_the_ranks_made_of_a_token_is_summed_in_float32(ranks: Ranks) -> None:
    assert all((out == 258.0).all() for out in ranks.run(whole_numbers, 4))
