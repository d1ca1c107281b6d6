"""Damage and failure of every kind: what is hit is named, the checkpoint before loads, and nothing waits for ever."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import MANIFEST, read_manifest
from ckpt.save import Saving
from ckpt.shelf.address import latest
from ckpt.verify import verify
from core.errors import CheckpointError
from tests.ckpt.harm import (
    ALONE,
    DAMAGES,
    NOBODY,
    READ_ERRORS,
    Two,
    assert_loads_whole,
    check_said,
    harmed,
    hit_by,
    refusal,
    targets_for,
    two_checkpoints,
)
from tests.ckpt.pieces import bits

SAVINGS = [Saving(), Saving(codec="zstd"), Saving(store="torch_dist")]
IDS = ["zarr", "zarr zstd", "torch_dist"]
# Flips of one file: each at another byte.
FLIPS = 6


@pytest.fixture(params=SAVINGS, ids=IDS)
def two(tmp_path: Path, request: pytest.FixtureRequest) -> Two:
    return two_checkpoints(tmp_path, request.param)


def test_the_newer_checkpoint_has_files_of_blocks_of_bundles_and_of_descriptions(two: Two) -> None:
    """What the tests below harm."""
    kinds = {len(hit_by(two, path, None)) for path in two.manifest.files}
    assert {0, 2} <= kinds or two.manifest.store == "torch_dist"
    assert {rank for path in two.files for _, rank in hit_by(two, path, None)} == {0, 1}
    assert any(len(piece.blocks) > 1 for entry in two.manifest.entries for piece in entry.pieces)


@pytest.mark.parametrize("kind", [*DAMAGES, *READ_ERRORS])
def test_any_harm_to_any_file_is_named_with_tensor_and_rank_and_the_checkpoint_before_loads(
    two: Two, kind: str
) -> None:
    chance = random.Random(5)
    harm = (DAMAGES | READ_ERRORS)[kind]
    for path in two.files:
        for _ in range(FLIPS if kind == "a bit flipped" else 1):
            with harmed(two, path, harm, chance) as at:
                check_said(two, path, at)
            assert_loads_whole(two.older, two.truth[two.older])
    assert verify(two.newer) == ()
    assert_loads_whole(two.newer, two.truth[two.newer])


def test_every_missing_file_is_named_at_once(two: Two) -> None:
    data = [path for path in two.manifest.files if hit_by(two, path, None)]
    for path in data:
        (Path(two.newer) / path).unlink()
    said = refusal(two)
    assert all(path in said for path in data)
    assert {damage.file for damage in verify(two.newer)} == set(data)
    assert {damage.tensor for damage in verify(two.newer)} == {e.name for e in two.manifest.entries if e.pieces}
    assert latest(two.run) == two.older


def test_every_damaged_block_is_named_by_verify_at_once(two: Two) -> None:
    for path in two.manifest.files:
        file = Path(two.newer) / path
        if hit_by(two, path, None):
            file.write_bytes(bytes(byte ^ 0xFF for byte in file.read_bytes()))
    expected = {hit for path in two.manifest.files for hit in hit_by(two, path, None)}
    blocks = sum(len(piece.blocks) for entry in two.manifest.entries for piece in entry.pieces)
    named = [(damage.tensor, damage.rank) for damage in verify(two.newer) if damage.tensor]
    assert set(named) == expected and len(named) == blocks


@contextmanager
def reading(patched: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFiles, "read_into", patched)
        yield


def test_a_file_that_is_cut_short_while_it_is_read_is_named(two: Two) -> None:
    """After its size was looked at."""
    real = LocalFiles.read_into
    path = next(path for path in two.manifest.files if hit_by(two, path, None))

    def cut_and_read(files: LocalFiles, which: str, offset: int, buffers: Sequence[np.ndarray]) -> None:
        if which == path:
            os.truncate(files.root / path, 1)
        real(files, which, offset, buffers)

    with reading(cut_and_read):
        said = refusal(two)
    assert path in said and re.search(r"ends after \d+ bytes, in the middle", said)
    assert any(f"{tensor} (written by rank {rank})" in said for tensor, rank in hit_by(two, path, None))


def test_an_error_of_the_disk_is_named_with_file_tensor_and_rank(two: Two) -> None:
    real = LocalFiles.read_into
    for path in two.manifest.files:

        def fail(files: LocalFiles, which: str, offset: int, buffers: Sequence[np.ndarray], path: str = path) -> None:
            if which == path:
                raise OSError(errno.EIO, "Input/output error", str(files.root / path))
            real(files, which, offset, buffers)

        with reading(fail):
            damages = verify(two.newer)
            assert {(d.file, d.what) for d in damages} == {(path, "cannot be read: Input/output error")}
            hit = hit_by(two, path, None)
            assert {(d.tensor, d.rank) for d in damages} == (hit or NOBODY)
            if hit:
                said = refusal(two)
                assert path in said and "Input/output error" in said
                assert any(f"{tensor} (written by rank {rank})" in said for tensor, rank in hit)
    assert_loads_whole(two.newer, two.truth[two.newer])


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything: be someone else for a moment."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder to which others than its owner have a way."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_files_and_folders_that_may_not_be_read_are_named(public_folder: Path) -> None:
    two = two_checkpoints(public_folder, Saving())
    path = next(path for path in two.manifest.files if len(hit_by(two, path, None)) == 1)
    ((tensor, rank),) = hit_by(two, path, None)
    Path(two.newer, path).chmod(0)
    with as_nobody():
        said = refusal(two)
        damages = verify(two.newer)
    assert path in said and "Permission denied" in said and f"{tensor} (written by rank {rank})" in said
    assert {(d.tensor, d.rank, d.file) for d in damages} == {(tensor, rank, path)}
    Path(two.newer, path).chmod(0o644)

    Path(two.newer, path).parent.chmod(0)
    with as_nobody():
        with pytest.raises(CheckpointError) as caught:
            verify(two.newer)
        for said in (refusal(two), str(caught.value)):
            assert str(Path(two.newer, path).parent) in said and "Permission denied" in said
        assert latest(two.run) == two.older
    Path(two.newer, path).parent.chmod(0o755)

    Path(two.newer, MANIFEST).chmod(0)
    with as_nobody():
        assert f"{two.newer}/{MANIFEST}: cannot be read: Permission denied" in refusal(two)
        assert latest(two.run) == two.older
    assert_loads_whole(two.older, two.truth[two.older])


def test_after_a_failed_load_another_checkpoint_fills_everything(two: Two) -> None:
    """Whatever the failed one has filled by then."""
    entry = two.manifest.entries[-1]
    block = entry.pieces[-1].blocks[-1]
    file = Path(two.newer) / block.file
    content = bytearray(file.read_bytes())
    content[block.offset] ^= 1
    file.write_bytes(content)
    targets = targets_for(two.truth[two.newer])
    with pytest.raises(CheckpointError, match=entry.name):
        load(two.newer, targets, ALONE)
    load(two.older, targets, ALONE)
    assert all(bits(target.data) == bits(two.truth[two.older][target.name]) for target in targets)


def test_the_manifest_of_another_checkpoint_in_its_place_does_not_pass(two: Two) -> None:
    shutil.copy(Path(two.older) / MANIFEST, Path(two.newer) / MANIFEST)
    assert read_manifest(LocalFiles(Path(two.newer))) != two.manifest
    assert {d.tensor for d in verify(two.newer)} >= {"model.experts", "model.norm", "optimizer.count"}
    with pytest.raises(CheckpointError, match="is damaged"):
        load(two.newer, targets_for(two.truth[two.newer]), ALONE)
