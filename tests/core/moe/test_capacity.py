"""Experts that take only so many rows: against a plain loop, and the same answer however a microbatch lies on ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.attention.packing import packing_of
from core.config.architecture import Capacity
from core.config.mapping import ParallelConfig
from core.kernels.routing import within_capacity
from core.moe.capacity import kept_choices
from core.parallel.groups import groups_for
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
