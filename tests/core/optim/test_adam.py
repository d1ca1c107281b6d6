"""AdamW over flat shards against the written-out algorithm in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.config.run import OptimizerConfig
from core.optim.adam import AdamW, Shard
from tests.core.numbers import draw, near
from tests.core.optim.trees import plain_adamw

CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, beta1=0.8, beta2=0.9, eps=1e-3)
RATES = [0.05, 0.1, 0.02, 0.07]
SIZES = (0, 1, 15, 64, 97)


def shards(dtype: torch.dtype) -> list[Shard]:
    """One shard per size, every second one decays; parts of larger buffers, as they lie in buckets."""
    masters = [torch.cat([draw(n, 16), draw(n, n), draw(n, 16)]).to(dtype)[16 : 16 + n] for n in SIZES]
    return [Shard(master=m, gradient=torch.zeros_like(m), decay=i % 2 == 0) for i, m in enumerate(masters)]


def gradient(step: int, size: int) -> Tensor:
    return draw(1000 * step + size, size)


def steps(adam: AdamW, numbers: range) -> None:
    for step in numbers:
        for shard, size in zip(adam.shards, SIZES, strict=True):
            shard.gradient.copy_(gradient(step, size))
        adam.step(RATES[step])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_equal_the_written_out_algorithm(dtype: torch.dtype) -> None:
    adam = AdamW(shards(dtype), CONFIG)
    before = [shard.master.double().clone() for shard in adam.shards]
    steps(adam, range(4))
    for shard, start, size in zip(adam.shards, before, SIZES, strict=True):
        grads = [gradient(step, size).to(dtype).double() for step in range(4)]
        truth = plain_adamw(start, grads, RATES, CONFIG, CONFIG.weight_decay if shard.decay else 0.0)
        near(shard.master, truth, units=16)


def test_gradients_are_left_as_they_were() -> None:
    adam = AdamW(shards(torch.float32), CONFIG)
    steps(adam, range(1))
    for shard, size in zip(adam.shards, SIZES, strict=True):
        assert torch.equal(shard.gradient, gradient(0, size).float())


def test_no_shards_at_all_are_no_error() -> None:
    adam = AdamW([], CONFIG)
    adam.step(0.1)
    adam.set_steps(3)


def test_a_copy_of_masters_moments_and_steps_continues_bit_for_bit() -> None:
    whole_run, first, second = (AdamW(shards(torch.float32), CONFIG) for _ in range(3))
    steps(whole_run, range(4))
    steps(first, range(2))
    for old, new in zip(first.shards, second.shards, strict=True):
        new.master.copy_(old.master)
        for kind, tensor in second.moments(new).items():
            tensor.copy_(first.moments(old)[kind])
    second.set_steps(2)
    steps(second, range(2, 4))
    for shard, truth in zip(second.shards, whole_run.shards, strict=True):
        assert torch.equal(shard.master, truth.master)
