"""The Zarr store: open to other readers, and no missing or damaged chunk ever passes for data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr

import ckpt.store.zarr as zarr_store
from ckpt.host import to_numpy, to_torch
from ckpt.store.protocol import Array, Block, Request
from ckpt.store.zarr import ZarrStore
from core.errors import CheckpointError
from core.state.box import Box, whole
from tests.ckpt.pieces import bits, random_bits, save_as_ranks
from tests.ckpt.pieces import piece as cut_piece

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def write(folder: Path, data: np.ndarray, chunk: tuple[int, ...]) -> Array:
    array = Array(path="tensors/w", shape=data.shape, dtype=data.dtype.name, chunk=chunk)
    store = ZarrStore()
    store.begin(folder, [array])
    store.write(folder, [Block(array=array, box=whole(data.shape), data=data, first=True)])
    return array


def read(folder: Path, array: Array, box: Box) -> np.ndarray:
    (data,) = ZarrStore().read(folder, [Request(path=array.path, shape=array.shape, dtype=array.dtype, box=box)])
    return data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits("w", shape, dtype)
    array = write(tmp_path, to_numpy(tensor), shape)
    back = to_torch(read(tmp_path, array, whole(shape)))
    assert back.dtype == dtype and bits(back) == bits(tensor)


def test_a_tensor_that_is_a_view_is_stored_by_its_values(tmp_path: Path) -> None:
    tensor = torch.arange(35.0).reshape(5, 7).T[1:6:2]
    array = write(tmp_path, to_numpy(tensor), (3, 5))
    assert torch.equal(to_torch(read(tmp_path, array, whole((3, 5)))), tensor)


def test_plain_zarr_opens_an_array_and_finds_its_values(tmp_path: Path) -> None:
    tensor = torch.arange(35.0).reshape(5, 7)
    boxes = [Box(offset=(0, 0), shape=(3, 7)), Box(offset=(3, 0), shape=(2, 7))]
    folder = save_as_ranks(tmp_path, 1, [[cut_piece("layers.0.w", tensor, box)] for box in boxes])
    found = zarr.open(folder / "tensors" / "layers.0.w", mode="r")
    assert np.array_equal(found[:], tensor.numpy())
    assert list(zarr.open_group(folder / "tensors", mode="r").keys()) == ["layers.0.w"]


def test_tensorstore_alone_opens_a_bfloat16_array(tmp_path: Path) -> None:
    tensor = random_bits("w", (5, 7), torch.bfloat16)
    write(tmp_path, to_numpy(tensor), (5, 7))
    kvstore = {"driver": "file", "path": str(tmp_path / "tensors/w")}
    data = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result().read().result()
    assert data.view(np.uint16).tobytes() == bits(tensor)


def test_zeros_are_written_like_any_other_value(tmp_path: Path) -> None:
    write(tmp_path, np.zeros((4, 3), np.float32), (2, 3))
    assert {path.name for path in (tmp_path / "tensors/w").iterdir()} == {"zarr.json", "c.0.0", "c.1.0"}


@pytest.mark.parametrize("gone", ["c.1.0", "zarr.json"])
def test_a_missing_file_is_an_error_that_names_the_array_never_zeros(tmp_path: Path, gone: str) -> None:
    array = write(tmp_path, np.ones((4, 3), np.float32), (2, 3))
    (tmp_path / "tensors/w" / gone).unlink()
    with pytest.raises(CheckpointError, match=r"tensors/w: .*(missing|does not exist)"):
        read(tmp_path, array, whole((4, 3)))


def test_a_chunk_above_the_limit_is_read_and_checked_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_store, "INNER_BYTES", 64)
    data = np.arange(6 * 4 * 5, dtype=np.float32).reshape(6, 4, 5)
    array = write(tmp_path, data, (6, 4, 5))
    (codec,) = json.loads((tmp_path / "tensors/w/zarr.json").read_text())["codecs"]
    assert codec["configuration"]["chunk_shape"] == [1, 2, 5]
    file = tmp_path / "tensors/w/c.0.0.0"
    assert np.array_equal(read(tmp_path, array, whole((6, 4, 5))), data)
    assert np.array_equal(zarr.open(tmp_path / "tensors/w", mode="r")[:], data)
    damaged = bytearray(file.read_bytes())
    damaged[8] ^= 1  # within the first inner chunk: rows [0, 0:2]
    file.write_bytes(damaged)
    inside, beside = Box(offset=(0, 1, 2), shape=(1, 1, 1)), Box(offset=(0, 2, 0), shape=(6, 2, 5))
    assert np.array_equal(read(tmp_path, array, beside), data[beside.slices])
    with pytest.raises(CheckpointError, match="tensors/w"):
        read(tmp_path, array, inside)


def test_an_array_of_another_shape_than_the_manifest_says_is_refused(tmp_path: Path) -> None:
    write(tmp_path, np.ones((4, 3), np.float32), (4, 3))
    wrong = Array(path="tensors/w", shape=(3, 4), dtype="float32", chunk=(3, 4))
    with pytest.raises(CheckpointError, match=r"float32 \(4, 3\) where the manifest says float32 \(3, 4\)"):
        read(tmp_path, wrong, whole((3, 4)))


def test_results_keep_the_order_of_their_requests_however_little_may_be_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_store, "WINDOW_BYTES", 16)
    monkeypatch.setattr(zarr_store, "WINDOW_COUNT", 3)
    array = write(tmp_path, np.arange(101, dtype=np.int64), (10,))
    boxes = [Box(offset=(i,), shape=(1,)) for i in range(101)]
    requests = [Request(path=array.path, shape=(101,), dtype="int64", box=box) for box in boxes]
    assert [int(data[0]) for data in ZarrStore().read(tmp_path, requests)] == list(range(101))
