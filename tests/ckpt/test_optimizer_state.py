"""The distributed optimizer's state, in flat ranges of odd boxes, through a checkpoint into other worlds, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import read_manifest
from ckpt.save import Saving, save
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import Groups, groups_for
from core.state.inventory import inventory
from core.state.sharded import ShardedTensor
from tests.core.optim.trees import SMALL_BUCKET, Piece, Tree, assembled, backward, gradient, trained
from tests.ranks import Ranks

CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, eps=1e-3, clip_norm=None)
MIXED = {"": torch.float32, "matrix": torch.bfloat16, "norm": torch.bfloat16, "experts": torch.bfloat16}
SAVED_UNDER = [(2, ParallelConfig()), (2, ParallelConfig(tp=2, etp=2)), (4, ParallelConfig(tp=2, ep=2))]
LOADED_UNDER = [(1, ParallelConfig()), (3, ParallelConfig(ep=3)), (3, ParallelConfig(tp=3))]


def start(parallel: ParallelConfig) -> tuple[Tree, ChainedOptimizer, Groups]:
    groups = groups_for(parallel)
    model = Tree(groups, MIXED)
    return model, ChainedOptimizer(model, CONFIG, groups, bucket_bytes=SMALL_BUCKET), groups


def train(model: Tree, optimizer: ChainedOptimizer, groups: Groups, step: int) -> None:
    """One step whose gradient the first copy has alone, so that no sum over copies rounds."""
    entries = trained(model)
    whole = {n: gradient(step, 0, n, e.spec)[e.spec.box.slices] for n, e in entries.items()}
    optimizer.begin(1)
    buckets = {slot.name: bucket for bucket in optimizer.buckets for slot in bucket.slots}
    backward({n: g * float(buckets[n].group.position == 0) for n, g in whole.items()}, entries)
    optimizer.reduce()
    optimizer.step(0.05, 1.0)


def everything(model: Tree, optimizer: ChainedOptimizer, groups: Groups) -> list[ShardedTensor]:
    pieces = [replace(piece, name=f"model.{piece.name}") for piece in inventory(model, groups).values()]
    return pieces + optimizer.state()


def told(tensors: list[ShardedTensor]) -> list[Piece]:
    return [(t.name, t.shape, t.box, t.data.clone()) for t in tensors]


def _save(rank: int, world: int, run: Path, parallel: ParallelConfig) -> tuple[str, list[Piece], list[Piece]]:
    """Two steps, a checkpoint, and one more step: the folder, the state at the checkpoint, and at the end."""
    model, optimizer, groups = start(parallel)
    for step in range(2):
        train(model, optimizer, groups, step)
    folder = save(run, 2, everything(model, optimizer, groups), {}, groups.world, Saving(keep=1))
    saved = told(everything(model, optimizer, groups))
    train(model, optimizer, groups, 2)
    return folder, saved, told(everything(model, optimizer, groups))


def _load(rank: int, world: int, folder: str, parallel: ParallelConfig) -> tuple[list[Piece], list[Piece]]:
    """What a fresh optimizer, with other numbers in it, holds after loading, and after one more step."""
    model, optimizer, groups = start(parallel)
    train(model, optimizer, groups, 7)
    load(folder, everything(model, optimizer, groups), groups.world)
    optimizer.set_steps(2)
    loaded = told(everything(model, optimizer, groups))
    train(model, optimizer, groups, 2)
    return loaded, told(everything(model, optimizer, groups))


@pytest.mark.parametrize(("world", "parallel"), SAVED_UNDER)
def test_state_is_the_same_in_every_world_and_goes_on_bit_by_bit(
    ranks: Ranks, tmp_path: Path, world: int, parallel: ParallelConfig
) -> None:
    written = ranks.run(_save, world, tmp_path, parallel)
    folder = written[0][0]
    saved, ended = (assembled([answer[i] for answer in written]) for i in (1, 2))
    assert any(not torch.equal(tensor, ended[name]) for name, tensor in saved.items())
    for other, onto in LOADED_UNDER:
        read = ranks.run(_load, other, folder, onto)
        for i, expected in enumerate((saved, ended)):
            found = assembled([answer[i] for answer in read])
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), f"{name} on {other} ranks"


def test_both_ranks_wrote_and_each_element_of_the_state_once(ranks: Ranks, tmp_path: Path) -> None:
    written = ranks.run(_save, 2, tmp_path, ParallelConfig())
    entries = [
        entry for entry in read_manifest(LocalFiles(Path(written[0][0]))).entries if entry.name.startswith("optimizer.")
    ]
    writers = {piece.rank for entry in entries for piece in entry.pieces}
    assert writers == {0, 1}
    for entry in entries:
        assert sum(piece.box.elements for piece in entry.pieces) == torch.Size(entry.shape).numel()
    split = next(entry for entry in entries if entry.name == "optimizer.exp_avg.layers.0.experts")
    assert len(split.pieces) > 2  # not only whole rows: the middle of the bucket lies in the middle of an expert
