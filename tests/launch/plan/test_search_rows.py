"""For published rows, with the plan's own prices: a search finds what fits and is predicted at least as fast as what was published.

benchmarks/search.py prints all of them.
"""

from __future__ import annotations

import pytest

from core.check import check
from core.config.family import find_family
from launch.plan.memory import MemoryPlanner
from launch.plan.search import search
from launch.plan.time import plan_time
from launch.profiles import find_profile
from launch.request import Request, new_run

FIXED = frozenset({"precision.recipe"})


@pytest.mark.parametrize(
    ("family", "size", "hardware", "preset"),
    [
        ("deepseek_v3", "671b", "h100", "fp8-blockwise"),
        ("qwen3", "30b_a3b", "gb200", "mxfp8"),
    ],
)
def test_a_search_finds_what_fits_and_is_as_fast_as_a_published_row(
    family: str, size: str, hardware: str, preset: str
) -> None:
    run = new_run(Request(size=size, hardware=hardware, preset=preset), find_family(family)).run
    profile = find_profile(hardware)
    assert profile.chip is not None
    result = search(run, run.ranks, fixed=FIXED)
    found = result.found[0].setup.on(run, run.ranks)
    memory = max(rank.balanced.total for rank in MemoryPlanner().of(found))
    assert check(found) == () and memory == result.found[0].memory <= profile.chip.memory
    published, predicted = (plan_time(each, profile).step.tokens_per_second for each in (run, found))
    # The search compares by a closed form of the bubble, the plan executes the schedule.
    assert predicted >= 0.98 * published
    assert result.begun is not None and result.found[0].seconds <= result.begun.seconds
    assert found.precision.recipe == run.precision.recipe and found.train.global_batch == run.train.global_batch
