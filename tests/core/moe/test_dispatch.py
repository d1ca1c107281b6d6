"""All dispatchers against loops over tokens and choices: outputs, gradients, empty and lopsided ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from core.config.architecture import MoE, Router
from core.config.mapping import DispatcherName, ParallelConfig
from core.moe.dispatch.allgather import AllGatherDispatcher
from core.moe.dispatch.alltoall import AllToAllDispatcher
from core.moe.dispatch.flex import FlexDispatcher
from core.moe.dispatch.make import make_dispatcher
from core.moe.dispatch.protocol import Dispatcher
from core.moe.experts import Experts
from core.moe.router import Routing
from core.parallel.groups import Group, Groups, groups_for, one_rank
from core.state.inventory import initialise, inventory
from tests.core.shares import Piece, check_pieces, gradients_of, pieces_of, place_on
from tests.ranks import Ranks

HIDDEN, FFN, TOP_K = 6, 8, 3
NAMES: tuple[DispatcherName, ...] = ("allgather", "alltoall", "flex")
KINDS = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher, "flex": FlexDispatcher}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Tokens of each rank, and the experts [all tokens, K] that they choose, -1 for none; and how experts lie on the ranks."""

    experts: int
    cuts: tuple[int, ...]
    chosen: tuple[tuple[int, ...], ...]
    ffn: int = FFN
    multiple: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def mine(self, tensor: Tensor, rank: int) -> Tensor:
        """This rank's rows of a tensor over all tokens."""
        return tensor.split(list(self.cuts))[rank].clone()


def work(
    experts: int,
    cuts: Sequence[int],
    *,
    only: range | None = None,
    padded: bool = False,
    ffn: int = FFN,
    multiple: int = 1,
    parallel: ParallelConfig | None = None,
) -> Work:
    """Random distinct choices among `only` (all experts by default), some of them padding if asked; over ep by default."""
    generator = torch.Generator().manual_seed(experts + sum(cuts))
    pool = list(only or range(experts))
    chosen = []
    for token in range(sum(cuts)):
        order = torch.randperm(len(pool), generator=generator)[:TOP_K].tolist()
        chosen.append((-1,) * TOP_K if padded and token % 3 == 1 else tuple(pool[i] for i in order))
    parallel = parallel or ParallelConfig(ep=len(cuts))
    return Work(experts=experts, cuts=tuple(cuts), chosen=tuple(chosen), ffn=ffn, multiple=multiple, parallel=parallel)


def moe_of(job: Work) -> MoE:
    return MoE(experts=job.experts, top_k=TOP_K, expert_ffn=job.ffn, router=Router(score="softmax", normalise=False))


def experts_of(job: Work, groups: Groups) -> Experts:
    experts = Experts(moe_of(job), HIDDEN, init_std=1.0, place=place_on(groups, job.parallel))
    initialise(Holder(experts), 3)
    return experts


def inputs(job: Work) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [T, H], router weights [T, K], experts [T, K], and the gradient that arrives [T, H], of all ranks together."""
    generator = torch.Generator().manual_seed(11)
    tokens = sum(job.cuts)
    hidden, arrives = (torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(tokens, TOP_K, generator=generator, dtype=torch.float64)
    return hidden, weights, torch.tensor(job.chosen, dtype=torch.int64).reshape(tokens, TOP_K), arrives


class Holder(nn.Module):
    """Gives the experts a canonical name."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What one rank has after dispatch, experts, combine and backward."""

    out: Tensor
    hidden_gradient: Tensor
    weights_gradient: Tensor
    experts: dict[str, Piece]
    rows: Tensor
    counts: tuple[int, ...]


def move(rank: int, job: Work, name: DispatcherName, groups: Groups) -> Moved:
    """All six stages and the backward on this rank's tokens."""
    job = replace(job, parallel=replace(job.parallel, dispatcher=name))
    experts = experts_of(job, groups)
    hidden, weights, chosen, arrives = (job.mine(tensor, rank) for tensor in inputs(job))
    hidden.requires_grad_()
    weights.requires_grad_()
    counts = torch.bincount(chosen.flatten() + 1, minlength=job.experts + 1)[1:]
    routing = Routing(experts_TK=chosen, weights_TK=weights, counts_E=counts, balance=None)
    dispatcher: Dispatcher = make_dispatcher(moe_of(job), place_on(groups, job.parallel), multiple=job.multiple)
    if groups.ep.size > 1 and name in KINDS:
        assert type(dispatcher) is KINDS[name]
    rows, plan = dispatcher.dispatch_preprocess(hidden, routing)
    rows = dispatcher.dispatch(rows, plan)
    arrived, plan = dispatcher.dispatch_postprocess(rows, plan)
    back = dispatcher.combine_preprocess(experts(arrived), plan)
    out = dispatcher.combine_postprocess(dispatcher.combine(back, plan), plan)
    (out * arrives).sum().backward()
    assert hidden.grad is not None and weights.grad is not None
    return Moved(
        out=out.detach(),
        hidden_gradient=hidden.grad,
        weights_gradient=weights.grad,
        experts=pieces_of(experts, groups),
        rows=arrived.hidden_RH.detach(),
        counts=arrived.counts,
    )


def move_all(rank: int, world: int, jobs: Sequence[Work]) -> list[dict[str, Moved]]:
    """Every job with each dispatcher."""
    groups = {job.parallel: groups_for(job.parallel) for job in jobs}
    return [{name: move(rank, job, name, groups[job.parallel]) for name in NAMES} for job in jobs]


def naive(job: Work) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """The definition: every token and choice by itself, on whole weights, differentiated by autograd: the output, and gradients
    of hidden, router weights and expert weights."""
    experts = experts_of(job, one_rank())
    hidden, weights, chosen, arrives = inputs(job)
    hidden.requires_grad_()
    weights.requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    out = torch.zeros_like(hidden).detach()
    # An expert that nobody chose has a gradient of zeros.
    loss = loss + 0.0 * (experts.gate_up.sum() + experts.down.sum() + hidden.sum() + weights.sum())
    for t, choices in enumerate(chosen.tolist()):
        for k, e in enumerate(choices):
            if e < 0:
                continue
            gate, up = experts.gate_up[e, 0] @ hidden[t], experts.gate_up[e, 1] @ hidden[t]
            y = weights[t, k] * (experts.down[e] @ (gate * torch.sigmoid(gate) * up))
            out[t] += y.detach()
            loss = loss + (y * arrives[t]).sum()
    loss.backward()
    assert hidden.grad is not None and weights.grad is not None
    return out, hidden.grad, weights.grad, gradients_of(experts)


def check(found: Sequence[Moved], job: Work) -> None:
    """All ranks together against the loops."""
    *truths, of_experts = naive(job)
    for name, truth in zip(("out", "hidden_gradient", "weights_gradient"), truths, strict=True):
        parts = [getattr(moved, name) for moved in found]
        assert [len(part) for part in parts] == list(job.cuts)
        torch.testing.assert_close(torch.cat(parts), truth, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    # C2: the gradient of an expert, whole or cut, is that of all tokens, not EP times it
    check_pieces([moved.experts for moved in found], of_experts)
    # C10: nothing is dropped or doubled; under etp each of the ranks that share an expert sees all its rows
    routed = sum(e >= 0 for choices in job.chosen for e in choices)
    if job.multiple == 1:
        assert sum(sum(moved.counts) for moved in found) == routed * job.parallel.etp
    for moved in found:
        # D1, D3: never a count that the products cannot take, and never another one than there are rows
        assert all(count % job.multiple == 0 for count in moved.counts)
        assert moved.rows.shape == (sum(moved.counts), HIDDEN)


JOBS = {
    1: [work(5, (7,)), work(5, (0,)), work(4, (6,), padded=True)],
    # 7 tokens over two ranks (C9), uneven, none, padding, and all tokens to the experts of one rank (C1)
    2: [
        work(8, (4, 3)),
        work(8, (0, 5)),
        work(8, (1, 0)),
        work(8, (0, 0)),
        work(6, (5, 6), padded=True),
        work(8, (5, 2), only=range(4)),
        work(8, (0, 3), only=range(4, 8)),
    ],
    4: [work(12, (3, 0, 7, 1)), work(4, (2, 2, 5, 2), padded=True), work(12, (2, 3, 0, 1), only=range(9, 12))],
}
ETP, ETP_EP, TP_EP, EDP = (
    ParallelConfig(etp=2),
    ParallelConfig(etp=2, ep=2),
    ParallelConfig(tp=2, ep=4),
    ParallelConfig(tp=2, ep=2),
)
# The same over both foldings, with an ffn of 7 that two ranks of etp cannot halve, and one that leaves a rank nothing.
JOBS[2] += [
    work(5, (4, 3), ffn=7, parallel=ETP),
    work(3, (0, 5), ffn=1, parallel=ETP),
    work(4, (0, 0), parallel=ETP),
    work(5, (6, 2), padded=True, only=range(1, 4), ffn=7, parallel=ETP),
]
JOBS[3] = [
    work(6, (2, 0, 4)),
    work(4, (3, 1, 0), ffn=7, parallel=ParallelConfig(etp=3)),
    work(4, (2, 2, 1), parallel=ParallelConfig()),
]
JOBS[4] += [
    work(6, (3, 0, 7, 1), ffn=7, parallel=ETP_EP),
    work(4, (0, 4, 0, 2), padded=True, parallel=ETP_EP),
    work(8, (2, 3, 1, 1), only=range(4, 7), ffn=7, parallel=ETP_EP),
    work(4, (0, 0, 0, 0), parallel=ETP_EP),
    work(8, (2, 2, 2, 1), parallel=TP_EP),
    work(12, (5, 0, 0, 2), only=range(3), parallel=TP_EP),
    work(6, (2, 0, 4, 1), ffn=7, parallel=EDP),
    work(5, (2, 3, 0, 1), ffn=7, parallel=ETP),
]
# Nodes of two neighbours of ep, which only flex makes something of; one node of all, and two of one rank each beside them.
NODES = ParallelConfig(ep=4, ep_per_node=2)
JOBS[2] += [work(6, (5, 6), padded=True, parallel=ParallelConfig(ep=2, ep_per_node=2))]
JOBS[4] += [
    work(12, (3, 0, 7, 1), parallel=NODES),
    work(8, (0, 5, 0, 0), padded=True, parallel=NODES),
    work(8, (3, 2, 4, 1), only=range(4, 8), parallel=NODES),
    work(4, (0, 0, 0, 0), parallel=NODES),
    work(6, (4, 1, 3, 2), ffn=7, parallel=ParallelConfig(etp=2, ep=2, ep_per_node=2)),
]
# D1, D3: rows in multiples of what a quantised product takes, more than there are tokens among them.
JOBS[1] += [work(5, (7,), multiple=16), work(5, (0,), multiple=4)]
JOBS[2] += [
    work(8, (4, 3), multiple=5),
    work(8, (0, 5), multiple=3),
    work(4, (50, 50), padded=True, multiple=128),
    work(5, (4, 3), ffn=7, multiple=4, parallel=ETP),
]
JOBS[4] += [
    work(6, (3, 0, 7, 1), ffn=7, multiple=4, parallel=ETP_EP),
    work(8, (2, 3, 0, 1), padded=True, multiple=3, parallel=NODES),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_c1_c2_c4_c9_c10_d1_d3_all_dispatchers_are_the_loop_over_tokens_and_choices(ranks: Ranks, world: int) -> None:
    found = ranks.run(move_all, world, JOBS[world], timeout_seconds=20.0)
    for i, job in enumerate(JOBS[world]):
        for name in NAMES:
            check([rank[i][name] for rank in found], job)


def test_c1_experts_without_rows_have_zeros_of_the_right_shape_as_gradient(ranks: Ranks) -> None:
    found = ranks.run(move_all, 2, [work(8, (5, 2), only=range(4)), work(8, (0, 0))], timeout_seconds=10.0)
    idle = [found[1][0][name] for name in NAMES] + [found[r][1][name] for r in range(2) for name in NAMES]
    for moved in idle:
        assert moved.counts == (0,) * 4
        assert moved.rows.shape == (0, HIDDEN)
        assert moved.experts["gate_up"].gradient.shape == (4, 2, FFN, HIDDEN)
        assert moved.experts["down"].gradient.shape == (4, HIDDEN, FFN)
        assert not any(piece.gradient.any() for piece in moved.experts.values())


@pytest.mark.parametrize(
    "job",
    [
        work(8, (6, 5)),
        work(6, (4, 3), ffn=7, parallel=ETP),
        work(6, (3, 4, 2, 5), ffn=7, parallel=ETP_EP),
        work(8, (3, 0, 4, 2), parallel=TP_EP),
        work(8, (3, 0, 4, 2), parallel=NODES),
    ],
    ids=["ep=2", "etp=2", "etp=2 ep=2", "tp=2 ep=4", "ep=4 in nodes of 2"],
)
def test_c6_dispatchers_hand_every_expert_the_same_rows_in_the_same_order_and_repeat_bitwise(
    ranks: Ranks, job: Work
) -> None:
    first, second = (ranks.run(move_all, len(job.cuts), [job]) for _ in range(2))
    for rank in range(len(job.cuts)):
        gather, *others = (first[rank][0][name] for name in NAMES)
        for other in others:
            assert gather.counts == other.counts
            assert torch.equal(gather.rows, other.rows)
            for name, piece in gather.experts.items():
                assert torch.equal(piece.gradient, other.experts[name].gradient)
        for name in NAMES:
            for part in ("out", "hidden_gradient", "weights_gradient", "rows"):
                once, again = (getattr(run[rank][0][name], part) for run in (first, second))
                assert torch.equal(once, again), (name, part)


def test_etp_cuts_the_width_of_every_expert_and_ep_deals_experts_out(ranks: Ranks) -> None:
    """6 experts of width 7 over etp=2, ep=2: ranks 0 and 1 share experts 0 to 2, of which they hold 3 and 4 columns."""
    found = [rank[0]["alltoall"].experts for rank in ranks.run(move_all, 4, [JOBS[4][3]])]
    assert [pieces["gate_up"].box.offset for pieces in found] == [
        (0, 0, 0, 0),
        (0, 0, 3, 0),
        (3, 0, 0, 0),
        (3, 0, 3, 0),
    ]
    assert [pieces["gate_up"].box.shape for pieces in found] == [(3, 2, n, HIDDEN) for n in (3, 4, 3, 4)]
    assert [pieces["down"].box.offset for pieces in found] == [(0, 0, 0), (0, 0, 3), (3, 0, 0), (3, 0, 3)]
    assert [pieces["down"].box.shape for pieces in found] == [(3, HIDDEN, n) for n in (3, 4, 3, 4)]
    assert [pieces["down"].holders for pieces in found] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("kind", KINDS.values())
def test_experts_that_do_not_divide_over_the_group_are_refused(
    kind: type[AllGatherDispatcher | AllToAllDispatcher | FlexDispatcher],
) -> None:
    pair = Group(ranks=(0, 1), position=0, handle=None)
    with pytest.raises(ValueError, match="5 experts do not divide over 2 ranks"):
        kind(5, replace(one_rank(), ep=pair, experts=pair))


def held_experts(rank: int, world: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """What each rank holds: name, offset, shape, data."""
    parallel = ParallelConfig(ep=2)
    groups = groups_for(parallel)
    config = MoE(experts=12, top_k=1, expert_ffn=2, router=Router(score="softmax", normalise=False))
    holder = Holder(Experts(config, 3, init_std=1.0, place=place_on(groups, parallel)))
    initialise(holder, 3)
    pieces = inventory(holder, groups).values()
    return [(p.name, p.box.offset, (p.copy, p.copies), p.data) for p in pieces]


def test_experts_are_numbered_over_all_ranks_and_copies_hold_the_same(ranks: Ranks) -> None:
    """12 experts at EP=2 over 4 ranks: ranks 0 and 2 hold the first six, 1 and 3 the others (two-digit ids included)."""
    found = ranks.run(held_experts, 4)
    assert [piece[1][0] for rank in found for piece in rank if piece[0] == "experts.down"] == [0, 6, 0, 6]
    assert [piece[2] for rank in found for piece in rank if piece[0] == "experts.down"] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]
    for a, b in ((0, 2), (1, 3)):
        assert all(torch.equal(x[3], y[3]) for x, y in zip(found[a], found[b], strict=True))
    assert not torch.equal(found[0][0][3], found[1][0][3])
