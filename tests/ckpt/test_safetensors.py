"""Folders of safetensors files: boxes, float8 block scales, damage, shards, and taking a folder's place."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpt.store.safetensors import (
    INDEX,
    SINGLE,
    begin,
    check_free,
    commit,
    index_text,
    open_folder,
    plan_shards,
    shard_name,
)
from core.errors import CheckpointError, RequestError
from core.state.box import Box

ROWS, COLUMNS = 200, 300


def float8_folder(folder: Path) -> np.ndarray:
    """A float8 weight whose blocks at the edges are cut, its scales in another file; the true values in float64."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator) + 0.5
    save_file({"w": weight, "plain": torch.arange(6.0)}, folder / "a.safetensors")
    save_file({"w_scale_inv": scale}, folder / "b.safetensors")
    (folder / INDEX).write_text(
        index_text({"w": "a.safetensors", "plain": "a.safetensors", "w_scale_inv": "b.safetensors"}, 0)
    )
    blocks = np.kron(scale.numpy().astype(np.float64), np.ones((128, 128)))[:ROWS, :COLUMNS]
    return weight.float().numpy().astype(np.float64) * blocks


def test_float8_weights_are_each_value_times_the_scale_of_its_block(tmp_path: Path) -> None:
    truth = float8_folder(tmp_path)
    with open_folder(tmp_path) as folder:
        assert set(folder.tensors) == {"w", "plain"}
        read = folder.read("w")
        assert read.dtype == torch.float32
        assert np.array_equal(read.numpy(), truth.astype(np.float32))
        assert torch.equal(folder.read("plain"), torch.arange(6.0))


def test_any_box_of_a_float8_weight_is_that_box_of_the_whole(tmp_path: Path) -> None:
    truth = float8_folder(tmp_path).astype(np.float32)

    @settings(max_examples=60, database=None)
    @given(st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1), st.data())
    def compare(row: int, column: int, data: st.DataObject) -> None:
        shape = (data.draw(st.integers(1, ROWS - row)), data.draw(st.integers(1, COLUMNS - column)))
        box = Box(offset=(row, column), shape=shape)
        with open_folder(tmp_path) as folder:
            assert np.array_equal(folder.read("w", box).numpy(), truth[box.slices])

    compare()


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (1, 3), (3, 2), (6,)])
def test_a_scale_of_a_wrong_shape_is_an_error(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight = torch.zeros(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    save_file({"w": weight, "w_scale_inv": torch.ones(shape)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"w_scale_inv has shape .*, but \[200, 300\] has \[2, 3\] blocks"):
        open_folder(tmp_path).__enter__()


def test_a_scale_of_a_weight_that_is_not_float8_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(ROWS, COLUMNS), "w_scale_inv": torch.ones(2, 3)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"w has block scales but dtype torch\.float32"):
        open_folder(tmp_path).__enter__()


def test_a_scale_without_its_weight_is_a_tensor_like_any_other(tmp_path: Path) -> None:
    save_file({"v_scale_inv": torch.ones(2, 3)}, tmp_path / SINGLE)
    with open_folder(tmp_path) as folder:
        assert set(folder.tensors) == {"v_scale_inv"}


def test_every_damage_of_a_folder_is_named_at_once(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100), "odd": torch.zeros(3, dtype=torch.int64)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(100)}, tmp_path / "2.safetensors")
    save_file({"a": torch.zeros(100)}, tmp_path / "4.safetensors")
    cut = (tmp_path / "2.safetensors").read_bytes()[:-7]
    (tmp_path / "2.safetensors").write_bytes(cut)
    placed = {
        "a": "1.safetensors",
        "b": "2.safetensors",
        "c": "3.safetensors",
        "d": "1.safetensors",
        "e": "4.safetensors",
    }
    (tmp_path / INDEX).write_text(index_text(placed, 0))
    with pytest.raises(CheckpointError) as raised:
        open_folder(tmp_path).__enter__()
    message = str(raised.value)
    for part in (
        "2.safetensors is damaged or cut short",
        "3.safetensors is missing",
        "1.safetensors does not hold d, which the index puts there",
        "4.safetensors does not hold e",
        "odd has dtype I64",
        "a stands in 1.safetensors and again in 4.safetensors",
    ):
        assert part in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        open_folder(tmp_path).__enter__()


def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index_text({"a": "../secret.safetensors"}, 0))
    with pytest.raises(CheckpointError, match="names files outside its folder"):
        open_folder(tmp_path).__enter__()


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_folder(tmp_path).__enter__()


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_shards_keep_the_order_and_the_bound(sizes: list[int], bound: int) -> None:
    tensors = [(str(i), size) for i, size in enumerate(sizes)]
    shards = plan_shards(tensors, bound)
    assert [name for shard in shards for name in shard] == [name for name, _ in tensors]
    for shard in shards:
        assert len(shard) == 1 or sum(sizes[int(name)] for name in shard) <= bound
    # No shard could have taken the first tensor of the next one.
    for left, right in pairwise(shards):
        assert sum(sizes[int(name)] for name in (*left, right[0])) > bound


def test_shards_are_named_as_published_ones() -> None:
    assert shard_name(0, 1) == "model.safetensors"
    assert shard_name(11, 163) == "model-00012-of-00163.safetensors"


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    check_free(target, overwrite=False)
    partial = begin(target)
    save_file({"a": torch.ones(3)}, partial / SINGLE)
    assert not target.exists()
    commit(partial, target)
    assert torch.equal(load_file(target / SINGLE)["a"], torch.ones(3))
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_folder_in_use_is_replaced_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "note").write_text("mine")
    with pytest.raises(RequestError, match=r"is not empty; name another folder, or pass overwrite=True"):
        check_free(target, overwrite=False)
    check_free(target, overwrite=True)
    partial = begin(target)
    assert (target / "note").read_text() == "mine"
    (partial / "other").write_text("new")
    commit(partial, target)
    assert [path.name for path in target.iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(RequestError, match="is a file"):
        check_free(tmp_path / "model", overwrite=True)


def test_the_index_names_the_file_of_every_tensor(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index_text({"b": "2", "a": "1"}, 12))
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 12},
        "weight_map": {"a": "1", "b": "2"},
    }
