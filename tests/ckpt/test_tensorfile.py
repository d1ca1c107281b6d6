"""One safetensors file: read by box and written piece by piece, held against the library that defines the format."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt.store.tensorfile import TensorFile, TensorWriter, plan_file
from core.errors import CheckpointError
from core.state.box import Box

SHAPES = {"long": (3, 5000), "wide": (7, 11, 4100), "four": (3, 2, 5, 7), "row": (13,), "none": (0, 4), "one": ()}


def tensors() -> dict[str, Tensor]:
    """Shapes of every kind in every dtype, names that sort otherwise than they are written."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        found[f"x.{dtype}.10"] = torch.randn(5, 7, generator=generator).to(dtype)
        found[f"x.{dtype}.9"] = torch.randn(3, generator=generator).to(dtype)
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_a_file_is_byte_for_byte_that_of_the_library(tmp_path: Path) -> None:
    found = tensors() | {"ü": torch.ones(1)}
    for metadata in ({}, {"format": "pt"}):
        save_file(found, tmp_path / "theirs", metadata=metadata or None)
        plan = plan_file({name: (t.dtype, tuple(t.shape)) for name, t in found.items()}, metadata)
        writer = TensorWriter(tmp_path / "ours", plan)
        for name, tensor in reversed(found.items()):  # in any order, and in two parts
            half = tensor.numel() // 2
            writer.write(name, 0, tensor.reshape(-1)[:half])
            writer.write(name, half, tensor.reshape(-1)[half:])
        writer.close()
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
        assert plan.bytes == (tmp_path / "ours").stat().st_size


def test_any_box_is_that_box_of_the_whole(tmp_path: Path) -> None:
    found = tensors()
    save_file(found, tmp_path / "file", metadata={"format": "pt", "note": "ü"})
    file = TensorFile(tmp_path / "file")
    assert file.metadata == {"format": "pt", "note": "ü"}
    assert {name: placed.shape for name, placed in file.tensors.items()} == {
        n: tuple(t.shape) for n, t in found.items()
    }

    @settings(max_examples=150, database=None)
    @given(st.sampled_from(sorted(found)), st.data())
    def compare(name: str, data: st.DataObject) -> None:
        shape = found[name].shape
        low = tuple(data.draw(st.integers(0, max(0, size - 1))) for size in shape)
        box = Box(offset=low, shape=tuple(data.draw(st.integers(0, s - o)) for s, o in zip(shape, low, strict=True)))
        read = file.read(name, box)
        assert read.shape == box.shape and read.is_contiguous()
        assert torch.equal(bits(read), bits(found[name][box.slices]))

    compare()
    for name, tensor in found.items():
        assert torch.equal(bits(file.read(name)), bits(tensor))
    file.close()


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NEXT = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its 0 bytes are fewer"),
        (b"\xff" * 16, "its 16 bytes are fewer"),
        (struct.pack("<Q", 3) + b"\xff{}", "is not one of safetensors"),
        (header([]), "is not one of safetensors"),
        (header({"a": 3}), "is not one of safetensors"),
        (header({"a": ENTRY | {"shape": [3]}}, bytes(8)), r"a has 8 bytes for shape \[3\] of F32"),
        (header({"a": ENTRY}, bytes(7)), "instead of"),
        (header({"a": ENTRY}, bytes(9)), "instead of"),
        (header({"a": ENTRY, "b": ENTRY}, bytes(16)), "overlap or leave holes"),
        (header({"b": NEXT}, bytes(16)), "overlap or leave holes"),
    ],
)
def test_a_file_that_is_damaged_says_why(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=says):
        TensorFile(tmp_path / "file")


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    with (tmp_path / "file").open("r+b") as opened:
        opened.truncate(2000)
    with pytest.raises(CheckpointError, match="file: tensor a cannot be read: the file ends at byte 2000"):
        file.read("a")
    file.close()


def test_several_writers_fill_one_file(tmp_path: Path) -> None:
    plan = plan_file({"a": (torch.float32, (6,)), "b": (torch.bfloat16, (3,))}, {})
    first = TensorWriter(tmp_path / "file", plan)
    second = TensorWriter(tmp_path / "file", plan, begin=False)
    second.write("a", 4, torch.tensor([4.0, 5.0]))
    first.write("b", 0, torch.ones(3, dtype=torch.bfloat16))
    first.write("a", 0, torch.arange(4.0))
    first.close()
    second.close(sync=False)
    read = load_file(tmp_path / "file")
    assert torch.equal(read["a"], torch.arange(6.0)) and torch.equal(read["b"], torch.ones(3).bfloat16())
