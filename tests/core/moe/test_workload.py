"""Forced routing: each load is what its name says, K different experts a token, and of no mapping's doing (C8, C11)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.config.architecture import MoE, Router
from core.config.run import WorkloadName
from core.moe.replay import moe_layers
from core.moe.workload import Workload
from core.state.inventory import initialise
from core.transformer.stage import build_model
from tests.core.tiny import deepseek, losses_of, microbatches, total_of

NAMES: tuple[WorkloadName, ...] = get_args(WorkloadName)
LAYER = "layers.3"


def moe(experts: int, top_k: int) -> MoE:
    return MoE(experts=experts, top_k=top_k, expert_ffn=8, router=Router(score="softmax", normalise=True))


def load(name: WorkloadName, experts: int = 12, top_k: int = 3, **more: Any) -> Workload:
    given = {"seed": 5, "step": 0, "first": 0, "ep": 4} | more
    return Workload(name=name, layers={LAYER: moe(experts, top_k), "layers.4": moe(experts, top_k)}, **given)


def chosen(workload: Workload, tokens: int, layer: str = LAYER) -> Tensor:
    return workload.of(layer, torch.arange(tokens))


def counts(workload: Workload, tokens: int) -> list[int]:
    return torch.bincount(chosen(workload, tokens).flatten(), minlength=workload.layers[LAYER].experts).tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_c11_every_token_gets_k_different_experts_that_there_are(data: st.DataObject) -> None:
    ep, held = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 5))
    experts = ep * held
    top_k = data.draw(st.integers(1, experts))
    name = data.draw(st.sampled_from(NAMES))
    step, first = data.draw(st.integers(0, 100)), data.draw(st.integers(0, 10**12))
    found = chosen(load(name, experts, top_k, ep=ep, step=step, first=first), 23)
    assert found.shape == (23, top_k) and found.dtype == torch.int64
    assert all(len(set(row)) == top_k and min(row) >= 0 and max(row) < experts for row in found.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_a_token_gets_the_same_experts_wherever_its_microbatch_begins_and_whoever_asks(name: WorkloadName) -> None:
    whole = chosen(load(name, step=3), 40)
    mine = torch.tensor([9, 0, 4])
    assert torch.equal(load(name, step=3, first=17).of(LAYER, mine), whole[mine + 17])
    assert chosen(load(name), 0).shape == (0, 3)


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_seeds_have_loads_of_their_own(name: WorkloadName) -> None:
    assert not torch.equal(chosen(load(name), 40), chosen(load(name), 40, "layers.4"))
    assert not torch.equal(chosen(load(name), 40), chosen(load(name, seed=6), 40))


@pytest.mark.parametrize("tokens", [1, 7, 8, 31])
def test_balanced_gives_every_expert_the_same_up_to_one(tokens: int) -> None:
    found = counts(load("balanced", first=13), tokens)
    assert max(found) - min(found) <= 1 and sum(found) == tokens * 3


def test_balanced_spreads_the_experts_of_a_token_over_ranks_as_training_does() -> None:
    """Neighbouring experts lie on one rank: tokens that took those would be cheaper to send than any that are trained on."""
    ranks = [len({expert // 16 for expert in row}) for row in chosen(load("balanced", 128, 8), 16).tolist()]
    assert sum(ranks) / len(ranks) > 4


def test_a_hot_expert_is_in_every_token_and_the_others_share_the_rest_evenly() -> None:
    found = counts(load("hot_expert"), 44)
    (hot,) = [expert for expert, count in enumerate(found) if count == 44]
    assert set(found[:hot] + found[hot + 1 :]) == {8}
    assert counts(load("hot_expert", step=9), 44)[hot] == 44


def test_rotating_has_another_hot_expert_each_step_until_all_were() -> None:
    hot = [counts(load("rotating", step=step), 44).index(44) for step in range(24)]
    assert sorted(hot[:12]) == list(range(12)) and hot[12:] == hot[:12]


@pytest.mark.parametrize(("top_k", "on_it"), [(2, 2), (3, 3), (5, 3)])
def test_a_hot_rank_gets_as_many_choices_of_a_token_as_it_has_experts_for(top_k: int, on_it: int) -> None:
    found = chosen(load("hot_rank", top_k=top_k), 20) // 3
    ranks = [Counter(row) for row in found.tolist()]
    (hot,) = {row.most_common(1)[0][0] for row in ranks} if on_it * 2 > top_k else {0}
    assert all(row[hot] == on_it for row in ranks)
    on_rank = [count for expert, count in enumerate(counts(load("hot_rank", top_k=top_k), 20)) if expert // 3 == hot]
    assert max(on_rank) - min(on_rank) <= 1


@pytest.mark.parametrize(("top_k", "used"), [(3, 6), (8, 8)])
def test_zero_load_leaves_the_higher_experts_without_a_token(top_k: int, used: int) -> None:
    found = counts(load("zero_load", top_k=top_k), 24)
    assert min(found[:used]) > 0 and max(found[:used]) - min(found[:used]) <= 1
    assert found[used:] == [0] * (12 - used)


def test_a_model_goes_where_it_is_told_and_its_gates_and_balance_losses_are_its_own() -> None:
    """Weights come from the scores, so that gradients reach the gate; the balance losses look at what routers would choose."""
    config = deepseek()
    model = build_model(config, dtype=torch.float64)
    initialise(model, 7)
    batch = microbatches(0)[0]
    forced = replace(
        batch, prescribed=Workload(name="balanced", seed=1, step=0, first=0, layers=moe_layers(config), ep=1)
    )
    own, made = losses_of(model, batch), losses_of(model, forced)
    assert set(made.routings) == set(moe_layers(config))
    for routing in made.routings.values():
        assert routing.counts_E.tolist() == [26] * 16
    assert made.balance["layers.1/z"] == own.balance["layers.1/z"]
    assert made.balance["layers.1/aux_sequence"] == own.balance["layers.1/aux_sequence"]
    total_of(model, forced).backward()
    assert all(
        p.grad is not None and float(p.grad.abs().max()) > 1e-6
        for name, p in model.named_parameters()
        if name.endswith("router.weight")
    )


def test_a_layer_of_fewer_experts_than_choices_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="fewer than top_k=5"):
        chosen(load("balanced", 4, 5), 3)
