"""The manifest: what it says comes back, and whatever else is in its place is one clear message."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.files.local import LocalFiles
from ckpt.manifest import (
    MANIFEST,
    Block,
    Entry,
    File,
    Manifest,
    Piece,
    file_faults,
    manifest_bytes,
    read_manifest,
    require_json,
)
from core.errors import CheckpointError
from core.state.box import Box

DATA = "tensors/w/c.1.0"
PIECE = Piece(
    box=Box(offset=(1, 0), shape=(2, 3)),
    rank=1,
    block=(1, 3),
    blocks=(
        Block(file=DATA, offset=0, size=12, crc32c=0xFFFFFFFF),
        Block(file=DATA, offset=16, size=12, crc32c=0),
    ),
)
SCALAR = Entry(name="count", shape=(), dtype="int64", pieces=())
WHOLE = Manifest(
    step=7,
    sequence=3,
    store="zarr",
    codec="raw",
    files={DATA: File(size=28, crc32c=5), "tensors/w/zarr.json": File(size=0, crc32c=0)},
    entries=(Entry(name="w", shape=(3, 3), dtype="float32", pieces=(PIECE,)), SCALAR),
    extra={"rate": 0.1, "seed": 2**63, "none": None, "deep": [{"a": [True]}]},
)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest))


def read(folder: Path) -> Manifest:
    return read_manifest(LocalFiles(folder))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    return str(caught.value)


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, WHOLE)
    assert read(tmp_path) == WHOLE


def test_infinity_and_nan_survive_in_extra(tmp_path: Path) -> None:
    write_manifest(tmp_path, replace(WHOLE, extra={"a": math.inf, "b": math.nan}))
    extra = read(tmp_path).extra
    assert extra["a"] == math.inf and math.isnan(extra["b"])


def test_every_truncation_is_refused_as_damage(tmp_path: Path) -> None:
    write_manifest(tmp_path, WHOLE)
    text = (tmp_path / MANIFEST).read_bytes()
    for length in range(0, len(text) - 2, 7):
        (tmp_path / MANIFEST).write_bytes(text[:length])
        assert "the manifest is damaged" in refusal(tmp_path)


def test_no_flipped_bit_gives_a_different_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path, WHOLE)
    text = (tmp_path / MANIFEST).read_bytes()
    for position in range(len(text)):
        flipped = bytearray(text)
        flipped[position] ^= 1 << (position % 8)
        (tmp_path / MANIFEST).write_bytes(bytes(flipped))
        try:
            assert read(tmp_path) == WHOLE  # white space, say
        except CheckpointError as error:
            assert str(tmp_path) in str(error)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", '"x"', '{"schema": 2}', '{"schema": "1", "content": {}, "crc32": 0}']
)
def test_json_of_another_kind_is_refused_as_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    assert "the manifest is damaged" in refusal(tmp_path)


def test_a_newer_or_older_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    write_manifest(tmp_path, WHOLE)
    document = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(document | {"schema": 99}))
    assert "version 99" in refusal(tmp_path) and "reads version 2" in refusal(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(document | {"schema": 1}))
    assert "version 1" in refusal(tmp_path) and "older zoo" in refusal(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_told_for_what_it_is(tmp_path: Path) -> None:
    assert "there is no such checkpoint" in refusal(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("mine")
    assert "this is not a checkpoint" in refusal(tmp_path)
    assert "there is no such checkpoint" in refusal(tmp_path / "notes.txt")
    partial = tmp_path / "checkpoints" / "step_00000001.0abc.partial"
    (partial / "pieces").mkdir(parents=True)
    (partial / "pieces/c.0").write_bytes(b"x")
    assert "half-written" in refusal(partial)
    assert "this is a run folder" in refusal(tmp_path)


def test_a_listed_file_that_is_missing_or_of_another_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensors/w").mkdir(parents=True)
    (tmp_path / "tensors/w/zarr.json").touch()
    file, faults = tmp_path / DATA, lambda: file_faults(LocalFiles(tmp_path), WHOLE)
    assert faults() == {DATA: "tensors/w/c.1.0 is missing"}
    for size in (27, 29):
        file.write_bytes(bytes(size))
        assert faults() == {DATA: f"tensors/w/c.1.0 has {size} bytes instead of 28"}
    file.write_bytes(bytes(28))
    assert faults() == {}


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {1: 2}}, "extra.a"),
        ({"a": [0, {2}]}, r"extra.a\[1\]"),
        ({"a": b"x"}, "extra.a"),
        ({"p": Path("x")}, "extra.p"),
    ],
)
def test_what_json_would_change_or_refuse_is_refused_with_its_place(value: object, where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        require_json(value)
