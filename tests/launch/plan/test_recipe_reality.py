"""The memory plan of runs under recipes of fewer bits, against real ranks: what every part of them keeps, holds and sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import ComputeName, PrecisionConfig
from core.config.recipe import MXFP8, NVFP4, RECIPES, InputGradient, Recipe, WeightGradient
from core.config.run import RunConfig
from launch.plan.memory import MemoryPlanner
from tests.launch.plan.reality import as_planned, measure
from tests.launch.plan.runs import tiny_run
from tests.ranks import Ranks

PLAIN = replace(
    MXFP8,
    name="forward alone",
    input_gradient=InputGradient(gradient=None, weight=None),
    weight_gradient=WeightGradient(gradient=None, input=None),
)
PARTLY = replace(
    NVFP4,
    name="partly",
    high=("layers.*.attention.*", "mtp.*.mlp.experts.down", "layers.1.mlp.experts.gate_up"),
    high_first=1,
)
CASES: dict[str, tuple[Recipe, str, ParallelConfig, int, MemoryConfig]] = {
    "delayed, experts on ranks": (
        RECIPES["fp8_delayed"],
        "deepseek",
        ParallelConfig(pp=2, ep=2),
        4,
        MemoryConfig(),
    ),
    "current, tokens cut": (
        RECIPES["fp8_current"],
        "qwen3",
        ParallelConfig(tp=2, cp=2, ep=2, dispatcher="allgather"),
        4,
        MemoryConfig(),
    ),
    "blockwise, experts cut": (
        RECIPES["fp8_blockwise"],
        "mixtral",
        ParallelConfig(tp=2, etp=2),
        2,
        MemoryConfig(recompute=("core_attn", "moe_act")),
    ),
    "mxfp8, whole shards": (
        RECIPES["mxfp8"],
        "qwen3",
        ParallelConfig(ep=2, sharding="fsdp", dispatcher="flex"),
        2,
        MemoryConfig(),
    ),
    "mxfp8, everything again": (
        RECIPES["mxfp8"],
        "deepseek",
        ParallelConfig(pp=2, vpp=2, ep=2),
        4,
        MemoryConfig(recompute=("full",)),
    ),
    "nvfp4, halved backwards": (
        RECIPES["nvfp4"],
        "deepseek",
        ParallelConfig(tp=2, pp=2, schedule="zero_bubble"),
        4,
        MemoryConfig(recompute=("mla_up_proj", "mlp")),
    ),
    "some layers alone": (PARTLY, "deepseek", ParallelConfig(ep=2), 2, MemoryConfig()),
    "last layer high": (replace(MXFP8, high_last=1), "deepseek", ParallelConfig(pp=2), 2, MemoryConfig()),
    "forward alone": (PLAIN, "mixtral", ParallelConfig(ep=2), 2, MemoryConfig()),
}


@pytest.fixture(scope="module")
def planner() -> MemoryPlanner:
    return MemoryPlanner()


def _run(name: str) -> RunConfig:
    recipe, model, parallel, ranks, memory = CASES[name]
    return tiny_run(model, parallel, ranks, memory, PrecisionConfig(recipe=recipe))


PRIMARY: dict[str, tuple[Recipe, str, ParallelConfig, int]] = {
    "blockwise, weights cut": (RECIPES["fp8_blockwise"], "mixtral", ParallelConfig(tp=2, ep=2), 4),
    "current, alone": (RECIPES["fp8_current"], "qwen3", ParallelConfig(), 1),
    "mxfp8, both roundings": (RECIPES["mxfp8"], "deepseek", ParallelConfig(ep=2), 2),
    "nvfp4, weights cut": (RECIPES["nvfp4"], "deepseek", ParallelConfig(tp=2), 2),
    "some layers alone": (PARTLY, "deepseek", ParallelConfig(ep=2), 2),
}


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PRIMARY)
def test_weights_in_low_precision_are_held_and_fetched_as_planned(
    name: str, compute: ComputeName, ranks: Ranks, planner: MemoryPlanner
) -> None:
    recipe, model, parallel, world = PRIMARY[name]
    precision = PrecisionConfig(compute=compute, recipe=recipe, primary=True)
    run = tiny_run(model, parallel, world, precision=precision)
    for rank, measured in enumerate(ranks.run(measure, world, run)):
        as_planned(measured, planner, run, rank)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_holds_keeps_and_sends_under_a_recipe_what_its_plan_says(
    name: str, ranks: Ranks, planner: MemoryPlanner
) -> None:
    run = _run(name)
    for rank, measured in enumerate(ranks.run(measure, run.ranks, run)):
        as_planned(measured, planner, run, rank, kept=True)


def test_the_cases_meet_every_recipe() -> None:
    assert {recipe.name for recipe, *_ in CASES.values()} >= set(RECIPES)
