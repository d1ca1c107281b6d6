"""Checkpoints of whole tiny models as runs save them, with optimizer moments, pieces cut for the ranks of a mapping that is not there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ckpt.described import RUN
from ckpt.files.protocol import Address
from ckpt.reshard import smallest_world
from ckpt.save import Saving
from core.config.architecture import ModelConfig
from core.config.family import find_family
from core.config.mapping import ParallelConfig
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.config.serial import run_to_json
from core.state.box import Box
from core.state.sharded import ShardedTensor
from core.transformer.fake import FakeStages, canonical_shapes
from tests.ckpt.pieces import save_as_ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = 30


def truth_of(model: ModelConfig, seed: int = 0, *, moments: bool = True) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole: parameters, and moments of those that are trained."""
    generator = torch.Generator().manual_seed(seed)
    shapes = canonical_shapes(model)
    names = [f"model.{name}" for name in shapes]
    if moments:
        names += [f"optimizer.{m}.{name}" for m in MOMENTS for name in shapes if not name.endswith("router.bias")]
    of = {
        **{f"model.{n}": s for n, s in shapes.items()},
        **{f"optimizer.{m}.{n}": s for m in MOMENTS for n, s in shapes.items()},
    }
    return {name: torch.randn(of[name], generator=generator) for name in names}


def ranks_under(model: ModelConfig, parallel: ParallelConfig, truth: Mapping[str, Tensor]) -> list[list[ShardedTensor]]:
    """What each rank of the smallest world of a mapping holds of `truth`."""
    ranks = smallest_world(parallel)
    stages = FakeStages(model, parallel, ranks)
    found = []
    for rank in range(ranks):
        mine = []
        for canonical, piece in stages.pieces(rank).items():
            for prefix in ("model", *(f"optimizer.{moment}" for moment in MOMENTS)):
                name = f"{prefix}.{canonical}"
                if name in truth:
                    mine.append(_piece(name, truth[name], piece.box, piece.copy, piece.copies))
        found.append(mine)
    return found


def save_run(
    run: Address,
    model: ModelConfig,
    family: str,
    *,
    parallel: ParallelConfig | None = None,
    saving: Saving | None = None,
    seed: int = 0,
    moments: bool = True,
) -> dict[str, Tensor]:
    """Save step 30 of a run; the tensors that are in it."""
    parallel = parallel or ParallelConfig()
    truth = truth_of(model, seed, moments=moments)
    extra = {RUN: run_to_json(run_of(model, family, parallel)), "step": STEP, "tokens": 5, "data": "d"}
    save_as_ranks(run, STEP, ranks_under(model, parallel, truth), extra, saving or Saving())
    return truth


def run_of(model: ModelConfig, family: str, parallel: ParallelConfig) -> RunConfig:
    """A run of a tiny model; what it trains on does not matter."""
    return RunConfig(
        family=find_family(family).name,
        size="tiny",
        hardware="cpu",
        ranks=smallest_world(parallel),
        model=model,
        parallel=parallel,
        train=TrainConfig(steps=60, sequence_tokens=8, global_batch=2, microbatch=1),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        data=DataConfig(),
        precision=PrecisionConfig(),
        checkpoint=CheckpointConfig(),
    )


def _piece(name: str, tensor: Tensor, box: Box, copy: int, copies: int) -> ShardedTensor:
    return ShardedTensor(
        name=name, shape=tuple(tensor.shape), box=box, data=tensor[box.slices].clone(), copy=copy, copies=copies
    )
