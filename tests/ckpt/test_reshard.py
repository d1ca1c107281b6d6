"""Pieces for the ranks of another mapping: exactly what their real modules hold, and the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from ckpt.described import MAPPING, mapping_of
from ckpt.files.local import LocalFiles
from ckpt.manifest import read_manifest
from ckpt.offline import reshard_job
from ckpt.opening import open_any
from ckpt.reshard import canonical, held_under, smallest_world
from ckpt.source import Form
from ckpt.stored import CheckpointSource
from ckpt.stream import Streaming, write_checkpoint
from core.config.architecture import ModelConfig
from core.config.mapping import ParallelConfig
from core.config.override import override_section, parse_assignment
from core.errors import CheckpointError, ConfigError
from core.state.box import intersect
from tests.ckpt.pieces import assert_loads
from tests.ckpt.stored_models import ranks_under, save_run
from tests.core import tiny

MODELS = {"mixtral": tiny.mixtral(), "qwen3": tiny.qwen3(), "deepseek_v3": tiny.deepseek()}
BEFORE = ParallelConfig(tp=2, ep=2)
SETTINGS = {
    "mixtral": ("parallel.tp=1", "parallel.ep=4", "parallel.pp=2"),
    "qwen3": ("parallel.tp=1", "parallel.cp=2", "parallel.etp=2"),
    "deepseek_v3": ("parallel.ep=8", "parallel.pp=2", "parallel.layout=Ett|mmL"),
}


@pytest.fixture(params=MODELS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ModelConfig, Path]:
    return request.param, MODELS[request.param], tmp_path


def test_every_rank_to_come_finds_its_pieces_whole_and_the_numbers_are_the_same(
    run: tuple[str, ModelConfig, Path],
) -> None:
    name, model, folder = run
    truth = save_run(folder / "run", model, name, parallel=BEFORE)
    job, parallel = reshard_job(open_any(folder / "run"), folder / "out", Streaming(), SETTINGS[name])
    address = write_checkpoint(job)
    manifest = read_manifest(LocalFiles(Path(address)))
    ranks = ranks_under(model, parallel, truth)
    assert_loads(address, ranks, truth)
    pieces = {entry.name: [piece.box for piece in entry.pieces] for entry in manifest.entries}
    assert pieces.keys() == truth.keys()
    for held in (tensor for rank in ranks for tensor in rank):
        met = [box for box in pieces[held.name] if intersect(box, held.box)]
        assert all(intersect(box, held.box) == box for box in met), f"{held.name} {held.box} cuts through a piece"
    assert mapping_of(manifest.extra) == parallel
    assert {piece.rank for entry in manifest.entries for piece in entry.pieces} == set(range(smallest_world(parallel)))


def test_the_mapping_starts_from_the_one_that_saved_it_and_the_run_keeps_its_own(tmp_path: Path) -> None:
    save_run(tmp_path / "run", MODELS["mixtral"], "mixtral", parallel=BEFORE)
    opened = open_any(tmp_path / "run")
    job, parallel = reshard_job(opened, tmp_path / "out", Streaming(), ["parallel.ep=4"])
    assert parallel == ParallelConfig(tp=2, ep=4)
    assert job.extra["run"]["parallel"]["ep"] == 2 and job.extra[MAPPING]["ep"] == 4
    write_checkpoint(job)
    again, parallel = reshard_job(open_any(tmp_path / "out"), tmp_path / "more", Streaming(), ["parallel.tp=1"])
    assert parallel == ParallelConfig(ep=4)
    assert again.step == 30


def test_all_faults_come_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    save_run(tmp_path / "run", MODELS["mixtral"], "mixtral", parallel=BEFORE)
    asked = [
        "parallel.tp=3",
        "parallel.ep=3",
        "tp=2",
        "parallel.schedule=fast",
        "train.steps=3",
        "parallel.pp",
        "parallel.ep=4",
    ]
    with pytest.raises(ConfigError) as error:
        reshard_job(open_any(tmp_path / "run"), tmp_path / "out", Streaming(), asked)
    text = str(error.value)
    for part in (
        "parallel.tp=3: must divide model.attention.heads=2",
        "parallel.ep=4: was also given as 3",
        "tp=2: is in no section (did you mean parallel.tp?). Works: parallel.….",
        "parallel.schedule=fast: is not one of the choices",
        "train.steps=3: is in no section",
        "--set=parallel.pp: is not of the form key=value",
    ):
        assert part in text, part
    assert "--ranks" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_tensors_that_are_not_the_model_s_are_named() -> None:
    class Odd:
        forms: ClassVar = {
            "model.embedding.weight": Form(shape=(31, 16), dtype="float32"),
            "model.odd": Form(shape=(), dtype="bool"),
        }

    with pytest.raises(CheckpointError) as error:
        held_under(Odd(), MODELS["mixtral"], ParallelConfig())  # type: ignore[arg-type]
    assert "odd: is no tensor of the model" in str(error.value)
    assert "final_norm.weight: is a tensor of the model that is not there" in str(error.value)
    assert "embedding" not in str(error.value)


def test_moments_and_parameters_have_one_name_in_the_model() -> None:
    assert (
        canonical("optimizer.exp_avg.layers.0.mlp.down") == canonical("model.layers.0.mlp.down") == "layers.0.mlp.down"
    )


def test_a_box_of_a_resharded_checkpoint_is_read_from_its_own_pieces_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = save_run(tmp_path / "run", MODELS["qwen3"], "qwen3")
    job, parallel = reshard_job(open_any(tmp_path / "run"), tmp_path / "out", Streaming(), ["parallel.tp=2"])
    source = CheckpointSource(write_checkpoint(job))
    read: list[int] = []
    original = LocalFiles.read_into

    def counted(self: LocalFiles, path: str, offset: int, buffers: list) -> None:  # type: ignore[type-arg]
        read.append(sum(buffer.nbytes for buffer in buffers))
        original(self, path, offset, buffers)

    monkeypatch.setattr(LocalFiles, "read_into", counted)
    for held in ranks_under(MODELS["qwen3"], parallel, truth)[1]:
        read.clear()
        source.read(held.name, held.box)
        assert sum(read) == held.data.nbytes, held.name


def test_settings_of_one_section_are_read_as_those_of_a_run() -> None:
    items = [parse_assignment(text) for text in ("parallel.tp=4", "parallel.layout=none", "parallel.ep=two")]
    parallel, faults = override_section("parallel", ParallelConfig(layout="EtL"), items)
    assert parallel == ParallelConfig(tp=4)
    assert [str(fault) for fault in faults] == [
        "parallel.ep=two: must be a whole number. Works: for example 64. [setting.value]"
    ]
