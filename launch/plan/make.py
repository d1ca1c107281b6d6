"""The plan of a run: what its ranks hold, send and wait for, out of the real modules and the profile of its hardware."""

from __future__ import annotations

from core.config.run import RunConfig
from launch.plan.memory import MemoryPlanner
from launch.plan.result import Plan
from launch.plan.time import plan_time
from launch.profiles import find_profile


def make_plan(run: RunConfig, planner: MemoryPlanner | None = None) -> Plan:
    """The plan of a run that keeps every rule (core/check). planner: one that knows layers already.

    Nothing is known beforehand of the machine at hand (`--hw cpu`, `--hw gpu`): its plan has memory alone.
    """
    profile = find_profile(run.hardware)
    memory = (planner or MemoryPlanner()).of(run)
    capacity = None if profile.chip is None else int(profile.chip.memory)
    if profile.speeds is None:
        return Plan(memory=memory, capacity=capacity, stages=(), communication=(), time=None)
    timed = plan_time(run, profile)
    return Plan(
        memory=memory, capacity=capacity, stages=timed.stages, communication=timed.communication, time=timed.step
    )
