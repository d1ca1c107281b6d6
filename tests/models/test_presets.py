"""Every set-up that the zoo ships can run (fault F1)."""

from __future__ import annotations

import pytest

from core.check import check
from core.config.family import Family, Preset, all_families
from launch.request import Request, new_run

SHIPPED = [(family, preset) for family in all_families() for preset in family.presets]


@pytest.mark.parametrize(
    ("family", "preset"), SHIPPED, ids=[f"{family.name}-{preset.size}-{preset.hardware}" for family, preset in SHIPPED]
)
def test_f1_a_shipped_set_up_breaks_no_rule_and_is_what_the_launch_runs(family: Family, preset: Preset) -> None:
    run = new_run(Request(size=preset.size, hardware=preset.hardware), family).run
    assert check(run) == ()
    assert (run.ranks, run.parallel, run.optimizer) == (preset.ranks, preset.parallel, preset.optimizer)
