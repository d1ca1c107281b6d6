"""What a run is doing, its logs, stopping it and starting it again, from its folder and its cluster's answers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest

from core.config.family import find_family
from core.config.precision import FloatName
from core.config.run import RunConfig
from core.errors import RequestError
from core.training.metrics import MetricsWriter, StepMetrics
from launch.again import changes, confirm, refuse_running
from launch.agent import failed_elsewhere
from launch.backends.local import LocalBackend, this_process
from launch.ending import end_run, fail_run
from launch.folder import RunFile, Submission, note_event, read_events, write_json, write_run, write_submission
from launch.jobs import logs, status, status_text, stop
from launch.request import Request, new_run
from tests.launch.test_backends import fake_tools


@pytest.fixture
def run() -> RunConfig:
    return new_run(Request(steps=40), find_family("mixtral")).run


@pytest.fixture
def out(tmp_path: Path, run: RunConfig) -> Path:
    """The folder of a run of 40 steps that has done 7."""
    folder = tmp_path / "a run"
    write_run(folder, RunFile(run=run, prepared=str(tmp_path / "nowhere"), identity="x", command=(), versions={}))
    write_json(folder / "summary.json", {})
    with MetricsWriter(folder, resume_from_step=0) as writer:
        for step in range(1, 8):
            loss = 3.0 - step / 10
            held = {"step": step, "loss": loss, "learning_rate": 1.0, "grad_norm": 1.0, "tokens": step}
            found = 2.5 if step == 5 else None
            writer.write(StepMetrics(**held, tokens_per_second=1000.0 * step, validation_loss=found))  # type: ignore[arg-type]
    return folder


def submitted(out: Path, job: str = "41", backend: str = "slurm") -> None:
    write_submission(out, Submission(backend=backend, options=(), restarts=0, job=job, host=os.uname().nodename))
    note_event(out, "submitted", backend=backend, job=job)


def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> Path:
    tools = fake_tools(tmp_path, squeue=f"echo '{says}'", scancel='echo "$@" >> "$TOOLS/cancelled"')
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("TOOLS", str(tools))
    return tools


def test_a_status_tells_steps_losses_and_where_the_job_is(
    out: Path, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(tmp_path, monkeypatch, "40 PENDING Priority\n  41 RUNNING None")
    submitted(out)
    found = status(out)
    assert (found.step, found.steps, found.state.where, found.checkpoint) == (7, 40, "running", None)
    assert found.tokens_per_second == pytest.approx(4000) and found.validation_loss == 2.5
    batch = run.train.global_batch * run.train.sequence_tokens
    assert found.left_seconds == pytest.approx(33 * batch / 4000)
    text = status_text(out, found)
    for part in (
        "job         41 on slurm: running",
        "7 of 40",
        "2.3000, validation 2.5000",
        "4,000",
        "none yet",
        "submitted",
    ):
        assert part in text
    assert status(out).failed is None
    write_json(out / "errors" / "rank1.json", {"rank": 1, "time": 5.0, "message": "the disk is full", "exit_code": 1})
    assert "rank 1: the disk is full" in status_text(out, status(out))


def test_a_job_that_is_gone_is_what_the_folder_says_of_its_end(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status(out).state.words == "never started"
    queue(tmp_path, monkeypatch, "141 RUNNING None")
    submitted(out)
    assert status(out).state.words == "not in the queue any more"
    note_event(out, "started", job="41", after_step=0)
    assert "killed" in status(out).state.words
    fail_run(out, 1.0, "rank 0 failed first: x\nmore")
    assert status(out).state.words == "failed" and read_events(out)[-1]["because"] == "rank 0 failed first: x"
    end_run(out, "stopped", 1.0, report=False)
    found = status(out)
    assert (found.state.where, found.state.words, found.left_seconds) == ("gone", "stopped", None)
    assert json.loads((out / "summary.json").read_text())["seconds"] == 2.0


@pytest.mark.parametrize(
    ("state", "cancelled", "says"),
    [
        ("RUNNING", "--batch --signal=USR1 41\n", "saves a checkpoint and ends"),
        ("PENDING", "41\n", "out of the queue"),
        ("COMPLETED", None, "nothing to stop"),
    ],
)
def test_stopping_saves_what_runs_takes_out_what_waits_and_leaves_a_mark_that_it_was_asked_for(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, cancelled: str | None, says: str
) -> None:
    tools = queue(tmp_path, monkeypatch, f"41 {state} None")
    with pytest.raises(RequestError, match="never started"):
        stop(out)
    submitted(out)
    assert says in stop(out)
    got = (tools / "cancelled").read_text() if (tools / "cancelled").exists() else None
    assert got == cancelled
    assert (out / "stop").exists() == (cancelled is not None)
    assert (read_events(out)[-1]["event"] == "stop asked") == (cancelled is not None)


def test_a_run_that_runs_or_waits_is_not_started_a_second_time(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_running(out)
    tools = queue(tmp_path, monkeypatch, "41 PENDING BeginTime")
    submitted(out)
    with pytest.raises(RequestError, match=r"job 41 is pending \(BeginTime\).*launch stop"):
        refuse_running(out)
    (tools / "squeue").write_text("#!/bin/bash\n")
    refuse_running(out)
    (tools / "squeue").write_text("#!/bin/bash\necho no controller >&2; exit 1\n")
    with pytest.raises(RequestError, match="`squeue --me` failed: no controller"):
        refuse_running(out)


def test_a_launcher_is_known_by_more_than_the_number_of_its_process(out: Path) -> None:
    backend = LocalBackend()
    other = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert other.stdout is not None and other.stdout.readline()
        fields = Path(f"/proc/{other.pid}/stat").read_text().rsplit(")", 1)[1].split()
        name = f"{other.pid}@{fields[19]}"
        assert backend.state(name).where == "running"
        submitted(out, name, "local")
        with pytest.raises(RequestError, match="is running"):
            refuse_running(out)
        later = f"{other.pid}@{int(fields[19]) + 1}"
        assert backend.state(later).where == "gone"
        backend.stop(later)
        time.sleep(0.2)
        assert other.poll() is None, "another process of the same number was stopped"
        backend.stop(name)
        assert other.wait(timeout=10) == -15
        assert backend.state(name).where == "gone"
    finally:
        other.kill()
        other.communicate()
    assert backend.state(this_process()).where == "running"


def test_logs_are_those_of_the_newest_start_and_of_the_rank_that_is_asked_for(out: Path) -> None:
    for start, rank, stream, text in (
        ("start9", 0, "stdout", "old"),
        ("start10", 0, "stdout", "step 1\nstep 2\n"),
        ("start10", 0, "stderr", "a warning"),
        ("start10", 1, "stderr", "of rank 1"),
    ):
        (out / "logs" / start).mkdir(parents=True, exist_ok=True)
        (out / "logs" / start / f"rank{rank}.{stream}.txt").write_text(text)
    (out / "logs" / "slurm-7.txt").write_text("requeued")
    said: list[str] = []
    logs(out, None, False, said.append)
    text = "\n".join(said)
    assert text.index("requeued") < text.index("step 2") < text.index("a warning") and "old" not in text
    said.clear()
    logs(out, 1, False, said.append)
    assert said == [f"==> {out / 'logs' / 'start10' / 'rank1.stderr.txt'} <==", "of rank 1"]
    with pytest.raises(RequestError, match="ranks 0 to 1"):
        logs(out, 2, False, said.append)


def test_logs_that_are_followed_go_on_until_the_job_has_ended(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = queue(tmp_path, monkeypatch, "41 RUNNING None")
    submitted(out)
    path = out / "logs" / "start1" / "rank0.stdout.txt"
    path.parent.mkdir(parents=True)
    path.write_text("one\n")
    said: list[str] = []
    thread = threading.Thread(target=logs, args=(out, 0, True, said.append))
    thread.start()
    end = time.monotonic() + 20
    while "one" not in said:
        assert time.monotonic() < end
        time.sleep(0.02)
    with path.open("a") as file:
        file.write("two\n")
    (tools / "squeue").write_text("#!/bin/bash\n")
    thread.join(timeout=20)
    assert not thread.is_alive() and said == [f"==> {path} <==", "one", "two"]


def test_every_setting_that_changed_is_listed_with_both_values(run: RunConfig) -> None:
    assert changes(run, run) == ()
    other = replace(
        run,
        ranks=4,
        train=replace(run.train, steps=50),
        parallel=replace(run.parallel, tp=2),
        optimizer=replace(run.optimizer, clip_norm=None),
    )
    assert set(changes(run, other)) == {
        f"ranks: {run.ranks} → 4",
        "train.steps: 40 → 50",
        "parallel.tp: 1 → 2",
        "optimizer.clip_norm: 1.0 → none",
    }


@pytest.mark.parametrize(
    ("before", "after", "effect"),
    [("float32", "bfloat16", "rounded to nearest even"), ("bfloat16", "float32", "widened exactly")],
)
def test_moments_kept_in_another_format_are_said_to_be_converted(
    run: RunConfig, before: FloatName, after: FloatName, effect: str
) -> None:
    held, wanted = (replace(run, precision=replace(run.precision, moments=name)) for name in (before, after))
    expected = f"precision.moments: {before} → {after} (moments of the checkpoint are {effect})"
    assert changes(held, wanted) == (expected,)


class Terminal(io.StringIO):
    """A terminal on which something was typed."""

    def isatty(self) -> bool:
        return True


def test_changes_are_confirmed_on_a_terminal_or_by_yes_and_refused_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    confirm((), yes=False)
    confirm(("a: 1 → 2",), yes=True)
    assert "a: 1 → 2" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(RequestError, match=r"a: 1 → 2\nAdd --yes") as caught:
        confirm(("a: 1 → 2",), yes=False)
    assert caught.value.exit_code == 2
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    confirm(("a: 1 → 2",), yes=False)
    assert "Go on?" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    with pytest.raises(click.Abort):
        confirm(("a: 1 → 2",), yes=False)


def test_an_agent_whose_workers_fail_ends_with_their_code_and_leaves_word(out: Path) -> None:
    command = [sys.executable, "-m", "launch.agent", str(out), "--job", "41"]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert made.returncode == 2 and "Traceback" not in made.stderr, made.stderr
    assert "nowhere" in made.stderr and "failed first" in made.stderr
    said = json.loads((out / "errors" / "node0.json").read_text())
    assert said["node"] == 0 and "nowhere" in said["message"]
    events = [(event["event"], event.get("job")) for event in read_events(out)]
    assert events == [("started", "41"), ("failed", None)]
    before = time.time()
    assert not failed_elsewhere(out, before)  # of an earlier start
    write_json(out / "errors" / "node3.json", {"node": 3, "time": before + 1, "message": "x"})
    assert failed_elsewhere(out, before)
    lost = subprocess.run([*command, "--node-variable", "NOT_SET"], capture_output=True, text=True, check=False)
    assert lost.returncode == 2 and "NOT_SET" in lost.stderr
