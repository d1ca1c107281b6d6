"""The manifest: what it says comes back, and whatever else is in its place is one clear message."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ckpt.manifest import (
    MANIFEST,
    Entry,
    File,
    Manifest,
    Piece,
    file_faults,
    read_manifest,
    require_json,
    write_manifest,
)
from core.errors import CheckpointError
from core.state.box import Box, whole

PIECE = Piece(
    box=Box(offset=(1, 0), shape=(2, 3)),
    rank=1,
    array="tensors/w",
    array_box=whole((3, 3)),
    crc32=0xFFFFFFFF,
    files=(File(path="tensors/w/c.1.0", size=28),),
)
SCALAR = Entry(name="count", shape=(), dtype="int64", pieces=())
WHOLE = Manifest(
    step=7,
    sequence=3,
    store="zarr",
    entries=(Entry(name="w", shape=(3, 3), dtype="float32", pieces=(PIECE,)), SCALAR),
    extra={"rate": 0.1, "seed": 2**63, "none": None, "deep": [{"a": [True]}]},
)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, WHOLE)
    assert read_manifest(tmp_path) == WHOLE


def test_infinity_and_nan_survive_in_extra(tmp_path: Path) -> None:
    write_manifest(
        tmp_path, Manifest(step=0, sequence=1, store="zarr", entries=(), extra={"a": math.inf, "b": math.nan})
    )
    extra = read_manifest(tmp_path).extra
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
            assert read_manifest(tmp_path) == WHOLE  # white space, say
        except CheckpointError as error:
            assert str(tmp_path) in str(error)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", '"x"', '{"schema": 1}', '{"schema": "1", "content": {}, "crc32": 0}']
)
def test_json_of_another_kind_is_refused_as_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    assert "the manifest is damaged" in refusal(tmp_path)


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    write_manifest(tmp_path, WHOLE)
    document = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(document | {"schema": 99}))
    assert "version 99" in refusal(tmp_path) and "up to 1" in refusal(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_told_for_what_it_is(tmp_path: Path) -> None:
    assert "there is no such checkpoint folder" in refusal(tmp_path / "nowhere")
    assert "this is not a checkpoint" in refusal(tmp_path)
    partial = tmp_path / "checkpoints" / "step_00000001.0abc.partial"
    partial.mkdir(parents=True)
    assert "half-written" in refusal(partial)
    assert "this is a run folder" in refusal(tmp_path)


def test_a_listed_file_that_is_missing_or_cut_short_is_named_with_its_tensor(tmp_path: Path) -> None:
    file = tmp_path / "tensors/w/c.1.0"
    assert [(e.name, what) for e, _, what in file_faults(tmp_path, WHOLE)] == [("w", "tensors/w/c.1.0 is missing")]
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(27))
    assert [what for _, _, what in file_faults(tmp_path, WHOLE)] == ["tensors/w/c.1.0 has 27 bytes instead of 28"]
    file.write_bytes(bytes(28))
    assert not list(file_faults(tmp_path, WHOLE))


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
