"""Dense and expert parameters together: one true norm, clipping, and the same update on one rank as on two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import groups_for, one_rank
from core.state.spec import TensorSpec
from tests.core.numbers import near
from tests.core.optim.trees import Tensors, gradient, plain_adamw
from tests.ranks import Ranks

CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, eps=1e-3, clip_norm=2.0)
RATES = [0.05, 0.1, 0.02]
NAMES = ("matrix", "gain", "experts")


def _train(rank: int, world: int, ep: int, config: OptimizerConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and final tensors of three steps of two microbatches; each rank has its share of the gradient."""
    groups = groups_for(ParallelConfig(ep=ep))
    model = Tensors(groups)
    optimizer = ChainedOptimizer(model, config, groups)
    norms = []
    for step, rate in enumerate(RATES):
        for share in (0.25, 0.75):
            for name in NAMES:
                parameter, grad = model.get_parameter(name), gradient(step, name)
                # Dense gradients are shares over all ranks; an expert's over the ranks that hold copies of it.
                copies = groups.edp if name == "experts" else groups.replicas
                weight = (copies.position + 1) * 2 / (copies.size * (copies.size + 1))
                piece = grad[model.experts_box.slices] if name == "experts" else grad
                parameter.grad = (piece * share * weight).float()
            optimizer.accumulate()
        optimizer.reduce()
        norms.append(optimizer.gradient_norm())
        optimizer.step(rate, norms[-1])
    return norms, {name: model.get_parameter(name).detach() for name in NAMES}


def expected(config: OptimizerConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """By numpy's norm and the written-out algorithm."""
    whole = [np.concatenate([gradient(s, n).numpy().ravel() for n in NAMES]) for s in range(len(RATES))]
    norms = [float(np.linalg.norm(row)) for row in whole]
    limit = config.clip_norm
    factors = [1.0 if limit is None else min(1.0, limit / norm) for norm in norms]
    start, result = Tensors(), {}
    for name in NAMES:
        grads = [gradient(step, name) * factor for step, factor in enumerate(factors)]
        decay = 0.0 if name == "gain" else config.weight_decay
        result[name] = plain_adamw(start.get_parameter(name).detach(), grads, RATES, config, decay)
    return norms, result


@pytest.mark.parametrize("clip_norm", [2.0, 1e6, None])
def test_one_rank_equals_the_written_out_algorithm(clip_norm: float | None) -> None:
    config = replace(CONFIG, clip_norm=clip_norm)
    norms, tensors = _train(0, 1, 1, config)
    true_norms, truth = expected(config)
    assert norms == pytest.approx(true_norms, rel=1e-6) and min(norms) > 2.0
    for name in NAMES:
        near(tensors[name], truth[name], units=16)


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (2, 1), (4, 2)])
def test_norm_and_update_do_not_depend_on_where_experts_lie(ranks: Ranks, world: int, ep: int) -> None:
    true_norms, truth = expected(CONFIG)
    told = ranks.run(_train, world, ep, CONFIG)
    for norms, tensors in told:
        assert norms == pytest.approx(true_norms, rel=1e-6)
        assert norms == told[0][0]  # bit for bit: all ranks must clip alike
        for name in ("matrix", "gain"):
            near(tensors[name], truth[name], units=16)
            assert torch.equal(tensors[name], told[0][1][name])
    near(torch.cat([tensors["experts"] for _, tensors in told[:ep]]), truth["experts"], units=16)


class Large(Tensors):
    """Many numbers of one size, for which a running float32 sum goes astray."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(elements))

    def specs(self) -> dict[str, TensorSpec]:
        found, shape = super().specs(), (self.matrix.numel(),)
        return {
            **found,
            "matrix": replace(found["matrix"], shape=shape, box=replace(found["matrix"].box, offset=(0,), shape=shape)),
        }


@pytest.mark.parametrize("elements", [0, 1, 4095, 4096, 4097, 5_000_011])
def test_the_norm_of_many_elements_is_exact(elements: int) -> None:
    model = Large(elements)
    optimizer = ChainedOptimizer(model, CONFIG, one_rank())
    model.matrix.grad = torch.full((elements,), 0.1)
    optimizer.accumulate()
    assert optimizer.gradient_norm() == pytest.approx(float(np.float32(0.1)) * elements**0.5, rel=2e-5)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(value: float) -> None:
    model = Tensors()
    optimizer = ChainedOptimizer(model, CONFIG, one_rank())
    model.experts.grad = torch.full_like(model.experts, value)
    optimizer.accumulate()
    assert not np.isfinite(optimizer.gradient_norm())


class DenseOnly(torch.nn.Module):
    """A model, or a pipeline stage, without any expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(7))

    def specs(self) -> dict[str, TensorSpec]:
        return {"gain": Tensors().specs()["gain"]}


def test_a_model_without_experts_trains() -> None:
    model = DenseOnly()
    optimizer = ChainedOptimizer(model, CONFIG, one_rank())
    model.gain.grad = torch.full((7,), 3.0)
    optimizer.accumulate()
    optimizer.reduce()
    norm = optimizer.gradient_norm()
    optimizer.step(0.1, norm)
    assert norm == pytest.approx(3 * 7**0.5) and bool((model.gain < 1.0).all())
    assert [piece.name for piece in optimizer.state()] == ["optimizer.exp_avg.gain", "optimizer.exp_avg_sq.gain"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_lists_moments_and_masters_by_canonical_name_and_leaves_buffers_out(dtype: torch.dtype) -> None:
    optimizer = ChainedOptimizer(Tensors(dtype=dtype), CONFIG, one_rank())
    kinds = ("exp_avg", "exp_avg_sq") + (("master",) if dtype == torch.bfloat16 else ())
    pieces = {piece.name: piece for piece in optimizer.state()}
    assert set(pieces) == {f"optimizer.{kind}.{name}" for kind in kinds for name in NAMES}
    assert all(piece.data.dtype == torch.float32 for piece in pieces.values())
    pieces["optimizer.exp_avg.experts"].data.fill_(2.0)
    assert bool((optimizer.expert.state()["exp_avg"]["experts"] == 2.0).all())


def test_a_restored_count_of_steps_is_that_of_both_kinds() -> None:
    optimizer = ChainedOptimizer(Tensors(), CONFIG, one_rank())
    optimizer.set_steps(17)
    counts = [s["step"].item() for kind in (optimizer.dense, optimizer.expert) for s in kind.update.state.values()]
    assert optimizer.steps == 17 and counts == [17.0] * 3
