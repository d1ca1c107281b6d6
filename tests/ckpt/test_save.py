"""Saving: whole or not at all, older ones untouched, everything refused with one message."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import read_manifest
from ckpt.save import Saving, save
from ckpt.shelf.address import latest, open_shelf, steps
from core.errors import CheckpointError
from core.parallel.groups import one_rank
from core.state.box import Box, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import assert_loads, bits, piece, poisoned, random_bits

ALONE = one_rank().world


def state(seed: int) -> dict[str, Tensor]:
    return {
        "model.w": random_bits("w", (5, 7), torch.float32, seed),
        "model.half": random_bits("half", (3, 2, 11), torch.bfloat16, seed),
        "optimizer.step": torch.tensor(seed),
        "model.empty": torch.zeros(0, 4),
    }


def sharded(tensors: dict[str, Tensor]) -> list[ShardedTensor]:
    return [piece(name, tensor, whole(tuple(tensor.shape))) for name, tensor in tensors.items()]


def assert_is(folder: str | None, truth: dict[str, Tensor]) -> None:
    assert folder is not None
    assert_loads(folder, [sharded(truth)], truth)


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()} - {".lock", "latest"}


def test_what_is_saved_comes_back_with_extra(tmp_path: Path) -> None:
    extra = {"schedule": {"step": 100}, "order": [3, 1, 2], "config": None}
    folder = save(tmp_path, 100, sharded(state(1)), extra, ALONE, Saving(keep=2))
    assert folder == str(tmp_path / "checkpoints" / "step_00000100") == latest(tmp_path)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000100\n"
    targets = [
        ShardedTensor(name=n, shape=tuple(t.shape), box=whole(tuple(t.shape)), data=poisoned(t.shape, t.dtype))
        for n, t in state(1).items()
    ]
    assert load(folder, targets, ALONE) == extra
    assert all(bits(target.data) == bits(state(1)[target.name]) for target in targets)


def test_a_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None and steps(tmp_path) == ()


def test_the_newest_are_kept_and_older_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save(tmp_path, step, sharded(state(step)), {}, ALONE, Saving(keep=2))
    assert names(tmp_path) == {"step_00000010", "step_00000011"}
    assert steps(tmp_path) == (10, 11)


def test_the_newest_is_the_one_saved_last_even_after_a_resume_from_an_older_step(tmp_path: Path) -> None:
    for step in (100, 200, 150):
        save(tmp_path, step, sharded(state(step)), {}, ALONE, Saving(keep=2))
    assert steps(tmp_path) == (150, 200)
    assert_is(latest(tmp_path), state(150))
    save(tmp_path, 160, sharded(state(160)), {}, ALONE, Saving(keep=1))
    assert steps(tmp_path) == (160,)


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 5, sharded(state(1)), {"try": 1}, ALONE, Saving(keep=3))
    folder = save(tmp_path, 5, sharded(state(2)), {"try": 2}, ALONE, Saving(keep=3))
    assert names(tmp_path) == {"step_00000005"}
    assert read_manifest(LocalFiles(Path(folder))).extra == {"try": 2}
    assert_is(folder, state(2))


def test_the_number_of_files_does_not_grow_with_that_of_small_tensors(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.norm": torch.ones(3) for i in range(50)}
    folder = save(tmp_path, 1, sharded(tensors), {}, ALONE, Saving(keep=1))
    # One of data, three of descriptions, the manifest.
    assert sum(path.is_file() for path in Path(folder).rglob("*")) <= 5


@pytest.mark.parametrize("extra", [{"a": {1: 2}}, {"a": torch.ones(1)}])
def test_an_extra_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, extra: dict) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.a"):
        save(tmp_path, 1, sharded(state(1)), extra, ALONE, Saving(keep=1))
    assert not (tmp_path / "checkpoints").exists()


def test_pieces_with_a_hole_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    half = piece("w", torch.ones(4, 4), Box(offset=(0, 0), shape=(2, 4)))
    with pytest.raises(CheckpointError, match=r"w: the element at \(2, 0\) is held by no piece"):
        save(tmp_path, 1, [half], {}, ALONE, Saving(keep=1))
    assert not (tmp_path / "checkpoints").exists()


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep=0"):
        save(tmp_path, 1, sharded(state(1)), {}, ALONE, Saving(keep=0))


def test_a_second_saver_of_the_same_run_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, sharded(state(1)), {}, ALONE, Saving(keep=1))
    with open_shelf(tmp_path).only_saver(), pytest.raises(CheckpointError, match="another process is saving"):
        save(tmp_path, 2, sharded(state(2)), {}, ALONE, Saving(keep=1))
    assert_is(latest(tmp_path), state(1))
    save(tmp_path, 3, sharded(state(3)), {}, ALONE, Saving(keep=1))
    assert_is(latest(tmp_path), state(3))


def test_a_run_path_that_is_a_file_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(CheckpointError, match="run: cannot be written: Not a directory"):
        save(tmp_path / "run", 1, sharded(state(1)), {}, ALONE, Saving(keep=1))


def test_too_little_free_space_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, sharded(state(1)), {}, ALONE, Saving(keep=1))
    monkeypatch.setattr(LocalFiles, "free_bytes", lambda files: 12345)
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 2 needs [\d,]+ bytes, 12,345 are free"):
        save(tmp_path, 2, sharded(state(2)), {}, ALONE, Saving(keep=1))
    assert names(tmp_path) == {"step_00000001"}
    assert_is(latest(tmp_path), state(1))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full_beforehand_keeps_the_older_checkpoint(small_disk: Path) -> None:
    save(small_disk, 1, sharded(state(1)), {}, ALONE, Saving(keep=1))
    big = state(2) | {"big": torch.ones(300_000)}
    with pytest.raises(CheckpointError, match=r"of step 2 needs 1,2\d\d,\d+ bytes, [\d,]+ are free"):
        save(small_disk, 2, sharded(big), {}, ALONE, Saving(keep=1))
    assert names(small_disk) == {"step_00000001"}
    assert_is(latest(small_disk), state(1))


def test_a_disk_that_fills_while_writing_keeps_the_older_checkpoint(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(small_disk, 1, sharded(state(1)), {}, ALONE, Saving(keep=1))
    # Someone else takes the space after the check: what the check sees is not what the writer finds.
    monkeypatch.setattr(LocalFiles, "free_bytes", lambda files: 10**9)
    big = state(2) | {f"big.{i}": torch.ones(100_000) for i in range(5)}
    with pytest.raises(CheckpointError) as caught:
        save(small_disk, 2, sharded(big), {}, ALONE, Saving(keep=1))
    message = str(caught.value)
    assert str(small_disk) in message and "No space left on device" in message and "bytes" in message
    assert len(message) < 800
    assert names(small_disk) == {"step_00000001"}
    assert_is(latest(small_disk), state(1))
    save(small_disk, 3, sharded(state(3)), {}, ALONE, Saving(keep=1))
    assert_is(latest(small_disk), state(3))
