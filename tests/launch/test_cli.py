"""The command line: instant without torch, exit codes, and nothing started or overwritten by mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt.save import Saving, save
from core.errors import RequestError
from core.parallel.groups import one_rank
from core.state.box import whole
from core.state.sharded import ShardedTensor
from core.training.metrics import MetricsWriter, StepMetrics
from launch.backends.protocol import Job, JobError, Outcome
from launch.cli import main
from launch.folder import read_run
from launch.start import Start, start
from tests.launch.small import RunsHere

TEXT = "the cat sat on the mat and the dog ran after the cat\n"


def launch(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_help_list_and_explanations_import_nothing_slow() -> None:
    code = (
        "import sys\nfrom launch.cli import main\n"
        "plan = ['plan', 'deepseek_v3', '--hw', 'gb200', '--explain', 'parallel.ep']\n"
        "for arguments in (['--help'], ['list'], plan, ['mixtral', '--help']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "slow = {'torch', 'numpy', 'rich', 'tensorboard', 'matplotlib'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_names_the_models_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = launch(capsys, "--help")
    assert code == 0
    for part in ("deepseek_v3, mixtral, qwen3", "--resume", "--dry-run", "prepare", "Exit codes"):
        assert part in out


def test_list_has_a_row_for_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = launch(capsys, "list")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert ["mixtral", "8x7b"] in [row[:2] for row in rows]
    assert ["deepseek_v3", "tiny", "cpu, gpu"] in [row[:3] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("mixtrl",), "Did you mean mixtral?"),
        (("lst",), "Did you mean list?"),
        (("mixtral", "--size", "9x9b"), "--size=9x9b: is not a size of mixtral"),
        (("mixtral", "--set", "model.moe.expert=3"), "did you mean model.moe.experts"),
        (("mixtral", "--ranks", "many"), "not a valid integer"),
        (("mixtral", "--bad"), "No such option"),
        (("mixtral", "--resume"), "--resume=: needs the folder of the run"),
        (("mixtral", "--resume", "--out", "nowhere"), "--out nowhere: holds no run to resume"),
        (("report", "nowhere"), "nowhere: holds no run"),
        (("sample", "nowhere", "--prompt", "x"), "nowhere: holds no run"),
        (("prepare", "--data", "nowhere", "--out", "new"), "nowhere"),
        (("mixtral", "--data", "nowhere"), "nowhere"),
    ],
)
def test_a_mistake_ends_with_code_two_and_one_message(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = launch(capsys, *arguments)
    assert code == 2
    assert part in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_starts_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = launch(capsys, "qwen3", "--steps", "7", "--dry-run", "--out", "here")
    assert code == 0
    assert "run folder   here" in out
    assert not list(tmp_path.iterdir())


class FakeBackend(RunsHere):
    """Writes `steps` lines of metrics instead of training, then ends as told."""

    def __init__(self, steps: int, ended: str = "finished") -> None:
        self.steps, self.ended, self.jobs = steps, ended, list[Job]()

    def start(self, job: Job) -> Outcome:
        self.jobs.append(job)
        with MetricsWriter(job.out, resume_from_step=0) as writer:
            for step in range(1, self.steps + 1):
                writer.write(
                    StepMetrics(step=step, loss=1, learning_rate=1, grad_norm=1, tokens_per_second=1, tokens=step)
                )
        if self.ended == "failed":
            raise JobError("rank 0 failed first: the disk is full")
        return Outcome(ended=self.ended)  # type: ignore[arg-type]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(TEXT * 30 + f"document {number}\n")
    return folder


def asked(out: Path | None, *, resume: bool = False, **options: object) -> Start:
    plain = dict.fromkeys(("size", "hardware", "ranks", "steps", "seed", "data", "dtype"))
    return Start(
        model="mixtral", out=out, resume=resume, dry_run=False, yes=True, options={**plain, "settings": (), **options}
    )


def test_a_launch_prepares_writes_the_run_starts_it_and_draws_the_report(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend(3)
    start(asked(None, steps=3, data=str(corpus)), backend)
    (job,) = backend.jobs
    assert job.ranks == 2
    assert job.out.parent == Path("runs") and job.out.name.startswith("mixtral-tiny-cpu-")
    file = read_run(job.out)
    assert (file.run.train.steps, file.run.data.path) == (3, str(corpus))
    assert Path(file.prepared).is_dir() and file.versions["python"]
    summary = json.loads((job.out / "summary.json").read_text())
    assert summary["ended"] == "finished" and 0 < summary["unigram_entropy"] < 6
    assert (job.out / "report.html").exists()
    out = capsys.readouterr().out
    assert f"run folder: {job.out}" in out and "report.html" in out


def test_an_interrupted_run_says_how_to_go_on_and_only_then_can_be_resumed(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a run"
    start(asked(out, steps=9, data=str(corpus)), FakeBackend(4, "stopped"))
    text = capsys.readouterr().out
    assert f"stopped at step 4, checkpoint saved; continue with: launch mixtral --resume --out '{out}'" in text
    before = (out / "run.json").read_bytes()
    with pytest.raises(RequestError, match=r"holds a run already\. Add --resume"):
        start(asked(out, steps=9, data=str(corpus)), FakeBackend(0))
    assert (out / "run.json").read_bytes() == before
    backend = FakeBackend(12)
    start(asked(out, resume=True, steps=12), backend)
    assert len(backend.jobs) == 1
    assert read_run(out).run.train.steps == 12


def test_a_new_run_takes_no_other_runs_checkpoints_and_its_own_resume_does(corpus: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    settings = (f"checkpoint.address={shared}",)
    backend = FakeBackend(1)
    start(asked(tmp_path / "first", data=str(corpus), settings=settings), backend)
    w = ShardedTensor(name="w", shape=(3,), box=whole((3,)), data=torch.zeros(3))
    save(shared, 7, [w], {}, one_rank().world, Saving())
    with pytest.raises(RequestError, match=r"checkpoint\.address=.*holds checkpoints of another run.*step 7"):
        start(asked(tmp_path / "second", data=str(corpus), settings=settings), backend)
    assert not (tmp_path / "second").exists()
    start(asked(tmp_path / "first", resume=True), backend)
    assert len(backend.jobs) == 2


def test_a_run_is_not_resumed_on_other_data(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    start(asked(out, data=str(corpus)), FakeBackend(1))
    (corpus / "0.txt").write_text("something else entirely\n" * 50)
    start(asked(out, resume=True), FakeBackend(1))  # the tokens it began with are still in the cache
    prepared = Path(read_run(out).prepared)
    for path in sorted(prepared.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(RequestError, match="the data has changed since the run began"):
        start(asked(out, resume=True), FakeBackend(1))


def test_a_failed_job_leaves_the_run_marked_failed(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the disk is full\ncontinue with: launch mixtral --resume --out "):
        start(asked(tmp_path / "run", data=str(corpus)), FakeBackend(2, "failed"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended"] == "failed"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_folder_that_is_not_empty_or_a_file_is_not_written_to(corpus: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "taken"
    if kind == "folder":
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    else:
        out.write_text("mine")
    with pytest.raises(RequestError, match="Give a folder that is new or empty"):
        start(asked(out, data=str(corpus)), FakeBackend(0))


def test_a_gpu_run_without_devices_is_refused_before_anything_starts(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RequestError, match=r"each rank needs a CUDA device, and torch sees 0 here\. Works: --hw cpu"):
        start(asked(tmp_path / "run", hardware="gpu", data=str(corpus)))
    assert not (tmp_path / "run").exists()


class LosesTheFolder(FakeBackend):
    """A job that fails because its folder went away."""

    def start(self, job: Job) -> Outcome:
        shutil.rmtree(job.out)
        job.out.write_text("")
        raise JobError("rank 0 failed first: the folder is gone")


def test_a_summary_that_cannot_be_written_does_not_hide_why_the_job_failed(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the folder is gone") as caught:
        start(asked(tmp_path / "run", data=str(corpus)), LosesTheFolder(0))
    assert caught.value.exit_code == 1
