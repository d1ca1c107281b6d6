"""What FSDP2 saves and loads: the canonical state, whoever wrote it, and masters where modules compute in less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt.load import load
from ckpt.save import Saving, save
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim.formats import Formats
from core.optim.protocol import Optimizer
from core.parallel.groups import Groups
from core.state.box import Box
from core.state.inventory import inventory
from core.state.sharded import ShardedTensor
from core.training.step import StepResult
from core.transformer.stage import Stage
from tests.core.optim.sharded import FSDP, built, steps_of
from tests.core.tiny import Case, Trained, assemble, deepseek, qwen3
from tests.core.training.test_step import SPLIT_FREE
from tests.ranks import Ranks

ZERO1 = ParallelConfig()
HYBRID = replace(FSDP, fsdp_replicas=2, ep=2)
# With momentum, decay and clipping; eps keeps an update smooth where a gradient is about zero.
ADAM = OptimizerConfig(learning_rate=0.01, eps=1e-3, weight_decay=0.1, clip_norm=1.0)
CASE = Case(model=deepseek(SPLIT_FREE), optimizer=ADAM, microbatch=2)

Piece = tuple[str, tuple[int, ...], Box, Tensor]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where a run is saved or taken up, its pieces there, and the steps that followed."""

    folder: str
    pieces: list[Piece]
    results: list[StepResult]


def everything(model: Stage, optimizer: Optimizer, groups: Groups) -> list[ShardedTensor]:
    """As launch/worker.py has it: the model, and then the optimizer."""
    pieces = [replace(piece, name=f"model.{name}") for name, piece in inventory(model, groups).items()]
    return pieces + optimizer.state()


def pieces_of(tensors: Sequence[ShardedTensor]) -> list[Piece]:
    return [(t.name, t.shape, t.box, t.data.clone()) for t in tensors]


def saved(rank: int, world: int, case: Case, out: Path, dtype: torch.dtype, formats: Formats | None = None) -> Run:
    """Two steps, a checkpoint, and two steps more."""
    model, optimizer, groups = built(case, dtype=dtype, formats=formats)
    steps_of(case, model, optimizer, groups, (0, 1))
    state = everything(model, optimizer, groups)
    pieces = pieces_of(state)
    folder = save(out, 2, state, {"step": 2}, groups.world, Saving(keep=1))
    return Run(folder=folder, pieces=pieces, results=steps_of(case, model, optimizer, groups, (2, 3)))


def taken_up(rank: int, world: int, case: Case, folder: str, dtype: torch.dtype, formats: Formats | None = None) -> Run:
    """A checkpoint loaded into other values, and two steps."""
    model, optimizer, groups = built(case, dtype=dtype, formats=formats)
    for piece in inventory(model, groups).values():
        piece.data.fill_(3.0)
    load(folder, everything(model, optimizer, groups), groups.world)
    optimizer.set_steps(2)
    pieces = pieces_of(everything(model, optimizer, groups))
    return Run(folder=folder, pieces=pieces, results=steps_of(case, model, optimizer, groups, (2, 3)))


def assembled(runs: Sequence[Run]) -> dict[str, Tensor]:
    """The whole tensors; copies have to be the same bits."""
    return assemble([Trained(results=[], pieces=run.pieces) for run in runs])


def same_state(found: Sequence[Run], expected: Sequence[Run]) -> None:
    here, there = assembled(found), assembled(expected)
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name


@pytest.mark.parametrize(
    ("world", "saves", "loads"),
    [(2, FSDP, ZERO1), (2, ZERO1, FSDP), (2, replace(FSDP, tp=2), replace(FSDP, ep=2)), (4, HYBRID, FSDP)],
    ids=["fsdp to zero1", "zero1 to fsdp", "tp to ep", "hybrid to whole"],
)
def test_a_checkpoint_is_taken_up_bit_for_bit_and_goes_on_alike(
    ranks: Ranks, tmp_path: Path, world: int, saves: ParallelConfig, loads: ParallelConfig
) -> None:
    first = ranks.run(saved, world, replace(CASE, parallel=saves), tmp_path, torch.float64)
    second = ranks.run(taken_up, world, replace(CASE, parallel=loads), first[0].folder, torch.float64)
    same_state(second, first)
    names = assembled(first)
    assert {name.split(".")[1] for name in names if name.startswith("optimizer")} == {"exp_avg", "exp_avg_sq"}
    assert all(names[name].any() for name in names if name.startswith("optimizer.exp_avg_sq"))
    for run in second:
        for result, expected in zip(run.results, first[0].results, strict=True):
            assert result.loss == pytest.approx(expected.loss, rel=1e-12)
            assert result.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-11)


@pytest.mark.parametrize(("saves", "loads"), [(ZERO1, FSDP), (FSDP, ZERO1)], ids=["zero1 to fsdp", "fsdp to zero1"])
def test_masters_of_a_model_in_bfloat16_survive_the_change_of_sharding(
    ranks: Ranks, tmp_path: Path, saves: ParallelConfig, loads: ParallelConfig
) -> None:
    """The model's own tensors are those masters under FSDP, and rounded under ZeRO-1."""
    first = ranks.run(saved, 2, replace(CASE, parallel=saves), tmp_path, torch.bfloat16)
    second = ranks.run(taken_up, 2, replace(CASE, parallel=loads), first[0].folder, torch.bfloat16)
    here, there = assembled(second), assembled(first)
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            assert torch.equal(tensor, there[name]), name
        elif not name.endswith("router.bias"):
            masters = there[f"optimizer.master.{rest}"].to(torch.float32)
            exact = masters if loads.sharding == "fsdp" else masters.to(torch.bfloat16)
            assert torch.equal(tensor, exact.double()), name
            assert not torch.equal(masters, masters.to(torch.bfloat16).float()), name
    assert second[0].results[0].loss == first[0].results[0].loss


def dtypes(
    rank: int, world: int, case: Case, dtype: torch.dtype
) -> tuple[list[StepResult], set[torch.dtype], set[str]]:
    """Results, the dtypes of shards and moments, and the kinds of the optimizer's state."""
    model, optimizer, groups = built(case, dtype=dtype)
    results = steps_of(case, model, optimizer, groups, range(4))
    state = optimizer.state()
    held = {parameter.dtype for parameter in model.parameters()} | {tensor.data.dtype for tensor in state}
    return results, held, {tensor.name.split(".")[1] for tensor in state}


@pytest.mark.parametrize("parallel", [FSDP, replace(FSDP, ep=2)], ids=["shards", "experts alone"])
def test_training_in_bfloat16_is_that_of_zero1_and_near_float32_with_masters_in_float32(
    ranks: Ranks, parallel: ParallelConfig
) -> None:
    case = Case(model=qwen3(), optimizer=ADAM, microbatch=2, parallel=parallel)
    wide, _, kinds = ranks.run(dtypes, 2, case, torch.float32)[0]
    assert kinds == {"exp_avg", "exp_avg_sq"}
    other, _, _ = ranks.run(dtypes, 2, replace(case, parallel=replace(parallel, sharding="zero1")), torch.bfloat16)[0]
    for narrow, held, kinds in ranks.run(dtypes, 2, case, torch.bfloat16):
        assert kinds == {"exp_avg", "exp_avg_sq", "master"}
        # Experts that no other rank holds stay as they are, and have masters beside them.
        assert held == ({torch.float32} if parallel.ep == 1 else {torch.float32, torch.bfloat16})
        for result, same, near in zip(narrow, other, wide, strict=True):
            assert result.loss == pytest.approx(same.loss, rel=1e-5)
            assert result.gradient_norm == pytest.approx(same.gradient_norm, rel=1e-4)
            assert result.loss == pytest.approx(near.loss, rel=0.02) and result.loss != near.loss
