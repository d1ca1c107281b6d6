"""Rows that travel in low precision: as bytes and back, and through every dispatcher of torch as if they had been rounded before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from core.config.architecture import MoE, Router
from core.config.mapping import DispatcherName, ParallelConfig
from core.config.recipe import FP8_BLOCKWISE, MXFP8, Forward, Operand, Recipe
from core.moe.dispatch.make import make_dispatcher
from core.moe.router import Routing
from core.parallel.groups import groups_for, one_rank
from core.parallel.meter import Meter
from core.precision.elements import E2M1, E4M3, E5M2
from core.precision.formats import MX, Blocks, Format, quantise
from core.precision.parcel import Parcels, parcels_of
from tests.core.precision.recipe_case import draw
from tests.core.shares import place_on
from tests.ranks import Ranks

FORMATS: dict[str, Format] = {
    "1x128": Blocks(element=E4M3, block=(1, 128), power_of_two=True),
    "mx": MX(element=E4M3, rounding="up"),
    "mx e5m2": MX(element=E5M2, rounding="up"),
    "mx e2m1": MX(element=E2M1, rounding="up"),
}
BYTES = {"1x128": 1 + 4 / 128, "mx": 1 + 1 / 32, "mx e5m2": 1 + 1 / 32, "mx e2m1": 0.5 + 1 / 32}


@pytest.mark.parametrize("shape", [(7, 256), (0, 128), (1, 1), (3, 37), (5, 130)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMATS)
def test_what_comes_out_is_what_quantising_rounds_and_once_more_it_is_the_same(
    name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, parcels = draw(*shape).to(dtype), Parcels(format=FORMATS[name])
    packed = parcels.pack(x)
    assert packed.dtype == torch.uint8 and packed.shape[0] == shape[0]
    if shape[1] == 256:
        assert packed.shape[1] == 256 * BYTES[name]
    out = parcels.unpack(packed, shape[1], dtype)
    assert out.dtype == dtype and torch.equal(out, quantise(x, FORMATS[name]).dequantise(dtype))
    assert not shape[0] or shape == (1, 1) or not torch.equal(out, x)
    assert torch.equal(parcels.unpack(parcels.pack(out), shape[1], dtype), out)


def test_what_is_not_finite_stays_so() -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = torch.inf, torch.nan
    parcels = Parcels(format=FORMATS["mx"])
    out = parcels.unpack(parcels.pack(x), 64, torch.float32)
    assert out[0, :32].isnan().all() and out[1, 32:].isnan().all()
    assert (out[0, 32:] == 1).all() and (out[1, :32] == 1).all()


def test_a_recipe_without_it_sends_rows_as_they_are() -> None:
    assert parcels_of(MXFP8) is None
    assert parcels_of(replace(MXFP8, dispatch=True, forward=Forward(input=None, weight=None))) is None
    assert parcels_of(replace(MXFP8, dispatch=True)) == Parcels(format=FORMATS["mx"])
    assert parcels_of(replace(FP8_BLOCKWISE, dispatch=True)) == Parcels(format=FORMATS["1x128"])


HIDDEN, TOP_K, EXPERTS = 96, 3, 8
CUTS = {1: (9,), 2: (6, 5), 4: (5, 0, 7, 3)}
NAMES: tuple[DispatcherName, ...] = ("allgather", "alltoall", "flex")
_MOE = MoE(experts=EXPERTS, top_k=TOP_K, expert_ffn=8, router=Router(score="softmax", normalise=False))


@dataclass(frozen=True, kw_only=True)
class Trip:
    """What one rank has after both ways and back: rows at the experts, outputs, both gradients, and bytes sent each way."""

    rows: Tensor
    out: Tensor
    hidden: Tensor
    weights: Tensor
    sent: int
    returned: int


def _operand(name: str) -> Operand:
    element, scaling = ("e4m3", "1x128") if name == "1x128" else ("e2m1" if name == "mx e2m1" else "e4m3", "mx")
    return Operand(element=element, scaling=scaling, power_of_two=scaling == "1x128")  # type: ignore[arg-type]


def trips(
    rank: int, world: int, parallel: ParallelConfig, format: str, names: Sequence[DispatcherName]
) -> list[tuple[Trip, Trip]]:
    """By dispatcher: rows packed on the way, and rows that were rounded before and travel as they are."""
    meter = Meter()
    groups = groups_for(parallel, meter=meter) if world > 1 else one_rank(meter)
    generator = torch.Generator().manual_seed(world)
    total = sum(CUTS[world])
    hidden, arrives = (torch.randn(total, HIDDEN, generator=generator).split(list(CUTS[world]))[rank] for _ in range(2))
    weights = torch.rand(total, TOP_K, generator=generator).split(list(CUTS[world]))[rank]
    order = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(total)])
    chosen = order.split(list(CUTS[world]))[rank]
    recipe: Recipe = replace(MXFP8, dispatch=True, forward=Forward(input=_operand(format), weight=_operand("mx")))
    packing = parcels_of(recipe)
    assert packing is not None
    rounded = quantise(hidden, packing.format).dequantise()
    found = []
    for name in names:
        place = place_on(groups, replace(parallel, dispatcher=name))
        pair = []
        for x, how in ((hidden, packing), (rounded, None)):
            dispatcher = make_dispatcher(_MOE, place, multiple=4, packing=how)
            h, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
            counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
            routing = Routing(experts_TK=chosen, weights_TK=w, counts_E=counts, balance=None)
            rows, plan = dispatcher.dispatch_preprocess(h, routing)
            before = _bytes(meter)
            arrived, plan = dispatcher.dispatch_postprocess(dispatcher.dispatch(rows, plan), plan)
            sent = _bytes(meter) - before
            made = arrived.hidden_RH * arrived.weights_R[:, None] * torch.arange(1.0, HIDDEN + 1) / groups.etp.size
            back = dispatcher.combine(dispatcher.combine_preprocess(made, plan), plan)
            out = dispatcher.combine_postprocess(back, plan)
            before = _bytes(meter)
            out.backward(arrives)
            assert h.grad is not None and w.grad is not None
            pair.append(
                Trip(
                    rows=arrived.hidden_RH.detach(),
                    out=out.detach(),
                    hidden=h.grad,
                    weights=w.grad,
                    sent=sent,
                    returned=_bytes(meter) - before,
                )
            )
        found.append((pair[0], pair[1]))
    return found


def _bytes(meter: Meter) -> int:
    return sum(meter.sent_bytes.values())


MAPPINGS = [
    (1, ParallelConfig()),
    (2, ParallelConfig(ep=2)),
    (2, ParallelConfig(etp=2)),
    (4, ParallelConfig(ep=2, etp=2)),
    (4, ParallelConfig(ep=4, ep_per_node=2)),
]


@pytest.mark.parametrize("format", ["1x128", "mx", "mx e2m1"])
@pytest.mark.parametrize(("world", "parallel"), MAPPINGS, ids=["one", "ep", "etp", "ep and etp", "nodes"])
def test_packed_rows_give_bitwise_what_rows_rounded_beforehand_give_and_gradients_pass_through(
    ranks: Ranks, world: int, parallel: ParallelConfig, format: str
) -> None:
    names: tuple[DispatcherName, ...] = ("flex",) if parallel.ep_per_node != 1 and parallel.ep == 4 else NAMES
    found = [trips(0, 1, parallel, format, names)] if world == 1 else ranks.run(trips, world, parallel, format, names)
    for of_rank in found:
        for packed, plain in of_rank:
            for field in ("rows", "out", "hidden", "weights"):
                assert torch.equal(getattr(packed, field), getattr(plain, field)), field
            assert packed.returned == plain.returned


def test_rows_of_one_byte_with_their_scales_are_what_is_sent(ranks: Ranks) -> None:
    """Of float32 rows a little more than a quarter; weights travel as they are."""
    for packed, plain in (
        pair for rank in ranks.run(trips, 2, ParallelConfig(ep=2), "mx", ("alltoall",)) for pair in rank
    ):
        rows = plain.sent // (4 * HIDDEN + 4)
        assert plain.sent == rows * (4 * HIDDEN + 4) and rows > 0
        assert packed.sent == rows * (HIDDEN + HIDDEN // 32 + 4)
