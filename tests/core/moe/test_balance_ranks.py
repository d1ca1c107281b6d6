"""Balance losses of microbatches whose tokens lie on tp * cp ranks: the shares and gradients add up to those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from core.attention.packing import packing_of
from core.config.architecture import AuxLoss, Balance, Router, ZLoss
from core.config.mapping import ParallelConfig
from core.moe.balance import BalanceScope, balance_losses
from core.parallel.groups import Groups, groups_for, one_rank
from core.parallel.meter import Meter
from tests.core.numbers import draw
from tests.core.shares import close
from tests.ranks import Ranks

EXPERTS, TOP_K = 8, 2
LOCAL: tuple[Balance, ...] = (
    AuxLoss(scope="microbatch", coefficient=0.5),
    AuxLoss(scope="sequence", coefficient=0.3),
    ZLoss(coefficient=0.1),
)
GLOBAL = AuxLoss(scope="global_batch", coefficient=0.7)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A mapping, and microbatches as lengths of their documents; replicas of dp take them in turn. padding: with tokens that do
    not count."""

    parallel: ParallelConfig
    microbatches: tuple[tuple[int, ...], ...]
    padding: bool = False

    @property
    def sizes(self) -> list[int]:
        return [sum(lengths) for lengths in self.microbatches]

    def valid(self, microbatch: int) -> Tensor:
        """[T] bool, False for padding."""
        keep = torch.arange(self.sizes[microbatch]) % 3 != 1
        return keep | torch.tensor(not self.padding)

    @property
    def total(self) -> int:
        return sum(int(self.valid(i).sum()) for i in range(len(self.microbatches)))

    def logits(self, microbatch: int) -> Tensor:
        return draw(50 + microbatch, self.sizes[microbatch], EXPERTS) * 2


@dataclass(frozen=True, kw_only=True)
class Found:
    """By loss the sum of this rank's shares; by microbatch, which of its tokens are mine and the gradient of their logits."""

    losses: dict[str, float]
    gradients: dict[int, tuple[Tensor, Tensor]]
    sent: dict[str, int]


def measure(job: Job, balance: Sequence[Balance], groups: Groups, mine: Sequence[int]) -> Found:
    """The losses of the microbatches `mine` one after the other, on this rank's tokens of them."""
    router = Router(score="softmax", normalise=False, balance=tuple(balance))
    losses: dict[str, float] = {}
    gradients, seen = {}, None
    for i in mine:
        bounds = torch.tensor([0, *accumulate(job.microbatches[i])])
        packing = packing_of(bounds, job.sizes[i], torch.device("cpu"), groups)
        logits = job.logits(i)[packing.mine_T].requires_grad_()
        scope = BalanceScope(
            sequence_T=packing.sequence_T[packing.mine],
            sequences=len(packing.lengths),
            valid_T=job.valid(i)[packing.mine_T] if job.padding else None,
            global_tokens=job.total,
            seen=seen,
            sequence=groups.sequence,
            tokens=groups.tokens,
        )
        found = balance_losses(logits, router, TOP_K, scope)
        seen = found.load
        for name, share in found.by_name.items():
            losses[name] = losses.get(name, 0.0) + float(share.detach())
        (gradient,) = torch.autograd.grad(torch.stack(list(found.by_name.values())).sum(), logits)
        gradients[i] = (packing.mine_T, gradient)
    return Found(losses=losses, gradients=gradients, sent={})


def measure_all(rank: int, world: int, jobs: Sequence[tuple[Job, tuple[Balance, ...]]]) -> list[Found]:
    """Each job on this rank's microbatches."""
    meter, found = Meter(), []
    groups = {job.parallel: groups_for(job.parallel, meter=meter) for job, _ in jobs}
    for job, balance in jobs:
        dp = groups[job.parallel].dp
        meter.sent_bytes.clear()
        told = measure(job, balance, groups[job.parallel], range(dp.position, len(job.microbatches), dp.size))
        sent = {f"{axis} {name}": n for (axis, name), n in meter.sent_bytes.items()}
        found.append(Found(losses=told.losses, gradients=told.gradients, sent=sent))
    return found


def check(found: Sequence[Found], truth: Found, job: Job) -> None:
    """All ranks together against one rank."""
    for name, loss in truth.losses.items():
        assert loss != 0.0
        assert sum(rank.losses[name] for rank in found) == pytest.approx(loss, rel=1e-12), name
    for i, (_, gradient) in truth.gradients.items():
        whole = torch.full_like(gradient, torch.nan)
        held = [rank.gradients[i] for rank in found if i in rank.gradients]
        assert sum(len(mine) for mine, _ in held) == len(whole)
        for mine, part in held:
            whole[mine] = part
        close(whole, gradient, f"{job}: logits of microbatch {i}")


DOCUMENTS = (5, 1, 12)  # B4: three packed documents of unequal length
# Fewer tokens than ranks, one token, and one document for all.
SMALL = ((1,), (2, 1), (7,))
JOBS = {
    1: [ParallelConfig()],
    2: [ParallelConfig(tp=2), ParallelConfig(cp=2), ParallelConfig(cp=2, cp_alltoall=2)],
    3: [ParallelConfig(tp=3), ParallelConfig(cp=3)],
    4: [ParallelConfig(tp=2, cp=2), ParallelConfig(tp=4), ParallelConfig(tp=2), ParallelConfig(cp=2)],
}


def jobs_of(world: int) -> list[Job]:
    """Every mapping of a world with several microbatches, of equal number on each replica."""
    batches = ((DOCUMENTS, (3, 3, 3, 3)), (*SMALL, DOCUMENTS))
    return [
        Job(parallel=parallel, microbatches=microbatches, padding=padding)
        for parallel in JOBS[world]
        for microbatches, padding in zip(batches, (False, True), strict=True)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_b1_b4_shares_of_every_loss_and_their_gradients_add_up_to_those_of_one_rank(ranks: Ranks, world: int) -> None:
    jobs = jobs_of(world)
    found = ranks.run(measure_all, world, [(job, LOCAL) for job in jobs])
    for i, job in enumerate(jobs):
        truth = measure(job, LOCAL, one_rank(), range(len(job.microbatches)))
        check([rank[i] for rank in found], truth, job)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_b1_b2_the_load_of_the_global_batch_is_that_of_all_ranks_so_far(ranks: Ranks, world: int) -> None:
    """Where replicas run microbatches side by side, one rank would have them as one microbatch of all documents."""
    jobs = jobs_of(world)
    found = ranks.run(measure_all, world, [(job, (GLOBAL,)) for job in jobs])
    for i, job in enumerate(jobs):
        replicas = world // (job.parallel.tp * job.parallel.cp)
        loss, gradients = side_by_side(job, replicas)
        truth = Found(losses={"aux_global_batch": loss}, gradients=gradients, sent={})
        check([rank[i] for rank in found], truth, job)


def side_by_side(job: Job, replicas: int) -> tuple[float, dict[int, tuple[Tensor, Tensor]]]:
    """The loss of the global batch and its gradients by the formula: E * sum_i f_i P_i, f of what the world has seen so far."""
    counts, tokens, loss = torch.zeros(EXPERTS, dtype=torch.float64), 0, torch.zeros((), dtype=torch.float64)
    logits = {i: job.logits(i).requires_grad_() for i in range(len(job.microbatches))}
    for start in range(0, len(job.microbatches), replicas):
        together = range(start, start + replicas)
        scores = [torch.softmax(logits[i], -1)[job.valid(i)] for i in together]
        for of_one in scores:
            chosen = of_one.detach().argsort(-1, descending=True)[:, :TOP_K]
            counts = counts + torch.bincount(chosen.flatten(), minlength=EXPERTS)
            tokens += len(of_one)
        for of_one in scores:
            loss = loss + EXPERTS * (counts / (TOP_K * tokens) * of_one.sum(0) / job.total).sum()
    loss = 0.7 * loss
    gradients = torch.autograd.grad(loss, list(logits.values()))
    return float(loss.detach()), {i: (torch.arange(len(g)), g) for i, g in enumerate(gradients)}


def test_only_counts_are_communicated(ranks: Ranks) -> None:
    """Over tp=2, cp=2: E numbers for the microbatch, E for each of its documents, E + 1 for the global batch, in all-reduces."""
    job = Job(parallel=ParallelConfig(tp=2, cp=2), microbatches=(DOCUMENTS,))
    for (rank,) in ranks.run(measure_all, 4, [(job, (*LOCAL, GLOBAL))]):
        numbers = {"sequence": EXPERTS * (1 + len(DOCUMENTS)), "tokens": EXPERTS + 1}
        # A ring sends 2 (n - 1) / n of the bytes; logits are float64 here.
        assert rank.sent == {f"{axis} all_reduce": 2 * 3 * 8 * n // 4 for axis, n in numbers.items()}
