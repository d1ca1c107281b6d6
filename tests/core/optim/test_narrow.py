"""Moments and main gradients in bfloat16: AdamW against the stated arithmetic in float64, and what is held, summed, saved and lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from core.config.mapping import ParallelConfig
from core.config.precision import PrecisionConfig
from core.config.run import OptimizerConfig
from core.optim import adam as adam_module
from core.optim.adam import AdamW, Shard
from core.optim.chained import ChainedOptimizer
from core.optim.formats import Formats, formats_of
from core.optim.norm import sum_of_squares
from core.parallel.groups import groups_for, one_rank
from tests.core.numbers import draw, near
from tests.core.optim.trees import SMALL_BUCKET, Piece, Tree, assembled, pieces_of, trained
from tests.ranks import Ranks

BFLOAT16 = torch.bfloat16
CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, beta1=0.9, beta2=0.95, eps=1e-3, clip_norm=None)
# Betas that float32 holds exactly: else what is a tie in one precision, and of few bits there are many, is none in the other.
EXACT = replace(CONFIG, beta1=0.875, beta2=0.9375)
STEPS = 20
SIZES = (0, 1, 15, 64, 97)
MOMENTS, GRADIENTS, BOTH = (
    Formats(moments=BFLOAT16),
    Formats(gradients=BFLOAT16),
    Formats(moments=BFLOAT16, gradients=BFLOAT16),
)
NARROW = pytest.mark.parametrize("formats", [MOMENTS, GRADIENTS, BOTH], ids=["moments", "gradients", "both"])


def shards(formats: Formats, sizes: Sequence[int] = SIZES) -> list[Shard]:
    """One shard per size in float32, every second one decays."""
    return [
        Shard(
            master=draw(n, n, dtype=torch.float32),
            gradient=torch.zeros(n, dtype=formats.gradients or torch.float32),
            decay=i % 2 == 0,
        )
        for i, n in enumerate(sizes)
    ]


def rounded(exact: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of float64 numbers, of two equally near the one with an even last bit: from the definition of the format."""
    unit = np.exp2(np.floor(np.log2(np.abs(exact), where=exact != 0, out=np.zeros_like(exact))) - 7)
    return np.rint(exact / unit) * unit


@dataclass(kw_only=True)
class Truth:
    """AdamW of one shard in float64; its moments are rounded to bfloat16 at the end of a step where they are kept in it."""

    master: np.ndarray
    moments: tuple[np.ndarray, np.ndarray]
    steps: int = 0

    def step(self, gradient: np.ndarray, rate: float, decay: float, c: OptimizerConfig) -> None:
        """One update; the moments are left exact."""
        self.steps += 1
        m = c.beta1 * self.moments[0] + (1 - c.beta1) * gradient
        v = c.beta2 * self.moments[1] + (1 - c.beta2) * gradient**2
        mean, square = m / (1 - c.beta1**self.steps), v / (1 - c.beta2**self.steps)
        self.master = self.master - rate * (mean / (np.sqrt(square) + c.eps) + decay * self.master)
        self.moments = m, v


@NARROW
def test_twenty_updates_are_the_stated_arithmetic_within_float32(
    formats: Formats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step from what the last one left: so near a tie may neither format nor reference have chosen the other neighbour."""
    monkeypatch.setitem(adam_module._PIECES, "cpu", 48)  # several pieces, and a part of one
    adam, ties = AdamW(shards(formats), EXACT, formats.moments), 0
    for step in range(STEPS):
        rate = 0.1 / (1 + step % 3)
        for shard, size in zip(adam.shards, SIZES, strict=True):
            shard.gradient.copy_(draw(1000 * step + size, size) * 10.0 ** (step % 4 - 2))
        before = [
            Truth(
                master=shard.master.double().numpy().copy(),
                moments=tuple(tensor.double().numpy().copy() for tensor in adam.moments(shard).values()),  # type: ignore[arg-type]
                steps=step,
            )
            for shard in adam.shards
        ]
        factor = 0.375 if step % 2 else 1.0
        held = [shard.gradient.double().numpy() * factor for shard in adam.shards]
        adam.step(rate, factor)
        for shard, truth, gradient in zip(adam.shards, before, held, strict=True):
            truth.step(gradient, rate, EXACT.weight_decay if shard.decay else 0.0, EXACT)
            near(shard.master, torch.from_numpy(truth.master), units=8)
            for found, exact in zip(adam.moments(shard).values(), truth.moments, strict=True):
                assert found.dtype == (formats.moments or torch.float32)
                if formats.moments is None:
                    continue  # the master, which they make, is near
                other = found.double().numpy() != rounded(exact)
                ties += int(other.sum())
                # Where float32 chose the other neighbour, the exact value lies between the two.
                halfway = (found.double().numpy() + rounded(exact)) / 2
                np.testing.assert_allclose(exact[other], halfway[other], rtol=1e-5)
    assert ties <= 10  # of 7080


@NARROW
def test_a_free_run_of_twenty_updates_ends_where_the_float64_run_does(formats: Formats) -> None:
    sizes = (977,)
    adam = AdamW(shards(formats, sizes), EXACT, formats.moments)
    (shard,) = adam.shards
    truth = Truth(master=shard.master.double().numpy(), moments=(np.zeros(sizes), np.zeros(sizes)))
    for step in range(STEPS):
        fresh = draw(step, *sizes).to(shard.gradient.dtype)
        shard.gradient.copy_(fresh)
        adam.step(0.1)
        truth.step(fresh.double().numpy(), 0.1, EXACT.weight_decay, EXACT)
        if formats.moments is not None:
            truth.moments = rounded(truth.moments[0]), rounded(truth.moments[1])
    error = np.abs(shard.master.double().numpy() - truth.master)
    # A moment near a tie may be rounded the other way, and then shows: in few elements, by one unit of bfloat16.
    assert np.quantile(error, 0.98) < 3e-6 and error.max() < 20 * 0.1 * 2.0**-8


def test_moments_are_rounded_to_nearest_and_even() -> None:
    values = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8, 2.0**-130]
    master = torch.zeros(len(values))
    adam = AdamW(
        [Shard(master=master, gradient=torch.tensor(values), decay=False)], replace(CONFIG, beta1=0.0), BFLOAT16
    )
    adam.step(0.0)
    first = adam.moments(adam.shards[0])["exp_avg"].double().tolist()
    assert first == [1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.0, 2.0**-130]


def test_the_update_uses_moments_before_they_are_rounded() -> None:
    """In the first step an update is rate * g / (|g| + eps) whatever g is, which rounded moments would miss by a few thousandths."""
    fresh = draw(5, 200, dtype=torch.float32)
    master = torch.zeros(200)
    adam = AdamW([Shard(master=master, gradient=fresh, decay=False)], CONFIG, BFLOAT16)
    adam.step(1.0)
    near(master, -fresh.double() / (fresh.double().abs() + CONFIG.eps), units=8)


def test_what_the_second_moment_loses_is_what_is_said_of_it() -> None:
    """Off by 8 % at most, typically by less than 0.7 %, and it fades: as the docstring of AdamW has it."""
    size = 4000
    kept, exact = (
        AdamW([Shard(master=torch.zeros(size), gradient=torch.zeros(size), decay=False)], CONFIG, moments)
        for moments in (BFLOAT16, None)
    )
    worst = 0.0
    for step in range(150):
        for adam in (kept, exact):
            adam.shards[0].gradient.copy_(draw(step, size))
            adam.step(0.0)
        found, truth = (adam.moments(adam.shards[0])["exp_avg_sq"].double() for adam in (kept, exact))
        worst = max(worst, float((found / truth - 1).abs().max()))
    error = found / truth - 1
    assert 0.001 < float(error.square().mean().sqrt()) < 0.007 and worst < 0.08
    assert abs(float(error.mean())) < 5e-4  # unbiased
    before = found
    for _ in range(100):
        kept.shards[0].gradient.zero_()
        kept.step(0.0)
    found = kept.moments(kept.shards[0])["exp_avg_sq"].double()
    assert bool((found < before * 0.95**100 * 1.08).all())


def test_with_a_beta_beyond_the_rule_a_moment_would_never_fade() -> None:
    """Why precision.moments-decay is a rule: the last that it allows fades, and 0.999 stays where it is."""
    for beta, fades in ((1 - 2.0**-8, True), (0.999, False)):
        master, gradient = torch.zeros(128), torch.zeros(128)
        adam = AdamW([Shard(master=master, gradient=gradient, decay=False)], replace(CONFIG, beta2=beta), BFLOAT16)
        second = adam.moments(adam.shards[0])["exp_avg_sq"]
        second.copy_(1 + torch.arange(128) / 128)  # every bfloat16 of a power of two
        before = second.clone()
        adam.step(0.0)
        assert bool((second < before).all()) is fades and bool((second == before).all()) is not fades


# ------------------------------------------------------------------------------------- what is held, and how it is summed


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_the_state_holds_half_and_masters_stay_float32(dtype: torch.dtype) -> None:
    held: dict[str, tuple[int, int]] = {}
    for name, formats in (("wide", Formats()), ("moments", MOMENTS), ("both", BOTH)):
        optimizer = ChainedOptimizer(Tree(dtypes={"": dtype}), CONFIG, one_rank(), formats=formats)
        moments = [t for shard in optimizer.shards for t in optimizer.adam.moments(shard).values()]
        masters = {shard.master.dtype for shard in optimizer.shards}
        assert masters == {torch.float32}
        held[name] = sum(t.nbytes for t in moments), sum(b.gradients.nbytes for b in optimizer.buckets)
        saved = {p.name.split(".")[1]: p.data.dtype for p in optimizer.state()}
        assert saved["exp_avg"] == saved["exp_avg_sq"] == (formats.moments or torch.float32)
        assert saved.get("master", torch.float32) == torch.float32
    states, sums = held["wide"]
    assert held["moments"] == (states // 2, sums) and held["both"] == (states // 2, sums // 2)


def test_what_a_run_asks_for_is_what_the_optimizer_gets() -> None:
    assert formats_of(PrecisionConfig()) == Formats()
    assert formats_of(PrecisionConfig(moments="bfloat16")) == MOMENTS
    assert formats_of(PrecisionConfig(compute="bfloat16", main_gradients="bfloat16")) == GRADIENTS


@pytest.mark.parametrize("elements", [0, 1, 4096, 4097, 3_000_017])
def test_the_norm_of_bfloat16_gradients_is_as_exact_as_that_of_float32_ones(elements: int) -> None:
    fresh = draw(elements, elements).to(BFLOAT16)
    truth = float(np.square(fresh.double().numpy()).sum())
    assert float(sum_of_squares([fresh])) == pytest.approx(truth, rel=1e-5, abs=0.0)


def _counted(rank: int, world: int, formats: Formats) -> list[Piece]:
    """One step of plain descent by 256 from the first rank and 1 from the others, in two microbatches; with the gradient of rank 0
    alone where the world has one rank."""
    groups = groups_for(ParallelConfig())
    model = Tree(groups, {"": BFLOAT16})
    optimizer = ChainedOptimizer(model, CONFIG, groups, bucket_bytes=SMALL_BUCKET, formats=formats)
    entries = trained(model)
    optimizer.begin(2)
    for microbatch in range(2):
        for entry in entries.values():
            number = 256.0 if rank == 0 else 1.0
            entry.tensor.grad = torch.full_like(entry.tensor, number if microbatch == 0 else 0.0)
        optimizer.accumulate()
    optimizer.reduce()
    return [
        (slot.name, slot.entry.spec.shape, slot.entry.spec.box, bucket.own_gradients[:1].double().clone())
        for bucket in optimizer.buckets
        for slot in bucket.slots[:1]
    ]


def test_copies_are_summed_in_float32_and_rounded_once(ranks: Ranks) -> None:
    """256 + 1 + 1 + 1 is 259, which bfloat16 rounds to 260; added one by one in bfloat16, 256 stays."""
    for rank in ranks.run(_counted, 4, GRADIENTS):
        assert {float(data) for _, _, _, data in rank if data.numel()} <= {260.0, 0.0}
        assert any(float(data) == 260.0 for _, _, _, data in rank)


def test_microbatches_are_added_up_in_bfloat16_each_rounded() -> None:
    model = Tree(dtypes={"": BFLOAT16})
    optimizer = ChainedOptimizer(model, CONFIG, one_rank(), formats=GRADIENTS)
    gain = model.get_parameter("layers.0.norm")
    for number in (256.0, 1.0, 1.0, 1.0, 2.0):
        gain.grad = torch.full_like(gain, number)
        optimizer.accumulate()
    optimizer.reduce()
    (slot,) = (slot for b in optimizer.buckets for slot in b.slots if slot.name == "layers.0.norm")
    assert slot.gradient.dtype == BFLOAT16 and slot.gradient.tolist() == [258.0] * 7


def _whole_numbers(
    rank: int, world: int, parallel: ParallelConfig, formats: Formats
) -> tuple[list[Piece], list[Piece]]:
    """Six steps by gradients whose sums bfloat16 holds exactly, over a model that is cut as the mapping says."""
    groups = groups_for(parallel)
    model = Tree(groups, {"": BFLOAT16})
    config = replace(CONFIG, clip_norm=1.0)
    optimizer = ChainedOptimizer(model, config, groups, bucket_bytes=SMALL_BUCKET, formats=formats)
    entries = trained(model)
    for step in range(6):
        optimizer.begin(1)
        for name, entry in entries.items():
            exact = (draw(step + len(name), *entry.spec.shape) * 3).round()[entry.spec.box.slices]
            copies = next(bucket.group for bucket in optimizer.buckets for slot in bucket.slots if slot.name == name)
            # Twice as much from the first as the others take away again.
            share = exact * copies.size if copies.position == 0 else -exact
            entry.tensor.grad = share.to(BFLOAT16)
        optimizer.accumulate()
        optimizer.reduce()
        optimizer.gradient_norm()
        optimizer.step(0.05, 3.0)
    optimizer.wait_all()
    state = [(p.name, p.shape, p.box, p.data.clone()) for p in optimizer.state()]
    return pieces_of(model, groups), state


@NARROW
def test_where_sums_are_exact_every_mapping_makes_the_same_bits(ranks: Ranks, formats: Formats) -> None:
    found = []
    for world, parallel in (
        (1, ParallelConfig()),
        (2, ParallelConfig(ep=2)),
        (3, ParallelConfig()),
        (4, ParallelConfig(tp=2, ep=2)),
    ):
        told = ranks.run(_whole_numbers, world, parallel, formats)
        found.append(assembled([pieces for pieces, _ in told]) | assembled([state for _, state in told]))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, tensor in found[0].items():
            assert torch.equal(other[name], tensor), name
