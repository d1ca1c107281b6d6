"""The MoE layer spread over both foldings: outputs, losses and every gradient are those of one rank, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from core.attention.packing import packing_of
from core.config.architecture import (
    AuxLoss,
    ExpertBias,
    ExpertChoice,
    MoE,
    QuantileBias,
    Router,
    SharedExperts,
    Sinkhorn,
    ZLoss,
)
from core.config.mapping import DispatcherName, ParallelConfig
from core.moe.balance import BalanceScope
from core.moe.layer import MoELayer
from core.moe.router import RouterInputs
from core.parallel.baton import Baton
from core.parallel.groups import Groups, groups_for, one_rank
from tests.core.numbers import draw
from tests.core.shares import Share, check_pieces, close, fill, gradients_of, pieces_of, place_on
from tests.ranks import Ranks

HIDDEN = 6
BALANCE = (
    AuxLoss(scope="microbatch", coefficient=0.5),
    AuxLoss(scope="sequence", coefficient=0.3),
    ZLoss(coefficient=0.1),
    ExpertBias(rate=0.1),
)
# An ffn of 7, for experts and for the shared expert, divides over no number of ranks.
MODEL = MoE(
    experts=12,
    top_k=3,
    expert_ffn=7,
    router=Router(score="sigmoid", normalise=True, scale=1.5, balance=BALANCE),
    shared=SharedExperts(count=1),
)
# Routed experts of another width than the tokens, and a gate before the shared one.
LATENT = replace(MODEL, latent=3, shared=SharedExperts(count=1, gated=True))
# Choices, and thresholds for them, that all ranks of a microbatch have to come to together.
SOFTMAX = replace(MODEL, router=Router(score="softmax", normalise=False, balance=(ZLoss(coefficient=0.1),)))
TOGETHER = {
    "sinkhorn": replace(SOFTMAX, router=replace(SOFTMAX.router, selection=Sinkhorn(tolerance=1e-4))),
    "expert choice": replace(SOFTMAX, router=replace(SOFTMAX.router, selection=ExpertChoice())),
    "quantile": replace(
        SOFTMAX, router=replace(SOFTMAX.router, balance=(QuantileBias(ema=0.5), ZLoss(coefficient=0.1)))
    ),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A mapping, the microbatch of each of its replicas of dp as lengths of its documents, and the layer."""

    parallel: ParallelConfig
    microbatches: tuple[tuple[int, ...], ...]
    model: MoE = MODEL

    @property
    def total(self) -> int:
        return sum(map(sum, self.microbatches))


def run(layer: MoELayer, job: Job, groups: Groups, replica: int) -> tuple[Tensor, Share]:
    """The layer forward and backward on this rank's tokens of one microbatch; first of the result: which those are."""
    lengths = job.microbatches[replica]
    bounds, tokens = torch.tensor([0, *accumulate(lengths)]), sum(lengths)
    packing = packing_of(bounds, tokens, torch.device("cpu"), groups)
    scope = BalanceScope(
        sequence_T=packing.sequence_T[packing.mine],
        sequences=len(lengths),
        valid_T=None,
        global_tokens=job.total,
        seen=None,
        sequence=groups.sequence,
        tokens=groups.tokens,
    )
    x = draw(10 + replica, tokens, HIDDEN)[packing.mine_T].requires_grad_()
    out, routing = layer(x, RouterInputs(packing=packing, scope=scope))
    assert routing.balance is not None
    losses = routing.balance.by_name
    arrives = draw(20 + replica, tokens, HIDDEN)[packing.mine_T]
    ((out * arrives).sum() + torch.stack(list(losses.values())).sum()).backward()
    assert x.grad is not None
    extra = {name: loss.detach() for name, loss in losses.items()} | {"counts": routing.counts_E}
    if routing.balance.quantiles is not None:
        extra["quantiles"] = routing.balance.quantiles
    return packing.mine_T, Share(out=out, input_gradient=x.grad, pieces={}, extra=extra)


def run_all(rank: int, world: int, jobs: Sequence[Job]) -> list[tuple[int, Tensor, Share]]:
    """Each job on this rank: its replica, which tokens it has, and what it makes of them."""
    groups = {job.parallel: groups_for(job.parallel) for job in jobs}
    found = []
    for job in jobs:
        mine = groups[job.parallel]
        layer = MoELayer(job.model, HIDDEN, 1.0, place_on(mine, job.parallel))
        fill(layer)
        tokens, share = run(layer, job, mine, mine.dp.position)
        found.append((mine.dp.position, tokens, replace(share, pieces=pieces_of(layer, mine))))
    return found


def check(found: Sequence[tuple[int, Tensor, Share]], job: Job) -> None:
    layer = MoELayer(job.model, HIDDEN, 1.0, place_on())
    fill(layer)
    extra: dict[str, Tensor] = {}
    for replica in range(len(job.microbatches)):
        _, truth = run(layer, job, one_rank(), replica)
        of_replica = [(tokens, share) for at, tokens, share in found if at == replica]
        assert sorted(int(t) for tokens, _ in of_replica for t in tokens) == list(range(len(truth.out)))
        for tokens, share in of_replica:
            scale = float(truth.out.detach().abs().max())
            close(share.out, truth.out.detach()[tokens], f"{job}: output", size=scale)
            scale = float(truth.input_gradient.abs().max())
            close(share.input_gradient, truth.input_gradient[tokens], f"{job}: input gradient", size=scale)
        for name, value in truth.extra.items():
            extra[name] = extra.get(name, 0) + value
    for name, value in extra.items():
        total = torch.stack([share.extra[name] for _, _, share in found]).sum(0)
        torch.testing.assert_close(total, value, rtol=1e-12, atol=0, msg=lambda m, n=name: f"{job}: {n}: {m}")
    check_pieces([share.pieces for _, _, share in found], gradients_of(layer))


# Each replica's documents; the last has fewer tokens than a microbatch has ranks.
BATCHES = ((5, 1, 7), (4, 4), (2, 9, 1), (1,))
MAPPINGS = {
    1: [ParallelConfig()],
    2: [ParallelConfig(tp=2, ep=2), ParallelConfig(cp=2, etp=2), ParallelConfig(etp=2), ParallelConfig(ep=2)],
    3: [ParallelConfig(tp=3, ep=3), ParallelConfig(cp=3, etp=3)],
    4: [
        ParallelConfig(tp=2, ep=4),
        ParallelConfig(tp=2, cp=2, etp=2, ep=2),
        ParallelConfig(tp=2, ep=2),
        ParallelConfig(cp=2, etp=4),
        ParallelConfig(ep=4),
        ParallelConfig(tp=4, etp=2),
    ],
}
NAMES: tuple[DispatcherName, ...] = ("allgather", "alltoall", "flex")


def jobs_of(world: int, models: Sequence[MoE] = (MODEL, LATENT), names: Sequence[DispatcherName] = NAMES) -> list[Job]:
    jobs = []
    for parallel in MAPPINGS[world]:
        replicas = world // (parallel.tp * parallel.cp)
        for first, name in enumerate(names):
            batches = [BATCHES[-1 - i if first else i] for i in range(replicas)]
            named = replace(parallel, dispatcher=name)
            jobs += [Job(parallel=named, microbatches=tuple(batches), model=model) for model in models]
    return jobs


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_b1_c2_c4_every_folding_and_dispatcher_gives_the_outputs_losses_and_gradients_of_one_rank(
    ranks: Ranks, world: int
) -> None:
    jobs = jobs_of(world)
    found = ranks.run(run_all, world, jobs, timeout_seconds=60.0)
    for i, job in enumerate(jobs):
        check([rank[i] for rank in found], job)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_choices_that_look_at_a_whole_microbatch_are_those_of_one_rank_in_every_folding(
    ranks: Ranks, world: int
) -> None:
    jobs = jobs_of(world, tuple(TOGETHER.values()), NAMES if world < 4 else NAMES[:2])
    found = ranks.run(run_all, world, jobs, timeout_seconds=60.0)
    for i, job in enumerate(jobs):
        check([rank[i] for rank in found], job)


@dataclass
class _WaitLog(Baton):
    """Stands where a wait for ep gives way to other work, and writes that one began."""

    log: list[str] = field(default_factory=list)

    def give_way(self) -> None:
        self.log.append("wait")


def order_of_work(rank: int, world: int) -> tuple[list[str], list[str]]:
    """When the shared experts compute, and when the rank waits for rows on their way, forward and backward."""
    parallel = ParallelConfig(ep=2)
    log: list[str] = []
    groups = groups_for(parallel)
    groups = replace(groups, ep=replace(groups.ep, baton=_WaitLog(log=log)))
    layer = MoELayer(MODEL, HIDDEN, 1.0, place_on(groups, parallel))
    fill(layer)
    assert layer.shared is not None
    layer.shared.register_forward_hook(lambda module, args, out: log.append("shared"))
    # The first product is the last of the MLP's backward.
    layer.shared.gate_up.register_post_accumulate_grad_hook(lambda parameter: log.append("shared"))
    x = draw(1, 5, HIDDEN).requires_grad_()
    out, _ = layer(x, RouterInputs(packing=packing_of(None, 5, torch.device("cpu"), groups)))
    forward = list(log)
    log.clear()
    out.sum().backward()
    return forward, log


def test_shared_experts_compute_while_rows_are_on_their_way_forward_and_backward(ranks: Ranks) -> None:
    for forward, backward in ranks.run(order_of_work, 2):
        # counts; rows and weights to the experts; outputs home
        assert forward == ["wait", "shared", "wait", "wait", "wait"]
        # gradients of outputs to the experts; those of rows and weights home
        assert backward == ["wait", "shared", "wait", "wait"]
