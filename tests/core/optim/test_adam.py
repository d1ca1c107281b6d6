"""AdamW against the written-out algorithm in float64; masters, accumulation and state."""

from __future__ import annotations

import pytest
import torch

from core.config.run import OptimizerConfig
from core.optim.adam import AdamW
from core.state.inventory import declared
from tests.core.numbers import near
from tests.core.optim.trees import Tensors, gradient, plain_adamw

CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, beta1=0.8, beta2=0.9, eps=1e-3)
RATES = [0.05, 0.1, 0.02, 0.07]
NAMES = ("matrix", "gain", "experts")


def optimizer_of(model: Tensors) -> AdamW:
    return AdamW({n: e for n, e in declared(model).items() if e.spec.trained}, CONFIG)


def leave(model: Tensors, step: int, names: tuple[str, ...] = NAMES) -> None:
    """Gradients as a backward would leave them."""
    for name in names:
        parameter = model.get_parameter(name)
        parameter.grad = gradient(step, name).to(parameter.dtype)


def expected(name: str, dtype: torch.dtype = torch.float64, rates: list[float] = RATES) -> torch.Tensor:
    start = Tensors(dtype=dtype).get_parameter(name).detach()
    grads = [gradient(step, name).to(dtype).double() for step in range(len(rates))]
    return plain_adamw(start, grads, rates, CONFIG, 0.0 if name == "gain" else CONFIG.weight_decay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_equal_the_written_out_algorithm(dtype: torch.dtype) -> None:
    model = Tensors(dtype=dtype)
    optimizer = optimizer_of(model)
    for step, rate in enumerate(RATES):
        leave(model, step)
        optimizer.accumulate()
        optimizer.step(rate)
    for name in NAMES:
        # Torch keeps the count of steps, and with it the bias correction, in float32.
        near(model.get_parameter(name).float(), expected(name), units=16)
    assert model.get_buffer("bias").tolist() == [1.0] * 4


def test_bfloat16_parameters_are_roundings_of_float32_masters() -> None:
    model = Tensors(dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    for step, rate in enumerate(RATES):
        leave(model, step)
        optimizer.accumulate()
        optimizer.step(rate)
    masters = optimizer.state()["master"]
    assert set(masters) == set(NAMES)
    for name in NAMES:
        near(masters[name], expected(name, torch.bfloat16), units=32)
        assert torch.equal(model.get_parameter(name), masters[name].to(torch.bfloat16))


def test_updates_too_small_for_bfloat16_add_up_in_the_master() -> None:
    model = Tensors(dtype=torch.bfloat16)
    model.gain.data.fill_(1.0)
    optimizer = optimizer_of(model)
    for _ in range(40):
        model.gain.grad = torch.ones_like(model.gain)
        optimizer.accumulate()
        optimizer.step(1e-3)  # half a step of bfloat16 below one is 2^-9
    assert optimizer.state()["master"]["gain"][0].item() == pytest.approx(0.96, abs=1e-3)
    assert model.gain[0].item() == pytest.approx(0.96, abs=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_microbatches_add_up_in_float32(dtype: torch.dtype) -> None:
    model = Tensors(dtype=dtype)
    optimizer = optimizer_of(model)
    for value in (256.0, 1.0, 1.0, 1.0):
        model.gain.grad = torch.full_like(model.gain, value)
        optimizer.accumulate()
        assert model.gain.grad is None
    total = optimizer.slots["gain"].gradient
    assert total is not None and total.dtype == torch.float32 and total.tolist() == [259.0] * 7


def test_a_parameter_that_nothing_reached_gets_zeros_and_only_decays() -> None:
    model = Tensors()
    before = model.matrix.detach().clone()
    optimizer = optimizer_of(model)
    leave(model, 0, ("gain",))
    optimizer.accumulate()
    assert [g.shape for g in optimizer.gradients()] == [(5, 3), (7,), (4, 3, 2)]
    assert not optimizer.gradients()[0].any()
    optimizer.step(0.1)
    near(model.matrix, before * (1 - 0.1 * 0.25))


def test_a_step_consumes_the_gradients() -> None:
    model = Tensors()
    optimizer = optimizer_of(model)
    leave(model, 0)
    optimizer.accumulate()
    optimizer.step(0.1)
    assert not any(bool(g.any()) for g in optimizer.gradients())
    assert all(p.grad is None for p in model.parameters())


def test_no_parameters_at_all_are_no_error() -> None:
    optimizer = AdamW({}, CONFIG)
    optimizer.accumulate()
    optimizer.step(0.1)
    assert optimizer.gradients() == [] and optimizer.state() == {"exp_avg": {}, "exp_avg_sq": {}, "master": {}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    whole_run, first = Tensors(dtype=dtype), Tensors(dtype=dtype)
    optimizer, before = optimizer_of(whole_run), optimizer_of(first)
    for step, rate in enumerate(RATES):
        for model, each in ((whole_run, optimizer), (first, before))[: 2 if step < 2 else 1]:
            leave(model, step)
            each.accumulate()
            each.step(rate)
    second = Tensors(dtype=dtype)
    second.load_state_dict(first.state_dict())
    after = optimizer_of(second)
    for kind, tensors in after.state().items():
        for name, tensor in tensors.items():
            tensor.copy_(before.state()[kind][name])
    after.set_steps(2)
    for step in (2, 3):
        leave(second, step)
        after.accumulate()
        after.step(RATES[step])
    for name in NAMES:
        assert torch.equal(second.get_parameter(name), whole_run.get_parameter(name))
