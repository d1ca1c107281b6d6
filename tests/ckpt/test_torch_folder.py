"""Folders that torch.distributed.checkpoint wrote itself, read in place: what torch saved is what we read."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import ckpt.blocks
from ckpt.dtype import ITEM_BYTES
from ckpt.files.local import LocalFiles
from ckpt.manifest import Manifest, read_manifest
from ckpt.read import read_into
from ckpt.store.torch_folder import is_torch_folder, manifest_of_torch_dist
from core.errors import CheckpointError
from core.state.box import whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import bits, poisoned, random_bits
from tests.ranks import Ranks


def save_with_torch(state: Mapping[str, Any], folder: Path) -> LocalFiles:
    with warnings.catch_warnings():
        # torch warns of what it is asked for: to save without other ranks.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return LocalFiles(folder)


def loaded(files: LocalFiles, manifest: Manifest) -> dict[str, Tensor]:
    """Every tensor, whole, read into poisoned memory."""
    targets = [
        ShardedTensor(name=e.name, shape=e.shape, box=whole(e.shape), data=poisoned(e.shape, getattr(torch, e.dtype)))
        for e in manifest.entries
    ]
    read_into(files, manifest, targets)
    return {target.name: target.data for target in targets}


def test_every_type_and_shape_that_torch_saved_is_read_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt.blocks, "BLOCK_BYTES", 64)
    state = {name: random_bits(name, (3, 7), getattr(torch, name)) for name in ITEM_BYTES}
    state |= {"scalar": torch.tensor(3), "nothing": torch.empty(0, 3), "large": random_bits("l", (97, 13), torch.int32)}
    files = save_with_torch(state, tmp_path)
    manifest = manifest_of_torch_dist(files)
    assert max(len(p.blocks) for e in manifest.entries for p in e.pieces) > 1
    found = loaded(files, manifest)
    assert {name: bits(t) for name, t in found.items()} == {name: bits(t) for name, t in state.items()}


def test_a_nested_state_has_dotted_names_and_what_is_no_tensor_is_told(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0)}, "moments": [torch.ones(2)], "step": 7, "name": "x"}
    manifest = manifest_of_torch_dist(save_with_torch(state, tmp_path))
    assert [entry.name for entry in manifest.entries] == ["model.w", "moments.0"]
    assert manifest.extra == {"left_out": ["name", "step"]}


def test_views_of_larger_memory_are_read_by_their_values(tmp_path: Path) -> None:
    large = torch.arange(60.0)
    state = {"part": large[7:19].view(3, 4), "other": large[30:]}
    files = save_with_torch(state, tmp_path)
    found = loaded(files, manifest_of_torch_dist(files))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_values_that_are_not_stored_row_by_row_are_refused_never_transposed(tmp_path: Path) -> None:
    files = save_with_torch({"w": torch.arange(12.0).reshape(3, 4).T}, tmp_path)
    with pytest.raises(CheckpointError, match=r"w: its values are not stored row by row \(strides \(1, 4\)\)"):
        manifest_of_torch_dist(files)


def save_shards(rank: int, world: int, folder: Path, truth: dict[str, Tensor]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    dcp.save(
        {name: distribute_tensor(t, mesh, [Shard(t.dim() - 1)]) for name, t in truth.items()}, checkpoint_id=folder
    )
    dist.barrier()


def test_shards_of_two_ranks_are_one_tensor(ranks: Ranks, tmp_path: Path) -> None:
    truth = {"w": torch.randn(5, 7), "v": torch.randn(3)}
    ranks.run(save_shards, 2, tmp_path, truth)
    files = LocalFiles(tmp_path)
    manifest = manifest_of_torch_dist(files)
    assert [len(entry.pieces) for entry in manifest.entries] == [2, 2]
    assert all(torch.equal(tensor, truth[name]) for name, tensor in loaded(files, manifest).items())


def test_what_changes_after_the_manifest_was_made_is_refused(tmp_path: Path) -> None:
    files = save_with_torch({"w": torch.arange(12.0)}, tmp_path)
    manifest = manifest_of_torch_dist(files)
    block = manifest.entries[0].pieces[0].blocks[0]
    content = bytearray((tmp_path / block.file).read_bytes())
    content[block.offset + 5] ^= 1
    (tmp_path / block.file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{block.file}: w .* is damaged"):
        loaded(files, manifest)


@pytest.mark.parametrize("kept", [0, 700, 1300])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, kept: int) -> None:
    files = save_with_torch({"w": torch.arange(12.0)}, tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{path.name}: w: .*"):
        manifest_of_torch_dist(files)


@pytest.mark.parametrize("content", [b"", b"nothing", pickle.dumps({"a": 1}), pickle.dumps(os.getcwd)], ids=range(4))
def test_a_description_that_is_none_is_refused_and_runs_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    assert is_torch_folder(LocalFiles(tmp_path))
    with pytest.raises(CheckpointError, match=r"\.metadata: (is damaged or not by torch|describes a dict)"):
        manifest_of_torch_dist(LocalFiles(tmp_path))


def test_a_folder_that_torch_did_not_write_is_none(tmp_path: Path) -> None:
    assert not is_torch_folder(LocalFiles(tmp_path))
    with pytest.raises(CheckpointError, match=r"is no folder of torch.distributed.checkpoint"):
        manifest_of_torch_dist(LocalFiles(tmp_path))


def test_a_type_that_no_checkpoint_holds_is_named(tmp_path: Path) -> None:
    files = save_with_torch({"w": torch.zeros(3, dtype=torch.complex64)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"w is complex64\. Works: bool"):
        manifest_of_torch_dist(files)


def test_loading_such_a_folder_tells_what_to_do(tmp_path: Path) -> None:
    files = save_with_torch({"w": torch.zeros(3)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint wrote this.*`ckpt convert`"):
        read_manifest(files)
