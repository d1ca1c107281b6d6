"""A launched run whose weights are held in eight bits: it is saved, resumed and sampled like any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ckpt.files.local import LocalFiles
from ckpt.manifest import read_manifest
from core.training.metrics import METRICS_FILE, read_metrics
from tests.launch.small import SMALL, write_corpus
from tests.launch.test_run import finished, launch

# Widths that products sum over are multiples of 16.
SIXTEENS = (
    "model.hidden=32",
    "model.moe.expert_ffn=16",
    "model.attention.query_rank=16",
    "model.attention.latent_rank=16",
)
RECIPE = (
    "precision.primary=true",
    "precision.recipe=fp8_current",
    "train.schedule_steps=4",
    "optimizer.warmup_steps=1",
    "parallel.ep=1",
    "train.eval_sequences=1",
)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out / METRICS_FILE)]


def test_a_run_that_was_resumed_has_the_losses_of_one_in_one_go_and_is_sampled(tmp_path: Path) -> None:
    wider = {setting.partition("=")[0] for setting in (*SIXTEENS, *RECIPE)}
    kept = [setting for setting in SMALL if setting.partition("=")[0] not in wider]
    settings = [word for text in (*kept, *SIXTEENS, *RECIPE) for word in ("--set", text)]
    begin = ("--data", str(write_corpus(tmp_path / "corpus")), "--ranks", "1", "--dtype", "bfloat16", *settings)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    finished(launch(whole, *begin, "--steps", "4"), 0)
    finished(launch(parted, *begin, "--steps", "2"), 0)
    finished(launch(parted, "--resume", "--steps", "4", "--yes"), 0)
    assert losses(parted) == losses(whole) and len(losses(whole)) == 4
    (manifest,) = whole.glob("checkpoints/*/manifest.json")
    held = {(e.name.split(".")[0], e.dtype) for e in read_manifest(LocalFiles(manifest.parent)).entries}
    assert ("model", "bfloat16") in held and ("optimizer", "float32") in held and len({t for _, t in held}) == 2
    command = [sys.executable, "-m", "launch.cli", "sample", str(whole), "--prompt", "the ", "--tokens", "5"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("the ") and len(said) > len("the \n")
