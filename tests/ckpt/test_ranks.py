"""Saving and loading with real ranks: shared writing, other world sizes, and one failure that reaches all."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import read_manifest
from ckpt.save import Saving, save
from ckpt.shelf.address import latest
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError
from core.parallel.groups import Group, groups_for
from core.state.box import part, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import bits, poisoned, random_bits
from tests.ranks import Ranks


def truth() -> dict[str, Tensor]:
    return {
        "model.dense": random_bits("dense", (7, 11), torch.float32),
        "model.norm": random_bits("norm", (11,), torch.bfloat16),
        "model.experts": random_bits("experts", (12, 2, 3, 5), torch.bfloat16),
        "optimizer.step": torch.tensor(3),
    }


def pieces(ep: int, poison: bool) -> tuple[list[ShardedTensor], Group]:
    """What this rank of the initialised world holds under expert parallelism over `ep` ranks."""
    groups = groups_for(ParallelConfig(ep=ep))
    held = []
    for name, tensor in truth().items():
        shape = tuple(tensor.shape)
        expert = name == "model.experts"
        box = part(shape, 0, groups.ep.position, groups.ep.size) if expert else whole(shape)
        copies = groups.edp if expert else groups.replicas
        data = poisoned(box.shape, tensor.dtype) if poison else tensor[box.slices].clone()
        held.append(ShardedTensor(name=name, shape=shape, box=box, data=data, copy=copies.position, copies=copies.size))
    return held, groups.world


def save_under(rank: int, world: int, run: Path, ep: int, step: int) -> str:
    tensors, group = pieces(ep, poison=False)
    return save(run, step, tensors, {"saved_at_ep": ep}, group, Saving(keep=2))


def load_under(rank: int, world: int, folder: str, ep: int) -> int:
    tensors, group = pieces(ep, poison=True)
    extra = load(folder, tensors, group)
    for tensor in tensors:
        assert bits(tensor.data) == bits(truth()[tensor.name][tensor.box.slices]), tensor.name
    return extra["saved_at_ep"]


def save_with_failing_rank(rank: int, world: int, run: Path, failing: int) -> str:
    """One rank may write no file over 4 bytes, as if its disk were full: what each rank is told."""
    tensors, group = pieces(2, poison=False)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, old[1]))
    try:
        save(run, 2, tensors, {}, group, Saving(keep=1))
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    return "saved"


def load_with_one_model_too_small(rank: int, world: int, folder: str) -> str:
    """Rank 1 lacks one tensor that rank 0 has as well: no fault. Neither has the counter: a fault on both."""
    tensors, group = pieces(1, poison=True)
    tensors = [t for t in tensors if t.name != "optimizer.step" and (rank == 0 or t.name != "model.norm")]
    try:
        load(folder, tensors, group)
    except CheckpointError as error:
        assert all(bits(t.data) == bits(poisoned(t.box.shape, t.data.dtype)) for t in tensors)
        return str(error)
    return "loaded"


def test_a_checkpoint_of_four_ranks_loads_on_one_two_and_four(ranks: Ranks, tmp_path: Path) -> None:
    folders = set(ranks.run(save_under, 4, tmp_path, 2, 1))
    assert folders == {latest(tmp_path)}
    (folder,) = folders
    for world, ep in ((1, 1), (2, 1), (2, 2), (4, 4)):
        assert ranks.run(load_under, world, folder, ep) == [2] * world


def test_copies_are_written_once_and_by_more_than_the_first_rank(ranks: Ranks, tmp_path: Path) -> None:
    folder = ranks.run(save_under, 4, tmp_path, 2, 1)[0]
    writers = {
        entry.name: [piece.rank for piece in entry.pieces] for entry in read_manifest(LocalFiles(Path(folder))).entries
    }
    # Experts 0-5 are on ranks 0 and 2, experts 6-11 on ranks 1 and 3.
    assert [rank % 2 for rank in writers["model.experts"]] == [0, 1]
    assert all(len(writers[name]) == 1 for name in truth() if name != "model.experts")
    assert len({rank for found in writers.values() for rank in found}) >= 3


@pytest.mark.parametrize(("world", "failing"), [(2, 1), (4, 0), (4, 3)])
def test_one_rank_that_cannot_write_fails_all_and_leaves_the_older_checkpoint(
    ranks: Ranks, tmp_path: Path, world: int, failing: int
) -> None:
    folder = ranks.run(save_under, world, tmp_path, 2, 1)[0]
    messages = ranks.run(save_with_failing_rank, world, tmp_path, failing)
    # The first line tells the free bytes, which others change while the ranks ask.
    assert len({tuple(message.splitlines()[1:]) for message in messages}) == 1
    assert f"rank {failing}: " in messages[0] and "File too large" in messages[0]
    assert f"pieces/{failing:05d}." in messages[0], "the file is named"
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == ["step_00000001"]
    assert ranks.run(load_under, 2, folder, 1) == [2, 2]


def test_what_no_rank_wants_is_unexpected_and_what_one_of_them_wants_is_not(ranks: Ranks, tmp_path: Path) -> None:
    folder = ranks.run(save_under, 1, tmp_path, 1, 1)[0]
    messages = ranks.run(load_with_one_model_too_small, 2, folder)
    assert messages[0] == messages[1]
    assert messages[0].splitlines()[1:] == ["  optimizer.step: in the checkpoint, but nothing to load it into"]


def test_a_damaged_piece_of_one_rank_fails_the_load_of_all(ranks: Ranks, tmp_path: Path) -> None:
    folder = ranks.run(save_under, 2, tmp_path, 2, 1)[0]
    # Experts 6-11, which rank 1 alone loads.
    entry = next(e for e in read_manifest(LocalFiles(Path(folder))).entries if e.name == "model.experts")
    block = next(piece.blocks[0] for piece in entry.pieces if piece.box.offset[0] == 6)
    chunk = Path(folder) / block.file
    content = bytearray(chunk.read_bytes())
    content[block.offset] ^= 4
    chunk.write_bytes(content)
    assert ranks.run(load_failing, 2, folder, 2) == ["rank 1"] * 2


def load_failing(rank: int, world: int, folder: str, ep: int) -> str:
    tensors, group = pieces(ep, poison=True)
    with pytest.raises(CheckpointError, match=r"model\.experts") as caught:
        load(folder, tensors, group)
    dist.barrier()
    return str(caught.value).split(":")[0]
