"""kill -9 at a random instant of a save: the newest complete checkpoint always loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_after_a_kill_at_any_instant_the_newest_checkpoint_is_whole_and_none_was_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ckpt.interrupted", str(tmp_path), "20", "20261130"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == 20
    assert found[-1][0] > found[0][0], "the savers after a kill went on"
    assert any(half_written for _, half_written in found), "no kill hit a save: the test shows nothing"
