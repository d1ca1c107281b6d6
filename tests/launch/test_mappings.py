"""A launched run has the same losses under every mapping, also one that it is resumed with; what cannot run starts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.config.family import find_family
from core.data.storage import TokenFiles
from core.data.tokens import prepare
from core.training.metrics import read_metrics
from launch.cli import main
from launch.folder import RunFile, holds_run, read_json, read_run, write_run
from launch.request import Request, new_run, resumed_run
from launch.worker import StopFlag, sample, train
from tests.launch.small import SMALL, write_corpus
from tests.ranks import Ranks

# Three layers, so that stages are uneven; two heads, eight experts, one module that predicts ahead.
KEPT = tuple(text for text in SMALL if not text.startswith(("model.num_layers", "train.sample_tokens")))
SETTINGS = (
    *KEPT,
    "model.num_layers=3",
    "train.sample_tokens=2",
    "train.schedule_steps=6",
    "optimizer.warmup_steps=2",
    "parallel.ep=1",
)
STEPS = 3

MAPPINGS = {
    "tensors": (2, ("tp=2",)),
    "a ring of tokens": (2, ("cp=2",)),
    "heads for tokens": (2, ("cp=2", "cp_alltoall=2", "dispatcher=allgather")),
    "a layout of virtual stages": (2, ("pp=2", "layout=Et|tt|m|L")),
    "stages that are empty": (4, ("pp=4", "vpp=2", "schedule=zero_bubble")),
    "experts and inside experts": (4, ("etp=2", "ep=2")),
    "forward beside backward": (4, ("pp=2", "ep=2", "schedule=combined")),
    "parameters apart": (4, ("ep=2", "sharding=fsdp")),
    "parameters apart, in two copies": (4, ("tp=2", "sharding=fsdp", "fsdp_replicas=2")),
    "tensors, stages and experts": (4, ("tp=2", "pp=2", "vpp=2", "ep=2", "layout=E|tt|tm|L")),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFiles:
    """The corpus as tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    corpus = write_corpus(folder / "corpus")
    return prepare(source=str(corpus), out=folder / "tokens", vocab=300, tokenizer=None, validation_fraction=0.05)


@pytest.fixture(scope="module")
def alone(tokens: TokenFiles, _pool: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one rank."""
    out = tmp_path_factory.mktemp("alone")
    run_ranks(_pool, begun(out, tokens, 1), 1)
    return out


def begun(out: Path, tokens: TokenFiles, ranks: int, *parallel: str, steps: int = STEPS) -> Path:
    """Plan a run and write it to `out`, as a launch does before it starts the workers."""
    settings = [
        text for text in SETTINGS if text.split("=")[0] not in {f"parallel.{p.split('=')[0]}" for p in parallel}
    ]
    settings += [f"parallel.{text}" for text in parallel]
    request = Request(ranks=ranks, steps=steps, data=str(tokens.folder), settings=tuple(settings))
    planned = new_run(request, find_family("deepseek_v3"))
    write_run(
        out, RunFile(run=planned.run, prepared=str(tokens.folder), identity=tokens.identity, command=(), versions={})
    )
    return out


def resumed(out: Path, ranks: int, *parallel: str, steps: int = STEPS) -> Path:
    """Plan to go on with the run in `out` under another mapping."""
    file = read_run(out)
    request = Request(ranks=ranks, steps=steps, settings=tuple(f"parallel.{text}" for text in parallel))
    planned = resumed_run(request, find_family("deepseek_v3"), file.run)
    write_run(out, RunFile(run=planned.run, prepared=file.prepared, identity=file.identity, command=(), versions={}))
    return out


def run_ranks(ranks: Ranks, out: Path, world: int) -> None:
    ranks.run(train_one_rank, world, out, timeout_seconds=120.0)


def train_one_rank(rank: int, world: int, out: Path) -> None:
    train(out, StopFlag())


def measured(out: Path) -> list[dict[str, Any]]:
    """What every step measured of the model, and the last one on held-out text."""
    names = ("step", "loss", "learning_rate", "grad_norm", "mtp_loss", "aux_loss", "tokens")
    lines = read_metrics(out)
    return [{name: line[name] for name in names} for line in lines] + [{"validation": lines[-1]["validation_loss"]}]


def check_same(out: Path, alone: Path) -> None:
    ours, theirs = measured(out), measured(alone)
    assert [line.get("step") for line in ours] == [*range(1, STEPS + 1), None]
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_run_has_the_losses_of_one_rank(
    name: str, ranks: Ranks, tokens: TokenFiles, alone: Path, tmp_path: Path
) -> None:
    world, parallel = MAPPINGS[name]
    run_ranks(ranks, begun(tmp_path, tokens, world, *parallel), world)
    check_same(tmp_path, alone)
    samples = read_json(tmp_path / "samples.json")
    assert set(samples) == {"prompt", "before", "after"}
    assert samples["before"] == read_json(alone / "samples.json")["before"], "the same weights and the same draws"


def test_a_run_goes_on_under_other_mappings_as_if_it_had_not_stopped(
    ranks: Ranks, tokens: TokenFiles, alone: Path, tmp_path: Path
) -> None:
    run_ranks(ranks, begun(tmp_path, tokens, 2, "tp=2", steps=1), 2)
    run_ranks(ranks, resumed(tmp_path, 4, "tp=1", "pp=2", "ep=2", "layout=Et|tt|m|L", steps=2), 4)
    run_ranks(ranks, resumed(tmp_path, 2, "pp=1", "layout=none", "cp=2", "sharding=fsdp"), 2)
    check_same(tmp_path, alone)
    ours, theirs = (sample(out, "the ", tokens=5, temperature=0.8, seed=3) for out in (tmp_path, alone))
    assert ours == theirs, "one rank reads what any ranks have saved"


def launch(out: Path, *arguments: str) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(out.parent / "cache")}
    command = [sys.executable, "-m", "launch.cli", "deepseek_v3", "--hw", "cpu", "--out", str(out), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_command_starts_a_spread_run_and_resumes_it_spread_otherwise(
    tokens: TokenFiles, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = [argument for text in (*SETTINGS, "parallel.tp=2") for argument in ("--set", text)]
    launch(out, "--data", str(tokens.folder), "--steps", "2", *settings)
    other = ("parallel.tp=1", "parallel.pp=2", "parallel.layout=Et|tt|m|L", "parallel.schedule=zero_bubble")
    launch(
        out, "--resume", "--yes", "--steps", str(STEPS), *[argument for text in other for argument in ("--set", text)]
    )
    check_same(out, alone)
    assert (out / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        (("parallel.tp=3", "parallel.ep=5", "parallel.etp=97"), ("parallel.tp=3: must divide", "parallel.ep=5: must", "parallel.etp=97: must", "--ranks=2: must be a multiple of parallel.tp*cp*pp=3", "--ranks=2: must be a multiple of parallel.etp*ep*pp=485")),
        (("parallel.pp=2", "parallel.layout=Et|ttL", "parallel.vpp=2"), ("parallel.layout=Et|ttL: has 3 t, and model.num_layers=4",)),
        (("parallel.pp=2", "parallel.layout=E tL"), ("spaces are not allowed (character 2 of 4)",)),
        (("parallel.shedule=1f1b",), ("did you mean parallel.schedule",)),
        (("parallel.schedule=zerobubble",), ("did you mean zero_bubble?). Works: gpipe, 1f1b, zero_bubble, combined.",)),
        (("parallel.sharding=fsdp", "parallel.schedule=combined", "parallel.fsdp_replicas=3"), ("parallel.schedule=combined: runs a forward", "parallel.fsdp_replicas=3: must divide the 2 data-parallel ranks")),
        (("parallel.cp=2", "parallel.cp_alltoall=3", "train.global_batch=5"), ("parallel.cp_alltoall=3: must divide parallel.cp=2", "train.global_batch=5: must be a multiple")),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_every_fault_and_starts_nothing(
    settings: tuple[str, ...],
    faults: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = [argument for text in settings for argument in ("--set", text)]
    with pytest.raises(SystemExit) as ended:
        main(["deepseek_v3", "--hw", "cpu", "--out", "here", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    for fault in faults:
        assert fault in said
    count = 1 if len(said.splitlines()) == 2 else len(said.splitlines()) - 1
    assert said.startswith(f"{count} setting")
    assert not list(tmp_path.iterdir())


def test_a_mapping_that_a_run_cannot_be_resumed_with_is_refused_and_leaves_it_as_it_is(
    tokens: TokenFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = begun(tmp_path / "run", tokens, 2, "tp=2")
    before = (out / "run.json").read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["deepseek_v3", "--resume", "--out", str(out), "--ranks", "4", "--set", "parallel.tp=4"])
    assert ended.value.code == 2
    assert "parallel.tp=4: must divide model.attention.heads=2. Works: 2." in capsys.readouterr().err
    assert holds_run(out) and (out / "run.json").read_bytes() == before
