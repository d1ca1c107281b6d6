"""The Zarr store: plain zarr and tensorstore read it, no two writers share a chunk, and damage never passes for data."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ckpt.store.zarr as zarr_store
from ckpt.dtype import ITEM_BYTES, item_bytes
from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import read_manifest
from ckpt.plan import Held, plan_save
from ckpt.read import read_into
from ckpt.save import Saving
from ckpt.store.zarr import ZarrStore
from ckpt.verify import verify
from core.errors import CheckpointError
from core.parallel.groups import one_rank
from core.state.box import Box, flat_boxes, tiling_fault, whole
from tests.ckpt.pieces import Rank, bits, cut, joined, make_small, piece, random_bits, save_as_ranks, target_like

ALONE = one_rank().world
RAW = Saving()
CODECS = [RAW, Saving(codec="zstd")]
# What plain zarr has no type for, and by which it has to be told in an attribute.
FOREIGN = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few hundred bytes are laid out as those of many MiB are."""
    make_small(monkeypatch, block_bytes=64, own_file_bytes=100, share_bytes=100)


def saved(run: Path, ranks: list[Rank], saving: Saving = RAW) -> Path:
    return Path(save_as_ranks(run, 1, ranks, {}, saving))


def held_by_one(tensors: dict[str, Tensor]) -> list[Rank]:
    return [[piece(name, tensor, whole(tuple(tensor.shape))) for name, tensor in tensors.items()]]


def read_by_zarr(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor with elements, whole, by plain zarr and what its attributes say; each element found exactly once."""
    root = zarr.open_group(folder, mode="r")
    found = {name: typed(array[...], array.attrs) for name, array in members(root, "tensors")}
    parts: dict[str, list[tuple[Box, np.ndarray]]] = {}
    for _, array in members(root, "pieces"):
        for part in array.attrs["tensors"]:
            box = Box(offset=tuple(part["offset"]), shape=tuple(part["shape"]))
            parts.setdefault(part["name"], []).append((box, piece_of(array, part, box)))
    for name, boxes in parts.items():
        ends = np.array([np.add(box.offset, box.shape) for box, _ in boxes], int).reshape(len(boxes), -1)
        shape = tuple(map(int, ends.max(0)))
        assert tiling_fault(whole(shape), [box for box, _ in boxes]) is None
        found[name] = np.empty(shape, boxes[0][1].dtype)
        for box, values in boxes:
            found[name][box.slices] = values
    return found


def members(root: Any, group: str) -> list[tuple[str, Any]]:
    return list(root[group].arrays()) if group in root else []


def typed(values: Any, attributes: Any) -> np.ndarray:
    dtype = attributes["dtype"]
    return np.asarray(values).view(FOREIGN.get(dtype, dtype))


def piece_of(array: Any, part: Any, box: Box) -> np.ndarray:
    """A piece of a file of many."""
    dtype = np.dtype(FOREIGN.get(array.attrs["dtype"], array.attrs["dtype"]))
    if array.attrs["codec"] == "raw":
        return typed(array[part["at"] : part["at"] + box.elements], array.attrs).reshape(box.shape)
    # One zstd frame after the other, until the piece is full.
    compressed = array[part["at"] :].tobytes()
    with zstandard.ZstdDecompressor().stream_reader(compressed, read_across_frames=True) as reader:
        content = reader.read(box.elements * dtype.itemsize)
    return np.frombuffer(content, dtype).reshape(box.shape)


def read_by_tensorstore(folder: Path, name: str) -> np.ndarray:
    store = {"driver": "file", "path": str(folder / "tensors" / name)}
    return ts.open({"driver": "zarr3", "kvstore": store}, open=True).result().read().result()


def every_kind() -> dict[str, Tensor]:
    """Every type in a shape with a file of its own, in prime sizes, as a scalar; and no elements."""
    found = {}
    for name in ITEM_BYTES:
        dtype = getattr(torch, name)
        found[f"model.{name}.large"] = random_bits(name, (12, 8, 6), dtype)
        found[f"model.{name}.prime"] = random_bits(name, (13, 11), dtype, seed=1)
        found[f"model.{name}.scalar"] = random_bits(name, (), dtype, seed=2)
    return found


@pytest.mark.parametrize("saving", CODECS, ids=["raw", "zstd"])
def test_plain_zarr_reads_every_type_and_shape_bit_for_bit(tmp_path: Path, saving: Saving) -> None:
    truth = every_kind()
    folder = saved(tmp_path, held_by_one({**truth, "model.nothing": torch.empty(3, 0)}), saving)
    found = read_by_zarr(folder)
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert found[name].shape == tuple(tensor.shape) and found[name].tobytes() == bits(tensor), name
    assert {name for name in truth if (folder / "tensors" / name).is_dir()} >= {n for n in truth if n.endswith("large")}


@pytest.mark.parametrize("saving", CODECS, ids=["raw", "zstd"])
def test_tensorstore_alone_reads_the_arrays(tmp_path: Path, saving: Saving) -> None:
    truth = {name: tensor for name, tensor in every_kind().items() if name.endswith("large")}
    folder = saved(tmp_path, held_by_one(truth), saving)
    for name, tensor in truth.items():
        assert read_by_tensorstore(folder, name).tobytes() == bits(tensor), name


@pytest.mark.parametrize("saving", CODECS, ids=["raw", "zstd"])
@pytest.mark.parametrize("parts", [(1, 1), (4, 1), (2, 3), (1, 6)], ids=str)
def test_arrays_of_many_writers_and_of_sharded_chunks_are_one_to_others(
    tmp_path: Path, parts: tuple[int, int], saving: Saving
) -> None:
    tensor = random_bits("w", (16, 18), torch.float32)
    folder = saved(tmp_path, cut("w", tensor, parts, copies=2), saving)
    description = json.loads((folder / "tensors/w/zarr.json").read_text())
    assert description["codecs"][0]["name"] == "sharding_indexed"
    # By bits: NaN, which may occur here, is equal to nothing.
    assert np.asarray(zarr.open_array(folder / "tensors/w", mode="r")[...]).tobytes() == bits(tensor)
    assert read_by_tensorstore(folder, "w").tobytes() == bits(tensor)


def test_a_piece_of_one_block_is_one_chunk_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, block_bytes=1 << 20, own_file_bytes=1, share_bytes=1 << 20)
    tensor = random_bits("w", (3, 5), torch.bfloat16)
    folder = saved(tmp_path, held_by_one({"w": tensor, "s": torch.tensor(2.5)}))
    assert (folder / "tensors/w/c.0.0").stat().st_size == 30 + 4
    assert read_by_zarr(folder)["w"].tobytes() == bits(tensor)
    assert read_by_zarr(folder)["s"] == 2.5


def test_flat_ranges_of_an_optimizer_shard_are_found_by_their_attributes(tmp_path: Path) -> None:
    tensor = random_bits("moment", (7, 5, 3), torch.float32)
    ranks = [
        [piece("m", tensor, box) for box, _ in flat_boxes(whole((7, 5, 3)), start, stop)]
        for start, stop in ((0, 31), (31, 32), (32, 105))
    ]
    assert read_by_zarr(saved(tmp_path, ranks))["m"].tobytes() == bits(tensor)


def test_what_plain_zarr_finds_missing_in_floating_types_is_nan_not_zero(tmp_path: Path) -> None:
    truth = {name: torch.zeros(16, 18).to(getattr(torch, name)) for name in ITEM_BYTES if "float" in name}
    folder = saved(tmp_path, [rank for rank in joined(*(cut(n, t, (2, 1)) for n, t in truth.items()))])
    for name in truth:
        (folder / "tensors" / name / "c.1.0").unlink()
        values = typed(zarr.open_array(folder / "tensors" / name, mode="r")[...], {"dtype": name}).astype(np.float32)
        assert np.isnan(values[8:]).all() and not np.isnan(values[:8]).any(), name


@pytest.mark.parametrize("path", ["tensors/w/c.1.0", "pieces/00000.0.int64/c.0"])
def test_a_deleted_chunk_is_an_error_that_names_the_tensor_never_zeros(tmp_path: Path, path: str) -> None:
    tensors = cut("w", torch.ones(16, 18), (2, 1))
    ranks = [[*tensors[0], piece("count", torch.tensor(3), whole(()))], tensors[1]]
    folder = saved(tmp_path, ranks)
    (folder / path).unlink()
    name = "w" if "/w/" in path else "count"
    (damage,) = verify(str(folder))
    assert (damage.file, damage.tensor) == (path, name)
    whole_ranks = [piece("w", torch.ones(16, 18), whole((16, 18))), piece("count", torch.tensor(3), whole(()))]
    with pytest.raises(CheckpointError, match=rf"{path} is missing, which holds {name}"):
        load(str(folder), target_like(whole_ranks), ALONE)


def test_a_description_that_is_missing_or_changed_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path, held_by_one({"w": torch.ones(16, 18), "v": torch.ones(3)}))
    described = [path for path in read_manifest(LocalFiles(folder)).files if path.endswith("zarr.json")]
    assert len(described) == 5, described
    for path in described:
        content = (folder / path).read_bytes()
        (folder / path).unlink()
        assert [damage.file for damage in verify(str(folder))] == [path]
        (folder / path).write_bytes(content.replace(b"3", b"4"))
        assert [damage.file for damage in verify(str(folder))] == [path]
        (folder / path).write_bytes(content)


@pytest.mark.parametrize("saving", CODECS, ids=["raw", "zstd"])
def test_a_flipped_bit_in_a_chunk_is_refused_by_zarr_and_tensorstore_too(tmp_path: Path, saving: Saving) -> None:
    folder = saved(tmp_path, held_by_one({"w": random_bits("w", (16, 18), torch.float32)}), saving)
    blocks = read_manifest(LocalFiles(folder)).entries[0].pieces[0].blocks
    assert len(blocks) > 4
    file = folder / blocks[0].file
    content = file.read_bytes()
    index = len(content) - 16 * len(blocks) - 4
    ends = [block.offset + block.size for block in blocks]
    for at in (blocks[0].offset, blocks[2].offset + 5, ends[3], ends[3] + 3, index, index + 17, len(content) - 1):
        damaged = bytearray(content)
        damaged[at] ^= 8
        file.write_bytes(damaged)
        assert len(verify(str(folder))) == 1, at
        # Whatever zarr raises: a wrong checksum is a ValueError, a wrong index may be anything.
        with pytest.raises(Exception, match=r"(?i)checksum|crc32c"):
            zarr.open_array(folder / "tensors/w", mode="r")[...]
        with pytest.raises(ValueError, match=r"^(DATA_LOSS|FAILED_PRECONDITION|INVALID_ARGUMENT): Error reading"):
            read_by_tensorstore(folder, "w")
    file.write_bytes(content)
    assert verify(str(folder)) == ()


def test_a_damaged_chunk_spoils_only_what_it_holds(tmp_path: Path) -> None:
    tensor = random_bits("w", (16, 18), torch.float32)
    folder = saved(tmp_path, held_by_one({"w": tensor}))
    manifest = read_manifest(LocalFiles(folder))
    (stored,) = manifest.entries[0].pieces
    damaged = bytearray((folder / stored.blocks[0].file).read_bytes())
    damaged[stored.blocks[0].offset] ^= 1
    (folder / stored.blocks[0].file).write_bytes(damaged)
    beside = target_like([piece("w", tensor, Box(offset=(stored.block[0], 3), shape=(4, 9)))])
    read_into(LocalFiles(folder), manifest, beside)
    assert bits(beside[0].data) == bits(tensor[beside[0].box.slices])
    inside = target_like([piece("w", tensor, Box(offset=(0, 0), shape=(16, 1)))])
    with pytest.raises(CheckpointError, match=r"w \(written by rank 0\) is damaged"):
        read_into(LocalFiles(folder), manifest, inside)


@st.composite
def states(draw: st.DrawFn) -> list[list[Held]]:
    """What up to five ranks hold: tensors cut along grids, in flat ranges, or copied, of any size from none to some thousands."""
    world = draw(st.integers(1, 5))
    held: list[list[Held]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
        dtype = draw(st.sampled_from(["bool", "bfloat16", "float32", "int64"]))
        how = draw(st.sampled_from(["copied", "flat", "rows"]))
        form: dict[str, Any] = {"name": f"t{number}", "shape": shape, "dtype": dtype}
        elements = math.prod(shape)
        if how == "copied" or not shape or not elements or (how == "rows" and shape[0] % world):
            for rank in range(world):
                held[rank].append(Held(**form, box=whole(shape), copy=rank, copies=world))
            continue
        step = shape[0] // world * (elements // shape[0]) if how == "rows" else 0
        ends = [rank * step for rank in range(world)] + [elements]
        if how == "flat":
            ends = sorted(
                [0, *draw(st.lists(st.integers(0, elements), min_size=world - 1, max_size=world - 1)), elements]
            )
        for rank in range(world):
            for box, _ in flat_boxes(whole(shape), ends[rank], ends[rank + 1]):
                held[rank].append(Held(**form, box=box, copy=0, copies=1))
    return held


@given(states(), st.sampled_from([60, 300, 1 << 20]))
@settings(max_examples=150)
def test_no_two_writers_share_a_chunk_and_every_piece_has_its_place(held: list[list[Held]], piece_bytes: int) -> None:
    plan = plan_save(held, piece_bytes)
    files = ZarrStore().lay_out(plan)
    assert max(Counter(file.path for file in files).values(), default=1) == 1
    assert all(write.rank == file.rank for file in files for write in file.writes)
    placed = Counter((write.name, write.box) for file in files for write in file.writes)
    assert placed == Counter((write.name, write.box) for write in plan.writes)
    for file in files:
        group, array, chunk = file.path.split("/")
        if group == "tensors":
            # A file of a tensor's own array is one cell of its grid, whole.
            ((write,), shape) = (file.writes, plan.tensors[array][0])
            cell = tuple(int(n) for n in chunk.split(".")[1:])
            assert write.box.offset == tuple(n * size for n, size in zip(cell, write.box.shape, strict=True))
            assert all(full % size == 0 for full, size in zip(shape, write.box.shape, strict=True))
        else:
            assert len({plan.tensors[write.name][1] for write in file.writes}) == 1


def test_the_number_of_files_grows_with_ranks_and_bytes_not_with_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 tensors on four ranks, from a scalar to 800 KiB; then a few of many MiB."""
    monkeypatch.undo()
    shapes = {f"t{n}": () if n == 0 else (n, 401) for n in range(500)}
    held = [
        [Held(name=n, shape=s, dtype="float32", box=whole(s), copy=rank, copies=4) for n, s in shapes.items()]
        for rank in range(4)
    ]
    assert len(ZarrStore().lay_out(plan_save(held))) == 4, "one file per rank"
    large = {f"large{n}": (4096, 1024) for n in range(3)}
    held = [
        [*rank, *(Held(name=n, shape=s, dtype="float32", box=whole(s), copy=r, copies=4) for n, s in large.items())]
        for r, rank in enumerate(held)
    ]
    plan = plan_save(held)
    assert len(ZarrStore().lay_out(plan)) <= 4 + plan.bytes // zarr_store.SMALL_BYTES
    assert len(ZarrStore().lay_out(plan)) == 4 + 3 * 4


def test_files_of_many_pieces_are_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_store, "FILE_BYTES", 1000)
    held = [
        [Held(name=f"t{n}", shape=(n,), dtype="int64", box=whole((n,)), copy=0, copies=1) for n in range(1, 100, 7)]
    ]
    plan = plan_save(held, 90)
    files = ZarrStore().lay_out(plan)
    sizes = [sum(w.box.elements * item_bytes("int64") for w in file.writes) for file in files]
    assert max(sizes) <= 1000 and len(files) <= 2 * sum(sizes) // 1000 + 1
