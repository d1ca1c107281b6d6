"""The factor of losses in float16: how it moves, what it remembers, and where it gives up."""

from __future__ import annotations

import pytest

from core.optim.scaler import GOOD_STEPS, LossScaleError, LossScaler


def test_it_starts_at_65536_and_doubles_after_a_thousand_good_steps_in_a_row() -> None:
    scaler = LossScaler()
    assert scaler.scale == 65536 and GOOD_STEPS == 1000
    for step in range(999):
        scaler.note(step + 1, overflow=False)
    assert scaler.scale == 65536
    scaler.note(1000, overflow=False)
    assert (scaler.scale, scaler.good, scaler.skipped) == (131072, 0, 0)
    for step in range(999):
        scaler.note(step + 1001, overflow=False)
    scaler.note(2000, overflow=True)
    assert (scaler.scale, scaler.good, scaler.skipped) == (65536, 0, 1)
    scaler.note(2001, overflow=False)
    assert (scaler.scale, scaler.good) == (65536, 1), "the row begins anew"


def test_it_gives_up_below_2_to_the_minus_14_and_says_what_to_do() -> None:
    scaler = LossScaler()
    for step in range(30):
        scaler.note(step + 1, overflow=True)
    assert scaler.scale == 2.0**-14 and scaler.skipped == 30
    with pytest.raises(
        LossScaleError, match=r"^step 31: .* times 6\.1\d+e-05, and nothing was updated.*precision\.compute=bfloat16"
    ):
        scaler.note(31, overflow=True)


def test_a_fixed_factor_stays_and_still_counts_what_it_skipped() -> None:
    scaler = LossScaler(fixed=8.0)
    for step in range(1500):
        scaler.note(step + 1, overflow=step % 3 == 0)
    assert scaler.scale == 8.0 and scaler.skipped == 500
    scaler.restore({"scale": 2.0, "good": 5, "skipped": 7})
    assert (scaler.scale, scaler.skipped) == (8.0, 7)


def test_it_never_grows_beyond_what_float32_sums_can_bear() -> None:
    scaler = LossScaler(scale=2.0**32, good=GOOD_STEPS - 1)
    scaler.note(1, overflow=False)
    assert scaler.scale == 2.0**32


def test_a_checkpoint_has_all_of_it_and_one_without_leaves_the_start() -> None:
    first, second, fresh = LossScaler(), LossScaler(), LossScaler()
    for step in range(700):
        first.note(step + 1, overflow=step in (3, 4))
    second.restore(first.state())
    assert second == first and second.state() == {"scale": 16384.0, "good": 695, "skipped": 2}
    fresh.restore({})
    assert fresh == LossScaler()
