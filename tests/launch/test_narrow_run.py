"""Launched runs whose states take few bits: what a checkpoint holds, how a run goes on from it, and what is said before it is converted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.files.local import LocalFiles
from ckpt.manifest import read_manifest
from core.training.metrics import read_metrics
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


def test_a_float16_run_with_every_narrow_state_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    tmp_path: Path,
) -> None:
    """Four steps at once, and two and two: the same losses, and the same factor."""
    narrow = ("precision.moments=float8", "memory.optimizer_offload=0.5", "parallel.ep=1", "train.schedule_steps=20")
    settings = [word for text in (*SMALL, *narrow) for word in ("--set", text)]
    begin = ("--data", str(write_corpus(tmp_path / "corpus")), "--ranks", "1", "--dtype", "float16")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    finished(launch(whole, *begin, "--steps", "4", *settings), 0)
    finished(launch(parted, *begin, "--steps", "2", *settings), 0)
    finished(launch(parted, "--resume", "--steps", "4", "--yes"), 0)
    kept = ("step", "loss", "grad_norm", "loss_scale", "skipped")
    mine, its = ([{key: line[key] for key in kept} for line in read_metrics(run)] for run in (whole, parted))
    assert mine == its and len(mine) == 4 and mine[-1]["loss_scale"] == 65536.0
    newest = [max(run.glob("checkpoints/*/manifest.json")).parent for run in (whole, parted)]
    manifests = [read_manifest(LocalFiles(folder)) for folder in newest]
    assert [m.extra["loss_scaler"] for m in manifests] == [{"scale": 65536.0, "good": 4, "skipped": 0}] * 2
    assert {m.extra["updates"] for m in manifests} == {4}
    held = {(e.name.split(".")[1], e.dtype) for e in manifests[0].entries if e.name.startswith("optimizer.")}
    assert held == {("exp_avg", "bfloat16"), ("exp_avg_sq", "bfloat16"), ("master", "float32")}
