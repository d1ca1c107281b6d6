"""Jobs on a real Slurm of one node: submitted, preempted, told that their time is over, cancelled; with odd paths."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.training.metrics import METRICS_FILE, read_metrics
from launch.folder import read_events
from tests.launch.own_slurm import OwnSlurm, missing
from tests.launch.small import SMALL, write_corpus

STEPS = 120
# As many as no test waits for.
ENDLESS = 100_000
# Two cores may be shared by many; on a quiet machine no wait takes a tenth of it.
WAIT_SECONDS = 180.0
# What a shell, sbatch's own reader and its patterns for file names would each stumble over.
ODD = 'it\'s a "run" #1 %j $HOME é'


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnSlurm]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    slurm = OwnSlurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.close()


def launch(slurm: OwnSlurm, *arguments: str, code: int = 0) -> str:
    """What `launch` prints."""
    command = [sys.executable, "-m", "launch.cli", *arguments]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=slurm.environment, timeout=180)
    assert made.returncode == code, made.stdout + made.stderr
    return made.stdout + made.stderr


def asked(slurm: OwnSlurm, out: Path) -> list[str]:
    """The small model in `out`; the text is the same for all, so that it is tokenised once."""
    corpus = slurm.folder / "corpus"
    if not corpus.exists():
        write_corpus(corpus)
    settings = [argument for setting in SMALL for argument in ("--set", setting)]
    return ["deepseek_v3", "--hw", "cpu", "--backend", "slurm", "--out", str(out), "--data", str(corpus), *settings]


def begin(slurm: OwnSlurm, out: Path, *arguments: str, steps: int = STEPS) -> str:
    """Submit the small model into `out`; the job."""
    text = launch(slurm, *asked(slurm, out), "--steps", str(steps), *arguments)
    assert "submitted as job" in text
    return text.split("submitted as job ")[1].split(";")[0]


def wait(slurm: OwnSlurm, out: Path, ready: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not ready():
        if time.monotonic() > end:
            said = "\n".join(path.read_text() for path in (out / "logs").rglob("*.txt"))
            raise AssertionError(f"{what}: not within {WAIT_SECONDS} s\n{said}\n{slurm.logs()}")
        time.sleep(0.1)


def reach(slurm: OwnSlurm, out: Path, step: int) -> None:
    wait(slurm, out, lambda: any(line["step"] >= step for line in read_metrics(out / METRICS_FILE)), f"step {step}")


def happened(out: Path, event: str) -> int:
    return sum(line["event"] == event for line in read_events(out))


def trained(out: Path) -> list[dict[str, Any]]:
    names = ("step", "loss", "learning_rate", "grad_norm", "mtp_loss", "expert_load", "validation_loss")
    return [{name: line[name] for name in names if name in line} for line in read_metrics(out / METRICS_FILE)]


def test_a_job_that_is_preempted_and_runs_out_of_time_is_requeued_and_ends_with_the_losses_of_one_left_alone(
    slurm: OwnSlurm, tmp_path: Path
) -> None:
    alone, broken = tmp_path / "alone", tmp_path / ODD
    begin(slurm, alone)
    wait(slurm, alone, lambda: happened(alone, "finished"), "the end of the run left alone")
    assert [line["step"] for line in trained(alone)] == list(range(1, STEPS + 1))
    wait(slurm, alone, (alone / "report.html").exists, "the report")
    assert (alone / "logs" / "start1" / "rank1.stderr.txt").exists()

    job = begin(slurm, broken, "--cluster", "time=10:00", "--cluster", "grace=100")
    script = (broken / "job.sh").read_text()
    assert slurm.call("scontrol", "write", "batch_script", job, "-") == script.rstrip("\n")
    reach(slurm, broken, 10)
    urgent = slurm.call("sbatch", "--parsable", "-p", "urgent", "-n2", "-o", "/dev/null", "--wrap", "sleep 0.5")
    assert urgent
    wait(slurm, broken, lambda: happened(broken, "requeued") == 1, "requeue after the preemption")
    reach(slurm, broken, read_metrics(broken)[-1]["step"] + 8)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    wait(slurm, broken, lambda: happened(broken, "requeued") == 2, "requeue after the signal")
    stops = [line["step"] for line in read_events(broken) if line["event"] == "stopped"]
    assert 10 <= stops[0] < stops[1] < STEPS, "the signals came too late to prove anything"
    wait(slurm, broken, lambda: happened(broken, "finished"), "the end")
    assert [line["after_step"] for line in read_events(broken) if line["event"] == "started"] == [0, *stops]
    assert trained(broken) == trained(alone)
    text = launch(slurm, "status", str(broken))
    assert f"{STEPS} of {STEPS}" in text and "finished" in text and f"of step {STEPS}" in text
    assert f"{STEPS}  " in launch(slurm, "logs", str(broken))


def test_a_run_that_is_stopped_or_cancelled_is_left_alone_until_it_is_resumed(slurm: OwnSlurm, tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = begin(slurm, out, "--ranks", "1", "--set", "parallel.ep=1", steps=ENDLESS)
    reach(slurm, out, 5)
    assert f"job         {job} on slurm: running" in launch(slurm, "status", str(out))
    refused = launch(slurm, "resume", str(out), code=2)
    assert f"job {job} is running" in refused and "launch stop" in refused
    assert f"job {job} saves a checkpoint" in launch(slurm, "stop", str(out))
    wait(slurm, out, lambda: not slurm.call("squeue", "-h", "-j", job, "-t", "R,PD,CG"), "the end of the job")
    assert happened(out, "stopped") == 1 and happened(out, "requeued") == 0
    step = read_metrics(out)[-1]["step"]
    assert "nothing to stop" in launch(slurm, "stop", str(out))

    other = ("resume", str(out), "--set", "checkpoint.interval=20")
    assert "checkpoint.interval: 15 → 20" in launch(slurm, *other, code=2)
    launch(slurm, *other, "--yes")
    reach(slurm, out, step + 5)
    assert happened(out, "submitted") == 2 and happened(out, "resumed") == 1
    slurm.call("scancel", "--user", slurm.user)
    wait(slurm, out, lambda: not slurm.call("squeue", "-h", "-t", "R,PD,CG"), "the end of what was cancelled")
    assert happened(out, "requeued") == 0


def test_what_sbatch_does_not_take_is_said_in_its_own_words(slurm: OwnSlurm, tmp_path: Path) -> None:
    text = launch(slurm, *asked(slurm, tmp_path / "run"), "--cluster", "partition=nowhere", code=2)
    assert "invalid partition" in text and "Traceback" not in text
    assert "--resume" in text and "--backend slurm --cluster partition=nowhere" in text
