"""One whole optimizer step of a rank whose partners do not exist: every collective is called, no number means anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config.mapping import ParallelConfig, ScheduleName
from core.optim.chained import ChainedOptimizer
from core.parallel.fake import fake_world
from core.parallel.groups import groups_for
from core.parallel.meter import Meter
from core.pipeline.layout import layout_of
from core.state.inventory import initialise
from core.training.clock import Clock
from core.training.step import global_totals
from core.training.work import train_microbatches
from core.transformer.stage import build_model
from tests.core import tiny

MAPPING = ParallelConfig(tp=2, cp=2, pp=2, ep=8)


@pytest.mark.parametrize(("rank", "schedule"), [(37, "1f1b"), (5, "1f1b"), (62, "zero_bubble"), (0, "combined")])
def test_any_rank_of_64_runs_a_whole_step_alone(rank: int, schedule: ScheduleName) -> None:
    model, parallel, meter = tiny.deepseek(), replace(MAPPING, schedule=schedule), Meter()
    with fake_world(rank, 64):
        stages = layout_of(model, parallel).embedding_stages(model.tied_embeddings)
        groups = groups_for(parallel, embedding_stages=stages, meter=meter)
        stage = build_model(model, groups=groups, parallel=parallel)
        initialise(stage, 7)
        optimizer = ChainedOptimizer(stage, tiny.PLAIN, groups)
        batches = tiny.microbatches(0, groups.dp.position % 2, 2, 1, groups)
        totals = global_totals(stage, batches, groups)
        optimizer.begin(stage.passes(len(batches)))
        sums = train_microbatches(stage, batches, totals, after=optimizer.accumulate, clock=Clock())
        # What a real neighbour would have sent is missing, so that gradients may be anything: the update is what must run.
        optimizer.reduce()
        optimizer.gradient_norm()
        optimizer.step(0.1, 1.0)
        optimizer.wait_all()
    assert optimizer.steps == 1 and len(batches) == 4
    # Of the two layers the second, on the second pipeline rank, has experts.
    axes = set(meter.by_axis())
    assert {"tp", "ring", "pp", "dp", "world", "embedding", "replicas"} <= axes
    assert ("ep" in axes) == ("edp" in axes) == ("layers.1" in sums.counts) == (rank >= 32)
