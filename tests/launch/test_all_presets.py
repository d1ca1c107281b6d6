"""Every set-up that the zoo ships: planned by the real modules, timed by its executed schedule, and rendered as scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config.family import Family, Preset, all_families, find_family
from launch.backends.choose import choose_backend
from launch.describe import describe
from launch.job import job_environment, make_job
from launch.plan.make import make_plan
from launch.plan.memory import MemoryPlanner
from launch.request import Request, new_run

HERE = ("cpu", "gpu")
# Published for software that keeps less than ours does. Their notes say so.
TOO_LARGE = {("235b_a22b", "gb200", "mxfp8-paper"), ("30b_a3b", "b300", "bf16")}
CLUSTERS = {"slurm": (), "kubernetes": ("image=zoo:1", "mounts=/:/")}


@pytest.fixture(scope="module")
def planner() -> MemoryPlanner:
    return MemoryPlanner()


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_every_set_up_is_planned_and_rendered(family: Family, planner: MemoryPlanner) -> None:
    for preset in family.presets:
        planned = new_run(Request(size=preset.size, hardware=preset.hardware, preset=preset.name), family)
        plan = make_plan(planned.run, planner)
        assert len(plan.memory) == planned.run.parallel.pp
        assert all(each.balanced.total > 0 and each.worst.total >= each.balanced.total for each in plan.memory)
        if preset.hardware in HERE:
            assert plan.time is None
            continue
        key = (str(preset.size), preset.hardware, preset.name)
        assert (plan.headroom is not None and plan.headroom < 0) == (key in TOO_LARGE), key
        assert plan.time is not None and sum(plan.time.walls.values()) == pytest.approx(plan.time.seconds)
        assert len(plan.stages) == planned.run.parallel.pp
        assert preset.name in describe(planned, plan)
        job = make_job(planned.run, Path("/shared/run"), 0, job_environment(planned, None))
        for name, options in CLUSTERS.items():
            script = choose_backend(name, options).script(job)
            assert script is not None and "/shared/run" in script.text
            assert all(f"{variable}" in script.text for variable, _, _ in job.environment), key


def test_what_makes_room_for_a_set_up_does() -> None:
    request = Request(size="30b_a3b", hardware="b300", preset="bf16", settings=("memory.recompute=layernorm",))
    headroom = make_plan(new_run(request, find_family("qwen3")).run).headroom
    assert headroom is not None and headroom > 0


def test_a_set_up_that_does_not_fit_says_so_in_its_notes() -> None:
    found: dict[tuple[str, str, str], Preset] = {
        (str(preset.size), preset.hardware, preset.name): preset
        for family in all_families()
        for preset in family.presets
    }
    for key in TOO_LARGE:
        assert any("does not fit" in note for note in found[key].notes), key
