"""Learning rates in closed form: ends of warm-up and schedule, and what lies beyond."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config.run import OptimizerConfig, ScheduleName
from core.optim.schedules import learning_rate

HIGH, LOW = 3e-4, 3e-5


def config(schedule: ScheduleName = "cosine", warmup: int = 0, decay: int = 0) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=HIGH, min_learning_rate=LOW, warmup_steps=warmup, schedule=schedule, decay_steps=decay
    )


def rates(settings: OptimizerConfig, steps: int, shown: int | None = None) -> list[float]:
    return [learning_rate(settings, step, steps) for step in range(shown or steps)]


def test_warm_up_rises_in_equal_steps_to_the_full_rate() -> None:
    for schedule in ("cosine", "wsd"):
        assert rates(config(schedule, warmup=4), 100)[:4] == pytest.approx([HIGH / 4, HIGH / 2, HIGH * 3 / 4, HIGH])


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(config(), 0, 50) == HIGH
    assert learning_rate(config("wsd", decay=10), 0, 50) == HIGH


def test_a_cosine_starts_at_the_full_rate_is_halfway_in_the_middle_and_ends_at_the_minimum() -> None:
    got = rates(config(warmup=10), 111)
    assert got[10] == HIGH
    assert got[60] == pytest.approx((HIGH + LOW) / 2)
    assert got[35] == pytest.approx(LOW + (HIGH - LOW) * (1 + math.sqrt(0.5)) / 2)
    assert got[110] == pytest.approx(LOW)


def test_a_stable_rate_falls_in_equal_steps_over_the_last_ones() -> None:
    got = rates(config("wsd", warmup=2, decay=4), 20)
    assert got[2:16] == [HIGH] * 14
    assert got[16:] == pytest.approx([LOW + (HIGH - LOW) * share for share in (0.75, 0.5, 0.25, 0.0)])


def test_without_decay_steps_a_stable_rate_stays() -> None:
    assert rates(config("wsd"), 7, 12) == [HIGH] * 12


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 2), (3, 4), (3, 3), (5, 3), (2, 50)])
def test_beyond_the_end_the_last_rate_holds(schedule: ScheduleName, warmup: int, steps: int) -> None:
    got = rates(config(schedule, warmup, decay=2), steps, steps + 40)
    assert got[steps:] == [got[steps - 1]] * 40


def test_a_single_step_after_warm_up_has_the_full_rate() -> None:
    assert rates(config(), 1) == [HIGH]
    assert rates(config(warmup=3), 4)[3] == HIGH


def test_a_warm_up_longer_than_the_schedule_stops_on_its_way() -> None:
    assert rates(config(warmup=10), 5, 9) == pytest.approx([HIGH * share / 10 for share in (1, 2, 3, 4, 5, 5, 5, 5, 5)])


@given(st.sampled_from(["cosine", "wsd"]), st.integers(0, 20), st.integers(0, 20), st.integers(1, 60))
def test_a_rate_rises_once_and_falls_once_and_stays_in_its_range(
    schedule: ScheduleName, warmup: int, decay: int, steps: int
) -> None:
    got = rates(config(schedule, warmup, decay), steps, steps + 5)
    peak = got.index(max(got))
    assert got[: peak + 1] == sorted(got[: peak + 1]) and got[peak:] == sorted(got[peak:], reverse=True)
    assert all(0 < rate <= HIGH * (1 + 1e-12) for rate in got)
    assert all(rate >= LOW * (1 - 1e-12) for rate in got[warmup:])
