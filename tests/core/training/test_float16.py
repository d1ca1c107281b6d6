"""Training in float16 under a factor of losses: the same training as without, and steps whose gradients overflow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim.formats import Formats
from core.optim.scaler import LossScaleError, LossScaler
from core.parallel.groups import one_rank
from core.training.step import NotFiniteError, StepResult, train_step
from core.transformer.stage import Stage
from tests.core.optim.sharded import FSDP, built
from tests.core.tiny import Case, deepseek, microbatches, mixtral
from tests.ranks import Ranks

FLOAT16 = torch.float16
ADAM = OptimizerConfig(learning_rate=0.02, eps=1e-6, clip_norm=0.5)
SMALL = Case(model=mixtral(), optimizer=ADAM, steps=4)


def trained(
    case: Case, dtype: torch.dtype, scaler: LossScaler | None, formats: Formats | None = None
) -> tuple[list[StepResult], dict[str, torch.Tensor], Stage]:
    """The steps of a case; what is saved of its optimizer; the model."""
    model, optimizer, groups = built(case, dtype=dtype, formats=formats)
    results = []
    for step in range(case.steps):
        batches = microbatches(step, groups.dp.position, groups.dp.size, case.microbatch, groups)
        results.append(train_step(model, optimizer, batches, rate=0.02, groups=groups, scaler=scaler))
    return results, {piece.name: piece.data.clone() for piece in optimizer.state()}, model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_factor_that_is_a_power_of_two_changes_no_bit_where_nothing_over_or_underflows(dtype: torch.dtype) -> None:
    """Clipping, norms and losses included: what is scaled is divided again before it counts."""
    plain, state, _ = trained(SMALL, dtype, None)
    scaled, other, _ = trained(SMALL, dtype, LossScaler(fixed=1024.0))
    assert max(result.gradient_norm for result in plain) > 0.5, "something is clipped"
    for mine, its in zip(plain, scaled, strict=True):
        assert (mine.loss, mine.gradient_norm, mine.balance) == (its.loss, its.gradient_norm, its.balance)
        assert (mine.loss_scale, its.loss_scale) == (None, 1024.0) and not its.skipped
    for name, tensor in state.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("model", [mixtral(), deepseek()], ids=["mixtral", "deepseek"])
def test_training_in_float16_is_near_that_in_float32(model: object) -> None:
    case = replace(SMALL, model=model)
    plain, _, _ = trained(case, torch.float32, None)
    low, _, made = trained(case, FLOAT16, LossScaler())
    assert all(parameter.dtype == FLOAT16 for name, parameter in made.named_parameters() if "router" not in name)
    for mine, its in zip(plain, low, strict=True):
        assert its.loss_scale == 65536 and not its.skipped
        assert its.loss == pytest.approx(mine.loss, rel=0.01)
        assert its.gradient_norm == pytest.approx(mine.gradient_norm, rel=0.1)


def test_without_a_factor_small_gradients_are_lost_and_with_one_they_are_not() -> None:
    """Below 6e-8 float16 has nothing."""
    norms, case = {}, replace(SMALL, model=mixtral(()), optimizer=replace(ADAM, clip_norm=None))
    for name, dtype, fixed in (("truth", torch.float64, None), ("with", FLOAT16, 2.0**16), ("without", FLOAT16, None)):
        scaler = None if fixed is None else LossScaler(fixed=fixed)
        model, optimizer, groups = built(case, dtype=dtype)
        # What a head of small weights sends back is small.
        with torch.no_grad():
            for parameter in model.head.parameters() if model.head is not None else ():
                parameter.mul_(1e-5)
        result = train_step(model, optimizer, microbatches(0), rate=0.0, groups=groups, scaler=scaler)
        queries = [tensor for name, tensor in _gradients(optimizer).items() if "query" in name]
        # Divided again by the update, in place.
        norms[name] = float(torch.cat([g.double().reshape(-1) for g in queries]).norm())
        assert result.loss > 0
    assert norms["with"] == pytest.approx(norms["truth"], rel=0.05)
    assert abs(norms["without"] / norms["truth"] - 1) > 0.3


def _gradients(optimizer: object) -> dict[str, torch.Tensor]:
    return {slot.name: slot.gradient for bucket in optimizer.buckets for slot in bucket.slots}  # type: ignore[attr-defined]


def test_a_step_that_overflows_changes_nothing_but_the_factor_and_the_next_one_goes_on() -> None:
    """As if it had not been: parameters, moments, expert biases and bias correction are those of a run without its batch."""
    case = replace(SMALL, model=deepseek())
    model, optimizer, groups = built(case, dtype=FLOAT16)
    other, its_optimizer, _ = built(case, dtype=FLOAT16)
    scaler, told = LossScaler(scale=2.0**32), []

    def state() -> dict[str, torch.Tensor]:
        tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return tensors | {piece.name: piece.data.clone() for piece in optimizer.state()}

    before = state()
    result = train_step(
        model, optimizer, microbatches(0), rate=0.02, groups=groups, scaler=scaler, before_update=lambda: told.append(1)
    )
    assert result.skipped and result.loss_scale == 2.0**32 and told == [1], "a checkpoint was waited for all the same"
    assert not torch.tensor(result.gradient_norm).isfinite() and result.loss > 0
    for name, tensor in state().items():
        assert torch.equal(tensor, before[name]), name
    assert (scaler.scale, scaler.skipped, optimizer.steps) == (2.0**31, 1, 0)
    scaler.scale = 65536.0
    for step in (1, 2):
        mine = train_step(model, optimizer, microbatches(step), rate=0.02, groups=groups, scaler=scaler)
        its = train_step(
            other, its_optimizer, microbatches(step), rate=0.02, groups=groups, scaler=LossScaler(fixed=65536.0)
        )
        assert (mine.loss, mine.gradient_norm, mine.skipped) == (its.loss, its.gradient_norm, False)
    after = {piece.name: piece.data for piece in its_optimizer.state()}
    for piece in optimizer.state():
        assert torch.equal(piece.data, after[piece.name]), piece.name
    for name, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_the_factor_comes_down_until_gradients_fit_and_training_begins() -> None:
    model, optimizer, groups = built(SMALL, dtype=FLOAT16)
    scaler, results = LossScaler(scale=2.0**20), []
    for step in range(10):
        before = scaler.scale
        results.append(train_step(model, optimizer, microbatches(0), rate=0.02, groups=groups, scaler=scaler))
        assert results[step].loss_scale == before
        assert scaler.scale == (before / 2 if results[step].skipped else before)
    skipped = sum(result.skipped for result in results)
    assert results[0].skipped and 2 <= skipped <= 6
    assert scaler.skipped == skipped and optimizer.steps == 10 - skipped
    assert results[-1].loss < results[0].loss


def test_a_gradient_that_never_fits_ends_the_run_and_a_loss_that_is_no_number_at_once() -> None:
    model, optimizer, groups = built(SMALL, dtype=FLOAT16)
    scaler = LossScaler(scale=2.0**-14)
    with torch.no_grad():
        optimizer.buckets[0].slots[0].parameter.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[attr-defined]
    with pytest.raises(LossScaleError, match=r"^step 1: the gradient is not finite"):
        train_step(model, optimizer, microbatches(0), rate=0.02, groups=groups, scaler=scaler)
    model, optimizer, groups = built(SMALL, dtype=FLOAT16)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="nothing was updated"):
        train_step(model, optimizer, microbatches(0), rate=0.02, groups=groups, scaler=LossScaler())


def _on_ranks(rank: int, world: int, case: Case) -> list[tuple[float, float, bool, float | None]]:
    """Steps of which the first two overflow, by far, and the others by far do not."""
    model, optimizer, groups = built(case, dtype=FLOAT16, formats=Formats(on_host=0.5))
    scaler, found = LossScaler(scale=2.0**26), []
    for step in range(case.steps):
        batches = microbatches(step, groups.dp.position, groups.dp.size, case.microbatch, groups)
        r = train_step(model, optimizer, batches, rate=0.02, groups=groups, scaler=scaler)
        found.append((r.loss, r.gradient_norm, r.skipped, r.loss_scale))
        scaler.scale = 2.0**25 if step == 0 else 2.0**14
    return found


@pytest.mark.parametrize("parallel", [ParallelConfig(ep=2), ParallelConfig(pp=2), FSDP], ids=["dp, ep", "pp", "fsdp"])
def test_all_ranks_skip_the_same_steps_as_one_rank_does(ranks: Ranks, parallel: ParallelConfig) -> None:
    case = replace(SMALL, parallel=parallel, microbatch=2, steps=5)
    (alone,) = ranks.run(_on_ranks, 1, replace(case, parallel=ParallelConfig()))
    both = ranks.run(_on_ranks, 2, case)
    assert [step[2:] for step in both[0]] == [step[2:] for step in both[1]] == [step[2:] for step in alone]
    assert [step[2] for step in alone] == [True, True, False, False, False]
    for mine, its in zip(both[0], alone, strict=True):
        assert mine[0] == pytest.approx(its[0], rel=0.01)


def test_runs_without_a_factor_tell_none() -> None:
    model, optimizer, _ = built(SMALL, dtype=torch.float32)
    result = train_step(model, optimizer, microbatches(0), rate=0.02, groups=one_rank())
    assert result.loss_scale is None and not result.skipped
