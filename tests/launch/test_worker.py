"""What a worker says of a failure."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from core.errors import CheckpointError
from launch.worker import _explained, _leave_word


def test_a_full_disk_is_explained_and_any_other_error_is_left_as_it_is(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "metrics.jsonl"))
    said = _explained(full, tmp_path)
    assert isinstance(said, CheckpointError)
    assert "metrics.jsonl: the disk is full" in str(said) and f"--resume --out {tmp_path}" in str(said)
    other = OSError(errno.EACCES, "Permission denied")
    assert _explained(other, tmp_path) is other


def test_a_word_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "not_a_folder"
    file.write_text("")
    _leave_word(file, 0, CheckpointError("the disk is full"))
    assert capsys.readouterr().out == "the disk is full\n"


def test_a_foreseen_error_has_no_traceback_and_an_unforeseen_one_has(tmp_path: Path) -> None:
    _leave_word(tmp_path, 0, CheckpointError("no room"))
    _leave_word(tmp_path, 1, ValueError("a mistake of ours"))
    words = [json.loads((tmp_path / "errors" / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert (words[0]["message"], words[0]["traceback"], words[0]["exit_code"]) == ("no room", None, 1)
    assert words[1]["message"] == "ValueError: a mistake of ours" and words[1]["traceback"] is not None
