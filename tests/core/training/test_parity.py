"""One run, any mapping: ten optimizer steps give the losses and the parameters of one rank (known faults, groups b, c and e).

Every folding of 1, 2 and 4 ranks, and drawn ones of 8, each with a drawn schedule, layout, dispatcher, kind of context parallelism
and sharding; packed documents of uneven lengths, several microbatches a step, widths and a vocabulary that nothing divides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.training.step import StepResult
from tests.core.tiny import Case, Trained, assemble, train, train_all
from tests.core.training.mappings import MODELS, drawn, label
from tests.ranks import Ranks

# With momentum, decay and clipping; eps keeps an update smooth where a gradient is about zero, or rounding would decide its sign.
ADAM = OptimizerConfig(learning_rate=0.005, beta1=0.9, beta2=0.95, eps=1e-2, weight_decay=0.1, clip_norm=1.0)
STEPS, WINDOWS = 10, 8
FOLDINGS = [(world, *case) for world in (1, 2, 4) for case in drawn(world)]
FOLDINGS += [(8, *case) for case in drawn(8, 20)]


def case_of(world: int, name: str, parallel: ParallelConfig) -> Case:
    """Four windows at a time over the replicas where they are that few, so that there are several microbatches."""
    replicas = world // (parallel.tp * parallel.cp * parallel.pp)
    return Case(
        model=MODELS[name],
        parallel=parallel,
        microbatch=max(1, 4 // replicas),
        steps=STEPS,
        optimizer=ADAM,
        dtype=torch.float32,
    )


@cache
def on_one_rank(name: str, microbatch: int, dtype: torch.dtype, steps: int) -> Trained:
    """The truth."""
    return train(Case(model=MODELS[name], microbatch=microbatch, steps=steps, optimizer=ADAM, dtype=dtype))


def truth_for(name: str, case: Case, world: int) -> Trained:
    """A balance over the global batch so far sees the replicas' microbatches as one, the others each for itself."""
    replicas = world // (case.parallel.tp * case.parallel.cp * case.parallel.pp)
    together = case.microbatch * (replicas if name == "qwen3" else 1)
    return on_one_rank(name, together, case.dtype, case.steps)


def check_close(found: Sequence[Trained], truth: Trained, tolerance: float) -> None:
    for trained in found:
        for result, expected in zip(trained.results, truth.results, strict=True):
            assert losses(result) == pytest.approx(losses(expected), rel=tolerance)
            # The norm of the whole gradient is the first to feel the rounding of the steps before.
            assert result.gradient_norm == pytest.approx(expected.gradient_norm, rel=10 * tolerance)
            assert result.expert_counts == expected.expert_counts
    weights, expected_weights = assemble(found), assemble([truth])
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, expected_weights[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def losses(result: StepResult) -> dict[str, float]:
    """Every loss by name."""
    ahead = {f"ahead {i}": loss for i, loss in enumerate(result.ahead)}
    return {"loss": result.loss, **ahead, **result.balance}


@pytest.mark.parametrize(
    ("world", "name", "parallel"), FOLDINGS, ids=[f"{w} ranks: {n}: {label(p)}" for w, n, p in FOLDINGS]
)
def test_ten_steps_in_float32_give_the_run_of_one_rank(
    ranks: Ranks, world: int, name: str, parallel: ParallelConfig
) -> None:
    case = case_of(world, name, parallel)
    found = [done for (done,) in ranks.run(train_all, world, [case], timeout_seconds=120.0)]
    check_close(found, truth_for(name, case, world), 1e-5)


SMALLEST = [
    ParallelConfig(),
    ParallelConfig(tp=2),
    ParallelConfig(cp=2),
    ParallelConfig(cp=2, cp_alltoall=2),
    ParallelConfig(pp=2),
    ParallelConfig(pp=2, vpp=2, schedule="zero_bubble"),
    ParallelConfig(pp=2, vpp=2, schedule="combined"),
    ParallelConfig(ep=2),
    ParallelConfig(etp=2),
]


@pytest.mark.parametrize("parallel", SMALLEST, ids=label)
def test_two_steps_in_float64_agree_to_twelve_digits(ranks: Ranks, parallel: ParallelConfig) -> None:
    names = ("mixtral", "qwen3", "deepseek")
    cases = {name: replace(case_of(2, name, parallel), steps=2, dtype=torch.float64) for name in names}
    found = ranks.run(train_all, 2, list(cases.values()), timeout_seconds=120.0)
    for i, (name, case) in enumerate(cases.items()):
        check_close([rank[i] for rank in found], truth_for(name, case, 2), 1e-12)


def test_the_foldings_hold_every_axis_alone_every_pair_and_more_experts_than_replicas() -> None:
    """What the drawn cases must not lose when the draw changes."""
    parallels = [parallel for _, _, parallel in FOLDINGS]
    assert len(FOLDINGS) >= 60
    sizes = [
        {axis for axis in ("tp", "cp", "pp", "ep", "etp") if getattr(parallel, axis) > 1} for parallel in parallels
    ]
    pairs = {frozenset((a, b)) for used in sizes for a in used for b in used}
    assert len(pairs) == 15  # five alone and ten pairs
    assert {parallel.schedule for parallel in parallels} == {"gpipe", "1f1b", "zero_bubble", "combined"}
    assert {parallel.vpp for parallel in parallels} >= {1, 2, 3}
    assert any(parallel.layout and "|m" in parallel.layout for parallel in parallels)
    assert any(1 < parallel.cp_alltoall < parallel.cp for parallel in parallels)
    assert {(parallel.sharding, parallel.fsdp_replicas) for parallel in parallels} == {
        ("zero1", 1),
        ("fsdp", 1),
        ("fsdp", 2),
    }
    replicas = [world // (p.tp * p.cp * p.pp) for world, _, p in FOLDINGS]
    assert any(p.ep > dp for (_, _, p), dp in zip(FOLDINGS, replicas, strict=True))
    assert {name for _, name, _ in FOLDINGS} == set(MODELS)
