"""kill -9 of any rank at a random instant of a save: the newest complete checkpoint always loads, and no other rank waits for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def told(run: Path, *how: str) -> list[tuple[int, int, float]]:
    """(newest step, half-written saves or refused savers, seconds) each time; the program itself checks that the newest is whole."""
    command = [sys.executable, "-m", "tests.ckpt.interrupted", str(run), *how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(int(step), int(count), float(seconds)) for step, count, seconds in lines]


@pytest.mark.parametrize(("ranks", "kills"), [(1, 10), (2, 6), (4, 4)])
def test_after_a_kill_of_any_rank_at_any_instant_the_newest_checkpoint_is_whole_and_none_was_lost(
    tmp_path: Path, ranks: int, kills: int
) -> None:
    found = told(tmp_path, "random", str(kills), "20261130", str(ranks))
    assert len(found) == kills
    assert any(half_written for _, half_written, _ in found) or ranks > 1, "no kill hit a save: the test shows nothing"
    steps = [step for step, _, _ in found]
    assert steps == sorted(steps) and steps[0] > 0
    assert max(seconds for _, _, seconds in found) < 60


def test_a_kill_before_any_rename_or_removal_loses_no_complete_checkpoint(tmp_path: Path) -> None:
    steps = [step for step, _, _ in told(tmp_path, "changes")]
    # Step 2 is replaced, then step 3 saved: from some change on, step 3 is the newest.
    assert steps == sorted(steps) and set(steps) == {2, 3} and len(steps) > 20


def test_of_two_savers_at_once_one_is_refused_or_both_save_and_the_newest_is_whole(tmp_path: Path) -> None:
    found = told(tmp_path, "two", "8")
    assert len(found) == 8
    assert any(refused for _, refused, _ in found), "no two savers met: the test shows nothing"
