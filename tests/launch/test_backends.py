"""Scripts: what they say for which job, what is refused, and that the printed one is to the byte the submitted one."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from core.config.family import find_family
from core.errors import ConfigError, RequestError
from launch.backends.choose import choose_backend
from launch.backends.options import divide, parse_options, seconds_of
from launch.backends.protocol import Job
from launch.backends.slurm import SlurmOptions
from launch.cli import main
from launch.folder import read_events, read_submission
from launch.job import make_job
from launch.profiles import find_profile
from launch.request import Request, new_run
from tests.launch.small import SMALL, write_corpus

JOB = Job(ranks=8, out=Path("/runs/a run"), cuda=True, gpus_per_node=4, domain=72, expert_ranks=8, python="/opt/python")


def slurm(job: Job, *options: str) -> str:
    script = choose_backend("slurm", options).script(job)
    assert script is not None
    return script.text


def directives(text: str) -> list[str]:
    """The directives of a script, as sbatch reads them: up to the first command, unquoted as in a shell."""
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    assert not [line for line in lines[end:] if line.startswith("#SBATCH")]
    return [word for line in lines[1:end] for word in shlex.split(line.removeprefix("#SBATCH "))]


def test_options_of_slurm_become_directives_and_nothing_else_does() -> None:
    found = directives(
        slurm(JOB, "partition=gpu", "account=a b", "time=4:00:00", "grace=120", "sbatch=--comment='x y' --exclude=n1")
    )
    assert {"--partition=gpu", "--account=a b", "--time=4:00:00", "--comment=x y", "--exclude=n1"} <= set(found)
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--signal=B:USR1@120", "--requeue"} <= set(found)
    assert "--segment=2" in found and "--output=/runs/a run/logs/slurm-%j.txt" in found
    assert not [word for word in found if word.startswith(("--qos", "--reservation", "--constraint"))]
    assert "--output=/runs/50%%/logs/slurm-%j.txt" in directives(slurm(replace(JOB, out=Path("/runs/50%"))))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("partitoin=gpu",), ("cluster.partitoin=gpu", "did you mean cluster.partition")),
        (("gpu",), ("--cluster=gpu", "key=value")),
        (("grace=soon",), ("cluster.grace=soon",)),
        (("grace=0",), ("cluster.grace=0", "some seconds to save")),
        (("time=tomorrow",), ("cluster.time=tomorrow", "4:00:00")),
        (("time=5", "grace=300"), ("cluster.time=5", "longer than cluster.grace=300")),
        (("partition=a\n#SBATCH --uid=0",), ("cluster.partition", "line break")),
        (("nodes=3",), ("cluster.nodes=3", "must divide the 8 ranks", "Works: 4")),
        (("nodes=1",), ("cluster.nodes=1", "gives a node 8 ranks, and it has 4 GPUs", "Works: 2")),
        (("segment=3",), ("cluster.segment=3", "must divide the 2 nodes", "Works: 2, or 0")),
        (("mounts=/a:/a",), ("cluster.mounts=/a:/a", "no cluster.image")),
        (("sbatch=--comment='x",), ("cluster.sbatch", "is not quoted")),
        (("partition=a", "partition=b"), ("cluster.partition=b", "was also given as a")),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_works(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        slurm(JOB, *options)
    for word in words:
        assert word in str(caught.value)


def test_every_wrong_option_is_said_at_once_and_a_place_that_is_none_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend("slurm", ("a=1", "b", "grace=x"))
    assert len(caught.value.faults) == 3
    with pytest.raises(ConfigError, match="did you mean kubernetes"):
        choose_backend("kubernets", ())
    with pytest.raises(ConfigError, match="--backend is local"):
        choose_backend("local", ("partition=a",))
    with pytest.raises(ConfigError, match="is not a scheduler"):
        choose_backend("print", ("scheduler=pbs",))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("5:30", 330), ("4:00:01", 14401), ("1-12", 129600), ("2-0:30", 174600), ("1-1:1:1", 90061)],
)
def test_durations_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert seconds_of("time", text) == seconds


@pytest.mark.parametrize(
    ("ranks", "each", "domain", "experts", "nodes", "segment"),
    [
        (256, 4, 72, 64, 64, 16),  # a group of experts is one segment
        (256, 4, 72, 4, 64, None),  # it lies in a node
        (256, 8, 8, 64, 32, None),  # no NVLink between nodes
        (512, 4, 72, 256, 128, 16),  # larger than the domain's 18 nodes: the most that divides
        (24, 4, 72, 24, 6, 6),
        (28, 4, 72, 16, 7, 7),  # 4 does not divide 7 nodes
        (3, 4, 72, 3, 1, None),
    ],
)
def test_a_job_takes_as_few_nodes_as_it_can_and_keeps_groups_of_experts_in_an_nvlink_domain(
    ranks: int, each: int, domain: int, experts: int, nodes: int, segment: int | None
) -> None:
    job = replace(JOB, ranks=ranks, gpus_per_node=each, domain=domain, expert_ranks=experts)
    found = divide(job, None)
    assert (found.count, found.ranks, found.segment) == (nodes, min(ranks, each), segment)


def test_a_job_has_the_nodes_and_the_variables_of_its_hardware() -> None:
    planned = new_run(Request(hardware="gb200"), find_family("deepseek_v3"))
    job = make_job(planned.run, Path("/runs/x"))
    fabric = find_profile("gb200").fabric
    assert fabric is not None and (job.gpus_per_node, job.domain, job.cuda) == (fabric.gpus_per_node, 72, True)
    assert job.expert_ranks == planned.run.parallel.ep * planned.run.parallel.etp
    text = slurm(replace(job, environment=(("A_B", "it's $x", "because"),)))
    assert "export A_B='it'\"'\"'s $x'  # because\n" in text


@pytest.mark.parametrize("code", [0, 1, 75])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_the_script_runs_in_bash_with_odd_paths_and_asks_for_another_start_only_of_a_job_that_saved_and_runs(
    tmp_path: Path, code: int, state: str
) -> None:
    """With Slurm's commands replaced by such as note what they get."""
    out = tmp_path / 'it\'s a "run" $HOME #1'
    out.mkdir()
    tools = fake_tools(
        tmp_path,
        scontrol='if [ "$1" = show ]; then echo host7; echo host8; else echo "$@" > "$TOOLS/scontrol.got"; fi',
        srun=f'printf "%s\\n" "$@" > "$TOOLS/srun.got"; exit {code}',
        squeue=f"echo {state}",
    )
    script = out / "job.sh"
    script.write_text(slurm(replace(JOB, out=out, restarts=2), "setup=export FROM_SETUP=1"))
    variables = {
        "SLURM_JOB_NODELIST": "host[7-8]",
        "SLURM_JOB_ID": "41",
        "PATH": f"{tools}:/usr/bin:/bin",
        "TOOLS": str(tools),
    }
    made = subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (code, "")
    got = (tools / "srun.got").read_text().splitlines()
    assert got[got.index("/opt/python") :] == [
        *("/opt/python", "-P", "-m", "launch.agent", str(out), "--nodes", "2", "--node-variable", "SLURM_NODEID"),
        *("--meeting", "host7:20041", "--job", "41", "--restarts", "2"),
    ]
    again = code == 75 and state == "RUNNING"
    assert (tools / "scontrol.got").exists() == again
    assert [event["event"] for event in read_events(out)] == (["requeued"] if again else [])
    if again:
        assert (tools / "scontrol.got").read_text() == "requeue 41\n"


def test_a_job_that_was_started_too_often_is_not_started_again(tmp_path: Path) -> None:
    tools = fake_tools(tmp_path, scontrol='echo x; touch "$TOOLS/asked"', srun="exit 75", squeue="echo RUNNING")
    script = tmp_path / "job.sh"
    script.write_text(slurm(replace(JOB, out=tmp_path), "requeues=3"))
    variables = {"SLURM_JOB_NODELIST": "h", "SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "3"}
    variables |= {"PATH": f"{tools}:/usr/bin:/bin", "TOOLS": str(tools)}
    made = subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True, check=False)
    assert made.returncode == 75 and "requeues=N" in made.stderr
    assert (tools / "asked").exists()  # for the names of the hosts
    assert not read_events(tmp_path)


def test_what_is_printed_is_to_the_byte_what_a_dry_run_shows_and_what_sbatch_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = fake_tools(
        tmp_path, sbatch='cat "$2" > "$TOOLS/sbatch.got"; echo "$1" >> "$TOOLS/sbatch.said"; echo "77;here"'
    )
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("TOOLS", str(tools))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, corpus = tmp_path / "a run", write_corpus(tmp_path / "corpus")
    asked = ["deepseek_v3", "--out", str(out), "--data", str(corpus), *(a for text in SMALL for a in ("--set", text))]
    place = ["--cluster", "partition=gpu"]
    dry = ended(capsys, [*asked, "--backend", "slurm", *place, "--dry-run"])[0]
    assert not out.exists()
    printed, aside = ended(capsys, [*asked, "--backend", "print", *place])
    assert printed.startswith("#!/bin/bash\n") and "run folder" in aside
    assert dry.endswith(printed) and (out / "job.sh").read_text() == printed
    assert [event["event"] for event in read_events(out)] == ["printed"]

    said, _ = ended(capsys, [*asked, "--resume", "--backend", "slurm", *place])
    assert "submitted as job 77;" in said and f"launch status '{out}'" in said
    assert (tools / "sbatch.got").read_bytes() == printed.encode() and (
        tools / "sbatch.said"
    ).read_text() == "--parsable\n"
    submission = read_submission(out)
    assert submission is not None and (submission.backend, submission.job) == ("slurm", "77")
    assert submission.options == ("partition=gpu",)


def test_a_cluster_that_is_not_there_is_missed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(fake_tools(tmp_path)))
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as caught:
        main(["mixtral", "--backend", "slurm", "--out", str(out)])
    text = capsys.readouterr().err
    assert caught.value.code == 2 and "`sbatch`, which is not on this machine" in text and "--backend print" in text
    assert not out.exists()


def test_a_script_that_was_only_printed_cannot_be_stopped() -> None:
    backend = choose_backend("print", ())
    assert backend.state("").where == "gone"
    with pytest.raises(RequestError, match="only printed"):
        backend.stop("")


def test_options_have_the_types_that_they_declare() -> None:
    options = parse_options(SlurmOptions(), ("nodes=4", "grace=60", "qos=none", "setup=a=b c"))
    assert (options.nodes, options.grace, options.qos, options.setup) == (4, 60, None, "a=b c")


def fake_tools(folder: Path, **scripts: str) -> Path:
    """A folder of commands, each running its line of bash."""
    tools = folder / "tools"
    tools.mkdir()
    for name, line in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    return tools


def ended(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[str, str]:
    """What a launch prints, that ends well."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr()
    assert caught.value.code == 0, said.err
    return said.out, said.err
