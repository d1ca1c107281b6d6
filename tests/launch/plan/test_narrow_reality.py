"""The memory plan of runs whose states take few bits or wait in host memory, against real ranks: every byte of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.check import check
from core.check.built import not_built
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import PrecisionConfig
from launch.plan.memory import MemoryPlanner
from tests.launch.plan.reality import as_planned, measure
from tests.launch.plan.runs import tiny_run
from tests.ranks import Ranks

BOTH = PrecisionConfig(compute="bfloat16", moments="bfloat16", main_gradients="bfloat16")
MOMENTS = PrecisionConfig(moments="bfloat16")
EIGHT = PrecisionConfig(compute="bfloat16", moments="float8", masters="remainder")
SIXTEEN = PrecisionConfig(compute="float16", moments="float16")


@pytest.mark.parametrize(
    ("model", "parallel", "world", "precision"),
    [
        ("deepseek", ParallelConfig(pp=2, ep=2, schedule="zero_bubble"), 4, BOTH),
        ("qwen3", ParallelConfig(sharding="fsdp", ep=2), 4, BOTH),
        ("mixtral", ParallelConfig(tp=2), 2, MOMENTS),
        ("deepseek", ParallelConfig(sharding="fsdp", tp=2, fsdp_replicas=2), 4, BOTH),
        ("mixtral", ParallelConfig(ep=2), 2, EIGHT),
        ("qwen3", ParallelConfig(sharding="fsdp"), 2, SIXTEEN),
        ("qwen3", ParallelConfig(pp=2), 2, SIXTEEN),
    ],
    ids=["zero1", "fsdp", "moments alone", "replicas of shards", "float8 and remainders", "float16 fsdp", "float16"],
)
def test_a_rank_holds_and_sends_what_is_planned_and_less_than_with_float32(
    ranks: Ranks, model: str, parallel: ParallelConfig, world: int, precision: PrecisionConfig
) -> None:
    run = tiny_run(model, parallel, world, precision=precision)
    assert not check(run) and not not_built(run)
    planner = MemoryPlanner()
    wide = replace(run, precision=PrecisionConfig(compute=precision.compute))
    for rank, measured in enumerate(ranks.run(measure, world, run)):
        as_planned(measured, planner, run, rank)
        resident, before = planner.resident(run, rank), planner.resident(wide, rank)
        # Parts that are whole blocks of 128 are a little longer.
        assert before.parameters <= resident.parameters < 1.2 * before.parameters
        assert resident.optimizer < before.optimizer
        assert (resident.gradients < 0.9 * before.gradients) is (precision.main_gradients == "bfloat16")


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize(
    ("parallel", "precision"),
    [(ParallelConfig(), EIGHT), (ParallelConfig(sharding="fsdp"), SIXTEEN), (ParallelConfig(), MOMENTS)],
    ids=["zero1", "fsdp", "float32"],
)
def test_what_waits_in_host_memory_is_what_is_planned(
    ranks: Ranks, parallel: ParallelConfig, precision: PrecisionConfig, share: float
) -> None:
    run = tiny_run("mixtral", parallel, 2, MemoryConfig(optimizer_offload=share), precision=precision)
    assert not check(run) and not not_built(run)
    planner = MemoryPlanner()
    for rank, (measured, planned) in enumerate(zip(ranks.run(measure, 2, run), planner.of(run), strict=False)):
        resident = planner.resident(run, rank)
        assert (measured.optimizer, measured.on_host) == (resident.optimizer, resident.on_host)
        assert planned.on_host == resident.on_host > 0
        assert planned.balanced.optimizer - resident.travelling == resident.optimizer - resident.on_host
