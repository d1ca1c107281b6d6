"""kill -9 at a random instant of a save: the newest complete checkpoint always loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def found_after_kills(run: Path, *how: str) -> list[tuple[int, int]]:
    """(newest step, half-written saves) after every kill; the program itself checks that the newest is whole."""
    command = [sys.executable, "-m", "tests.ckpt.interrupted", str(run), *how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(int(step), int(half_written)) for step, half_written in lines]


def test_after_a_kill_at_any_instant_the_newest_checkpoint_is_whole_and_none_was_lost(tmp_path: Path) -> None:
    found = found_after_kills(tmp_path, "random", "8", "20261130")
    assert len(found) == 8
    assert any(half_written for _, half_written in found), "no kill hit a save: the test shows nothing"


def test_a_kill_before_any_rename_or_removal_loses_no_complete_checkpoint(tmp_path: Path) -> None:
    steps = [step for step, _ in found_after_kills(tmp_path, "changes")]
    # Step 2 is replaced, then step 3 saved: from some change on, step 3 is the newest.
    assert steps == sorted(steps) and set(steps) == {2, 3} and len(steps) > 20
