"""Every state in which a kill can leave the folders: the last good checkpoint is found, and the next save tidies up."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckpt.save as save_module
from ckpt.files.local import LocalFiles
from ckpt.files.protocol import Buffer
from ckpt.manifest import MANIFEST, Manifest
from ckpt.save import Saving, save
from ckpt.shelf.address import latest, open_shelf, steps
from ckpt.verify import verify
from core.errors import CheckpointError
from core.parallel.groups import one_rank
from core.state.box import whole
from tests.ckpt.harm import at_most
from tests.ckpt.pieces import assert_loads, piece

ALONE = one_rank().world
DATA = "pieces/00000.0.float32/c.0"


def truth(step: int) -> dict[str, Tensor]:
    return {"w": torch.full((3, 5), float(step))}


def write(run: Path, step: int, keep: int = 9) -> Path:
    return Path(save(run, step, [piece("w", truth(step)["w"], whole((3, 5)))], {}, ALONE, Saving(keep=keep)))


def assert_is(folder: str | Path | None, step: int) -> None:
    assert folder is not None
    assert_loads(folder, [[piece("w", truth(step)["w"], whole((3, 5)))]], truth(step))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def test_a_partial_folder_is_skipped_said_and_removed_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    shutil.copytree(write(tmp_path, 2), tmp_path / "checkpoints/step_00000003.00ab.partial")
    with caplog.at_level(logging.WARNING):
        assert_is(latest(tmp_path), 2)
    assert "step_00000003.00ab.partial: half-written" in caplog.text
    write(tmp_path, 4)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000004"]


def test_killed_between_the_two_renames_of_a_replacement_the_older_save_still_counts(tmp_path: Path) -> None:
    write(tmp_path, 1)
    aside = write(tmp_path, 2).rename(tmp_path / "checkpoints/step_00000002.00ab.replaced")
    assert latest(tmp_path) == str(aside) and steps(tmp_path) == (1, 2)
    assert_is(aside, 2)
    write(tmp_path, 3)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]
    assert_is(tmp_path / "checkpoints/step_00000002", 2)


def test_killed_while_the_replaced_one_was_removed_the_new_one_counts(tmp_path: Path) -> None:
    half_removed = tmp_path / "checkpoints/step_00000002.00ab.replaced"
    shutil.copytree(write(tmp_path, 2), half_removed)
    (half_removed / DATA).unlink()
    assert latest(tmp_path) == str(tmp_path / "checkpoints/step_00000002")
    assert open_shelf(tmp_path).survey().incomplete == ()
    write(tmp_path, 3)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def test_killed_while_pruning_nothing_half_removed_is_ever_found(tmp_path: Path) -> None:
    write(tmp_path, 1).rename(tmp_path / "checkpoints/step_00000001.00ab.removed")
    write_two = write(tmp_path, 2)
    assert latest(tmp_path) == str(write_two) and steps(tmp_path) == (2,)
    assert names(tmp_path) == ["step_00000002"]


@pytest.mark.parametrize("hurt", [MANIFEST, DATA, "pieces/00000.0.float32/zarr.json"])
def test_a_damaged_newest_is_skipped_with_its_reason_and_not_pruned_away_for(
    tmp_path: Path, hurt: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    file = write(tmp_path, 2) / hurt
    file.write_bytes(file.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING):
        assert_is(latest(tmp_path), 1)
    assert "step_00000002" in caplog.text and Path(hurt).name in caplog.text
    write(tmp_path, 3, keep=2)
    assert steps(tmp_path) == (1, 3), "a damaged checkpoint does not take the place of a good one"


def test_other_files_and_folders_beside_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 1)
    mine = tmp_path / "checkpoints" / "step_of_mine"
    mine.mkdir()
    (tmp_path / "checkpoints" / "step_00000009").write_text("a file")
    write(tmp_path, 2, keep=1)
    assert mine.is_dir() and (tmp_path / "checkpoints" / "step_00000009").is_file()
    assert steps(tmp_path) == (2,)


def two_savers_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_where_locks_do_not_work_a_saver_whose_files_another_one_removed_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    two_savers_without_locks(monkeypatch)
    real, others = save_module.finish, iter([lambda: write(tmp_path, 2)])

    def finish(*args: Any, **named: Any) -> Manifest:
        # Another saver does all its work between the first one's data and its descriptions.
        next(others, lambda: None)()
        return real(*args, **named)

    monkeypatch.setattr(save_module, "finish", finish)
    with pytest.raises(CheckpointError, match=r"pieces/00000\.0\.float32/c\.0 is missing, though it was written"):
        write(tmp_path, 2)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    assert_is(latest(tmp_path), 2)
    assert verify(latest(tmp_path) or "") == ()


def test_a_disk_that_is_full_for_the_pointer_fails_the_save_before_the_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What says that it failed did fail: no checkpoint of that step, the older one in its place."""
    write(tmp_path, 1)
    real = LocalFiles.write

    def write_unless_pointer(files: LocalFiles, path: str, buffers: Iterable[Buffer]) -> int:
        if path.startswith("latest"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(files, path, buffers)

    monkeypatch.setattr(LocalFiles, "write", write_unless_pointer)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="No space left"):
            write(tmp_path, step)
    assert names(tmp_path) == ["step_00000001"]
    assert_is(latest(tmp_path), 1)


@pytest.mark.parametrize("kind", ["replaced", "removed"])
def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write(tmp_path, 1)

    def busy(path: str, **_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        write(tmp_path, 1 if kind == "replaced" else 2, keep=1)
    assert [name.rpartition(".")[2] for name in names(tmp_path) if "." in name] == [kind]
    assert len(steps(tmp_path)) == 1
    write(tmp_path, 3)
    assert not [name for name in names(tmp_path) if "." in name]


def test_a_survey_beside_links_to_nothing_and_pipes_neither_fails_nor_waits(tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    (folder / "link").symlink_to("nowhere")
    assert latest(tmp_path) == str(folder)
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with at_most(20):
        assert latest(tmp_path) == str(tmp_path / "checkpoints/step_00000001")
