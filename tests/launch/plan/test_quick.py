"""Memory by a few traces and arithmetic, against the plan that traces every set-up itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.recipe import RECIPES
from core.config.run import RunConfig
from core.pipeline.schedule import make_schedule
from launch.plan.bounds import Bounds
from launch.plan.candidates import setup_of
from launch.plan.memory import MemoryPlanner
from launch.plan.quick import QuickMemory, effective, states_of
from launch.profiles import find_profile
from tests.launch.plan.test_search import a_run

RUN = a_run("deepseek_v3", "16b", "h100", 16, ParallelConfig(tp=2, pp=4, vpp=3, ep=4, dispatcher="deepep"))
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tp": {"tp": 1},
    "ep and vpp": {"ep": 2, "vpp": 1},
    "combined": {"schedule": "combined"},
    "zero bubble": {"schedule": "zero_bubble"},
    "no pipeline": {"pp": 1, "vpp": 1, "ep": 16},
    "three parts again": {"recompute": ("layernorm", "moe_act", "mlp")},
    "attention and what it begins with again": {"recompute": ("core_attn", "mla_up_proj", "mlp")},
    "both, and on the host": {
        "recompute": ("core_attn", "mla_up_proj"),
        "offload": ("attn_proj", "expert_fc1", "moe_act"),
    },
    "experts again, two sequences": {"recompute": ("moe", "moe_act"), "microbatch": 2},
    "everything again": {"recompute": ("full",), "tp": 4},
    "smaller states": {
        "moments": "bfloat16",
        "main_gradients": "bfloat16",
        "recipe": RECIPES["fp8_blockwise"],
        "primary": True,
    },
    "on the host": {"offload": ("core_attn", "expert_fc1"), "optimizer_offload": 0.5},
}


@pytest.fixture(scope="module")
def planner() -> MemoryPlanner:
    return MemoryPlanner()


@pytest.fixture(scope="module")
def quick(planner: MemoryPlanner) -> QuickMemory:
    return QuickMemory(RUN, planner.traces)


def changed(wanted: dict[str, Any]) -> RunConfig:
    """The run with settings of any section by their names."""
    run = RUN
    for name, value in wanted.items():
        for section in ("parallel", "train", "memory", "precision"):
            if name in vars(getattr(run, section)):
                run = replace(run, **{section: replace(getattr(run, section), **{name: value})})
    return run


@pytest.mark.parametrize("name", CHANGES)
def test_it_says_what_the_plan_says_to_a_per_cent_and_more_for_larger_microbatches(
    planner: MemoryPlanner, quick: QuickMemory, name: str
) -> None:
    run = changed(CHANGES[name])
    plan, guess = planner.of(run), quick.of(run)
    # Moments that are equally full may differ in which chunks wait, not in how many.
    assert [sum(each.in_flight) for each in guess] == [sum(each.in_flight) for each in plan]
    for mine, real in zip(guess, plan, strict=True):
        assert (mine.rank, mine.pp_rank) == (real.rank, real.pp_rank)
        for part in ("parameters", "gradients", "optimizer"):
            count = vars(real.balanced)[part]
            assert vars(mine.balanced)[part] == pytest.approx(count, abs=0.01 * real.balanced.total), part
        # Of equally full moments one may have more that waits, and the other more that is worked with. Gradients of weights are counted
        # as if they grew with the microbatch, which is on the safe side.
        most = 1.01 if run.train.microbatch == 1 else 1.08
        assert 0.99 * real.balanced.total <= mine.balanced.total <= most * real.balanced.total


@pytest.mark.parametrize("name", CHANGES)
def test_the_bound_of_a_search_is_never_above_the_plan(planner: MemoryPlanner, name: str) -> None:
    run = changed(CHANGES[name])
    bound = Bounds(run, 16, find_profile("h100"), frozenset()).of(setup_of(run))
    assert 0 < bound.bytes <= max(each.balanced.total for each in planner.of(run))


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("1f1b", 3), ("combined", 2), ("zero_bubble", 1), ("gpipe", 2)]
)
def test_the_moments_that_are_kept_hold_no_less_than_any_other(schedule: Any, virtual: int) -> None:
    for rank in range(3):
        states = states_of(schedule, 3, virtual, 7, rank)
        waiting = [0] * virtual
        for action in make_schedule(schedule, stages=3, virtual=virtual, microbatches=7).ranks[rank]:
            if action.kind == "forward":
                # Whatever chunks weigh, a kept moment is as heavy: here by weights of one chunk alone, and of all alike.
                for weights in ([1] * virtual, [1] + [0] * (virtual - 1), [0] * (virtual - 1) + [1]):
                    here = sum(n * w for n, w in zip(waiting, weights, strict=True))
                    same = [s for s in states if s.running == ((action.chunk, False),)]
                    assert max(sum(n * w for n, w in zip(s.waiting, weights, strict=True)) for s in same) >= here
                waiting[action.chunk] += 1
            elif action.kind in ("backward", "input_gradient"):
                waiting[action.chunk] -= 1
            elif action.kind == "combined":
                assert action.backward_chunk is not None
                waiting[action.backward_chunk] -= 1
                waiting[action.chunk] += 1


def test_what_others_cover_is_not_computed_again_twice() -> None:
    assert effective(("moe", "moe_act", "shared_experts", "mlp")) == ("moe", "mlp")
    assert effective(("layernorm", "full")) == ("full",)
    assert effective(MemoryConfig().recompute) == ()
