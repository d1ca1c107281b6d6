"""Moments in float16 and float8 under scales: what one rounding does, what is lost over many steps, and what never happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from core.config.run import OptimizerConfig
from core.optim.adam import AdamW, Shard
from core.optim.kept import BLOCK
from core.optim.moments import Place, ScaledMoment, kept_moments, noise_of
from core.state.box import Box, whole
from tests.core.numbers import draw

FLOAT16, FLOAT8 = torch.float16, torch.float8_e4m3fn
CPU = torch.device("cpu")
CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, beta1=0.9, beta2=0.95, eps=1e-3, clip_norm=None)
BOTH = pytest.mark.parametrize("dtype", [FLOAT16, FLOAT8], ids=["float16", "float8"])


def one(dtype: torch.dtype, elements: int, *, root: bool) -> ScaledMoment:
    """The first moment of so many elements, or the second."""
    found = kept_moments(elements, dtype, CPU, 0)[int(root)]
    assert isinstance(found, ScaledMoment)
    return found


def kept(moment: ScaledMoment, value: Tensor, noise: Tensor | None = None) -> Tensor:
    """What comes back of a value."""
    numbers = [part.here for part in moment.parts]
    moment.narrow(numbers, value, noise)
    return moment.widen(numbers, torch.float32)


def shards(sizes: Sequence[int], start: float | None = None) -> list[Shard]:
    """One shard per size, each a tensor of its own; every second one decays."""
    return [
        Shard(
            master=draw(n, n, dtype=torch.float32) if start is None else torch.full((n,), start),
            gradient=torch.zeros(n),
            decay=i % 2 == 0,
            places=(Place(name=f"of {n}", box=whole((n,)), start=0),),
        )
        for i, n in enumerate(sizes)
    ]


def uneven(elements: int) -> Tensor:
    """Numbers of both signs over twelve powers of ten."""
    return (draw(3, elements) * 10.0 ** (12 * draw(4, elements).sigmoid() - 6)).float()


# ------------------------------------------------------------------------------------------------------- one rounding


@pytest.mark.parametrize("elements", [1, 127, 128, 129, 1000])
def test_float16_is_off_by_half_a_last_place_and_never_more(elements: int) -> None:
    value = uneven(elements)
    largest = np.repeat(
        [float(value[i : i + BLOCK].abs().max()) for i in range(0, elements, BLOCK)],
        [len(value[i : i + BLOCK]) for i in range(0, elements, BLOCK)],
    )
    first = kept(one(FLOAT16, elements, root=False), value).double().numpy()
    # Below 2^-29 of the largest of its block a number has fewer bits: what fits is 2^-40 of it.
    allowed = np.maximum(np.abs(value.double().numpy()) * 2.0**-11, largest * 2.0**-40)
    assert (np.abs(first - value.double().numpy()) <= allowed).all()
    second = kept(one(FLOAT16, elements, root=True), value.square()).double().numpy()
    exact = value.double().numpy() ** 2
    roots = np.maximum(np.sqrt(exact) * 2.0**-11, largest * 2.0**-40)
    assert (np.abs(np.sqrt(second) - np.sqrt(exact)) <= roots * 1.001).all()


@BOTH
def test_what_comes_back_is_kept_again_exactly_and_a_checkpoint_has_it_exactly(dtype: torch.dtype) -> None:
    value, noise = uneven(1000), draw(5, 1000).sigmoid().float()
    for root in (False, True):
        exact = value.square() if root else value
        moment = one(dtype, 1000, root=root)
        back = kept(moment, exact, noise if dtype == FLOAT8 else None)
        assert torch.equal(back.to(moment.saved).float(), back)
        assert torch.equal(kept(one(dtype, 1000, root=root), back), back)
        # Half of a block and the whole of it have the same numbers: blocks that are no larger change nothing.
        assert torch.equal(kept(one(dtype, 64, root=root), back[:64]), back[:64])
        for draws in (7, 8):
            again = draw(draws, 1000).sigmoid().float()
            assert torch.equal(kept(one(dtype, 1000, root=root), back, again if dtype == FLOAT8 else None), back)


@BOTH
def test_a_second_moment_that_is_not_zero_never_becomes_zero_and_zero_stays(dtype: torch.dtype) -> None:
    value = torch.tensor([1.0, 1e-12, 1e-30, 1e-38, 0.0, 1e30, 1e-45])
    for noise in (None, torch.full((7,), 0.999)):
        back = kept(one(dtype, 7, root=True), value, noise if dtype == FLOAT8 else None)
        assert (back > 0).tolist() == (value > 0).tolist() and bool(back.isfinite().all())
        assert bool((back[:4] >= value[:4]).all()), "rather too large, so that the step is too small"


@BOTH
def test_extremes_neither_overflow_nor_come_back_finite_where_they_were_not(dtype: torch.dtype) -> None:
    largest = 3e38  # of 3.4e38
    back = kept(one(dtype, 3, root=False), torch.tensor([largest, -largest, 1.0]))
    assert bool(back.isfinite().all()) and back[0] == -back[1] and back[0] > 0.9 * largest
    back = kept(one(dtype, 3, root=True), torch.tensor([largest, 0.5 * largest, 0.0]))
    assert bool(back.isfinite().all()) and back[2] == 0.0
    for wrong in (torch.inf, torch.nan):
        assert not bool(kept(one(dtype, 2, root=False), torch.tensor([wrong, 1.0])).isfinite().any())


@pytest.mark.parametrize("root", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("value", [0.3, 1.01, 1.49, 13.7, 1e-5])
def test_float8_rounds_without_bias_within_four_standard_errors(root: bool, value: float) -> None:
    """A million times the same number, beside another that gives its block a scale: of the second moment the mean of the square is it."""
    blocks = 7874
    numbers = torch.full((blocks, BLOCK), value)
    numbers[:, 0] = 100.0
    place = (Place(name="a", box=whole((blocks, BLOCK)), start=0),)
    noise = noise_of(place, 0, numbers.numel(), seed=3, step=1, device=CPU)[int(root)]
    back = kept(one(FLOAT8, numbers.numel(), root=root), numbers.view(-1), noise).view(blocks, BLOCK)[:, 1:].double()
    smallest = 2.0**-9 * 2.0 ** (-5 if root else -2)  # under the scale of the largest, 10 or 100, that fits in 448
    if root and value < smallest**2:
        assert bool((back == smallest**2).all())
        return
    error = float(back.std()) / back.numel() ** 0.5
    assert len(back.unique()) == 2
    assert abs(float(back.mean()) - float(torch.tensor(value))) < 4 * error + 2.0**-17 * float(back.max() - back.min())


def test_noise_is_of_the_place_in_the_whole_tensor_whoever_holds_it() -> None:
    box = Box(offset=(3, 0), shape=(5, 7))
    full = noise_of((Place(name="a", box=whole((11, 7)), start=2),), 0, 90, seed=1, step=4, device=CPU)
    part = noise_of((Place(name="a", box=box, start=-3),), 0, 40, seed=1, step=4, device=CPU)
    assert torch.equal(part[:, :32], full[:, 2 + 21 + 3 : 2 + 21 + 35])
    assert (part[0, 32:] - 0.5).abs().max() < 1e-4, "what belongs to no tensor has no noise"
    middle = noise_of((Place(name="a", box=whole((11, 7)), start=2),), 13, 29, seed=1, step=4, device=CPU)
    assert torch.equal(middle, full[:, 13:29])
    for seed, step, name in ((2, 4, "a"), (1, 5, "a"), (1, 4, "b")):
        other = noise_of((Place(name=name, box=whole((11, 7)), start=2),), 0, 90, seed=seed, step=step, device=CPU)
        assert not torch.equal(other[:, 2:79], full[:, 2:79])
    assert abs(float(np.corrcoef(full[:, 2:79].numpy())[0, 1])) < 0.4


# ---------------------------------------------------------------------------------------------------------- many steps


class Truth:
    """torch.optim.AdamW in float64 on one tensor."""

    def __init__(self, shard: Shard, config: OptimizerConfig) -> None:
        assert isinstance(shard.master, Tensor)
        self.tensor = torch.nn.Parameter(shard.master.double().clone())
        self.update = torch.optim.AdamW(
            [self.tensor],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay if shard.decay else 0.0,
        )

    def step(self, rate: float, gradient: Tensor) -> None:
        self.tensor.grad = gradient.double()
        self.update.param_groups[0]["lr"] = rate
        self.update.step()


@pytest.mark.parametrize(("dtype", "typical", "worst"), [(FLOAT16, 0.0006, 0.01), (FLOAT8, 0.2, 1.0)])
def test_twenty_updates_stay_near_those_of_torch_in_float64(dtype: torch.dtype, typical: float, worst: float) -> None:
    """In units of the learning rate, which is about what one update moves a parameter."""
    adam = AdamW(shards((0, 1, 127, 977)), CONFIG, dtype, seed=5)
    truths = [Truth(shard, CONFIG) for shard in adam.shards]
    for step in range(20):
        factor = 0.375 if step % 2 else 1.0
        for shard, truth in zip(adam.shards, truths, strict=True):
            fresh = draw(100 * step + shard.gradient.numel(), shard.gradient.numel()).float()
            shard.gradient.copy_(fresh)
            truth.step(0.01, fresh * factor)
        adam.step(0.01, factor)
    for shard, truth in zip(adam.shards, truths, strict=True):
        assert isinstance(shard.master, Tensor)
        error = (shard.master.double() - truth.tensor.detach()) / 0.01
        assert not error.numel() or float(error.abs().max()) < worst * 20**0.5
    assert 0 < float(error.square().mean().sqrt()) < typical * 20**0.5


@pytest.mark.parametrize(
    ("dtype", "of_first", "of_second"), [(FLOAT16, (1e-4, 8e-4), (2e-4, 0.002)), (FLOAT8, (0.05, 0.11), (0.17, 0.28))]
)
def test_what_moments_lose_is_what_is_said_of_it_and_has_no_bias(
    dtype: torch.dtype, of_first: tuple[float, float], of_second: tuple[float, float]
) -> None:
    """As the docstring of AdamW has it: of the second moment itself, and of the size that the first typically has."""
    size = 4096
    narrow, exact = AdamW(shards([size], 0.0), CONFIG, dtype), AdamW(shards([size], 0.0), CONFIG)
    sizes = draw(1, size).exp().float()
    for step in range(80):
        for adam in (narrow, exact):
            adam.shards[0].gradient.copy_(sizes * draw(step, size))
            adam.step(0.0)
    typical = sizes.double() * ((1 - CONFIG.beta1) / (1 + CONFIG.beta1)) ** 0.5
    for kind, (low, high) in (("exp_avg", of_first), ("exp_avg_sq", of_second)):
        found, truth = (adam.moments(adam.shards[0])[kind].double() for adam in (narrow, exact))
        error = (found - truth) / (typical if kind == "exp_avg" else truth)
        rms = float(error.square().mean().sqrt())
        assert low < rms < high, kind
        assert abs(float(error.mean())) < 4 * rms / size**0.5 + (3e-4 if dtype == FLOAT16 else 0.0), kind


@BOTH
def test_moments_decay_without_gradient_as_fast_as_they_should(dtype: torch.dtype) -> None:
    size = 2048
    adam = AdamW(shards([size], 0.0), CONFIG, dtype)
    (shard,) = adam.shards
    shard.gradient.fill_(1.0)
    shard.gradient[::2] = -3.0
    for _ in range(30):
        adam.step(0.0)
    before = {kind: tensor.double() for kind, tensor in adam.moments(shard).items()}
    shard.gradient.zero_()
    for _ in range(60):
        adam.step(0.0)
    for (kind, start), beta in zip(before.items(), (0.9, 0.95), strict=True):
        left = adam.moments(shard)[kind].double()
        for half in (slice(0, None, 2), slice(1, None, 2)):
            assert float(left[half].mean() / start[half].mean()) == pytest.approx(beta**60, rel=0.1), kind


def test_rounded_to_nearest_a_float8_moment_would_not_decay_at_all() -> None:
    moment = one(FLOAT8, BLOCK, root=True)
    value = kept(moment, torch.full((BLOCK,), 17.0**2))
    for _ in range(100):
        value = kept(moment, value * 0.95)
    assert bool((value == 16.0**2).all())


def test_the_last_beta_that_float16_is_allowed_decays_and_the_next_one_stays() -> None:
    """Why the rule precision.moments-decay has other numbers for it."""
    for name, beta, decays in (
        ("exp_avg", 1 - 2.0**-11, True),
        ("exp_avg", 1 - 2.0**-13, False),
        ("exp_avg_sq", 0.999, True),
        ("exp_avg_sq", 1 - 2.0**-12, False),
    ):
        config = replace(CONFIG, beta1=beta) if name == "exp_avg" else replace(CONFIG, beta2=beta)
        adam = AdamW(shards([BLOCK], 0.0), config, FLOAT16)
        (shard,) = adam.shards
        start = 1 + torch.arange(BLOCK) / 1024 + 2.0**-10
        values = {"exp_avg": start, "exp_avg_sq": start.square()}
        adam.restore(shard, values)
        before = adam.moments(shard)[name]
        assert torch.equal(before, values[name])
        adam.step(0.0)
        after = adam.moments(shard)[name]
        assert bool((after < before).all()) is decays and bool((after == before).all()) is not decays
