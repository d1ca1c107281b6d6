"""The chained optimizer against torch's AdamW on whole tensors of one process: under any mapping, once-counted norm, state."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import groups_for, one_rank
from core.state.box import whole
from core.state.spec import Constant, TensorSpec
from tests.core.numbers import draw, near
from tests.core.optim.trees import (
    SMALL_BUCKET,
    Owner,
    Piece,
    Reference,
    Tree,
    assembled,
    backward,
    gradient,
    pieces_of,
    share,
    trained,
    value,
)
from tests.ranks import Ranks

CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, eps=1e-3, clip_norm=20.0)
RATES = [0.05, 0.1, 0.02]
MICROBATCHES = 2
ALL = {
    torch.float32: {"": torch.float32},
    torch.float64: {"": torch.float64},
    torch.bfloat16: {"": torch.bfloat16},
}
MIXED = {"": torch.float32, "matrix": torch.bfloat16, "whole": torch.float64, "norm": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A world, how it is folded, and which pipeline ranks hold the embedding."""

    world: int
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    stages: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        p = self.parallel
        sizes = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "ep": p.ep, "etp": p.etp}
        return " ".join([f"world{self.world}", *(f"{axis}{size}" for axis, size in sizes.items() if size > 1)])


MAPPINGS = [
    Layout(world=1),
    Layout(world=2),
    Layout(world=2, parallel=ParallelConfig(ep=2)),
    Layout(world=2, parallel=ParallelConfig(tp=2, etp=2)),
    Layout(world=2, parallel=ParallelConfig(pp=2), stages=(0, 1)),
    Layout(world=3),
    Layout(world=3, parallel=ParallelConfig(cp=3, ep=3)),
    Layout(world=3, parallel=ParallelConfig(pp=3), stages=(0, 2)),
    Layout(world=4, parallel=ParallelConfig(ep=2)),
    Layout(world=4, parallel=ParallelConfig(tp=2, ep=4)),
    Layout(world=4, parallel=ParallelConfig(tp=2, pp=2, etp=2), stages=(0, 1)),
    Layout(world=4, parallel=ParallelConfig(cp=2, pp=2, ep=2), stages=(1,)),
]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank knows after training."""

    norms: list[float]
    pieces: list[Piece]
    state: list[Piece]


def _train(
    rank: int,
    world: int,
    mapping: Layout,
    dtypes: Mapping[str, torch.dtype],
    begin: bool,
    config: OptimizerConfig = CONFIG,
) -> Answer:
    """Three steps of two microbatches with real backwards; the second reaches not everything, and one name nobody ever."""
    groups = groups_for(mapping.parallel, embedding_stages=mapping.stages)
    model = Tree(groups, dtypes, mapping.stages)
    optimizer = ChainedOptimizer(model, config, groups, bucket_bytes=SMALL_BUCKET)
    entries = trained(model)
    norms = []
    for step, rate in enumerate(RATES):
        if begin:
            optimizer.begin({name: len(reached_in(name)) for name in entries})
        for microbatch in range(MICROBATCHES):
            reached = {n: e.spec for n, e in entries.items() if microbatch in reached_in(n)}
            backward({n: share(step, microbatch, n, spec, groups) for n, spec in reached.items()}, entries)
            optimizer.accumulate()
        optimizer.reduce()
        norms.append(optimizer.gradient_norm())
        optimizer.step(rate, norms[-1])
    optimizer.wait_all()
    state = [(p.name, p.shape, p.box, p.data.clone()) for p in optimizer.state()]
    return Answer(norms=norms, pieces=pieces_of(model, groups), state=state)


def reached_in(name: str) -> Sequence[int]:
    """In which microbatches a parameter takes part."""
    if name.endswith("whole"):
        return ()
    return (0,) if name.endswith(("norm", "embedding.weight")) else (0, 1)


def truth(mapping: Layout, config: OptimizerConfig = CONFIG) -> Reference:
    """All stages' parameters in one process, in float64, in whole tensors."""
    specs: dict[str, TensorSpec] = {}
    for stage in range(mapping.parallel.pp):
        groups = replace(one_rank(), pp=replace(one_rank().pp, position=stage))
        specs |= {name: entry.spec for name, entry in trained(Tree(groups, embedding_stages=mapping.stages)).items()}
    start = {name: value(name, spec.shape) for name, spec in specs.items()}
    reference = Reference(start, [name for name, spec in specs.items() if not spec.decay], config)
    for step, rate in enumerate(RATES):
        grads = {
            name: sum((gradient(step, m, name, spec) for m in reached_in(name)), torch.zeros(spec.shape).double())
            for name, spec in specs.items()
        }
        reference.step(rate, grads)
    return reference


@pytest.mark.parametrize("begin", [False, True], ids=["in reduce", "during backward"])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_every_mapping_trains_as_torch_does_on_one_process(ranks: Ranks, mapping: Layout, begin: bool) -> None:
    reference = truth(mapping)
    assert max(reference.norms) > 20.0  # clipping is active
    told = ranks.run(_train, mapping.world, mapping, ALL[torch.float64], begin)
    for answer in told:
        assert answer.norms == pytest.approx(reference.norms, rel=1e-12)
        assert answer.norms == told[0].norms  # bit for bit: all ranks must clip alike
    found = assembled([answer.pieces for answer in told])
    assert {name for name in found if not name.endswith("bias")} == set(reference.tensors)
    for name, tensor in reference.tensors.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-12, atol=1e-12)
    for stage in range(mapping.parallel.pp):
        assert torch.equal(found[f"layers.{stage}.bias"], value(f"layers.{stage}.bias", (4,)))
    check_state(told, reference)


def check_state(told: Sequence[Answer], reference: Reference) -> None:
    """The moments are those of torch, and every element of them lies on exactly one rank."""
    owned: dict[str, int] = {}
    for name, _, box, _ in (piece for answer in told for piece in answer.state):
        owned[name] = owned.get(name, 0) + box.elements
    state = assembled([answer.state for answer in told])
    assert set(state) == {
        f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in reference.tensors
    }
    for name, tensor in reference.tensors.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            assert owned[f"optimizer.{kind}.{name}"] == tensor.numel()
            expected = reference.update.state[tensor][kind]
            torch.testing.assert_close(state[f"optimizer.{kind}.{name}"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip_norm", [20.0, 1e6, None])
def test_clipping_acts_where_the_norm_exceeds_the_limit_and_nowhere_else(ranks: Ranks, clip_norm: float | None) -> None:
    mapping, config = MAPPINGS[8], replace(CONFIG, clip_norm=clip_norm)
    reference = truth(mapping, config)
    told = ranks.run(_train, mapping.world, mapping, ALL[torch.float32], True, config)
    found = assembled([answer.pieces for answer in told])
    for name, tensor in reference.tensors.items():
        near(found[name], tensor, units=32)
    assert told[0].norms == pytest.approx(reference.norms, rel=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bfloat16_parameters_are_roundings_of_float32_masters_and_dtypes_may_mix(ranks: Ranks, world: int) -> None:
    mapping = Layout(world=world)
    for dtypes in (ALL[torch.bfloat16], MIXED):
        told = ranks.run(_train, world, mapping, dtypes, True)
        found = assembled([answer.pieces for answer in told])
        state = assembled([answer.state for answer in told])
        masters = {name.split("master.")[1]: tensor for name, tensor in state.items() if ".master." in name}
        assert set(masters) == {n for n, t in found.items() if t.dtype == torch.bfloat16 and not n.endswith("bias")}
        for name, master in masters.items():
            assert master.dtype == torch.float32
            assert torch.equal(found[name], master.to(torch.bfloat16))
            assert not torch.equal(found[name].float(), master)


def test_masters_do_not_depend_on_how_many_ranks_share_them(ranks: Ranks) -> None:
    """With nothing to round in the sums (all of the gradient on the first rank), the update is the same bit by bit."""
    found = [assembled([r for r, _ in ranks.run(_first_rank_alone, world)]) for world in (1, 2, 3, 4)]
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(other[name], tensor), name


def _first_rank_alone(rank: int, world: int) -> tuple[list[Piece], float]:
    groups = groups_for(ParallelConfig())
    model = Tree(groups, MIXED)
    optimizer = ChainedOptimizer(model, CONFIG, groups, bucket_bytes=SMALL_BUCKET)
    entries = trained(model)
    for step, rate in enumerate(RATES):
        if rank == 0:
            backward({n: gradient(step, 0, n, e.spec) for n, e in entries.items()}, entries)
        optimizer.accumulate()
        optimizer.reduce()
        optimizer.step(rate, 1.0)
    state = [(p.name, p.shape, p.box, p.data.clone()) for p in optimizer.state()]
    return pieces_of(model, groups) + state, 0.0


class Whole(nn.Module):
    """Tensors of whole vectors, so that torch's own loop over each ends where ours passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = {"a": (16, 3), "b": (32,), "c": (2, 8, 5)}
        for name, shape in self.shapes.items():
            setattr(self, name, nn.Parameter(draw(len(name), *shape, dtype=torch.float32)))

    def specs(self) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(
                shape=shape, box=whole(shape), replicas="dense", init=Constant(value=0.0), decay=name != "b"
            )
            for name, shape in self.shapes.items()
        }


def test_one_rank_in_float32_is_torchs_adamw_bit_for_bit() -> None:
    model, peer = Whole(), Whole()
    config = replace(CONFIG, clip_norm=None)
    optimizer = ChainedOptimizer(model, config, one_rank())
    groups = [
        {"params": [peer.get_parameter("a"), peer.get_parameter("c")], "weight_decay": 0.25},
        {"params": [peer.get_parameter("b")], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for step, rate in enumerate(RATES):
        for m in range(MICROBATCHES):
            for name, shape in model.shapes.items():
                fresh = draw(100 * step + 10 * m + len(name), *shape, dtype=torch.float32)
                for each in (model, peer):
                    parameter = each.get_parameter(name)
                    parameter.grad = fresh.clone() if parameter.grad is None else parameter.grad + fresh
            optimizer.accumulate()
        optimizer.reduce()
        optimizer.step(rate, optimizer.gradient_norm())
        for group in torchs.param_groups:
            group["lr"] = rate
        torchs.step()
        torchs.zero_grad()
    for name in model.shapes:
        assert torch.equal(model.get_parameter(name), peer.get_parameter(name)), name


def test_updates_too_small_for_bfloat16_add_up_in_the_master() -> None:
    model = Tree(dtypes=ALL[torch.bfloat16])
    optimizer = ChainedOptimizer(model, CONFIG, one_rank())
    gain = model.get_parameter("layers.0.norm")
    master = next(p.data for p in optimizer.state() if p.name == "optimizer.master.layers.0.norm")
    master.fill_(1.0)
    for _ in range(40):
        gain.grad = torch.ones_like(gain)
        optimizer.accumulate()
        optimizer.reduce()
        optimizer.step(1e-3, 1.0)  # half a step of bfloat16 below one is 2^-9
    assert master[0].item() == pytest.approx(0.96, abs=1e-3)
    assert gain[0].item() == pytest.approx(0.96, abs=4e-3)


@pytest.mark.parametrize("elements", [0, 1, 4095, 4096, 4097, 5_000_011])
def test_the_norm_of_many_elements_is_exact(elements: int) -> None:
    """For which a running float32 sum goes astray."""
    spec = TensorSpec(shape=(elements,), box=whole((elements,)), replicas="dense", init=Constant(value=0.0))
    model = nn.Module()
    model.add_module(
        "large", Owner("large", {"weight": replace(spec, shape=(1,), box=whole((1,)))}, ALL[torch.float32])
    )
    owner = model.get_submodule("large")
    assert isinstance(owner, Owner)
    owner.declared["weight"], owner.weight = spec, nn.Parameter(torch.zeros(elements))
    optimizer = ChainedOptimizer(model, CONFIG, one_rank())
    model.get_parameter("large.weight").grad = torch.full((elements,), 0.1)
    optimizer.accumulate()
    optimizer.reduce()
    norm = optimizer.gradient_norm()
    assert norm == pytest.approx(float(np.float32(0.1)) * elements**0.5, rel=2e-5)
    optimizer.step(0.1, norm)
    assert sum(piece.box.elements for piece in optimizer.state()) == 2 * elements


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm_and_its_step_can_be_given_up(bad: float) -> None:
    model = Tree()
    optimizer = ChainedOptimizer(model, CONFIG, one_rank())
    experts = model.get_parameter("layers.0.experts")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    experts.grad = torch.full_like(experts, bad)
    optimizer.accumulate()
    optimizer.reduce()
    assert not math.isfinite(optimizer.gradient_norm())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for parameter, begins in ((experts, False), (experts, True)):
        if begins:
            optimizer.begin({})
        else:
            parameter.grad = torch.ones_like(parameter)
        optimizer.accumulate()
        optimizer.reduce()
        assert optimizer.gradient_norm() == pytest.approx(0.0 if begins else parameter.numel() ** 0.5)


def test_norm_and_step_before_the_sums_are_our_mistake() -> None:
    optimizer = ChainedOptimizer(Tree(), CONFIG, one_rank())
    with pytest.raises(AssertionError, match="comes after reduce"):
        optimizer.gradient_norm()
    with pytest.raises(AssertionError, match="comes after reduce"):
        optimizer.step(0.1, 1.0)
    optimizer.reduce()
    optimizer.step(0.1, optimizer.gradient_norm())
    with pytest.raises(AssertionError, match="comes after reduce"):
        optimizer.step(0.1, 1.0)


def test_a_parameter_that_nothing_reaches_only_decays_and_old_gradients_do_not_come_back() -> None:
    model = Tree()
    optimizer = ChainedOptimizer(model, replace(CONFIG, clip_norm=None), one_rank())
    matrix = model.get_parameter("layers.0.matrix")
    for step, reached in enumerate((False, True, False)):
        if reached:
            matrix.grad = torch.full_like(matrix, 100.0)
        before = matrix.detach().clone()
        optimizer.accumulate()
        optimizer.reduce()
        norm = optimizer.gradient_norm()
        optimizer.step(0.1, norm)
        if step == 0:
            near(matrix, before * (1 - 0.1 * 0.25))
        assert norm == (pytest.approx(100.0 * 91**0.5) if reached else 0.0)


def test_a_restored_count_of_steps_is_that_of_every_shard() -> None:
    optimizer = ChainedOptimizer(Tree(dtypes=MIXED), CONFIG, one_rank(), bucket_bytes=SMALL_BUCKET)
    optimizer.set_steps(17)
    counts = [held.steps.item() for held in optimizer.adam._held.values()]
    assert optimizer.steps == 17 and counts == [17.0] * len(optimizer.buckets)


def test_state_is_shared_with_the_optimizer_and_names_masters_only_where_they_are_copies() -> None:
    optimizer = ChainedOptimizer(Tree(dtypes=MIXED), CONFIG, one_rank())
    pieces = {piece.name: piece for piece in optimizer.state()}
    masters = {name for name in pieces if ".master." in name}
    assert masters == {"optimizer.master.layers.0.matrix", "optimizer.master.layers.0.norm"}
    assert pieces["optimizer.exp_avg.layers.0.whole"].data.dtype == torch.float64
    assert all((p.copy, p.copies) == (0, 1) for p in pieces.values())
    for piece in pieces.values():
        piece.data.fill_(2.0)
    assert all(bool((piece.data == 2.0).all()) for piece in optimizer.state())


def test_a_model_without_trained_parameters_has_an_optimizer_that_does_nothing() -> None:
    optimizer = ChainedOptimizer(nn.Module(), CONFIG, one_rank())
    optimizer.begin(1)
    optimizer.accumulate()
    optimizer.reduce()
    norm = optimizer.gradient_norm()
    optimizer.step(0.1, norm)
    assert norm == 0.0 and optimizer.state() == [] and optimizer.steps == 1


def test_a_model_that_nobody_holds_any_more_is_freed_with_its_optimizer() -> None:
    """Hooks that own what owns the parameter would keep all of it alive, and with each process group a thread that polls."""
    model = Tree()
    optimizer = ChainedOptimizer(model, CONFIG, one_rank())
    optimizer.begin(1)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.reduce()
    optimizer.step(0.1, 1.0)
    left = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.embedding.weight)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in left] == [None, None, None]
