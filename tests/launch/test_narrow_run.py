"""A launched run whose moments are bfloat16: what its checkpoint holds, and what is said before it goes on with float32 ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.files.local import LocalFiles
from ckpt.manifest import read_manifest
from launch.cli import main
from tests.launch.small import SMALL, write_corpus
from tests.launch.test_run import finished, launch


def test_narrow_moments_are_saved_as_they_are_and_a_conversion_is_said_and_confirmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    narrow = ("precision.moments=bfloat16", "precision.main_gradients=bfloat16", "parallel.ep=1")
    settings = [word for text in (*SMALL, *narrow) for word in ("--set", text)]
    begin = ("--data", str(write_corpus(tmp_path / "corpus")), "--ranks", "1", "--steps", "2", "--dtype", "bfloat16")
    finished(launch(out, *begin, *settings), 0)
    (manifest,) = out.glob("checkpoints/*/manifest.json")
    entries = read_manifest(LocalFiles(manifest.parent)).entries
    held = {(e.name.split(".")[1], e.dtype) for e in entries if e.name.startswith("optimizer.")}
    assert held == {("exp_avg", "bfloat16"), ("exp_avg_sq", "bfloat16"), ("master", "float32")}
    with pytest.raises(SystemExit) as end:
        main(["deepseek_v3", "--resume", "--out", str(out), "--set", "precision.moments=float32"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "nothing was started" in said
    assert "precision.moments: bfloat16 → float32 (moments of the checkpoint are widened exactly)" in said
