"""Training of the tiny models by whichever optimizer the mapping names, for tests on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from core.config.mapping import ParallelConfig
from core.optim.formats import Formats
from core.optim.make import make_optimizer
from core.optim.protocol import Optimizer
from core.parallel.groups import Groups, groups_for
from core.parallel.meter import Meter
from core.pipeline.layout import layout_of
from core.state.inventory import initialise, inventory
from core.training.step import StepResult, train_step
from core.transformer.stage import Stage, build_model
from tests.core.tiny import Case, Trained, microbatches

FSDP = ParallelConfig(sharding="fsdp")


def built(
    case: Case, *, dtype: torch.dtype = torch.float64, meter: Meter | None = None, formats: Formats | None = None
) -> tuple[Stage, Optimizer, Groups]:
    """The initialised model of a case, and its optimizer."""
    stages = layout_of(case.model, case.parallel).embedding_stages(case.model.tied_embeddings)
    groups = groups_for(case.parallel, embedding_stages=stages, meter=meter)
    model = build_model(
        case.model, groups=groups, parallel=case.parallel, memory=case.memory, recipe=case.recipe, seed=7, dtype=dtype
    )
    initialise(model, 7)
    return model, make_optimizer(model, case.optimizer, groups, case.parallel, formats), groups


def steps_of(case: Case, model: Stage, optimizer: Optimizer, groups: Groups, steps: Sequence[int]) -> list[StepResult]:
    """The results of some steps of a case."""
    results = []
    for step in steps:
        batches = microbatches(step, groups.dp.position, groups.dp.size, case.microbatch, groups)
        results.append(train_step(model, optimizer, batches, rate=case.optimizer.learning_rate, groups=groups))
    optimizer.wait_all()
    return results


def told(model: Stage, groups: Groups, results: list[StepResult]) -> Trained:
    """What a rank knows now."""
    pieces = [(p.name, p.shape, p.box, p.data.clone()) for p in inventory(model, groups).values()]
    return Trained(results=results, pieces=pieces)


def train_sharded(case: Case, dtype: torch.dtype = torch.float64) -> Trained:
    """Train this rank's share of a case."""
    model, optimizer, groups = built(case, dtype=dtype)
    return told(model, groups, steps_of(case, model, optimizer, groups, range(case.steps)))


def train_several(rank: int, world: int, cases: Sequence[Case]) -> list[Trained]:
    """`train_sharded` of several cases one after the other, for the pool of ranks."""
    return [train_sharded(case) for case in cases]


def plain(case: Case) -> Case:
    """The same training by the other optimizer on one rank, all windows at once."""
    return replace(case, parallel=ParallelConfig(), microbatch=8)
