"""Jitter on what routers see: numbers of a token and a feature alone, in training alone, the same under every mapping."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from core.config.architecture import ModelConfig, MoE
from core.config.mapping import ParallelConfig
from core.moe.noise import jitter
from core.moe.router import RouterInputs
from core.state.inventory import initialise
from core.transformer.block import Block
from core.transformer.context import BatchPosition
from core.transformer.stage import Stage, build_model
from tests.core.moe.test_router import packed, router_of
from tests.core.tiny import Case, deepseek, losses_of, microbatches, mixtral, total_of, train, train_all
from tests.ranks import Ranks


def jittery(model: ModelConfig, reach: float = 0.3) -> ModelConfig:
    """Routers whose input is shaken."""

    def shaken(mlp: object) -> object:
        return replace(mlp, router=replace(mlp.router, jitter=reach)) if isinstance(mlp, MoE) else mlp

    return replace(model, layers=tuple(replace(x, mlp=shaken(x.mlp)) for x in model.layers))  # type: ignore[arg-type]


def built(model: ModelConfig) -> Stage:
    stage = build_model(model, dtype=torch.float64)
    initialise(stage, 7)
    return stage


def test_factors_fill_the_interval_around_one_evenly() -> None:
    factors = jitter(0.25, "a", torch.arange(500), 41, seed=3, step=1)
    assert 0.75 < factors.min() < 0.7501 and 1.2499 < factors.max() < 1.25
    assert factors.mean().item() == pytest.approx(1.0, abs=4 * 0.25 / 3**0.5 / (500 * 41) ** 0.5)
    assert factors.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.02)


def test_a_factor_is_that_of_its_token_and_feature_whoever_draws_it() -> None:
    factors = jitter(0.1, "a", torch.arange(20), 9, seed=3, step=1)
    some = torch.tensor([17, 2, 2, 0])
    assert torch.equal(jitter(0.1, "a", some, 9, seed=3, step=1), factors[some])
    assert torch.equal(jitter(0.1, "a", some, 6, seed=3, step=1), factors[some, :6])
    for other in (
        jitter(0.1, "b", some, 9, seed=3, step=1),
        jitter(0.1, "a", some, 9, seed=4, step=1),
        jitter(0.1, "a", some, 9, seed=3, step=2),
    ):
        assert (other != factors[some]).double().mean() > 0.99
    assert jitter(0.1, "a", some[:0], 9, seed=3, step=1).shape == (0, 9)


def test_the_router_sees_its_input_times_the_factors() -> None:
    router = router_of(jittery(mixtral()).layers[0].mlp.router, experts=4, top_k=2, hidden=3)  # type: ignore[union-attr]
    hidden = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = jitter(0.9, "a", torch.arange(5), 3, seed=0, step=0)
    plain = router(hidden * noise, RouterInputs(packing=packed(5)))
    found = router(hidden, RouterInputs(packing=packed(5), noise_TH=noise))
    assert torch.equal(found.weights_TK, plain.weights_TK) and torch.equal(found.experts_TK, plain.experts_TK)


def test_training_is_jittered_by_seed_and_step_and_evaluation_is_not() -> None:
    still, shaken = built(mixtral()), built(jittery(mixtral()))
    batch = microbatches(0)[0]
    assert batch.position is not None
    loss = total_of(shaken, batch).item()
    assert loss == total_of(shaken, batch).item()
    assert loss != total_of(still, batch).item()
    for change in ({"seed": 8}, {"step": 1}, {"first": 1}):
        other = replace(batch, position=replace(batch.position, **change))
        assert total_of(shaken, other).item() != loss, change
    for purpose in ("loss", "hidden"):
        ours, theirs = (model.run(0, None, batch, purpose=purpose) for model in (shaken, still))
        one, other = (made.tokens if purpose == "loss" else made.out for made in (ours, theirs))
        assert one is not None and other is not None and torch.equal(one, other)


def test_layers_are_shaken_apart() -> None:
    """A model of equal layers: what jitter adds to the first and the second router differs."""
    seen: dict[str, torch.Tensor] = {}
    model = built(jittery(mixtral()))
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for name, router in block.named_modules():
            if name.endswith("router"):
                router.register_forward_hook(
                    lambda _, given, __, path=block.path: seen.update({path: given[1].noise_TH})
                )
    losses_of(model, microbatches(0)[0])
    assert len(seen) == 2 and (seen["layers.0"] != seen["layers.1"]).double().mean() > 0.99


def test_a_microbatch_that_does_not_know_its_position_cannot_be_jittered() -> None:
    batch = replace(microbatches(0)[0], position=None)
    with pytest.raises(AssertionError, match=r"layers\.0 draws jitter in training"):
        total_of(built(jittery(mixtral())), batch)
    total_of(built(mixtral()), batch)


def test_a_layer_that_is_computed_again_is_jittered_the_same() -> None:
    gradients = []
    for again in (False, True):
        model = built(jittery(deepseek()))
        if again:
            for block in (module for module in model.modules() if isinstance(module, Block)):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        total_of(model, microbatches(0)[0]).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is not None and other is not None and torch.equal(gradient, other), name


def _split(parallel: ParallelConfig, world: int) -> int:
    """Windows of a microbatch that spread over as many replicas as there are."""
    return min(4, 8 * parallel.tp * parallel.cp * parallel.pp // world)


MAPPINGS = {
    2: [ParallelConfig(cp=2), ParallelConfig(ep=2)],
    4: [ParallelConfig(tp=2, pp=2), ParallelConfig(cp=2, ep=4)],
}


@pytest.mark.parametrize("world", MAPPINGS)
def test_every_mapping_jitters_the_same(ranks: Ranks, world: int) -> None:
    model = jittery(mixtral())
    alone = train(Case(model=model, microbatch=4, steps=1)).results
    cases = [
        Case(model=model, parallel=parallel, microbatch=_split(parallel, world), steps=1)
        for parallel in MAPPINGS[world]
    ]
    for done in ranks.run(train_all, world, cases):
        for case, trained in zip(cases, done, strict=True):
            for found, expected in zip(trained.results, alone, strict=True):
                assert found.loss == pytest.approx(expected.loss, rel=1e-9), case.parallel
                assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-9), case.parallel
                assert found.expert_counts == expected.expert_counts


def test_a_position_says_where_the_first_token_lies() -> None:
    firsts = [batch.position for batch in microbatches(3, position=1, replicas=2, microbatch=2)]
    assert firsts == [BatchPosition(seed=7, step=3, first=first * 13) for first in (2, 6)]
