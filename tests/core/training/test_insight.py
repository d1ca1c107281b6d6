"""What a step tells of its experts: against plain arithmetic on what its routers chose, and the same under every mapping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from core.config.architecture import Capacity, ModelConfig, MoE
from core.config.mapping import ParallelConfig
from core.moe.dispatch.counts import count_moved
from core.moe.insight import logit_size
from core.moe.router import Routing
from core.state.inventory import initialise
from core.training.insight import LayerInsight, insight_of
from core.transformer.block import Block
from core.transformer.stage import build_model
from tests.core.tiny import WINDOW, Case, deepseek, losses_of, microbatches, mixtral, qwen3, train, train_all
from tests.ranks import Ranks


def insight(counts: Sequence[int], *, lost: float = 0, ep: int = 1) -> LayerInsight:
    return insight_of(counts, told=(lost, 0, 0), largest=0, tokens=1, ep=ep)


def test_entropy_is_one_for_an_even_load_and_zero_for_one_expert_that_has_all() -> None:
    assert insight([7] * 12).entropy == pytest.approx(1.0, abs=1e-12)
    assert insight([0, 0, 31]).entropy == 0.0 and not math.copysign(1, insight([0, 0, 31]).entropy) < 0
    assert insight([5]).entropy == 1.0
    shares = np.array([1, 2, 4]) / 7
    assert insight([1, 2, 4]).entropy == pytest.approx(-(shares * np.log2(shares)).sum() / np.log2(3), rel=1e-12)


def test_the_dropped_share_is_of_all_choices() -> None:
    assert insight([3, 4], lost=3).dropped == pytest.approx(0.3)
    assert insight([0, 0], lost=5).dropped == 1.0
    assert insight([3, 4]).dropped == 0.0


def test_the_busiest_rank_is_measured_against_the_mean_of_all() -> None:
    counts = [9, 0, 1, 2, 0, 0]
    assert insight(counts).rank_load == 1.0
    assert insight(counts, ep=3).rank_load == pytest.approx(9 / (12 / 3))
    assert insight(counts, ep=2).rank_load == pytest.approx(10 / (12 / 2))
    assert insight(counts, ep=6).rank_load == pytest.approx(9 / (12 / 6))


def test_a_layer_to_which_nothing_was_routed_has_zeros() -> None:
    assert set(asdict(insight_of([0, 0], told=(0, 0, 0), largest=0, tokens=0, ep=2)).values()) == {0.0}


def test_logits_of_padding_do_not_count_and_no_token_is_no_logit() -> None:
    logits = torch.tensor([[3.0, -4.0], [100.0, -200.0], [0.5, 1.0]], requires_grad=True)
    found = logit_size(logits, torch.tensor([True, False, True]))
    assert found.tolist() == [9 + 16 + 0.25 + 1, 4.0] and not found.requires_grad
    assert logit_size(logits, None)[1] == 200.0
    assert logit_size(torch.zeros(0, 5), None).tolist() == [0.0, 0.0]
    assert logit_size(logits, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_what_found_no_room_is_counted_and_padding_is_not() -> None:
    before = torch.tensor([[0, 1], [2, 0], [-1, -1]])
    after = torch.tensor([[0, -1], [-1, -1], [-1, -1]])
    full = count_moved(after, before, experts_per_rank=2, token_once=False)
    assert (int(full.routed), int(full.dropped), int(full.saved)) == (1, 3, 0)
    assert int(count_moved(before, None, experts_per_rank=2, token_once=False).dropped) == 0


def test_c10_rows_that_did_not_travel_are_told_where_a_token_goes_once_to_a_rank() -> None:
    """Experts 0 and 1 lie on one rank, 2 and 3 on another: one row of each of two tokens is saved."""
    chosen = torch.tensor([[0, 1, 2], [3, 2, -1], [-1, -1, -1]])
    moved = count_moved(chosen, None, experts_per_rank=2, token_once=True)
    assert (int(moved.routed), int(moved.saved)) == (5, 2)
    assert insight_of([1, 1, 2, 1], told=(0, 2, 0), largest=0, tokens=2, ep=2).saved == pytest.approx(2 / 5)


def tight(model: ModelConfig) -> ModelConfig:
    """Experts that have no room for all."""

    def changed(mlp: object) -> object:
        return replace(mlp, capacity=Capacity(factor=0.75, drop="weight")) if isinstance(mlp, MoE) else mlp

    return replace(model, layers=tuple(replace(x, mlp=changed(x.mlp)) for x in model.layers))  # type: ignore[arg-type]


MODELS = {"mixtral": tight(mixtral()), "qwen3": qwen3(), "deepseek": tight(deepseek())}


def test_a_step_tells_what_its_routers_did() -> None:
    """Logits are written down where routers make them, choices where they leave them."""
    case = Case(model=MODELS["deepseek"], steps=1)
    found = train(case).results[0]
    model = build_model(case.model, dtype=case.dtype)
    initialise(model, 7)
    inputs: dict[str, torch.Tensor] = {}
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for name, router in block.named_modules():
            if name.endswith("router"):
                router.register_forward_hook(lambda r, given, _, path=block.path: inputs.update({path: given[0]}))
    routings: dict[str, Routing] = losses_of(model, microbatches(0)[0]).routings
    assert set(found.insight) == set(routings) == {"layers.1", "mtp.0.layer", "mtp.1.layer"}
    for path, routing in routings.items():
        told, moe = found.insight[path], case.model.layers[-1].mlp
        assert isinstance(moe, MoE)
        weight = model.get_parameter(f"{path}.mlp.router.weight").detach().numpy()
        logits = inputs[path].detach().numpy() @ weight.T
        assert told.logit_max == pytest.approx(np.abs(logits).max(), rel=1e-9)
        assert told.logit_rms == pytest.approx(np.sqrt((logits**2).mean()), rel=1e-9)
        kept = int((routing.experts_TK >= 0).sum())
        assert kept < 8 * WINDOW * moe.top_k
        assert told.dropped == pytest.approx(1 - kept / (8 * WINDOW * moe.top_k), abs=1e-12)
        assert sum(found.expert_counts[path]) == kept


MAPPINGS = {
    2: [ParallelConfig(tp=2), ParallelConfig(cp=2, ep=2), ParallelConfig(pp=2), ParallelConfig(ep=2)],
    3: [ParallelConfig(cp=3)],
    4: [ParallelConfig(tp=2, pp=2), ParallelConfig(ep=4)],
}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], dict[str, LayerInsight]]:
    """One rank. A microbatch of so many windows decides what experts have room for."""
    return {
        (name, size): train(Case(model=model, steps=1, microbatch=size)).results[0].insight
        for name, model in MODELS.items()
        for size in (2, 8)
    }


@pytest.mark.parametrize("world", MAPPINGS)
def test_every_mapping_tells_the_same(
    ranks: Ranks, world: int, alone: dict[tuple[str, int], dict[str, LayerInsight]]
) -> None:
    names = [(name, parallel) for parallel in MAPPINGS[world] for name in MODELS]
    sizes = [8 if parallel.tp * parallel.cp * parallel.pp == world else 2 for _, parallel in names]
    cases = [
        Case(model=MODELS[name], parallel=parallel, steps=1, microbatch=size)
        for (name, parallel), size in zip(names, sizes, strict=True)
    ]
    for done in ranks.run(train_all, world, cases):
        for (name, parallel), size, trained in zip(names, sizes, done, strict=True):
            result = trained.results[0]
            expected = alone[name, size]
            assert set(result.insight) == set(expected)
            for layer, told in result.insight.items():
                rank_load = _rank_load(result.expert_counts[layer], parallel.ep)
                wanted = replace(expected[layer], rank_load=rank_load, saved=told.saved)
                assert asdict(told) == pytest.approx(asdict(wanted), rel=1e-9), (name, parallel, layer)


def _rank_load(counts: list[int], ep: int) -> float:
    held = np.array(counts).reshape(ep, -1).sum(1)
    return float(held.max() / held.mean())
