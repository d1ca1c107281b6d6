"""What rounding loses in a step: measured when it is due, over all ranks, and the same whoever holds which part."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from core.check import check
from core.config.mapping import ParallelConfig
from core.config.precision import PrecisionConfig
from core.config.recipe import MXFP8, NVFP4, Operand, Recipe
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.optim.make import make_optimizer
from core.parallel.groups import groups_for
from core.pipeline.layout import layout_of
from core.state.inventory import initialise
from core.training.insight import PrecisionInsight, precision_insight
from core.training.rounding import watching
from core.training.step import train_step
from core.transformer.quantise import quantisers
from core.transformer.stage import build_model
from tests.core.tiny import PLAIN, deepseek, microbatches, mixtral
from tests.ranks import Ranks

Insight = dict[str, dict[str, PrecisionInsight]]


def run_of(
    recipe: Recipe | None, parallel: ParallelConfig | None = None, *, ahead: bool = False, interval: int = 2
) -> RunConfig:
    return RunConfig(
        family="none",
        size="tiny",
        hardware="cpu",
        ranks=1,
        model=deepseek() if ahead else mixtral(),
        parallel=parallel or ParallelConfig(),
        train=TrainConfig(steps=5, sequence_tokens=13, global_batch=8, microbatch=2),
        optimizer=OptimizerConfig(learning_rate=1.0),
        data=DataConfig(),
        precision=PrecisionConfig(recipe=recipe, insight_interval=interval),
        checkpoint=CheckpointConfig(),
    )


def measured(run: RunConfig) -> Insight | None:
    """Of the second step, on this rank."""
    layout = layout_of(run.model, run.parallel)
    groups = groups_for(run.parallel, embedding_stages=layout.embedding_stages(run.model.tied_embeddings))
    model = build_model(
        run.model, groups=groups, parallel=run.parallel, recipe=run.precision.recipe, seed=7, dtype=torch.float32
    )
    initialise(model, 7)
    optimizer = make_optimizer(model, PLAIN, groups, run.parallel)
    batches = microbatches(0, groups.dp.position, groups.dp.size, 2, groups)
    with watching(model, run, 2) as watch:
        train_step(model, optimizer, batches, rate=0.1, groups=groups)
    assert all(quantiser.watch is None for quantiser in quantisers(model))
    return None if watch is None else watch.insight(groups)


def measured_on(rank: int, world: int, run: RunConfig) -> Insight | None:
    return measured(run)


@pytest.mark.parametrize(("step", "due"), [(1, False), (2, True), (3, False), (4, True), (5, True)])
def test_it_is_due_every_interval_and_in_the_last_step(step: int, due: bool) -> None:
    run = run_of(MXFP8)
    model = build_model(run.model, groups=groups_for(run.parallel), parallel=run.parallel, recipe=MXFP8, seed=7)
    with watching(model, run, step) as watch:
        assert (watch is not None) == due
        assert all((quantiser.watch is not None) == due for quantiser in quantisers(model))
    assert all(quantiser.watch is None for quantiser in quantisers(model))


@pytest.mark.parametrize(
    "run",
    [run_of(MXFP8, interval=0), run_of(None), run_of(replace(MXFP8, high=("layers.*",)))],
    ids=["never", "high", "all layers high"],
)
def test_nothing_is_measured_where_nobody_asks_or_nothing_is_rounded(run: RunConfig) -> None:
    assert measured(run) is None


def test_every_layer_tells_of_its_three_operands_and_modules_ahead_too() -> None:
    found = measured(run_of(MXFP8, ahead=True))
    assert found is not None and list(found) == ["layers.0", "layers.1", "mtp.0", "mtp.1"]
    for operands in found.values():
        assert list(operands) == ["input", "weight", "gradient"]
        for told in operands.values():
            # E4M3 keeps 4 bits: at most 2^-4 of a number is lost, of uniform ones about a half of it over √3.
            assert 0.01 < told.relative_error < 2**-4
            assert told.amax > 0 and told.saturated == 0 and sum(told.scales) > 0


def test_layers_that_stay_high_tell_nothing_and_four_bits_lose_more() -> None:
    found = measured(run_of(replace(NVFP4, high_last=1)))
    assert found is not None and list(found) == ["layers.0"]
    assert all(0.06 < told.relative_error < 0.3 for told in found["layers.0"].values())


def test_an_operand_that_is_not_rounded_is_left_out() -> None:
    forward = replace(MXFP8.forward, input=None, weight=None)
    gradients = replace(MXFP8.input_gradient, gradient=None, weight=None)
    found = measured(run_of(replace(MXFP8, forward=forward, input_gradient=gradients)))
    assert found is not None and list(found["layers.1"]) == ["input", "gradient"]


def test_gradients_of_e5m2_lose_twice_as_much_as_those_of_e4m3() -> None:
    wide = Operand(element="e5m2", scaling="mx")
    coarse = replace(
        MXFP8,
        input_gradient=replace(MXFP8.input_gradient, gradient=wide),
        weight_gradient=replace(MXFP8.weight_gradient, gradient=wide),
    )
    fine, found = measured(run_of(MXFP8)), measured(run_of(coarse))
    assert fine is not None and found is not None
    ratio = found["layers.0"]["gradient"].relative_error / fine["layers.0"]["gradient"].relative_error
    assert 1.6 < ratio < 2.4


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(), ParallelConfig(ep=2), ParallelConfig(pp=2)], ids=["dp", "ep", "pp"]
)
def test_two_ranks_tell_what_one_does_and_both_the_same(ranks: Ranks, parallel: ParallelConfig) -> None:
    alone = measured(run_of(MXFP8))
    first, second = ranks.run(measured_on, 2, run_of(MXFP8, parallel))
    assert alone is not None and first == second and list(first) == list(alone)
    for layer, operands in alone.items():
        # Rows that weights are multiplied by are cut into other blocks where others share them; forward rows and gradients are not.
        for role in ("input", "gradient"):
            assert first[layer][role].amax == pytest.approx(operands[role].amax, rel=1e-5)
            assert first[layer][role].relative_error == pytest.approx(operands[role].relative_error, rel=0.1)


def test_sums_become_shares() -> None:
    told = precision_insight([8.0, 16.0, 1.0, 2.0, 4.0, 0.0, 3.0, 5.0], 7.5, -1)
    assert told == PrecisionInsight(
        relative_error=0.25, amax=7.5, saturated=0.25, flushed=0.5, scales=(0, 3, 5), smallest_exponent=-1
    )
    assert math.isnan(precision_insight([8.0, 16.0, math.nan, 0.0, 0.0], math.nan, -1).relative_error)


def test_an_interval_below_zero_is_refused() -> None:
    faults = {fault.setting: str(fault) for fault in check(run_of(None, interval=-1))}
    assert "0 or more" in faults["precision.insight_interval"]
    assert "precision.insight_interval" not in {fault.setting for fault in check(run_of(None, interval=0))}
