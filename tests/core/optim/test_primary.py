"""Training whose weights are held as a recipe rounds them: the bits of training that rounds them again for each product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from core.config.architecture import Dense
from core.config.mapping import ParallelConfig
from core.config.recipe import FP8_BLOCKWISE, FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4, RECIPES, Recipe, RecipeName
from core.config.run import OptimizerConfig
from core.optim.chained import ChainedOptimizer
from core.optim.formats import Formats
from core.optim.primary import PrimaryBucket, primary_of, shape_of
from core.parallel.meter import Meter
from core.precision.formats import quantise
from core.state.hollow import is_hollow
from core.state.inventory import inventory
from core.transformer.quantise import histories, quantisers
from core.transformer.weights import weights
from tests.core.optim.sharded import built, steps_of
from tests.core.tiny import Case, Trained, assemble, deepseek, mixtral, qwen3
from tests.ranks import Ranks

BFLOAT16 = torch.bfloat16
PRIMARY = Formats(primary=True)
ADAM = OptimizerConfig(learning_rate=0.01, eps=1e-3, weight_decay=0.1, clip_norm=None)
CASE = Case(model=mixtral(), optimizer=ADAM, microbatch=2, dtype=torch.float32)
ONE = ParallelConfig()


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a rank knows after some steps, the model's tensors as a checkpoint has them; remembered: largest values of delayed scaling."""

    losses: list[float]
    norms: list[float]
    pieces: Trained
    remembered: list[Tensor]


def trained(case: Case, formats: Formats, steps: int = 2) -> Found:
    model, optimizer, groups = built(case, dtype=case.dtype, formats=formats)
    results = steps_of(case, model, optimizer, groups, range(steps))
    held = [(p.name, p.shape, p.box, p.data.clone()) for p in inventory(model, groups).values()]
    held += [
        (p.name.removeprefix("model."), p.shape, p.box, p.data.clone())
        for p in optimizer.state()
        if p.name.startswith("model.")
    ]
    return Found(
        losses=[result.loss for result in results],
        norms=[result.gradient_norm for result in results],
        pieces=Trained(results=[], pieces=held),
        remembered=[history.history.clone() for history in histories(model)],
    )


def check_same(found: Sequence[Found], truth: Sequence[Found], case: Case) -> None:
    """The norm of the gradient is a sum over buckets, which are others."""
    for here, there in zip(found, truth, strict=True):
        assert here.losses == there.losses, case
        assert here.norms == pytest.approx(there.norms, rel=1e-6)
        assert all(map(torch.equal, here.remembered, there.remembered))
    ours, theirs = (assemble([each.pieces for each in runs]) for runs in (found, truth))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def trained_both(rank: int, world: int, cases: Sequence[Case]) -> list[tuple[Found, Found]]:
    """Each case with primary weights, and without."""
    return [(trained(case, PRIMARY), trained(case, Formats())) for case in cases]


EP, ZERO_BUBBLE = ParallelConfig(ep=2, schedule="combined"), ParallelConfig(pp=2, schedule="zero_bubble")
DEEPSEEK = replace(CASE, model=deepseek())
CASES = {
    1: [replace(CASE, recipe=recipe) for recipe in (FP8_DELAYED, FP8_BLOCKWISE, NVFP4)],
    2: [
        replace(CASE, recipe=FP8_DELAYED),
        replace(CASE, recipe=FP8_BLOCKWISE, parallel=EP),
        replace(CASE, recipe=FP8_CURRENT, parallel=ParallelConfig(tp=2)),
        replace(CASE, recipe=NVFP4, parallel=ParallelConfig(etp=2)),
        replace(CASE, recipe=FP8_CURRENT, parallel=ZERO_BUBBLE, model=qwen3()),
        replace(CASE, recipe=MXFP8),
        replace(DEEPSEEK, recipe=FP8_CURRENT),
    ],
    4: [
        replace(CASE, recipe=FP8_CURRENT, microbatch=1),
        replace(CASE, recipe=FP8_DELAYED, parallel=ParallelConfig(tp=2, ep=2)),
        replace(CASE, recipe=NVFP4, parallel=replace(ZERO_BUBBLE, ep=2)),
    ],
}


@pytest.mark.parametrize("world", CASES)
def test_in_float32_primary_weights_are_the_training_without_bit_by_bit(ranks: Ranks, world: int) -> None:
    """Masters are then the weights themselves, so both round the same numbers. The embedding is tied, and pp has it twice."""
    everyone = ranks.run(trained_both, world, CASES[world]) if world > 1 else [trained_both(0, 1, CASES[1])]
    for number, case in enumerate(CASES[world]):
        found, truth = zip(*(of_rank[number] for of_rank in everyone), strict=True)
        check_same(found, truth, case)


def test_weights_that_a_recipe_leaves_high_stay_as_they_are() -> None:
    recipe = replace(FP8_CURRENT, high=("*.attention.*",), high_last=1)
    case = replace(CASE, recipe=recipe)
    model, optimizer, groups = built(case, dtype=BFLOAT16, formats=PRIMARY)
    hollow = {name for name, parameter in model.named_parameters() if is_hollow(parameter)}
    assert hollow == {"layers.0.mlp.experts.gate_up", "layers.0.mlp.experts.down"}
    assert hollow == {q.name for q in quantisers(model) if q.primary is not None}
    steps_of(case, model, optimizer, groups, range(1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_in_bfloat16_are_near_those_of_weights_that_are_rounded_twice(recipe: RecipeName) -> None:
    """A bfloat16 weight is off by up to 2**-9 of it, and eight bits round by up to 2**-4: few codes differ. MX rounds the same numbers."""
    case = replace(CASE, recipe=RECIPES[recipe])
    case = replace(case, optimizer=replace(ADAM, learning_rate=0.003), dtype=BFLOAT16)
    ours, theirs = (trained(case, formats, steps=3).losses for formats in (PRIMARY, Formats()))
    assert ours == pytest.approx(theirs, rel=0.03)
    assert (ours == theirs) == (recipe == "mxfp8")


# ------------------------------------------------------------------------------------------------------------- bits

WIDE = replace(mixtral(), hidden=48)


@dataclass(frozen=True, kw_only=True)
class Bits:
    """A rank's part of the masters of a weight (first element, elements), and the whole weight there: bytes, scales and their tensor's."""

    name: str
    shape: tuple[int, ...]
    start: int
    master: Tensor
    rows: tuple[Tensor, ...]
    columns: tuple[Tensor, ...] | None


def bits(rank: int, world: int, case: Case) -> list[Bits]:
    model, optimizer, groups = built(case, dtype=case.dtype, formats=PRIMARY)
    steps_of(case, model, optimizer, groups, range(2))
    assert isinstance(optimizer, ChainedOptimizer)
    found = []
    for bucket in primary_of(optimizer.buckets):
        for slot in bucket.slots:
            low, high = bucket.own_start, bucket.own_start + bucket.master.numel()
            start = min(max(low, slot.start), slot.stop)
            stop = max(start, min(high, slot.stop))
            held = bucket.quantisers[slot.name].primary
            assert held is not None
            sides = (held.rows, held.columns)
            tensors = [
                None
                if q is None
                else tuple(t.clone() for t in (q.data.view(torch.uint8), q.scales, q.tensor_scale) if t is not None)
                for q in sides
            ]
            assert tensors[0] is not None
            found.append(
                Bits(
                    name=slot.name,
                    shape=shape_of(slot),
                    start=start - slot.start,
                    master=bucket.master[start - low : stop - low].clone(),
                    rows=tensors[0],
                    columns=tensors[1],
                )
            )
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("recipe", [FP8_CURRENT, FP8_BLOCKWISE, MXFP8, NVFP4], ids=lambda r: r.name)
def test_every_rank_has_the_bits_of_the_whole_masters_rounding(ranks: Ranks, recipe: Recipe, world: int) -> None:
    """Dense and expert weights; of MX what is rounded is the master in the run's dtype."""
    layer = replace(WIDE.layers[0], mlp=Dense(ffn=136))
    model = replace(WIDE, hidden=144, layers=(layer, replace(WIDE.layers[1])))
    case = replace(CASE, model=model, recipe=recipe, dtype=BFLOAT16, microbatch=2)
    everyone = ranks.run(bits, world, case)
    format_ = next(bucket.format for bucket in primary_of(_optimizer(case).buckets))
    assert {len(found) for found in everyone} == {len(everyone[0])} and len(everyone[0]) >= 12
    for pieces in zip(*everyone, strict=True):
        master = torch.cat([piece.master for piece in sorted(pieces, key=lambda p: (p.start, len(p.master)))])
        whole = master.view(pieces[0].shape)
        whole = whole.to(BFLOAT16) if recipe is MXFP8 else whole
        rows, columns = quantise(whole, format_), quantise(whole.mT.contiguous(), format_)
        for piece in pieces:
            for held, truth in ((piece.rows, rows), (piece.columns, columns)):
                if held is None:
                    assert recipe is not MXFP8
                    continue
                expected = [
                    t for t in (truth.data.view(torch.uint8), truth.scales, truth.tensor_scale) if t is not None
                ]
                for ours, theirs in zip(held, expected, strict=True):
                    assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8)), piece.name


def _optimizer(case: Case) -> ChainedOptimizer:
    optimizer = built(replace(case, parallel=ONE), dtype=case.dtype, formats=PRIMARY)[1]
    assert isinstance(optimizer, ChainedOptimizer)
    return optimizer


# ------------------------------------------------------------------------------------------------- memory and traffic


def held(rank: int, world: int, case: Case, formats: Formats) -> tuple[int, int, int, dict[tuple[str, str], int]]:
    """Numbers and bytes of the weights that a recipe takes, bytes of their parameters, and bytes sent in a step."""
    meter = Meter()
    model, optimizer, groups = built(case, dtype=BFLOAT16, formats=formats, meter=meter)
    meter.sent_bytes.clear()
    steps_of(case, model, optimizer, groups, [0])
    assert isinstance(optimizer, ChainedOptimizer)
    taken = {quantiser.name for quantiser in quantisers(model)}
    parameters = [p for name, p in model.named_parameters() if name in taken]
    numbers = sum(parameter.numel() for parameter in parameters)
    storage = sum(p.untyped_storage().nbytes() for p in parameters if is_hollow(p))
    low = [bucket for bucket in optimizer.buckets if isinstance(bucket, PrimaryBucket)]
    return numbers, sum(bucket.num_bytes for bucket in low), storage, dict(meter.sent_bytes)


@pytest.mark.parametrize(
    ("recipe", "bytes_each", "sent_each"),
    [(FP8_CURRENT, 1.0, 1.0), (FP8_BLOCKWISE, 1.0, 1.0), (NVFP4, 0.5, 0.5), (MXFP8, 2.0, 2.0)],
    ids=["fp8_current", "fp8_blockwise", "nvfp4", "mxfp8"],
)
def test_a_weight_takes_and_sends_its_codes_and_nothing_else(
    ranks: Ranks, recipe: Recipe, bytes_each: float, sent_each: float
) -> None:
    """Of bfloat16's two bytes one or half of one; two copies of MX, which travels in bfloat16. Scales add less than six percent."""
    case = replace(CASE, model=replace(WIDE, hidden=128), recipe=recipe)
    plain = ranks.run(held, 2, replace(case, recipe=recipe), Formats())
    for (_, _, _, before), (numbers, taken, storage, after) in zip(
        plain, ranks.run(held, 2, case, PRIMARY), strict=True
    ):
        assert bytes_each * numbers < taken < 1.06 * bytes_each * numbers
        assert storage < 100
        gathers = [key for key in before if key[1] == "all_gather"]
        saved = sum(before[key] - after[key] for key in gathers)
        # Half of the weights come from the other rank; buffers end on boundaries of 64 bytes.
        assert saved == pytest.approx((2 - sent_each) * numbers / 2, abs=2000)
        assert {key: after[key] for key in before if key[1] == "reduce_scatter"} == pytest.approx(
            {key: before[key] for key in before if key[1] == "reduce_scatter"}, abs=8000
        )


def test_a_hollow_parameter_is_no_piece_of_the_model_and_published_weights_are_what_is_multiplied() -> None:
    case = replace(CASE, recipe=FP8_CURRENT)
    model, _, groups = built(case, dtype=BFLOAT16, formats=PRIMARY)
    taken = {quantiser.name: quantiser for quantiser in quantisers(model)}
    known, published = inventory(model, groups), weights(model, groups)
    assert not taken.keys() & known.keys() and published.keys() == known.keys() | taken.keys()
    parameters = dict(model.named_parameters())
    assert published.keys() == parameters.keys()
    for name, quantiser in taken.items():
        assert parameters[name].isnan().all() and quantiser.primary is not None
        data = published[name].data
        assert data.dtype == BFLOAT16 and data.shape == parameters[name].shape
        assert torch.equal(data.flatten(), quantiser.primary.rows.dequantise(BFLOAT16).flatten())
        with pytest.raises(RuntimeError, match="memory location"):
            parameters[name].data.copy_(data)
