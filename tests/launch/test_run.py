"""The command as a user has it: real workers, real text, killed and interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt.files.address import open_files
from ckpt.manifest import read_manifest
from core.training.metrics import METRICS_FILE, read_metrics, read_saves
from tests.launch.small import SMALL, write_corpus

STEPS = 120
WAIT_SECONDS = 180.0


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def launch(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """A launch of the small model into `out`, by the command line."""
    environment = os.environ | {"XDG_CACHE_HOME": str(out.parent / "cache")}
    command = [sys.executable, "-m", "launch.cli", "deepseek_v3", "--hw", "cpu", "--out", str(out), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=Path.cwd()
    )


def begin(out: Path, corpus: Path) -> subprocess.Popen[str]:
    """The first launch of a run."""
    settings = [argument for setting in SMALL for argument in ("--set", setting)]
    return launch(out, "--data", str(corpus), "--steps", str(STEPS), *settings)


def finished(job: subprocess.Popen[str], code: int) -> str:
    """What a launch printed, once it ended with `code`."""
    text, _ = job.communicate(timeout=WAIT_SECONDS)
    assert job.returncode == code, text
    return text


def reach(out: Path, step: int, job: subprocess.Popen[str]) -> None:
    """Wait until the run has recorded `step`."""
    end = time.monotonic() + WAIT_SECONDS
    while not any(line["step"] >= step for line in read_metrics(out / METRICS_FILE)):
        assert job.poll() is None, finished(job, 0)
        assert time.monotonic() < end, f"step {step} was not reached"
        time.sleep(0.01)


def worker_of(out: Path, rank: int) -> int:
    """The process of a rank of the run in `out`."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().decode().split("\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if "launch.worker" in command and str(out) in command and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"rank {rank} does not run")


def trained(out: Path) -> list[dict[str, Any]]:
    """The numbers of every step that do not depend on the clock."""
    names = ("step", "loss", "learning_rate", "grad_norm", "mtp_loss", "aux_loss", "expert_load", "validation_loss")
    return [{name: line[name] for name in names if name in line} for line in read_metrics(out / METRICS_FILE)]


def test_a_run_killed_interrupted_and_resumed_has_bitwise_the_losses_of_one_that_was_left_alone(
    corpus: Path, tmp_path: Path
) -> None:
    alone, broken = tmp_path / "alone", tmp_path / "broken"
    finished(begin(alone, corpus), 0)
    assert [line["step"] for line in trained(alone)] == list(range(1, STEPS + 1))
    assert (alone / "report.html").stat().st_size > 10_000
    saves = read_saves(alone)
    assert [save.step for save in saves] == list(range(15, STEPS + 1, 15))
    assert all(0 < save.stalled_seconds < save.seconds for save in saves)
    stopped = [line["step"] for line in read_metrics(alone / METRICS_FILE) if "checkpoint" in line["seconds"]]
    assert stopped == list(range(16, STEPS + 1, 15))
    assert set(json.loads((alone / "samples.json").read_text())) == {"prompt", "before", "after"}

    job = begin(broken, corpus)
    reach(broken, 20, job)
    os.kill(worker_of(broken, 1), signal.SIGKILL)
    text = finished(job, 1)
    assert "rank 1 failed first" in text and "SIGKILL" in text and "Traceback" not in text

    job = launch(broken, "--resume")
    reach(broken, 45, job)
    job.send_signal(signal.SIGTERM)
    assert "--resume" in finished(job, 0)
    stopped = len(trained(broken))
    assert 45 <= stopped < STEPS, "the interrupt came too late to prove anything"

    finished(launch(broken, "--resume"), 0)
    assert trained(broken) == trained(alone)


def test_a_sample_continues_the_prompt_and_a_damaged_checkpoint_is_refused(corpus: Path, tmp_path: Path) -> None:
    """With checkpoints that lie elsewhere, and for which training stops."""
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    settings = (*SMALL, f"checkpoint.address={elsewhere}", "checkpoint.asynchronous=false")
    finished(launch(out, "--data", str(corpus), "--steps", "3", *[a for s in settings for a in ("--set", s)]), 0)
    assert [save.step for save in read_saves(out)] == [3] and not (out / "checkpoints").exists()
    assert all(save.stalled_seconds == save.seconds for save in read_saves(out))
    command = [sys.executable, "-m", "launch.cli", "sample", str(out), "--prompt", "the ", "--tokens", "5"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0 and made.stdout.startswith("the "), made.stderr
    assert made.stdout == subprocess.run(command, capture_output=True, text=True, check=False).stdout

    (folder,) = (elsewhere / "checkpoints").glob("step_*")
    entries = {entry.name: entry for entry in read_manifest(open_files(folder)).entries}
    block = entries["model.embedding.weight"].pieces[0].blocks[0]
    data = bytearray((folder / block.file).read_bytes())
    data[block.offset + block.size // 2] ^= 1
    (folder / block.file).write_bytes(data)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "model.embedding.weight" in refused.stderr and "Traceback" not in refused.stderr
