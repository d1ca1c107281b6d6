"""The local backend: clean ends, first failures and signals, with workers that do not import torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.backends.local import LocalBackend
from launch.backends.protocol import Job, JobError
from launch.folder import read_events

WORKER = "tests.launch.fake_worker"


def start(out: Path, *plan: str, grace: float = 1.0, restarts: int = 0) -> str:
    (out / "plan.json").write_text(json.dumps(plan))
    return LocalBackend(WORKER, grace_seconds=grace).start(Job(ranks=len(plan), out=out, restarts=restarts)).ended


def test_a_clean_end_keeps_rank_zero_on_the_terminal_and_the_rest_in_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGQUIT)]
    assert start(tmp_path, "print", "print", "print") == "finished"
    assert capfd.readouterr().out == "rank 0 prints\n"
    logs = tmp_path / "logs" / "start1"
    assert (logs / "rank2.stdout.txt").read_text() == "rank 2 prints\n"
    assert (logs / "rank0.stderr.txt").read_text() == "rank 0 complains\n"
    shown = json.loads((tmp_path / "ready2").read_text())
    assert shown["WORLD_SIZE"] == "3" and int(shown["OMP_NUM_THREADS"]) >= 1
    assert dict(os.environ) == before
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGQUIT)]
    assert after == handlers


def test_the_first_error_is_shown_first_and_its_traceback_only_where_it_was_unexpected(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank0.json").write_text('{"rank": 0, "time": 0, "message": "of an earlier start"}')
    with pytest.raises(JobError) as caught:
        start(tmp_path, "follow", "fail")
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 failed first: the disk is full"
    assert lines[1] == "then rank 0: connection closed by peer"
    assert lines[2].endswith("logs/start1") and len(lines) == 3
    assert caught.value.exit_code == 1


def test_a_refusal_by_the_worker_keeps_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not a checkpoint") as caught:
        start(tmp_path, "refuse")
    assert caught.value.exit_code == 2


def test_a_killed_rank_ends_all_within_seconds_and_is_named_with_its_signal(tmp_path: Path) -> None:
    before = time.monotonic()
    with pytest.raises(JobError) as caught:
        start(tmp_path, "follow", "hang", "die")
    assert time.monotonic() - before < 8
    text = str(caught.value)
    assert text.startswith("rank 2 failed first: it was killed by SIGKILL")
    assert "last words" in text
    assert "then rank 0: connection closed by peer" in text
    assert "rank 1" not in text
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def test_an_exit_without_a_word_and_an_unexpected_error_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="rank 0 failed first: it ended with exit code 7 and left no message"):
        start(tmp_path, "exit")
    with pytest.raises(JobError, match="rank 0 failed first: division by zero\nTraceback: the line that divided"):
        start(tmp_path, "raise")
    assert (tmp_path / "logs" / "start2").is_dir()


def test_failed_workers_are_started_again_as_often_as_asked_and_each_failure_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, "print", "fail once", restarts=1) == "finished"
    said = capfd.readouterr()
    assert said.err.count("rank 1 failed first: a cable was pulled") == 1 and "restart 1" in said.err
    (event,) = read_events(tmp_path)
    assert (event["event"], event["restart"]) == ("restarted", 1) and "a cable was pulled" in event["because"]
    assert (tmp_path / "logs" / "start2" / "rank1.stdout.txt").read_text() == "rank 1 goes on\n"
    assert not list((tmp_path / "errors").glob("rank*.json"))

    with pytest.raises(JobError, match="rank 0 failed first: the disk is full"):
        start(tmp_path, "fail", restarts=1)
    assert len(list((tmp_path / "logs").glob("start*"))) == 4


def test_variables_of_a_job_reach_its_workers_and_the_users_own_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text('["print"]')
    job = Job(ranks=1, out=tmp_path, environment=(("ZOO_TEST", "of the job", "why"), ("OMP_NUM_THREADS", "7", "why")))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    LocalBackend(WORKER).start(job)
    shown = json.loads((tmp_path / "ready0").read_text())
    assert (shown["ZOO_TEST"], shown["OMP_NUM_THREADS"]) == ("of the job", "3")
    assert "ZOO_TEST" not in os.environ


SCRIPT = f"""
import sys
from pathlib import Path
from launch.backends.local import LocalBackend
from launch.backends.protocol import Job, JobError
try:
    print(LocalBackend("{WORKER}", grace_seconds=60).start(Job(ranks=2, out=Path(sys.argv[1]))).ended)
except JobError as error:
    sys.exit(str(error))
"""


def launched(out: Path, *plan: str) -> subprocess.Popen[str]:
    """A launcher as a process of its own, its workers ready."""
    (out / "plan.json").write_text(json.dumps(plan))
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)], stdout=pipe, stderr=pipe, text=True)
    end = time.monotonic() + 30
    while not all((out / f"ready{rank}").exists() for rank in range(len(plan))):
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(0.3)
    return process


def test_a_signal_lets_the_workers_save_and_ends_well(tmp_path: Path) -> None:
    process = launched(tmp_path, "save", "save")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (out, process.returncode) == ("stopped\n", 0), err
    assert "save a checkpoint first" in err
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def test_a_second_signal_kills(tmp_path: Path) -> None:
    process = launched(tmp_path, "hang", "hang")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "killed by a second interrupt" in err


NODE_SCRIPT = f"""
import sys
from pathlib import Path
from launch.backends.local import LocalBackend, Node
from launch.backends.protocol import Job
node = Node(number=int(sys.argv[2]), nodes=2, meeting="localhost:" + sys.argv[3])
print(LocalBackend("{WORKER}", node=node, terminal=False, patient=True).start(Job(ranks=4, out=Path(sys.argv[1]))).ended)
"""


def test_agents_of_two_nodes_number_ranks_by_node_log_in_one_folder_and_both_know_of_a_stop_that_one_was_told(
    tmp_path: Path,
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(["stop together"] * 4))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])
    pipe = subprocess.PIPE
    agents = [
        # the second is there first
        subprocess.Popen(
            [sys.executable, "-c", NODE_SCRIPT, str(tmp_path), node, port], stdout=pipe, stderr=pipe, text=True
        )
        for node in ("1", "0")
    ]
    try:
        end = time.monotonic() + 60
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(4)):
            assert time.monotonic() < end and all(agent.poll() is None for agent in agents)
            time.sleep(0.05)
        where = [json.loads((tmp_path / f"ready{rank}").read_text()) for rank in range(4)]
        assert [(place["GROUP_RANK"], place["LOCAL_RANK"]) for place in where] == [(n, r) for n in "01" for r in "01"]
        # Not to the one whose rank 0 it is, and more than once, as clusters do.
        for _ in range(3):
            agents[0].send_signal(signal.SIGUSR1)
            time.sleep(0.1)
        for agent in agents:
            out, err = agent.communicate(timeout=30)
            assert (out, agent.returncode) == ("stopped\n", 0), err
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    (folder,) = (tmp_path / "logs").iterdir()
    assert {path.name for path in folder.glob("*.stdout.txt")} == {f"rank{rank}.stdout.txt" for rank in range(4)}
