"""A linear layer is x times its weight transposed, says what its weight is, and is the same one however tp cuts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from core.config.mapping import ParallelConfig
from core.layers.linear import Cut, Linear
from core.parallel.groups import Group, groups_for, one_rank
from core.state.box import Box, whole
from core.state.spec import Normal
from tests.core.layers.places import place
from tests.core.numbers import draw, near
from tests.core.shares import Piece, Share, check_pieces, close, fill, pieces_of, place_on
from tests.ranks import Ranks


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_multiplies_by_the_transposed_weight(tokens: int, dtype: torch.dtype) -> None:
    layer = Linear(5, 11, init_std=0.1, place=place(dtype))
    layer.weight.data.copy_(draw(0, 11, 5))
    x = draw(1, tokens, 5, dtype=dtype)
    near(layer(x).detach(), torch.einsum("tk,nk->tn", x.double(), layer.weight.detach().double()))


def test_the_weight_is_declared_as_outputs_by_inputs() -> None:
    spec = Linear(5, 11, init_std=0.006, place=place()).specs()["weight"]
    assert spec.shape == (11, 5) and spec.init == Normal(std=0.006) and spec.decay and spec.replicas == "dense"
    assert spec.box == whole((11, 5)) and spec.adjacent == 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """A layer and how it is cut."""

    inputs: int
    outputs: int
    cut: Cut = "none"
    heads: int | None = None
    tokens: int = 7


def box_of(job: Job, tp: int, position: int) -> Box:
    """Which piece of the weight a rank holds, and how many neighbours the same, written out."""
    if job.heads is not None:
        each = job.outputs // job.heads
        low, high = position * job.heads // tp, -(-(position + 1) * job.heads // tp)
        return Box(offset=(low * each, 0), shape=((high - low) * each, job.inputs))
    low, high = (job.outputs * (position + i) // tp for i in range(2))
    if job.cut == "rows":
        return Box(offset=(low, 0), shape=(high - low, job.inputs))
    low, high = (job.inputs * (position + i) // tp for i in range(2))
    if job.cut == "columns":
        return Box(offset=(0, low), shape=(job.outputs, high - low))
    return whole((job.outputs, job.inputs))


def of_rank(job: Job, tp: int, position: int) -> tuple[Tensor, Tensor]:
    """What goes into a rank's layer, and the gradient that arrives behind it, which differs between ranks."""
    x, box = draw(0, job.tokens, job.inputs), box_of(job, tp, position)
    if job.cut == "columns":
        x = x[:, box.slices[1]]
    elif job.cut == "none" and job.heads is None:  # every rank has other tokens, the first of them none
        x = x[job.tokens * position // (2 * tp) :][: 2 * position]
    return x, draw(100 + position, len(x), box.shape[0])


def run_cut(rank: int, world: int, jobs: Sequence[Job]) -> list[tuple[Share, int]]:
    """Each layer on its share, and how many neighbours it says hold the same piece."""
    groups = groups_for(ParallelConfig(tp=world))
    found = []
    for job in jobs:
        layer = Linear(job.inputs, job.outputs, init_std=1.0, place=place_on(groups), cut=job.cut, heads=job.heads)
        fill(layer)
        x, arrives = of_rank(job, world, rank)
        x = x.clone().requires_grad_()
        out = layer(x)
        (out * arrives).sum().backward()
        assert x.grad is not None
        share = Share(out=out, input_gradient=x.grad, pieces=pieces_of(layer, groups), extra={})
        found.append((share, layer.specs()["weight"].adjacent))
    return found


def jobs_of(world: int) -> list[Job]:
    cuts: tuple[Cut, ...] = ("none", "rows", "columns")
    jobs = [Job(inputs=5, outputs=11, cut=cut) for cut in cuts] + [Job(inputs=11, outputs=6, cut=cut) for cut in cuts]
    # Fewer rows or columns than ranks, so that some hold nothing; no tokens.
    jobs += [Job(inputs=3, outputs=2, cut="rows"), Job(inputs=2, outputs=3, cut="columns")]
    jobs += [Job(inputs=5, outputs=7, cut="rows", tokens=0)]
    heads = [heads for heads in (1, 2, 3, 4, 8) if heads % world == 0 or world % heads == 0]
    return jobs + [Job(inputs=5, outputs=3 * h, heads=h) for h in heads]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_cut_gives_the_values_and_gradients_of_the_whole_layer(ranks: Ranks, world: int) -> None:
    jobs = jobs_of(world)
    found = ranks.run(run_cut, world, jobs)
    for i, job in enumerate(jobs):
        check_cut(job, [rank[i][0] for rank in found], [rank[i][1] for rank in found])


def check_cut(job: Job, shares: Sequence[Share], adjacent: Sequence[int]) -> None:
    """All ranks together against products in one process; the gradient is that of the sum of what all ranks did."""
    tp = len(shares)
    whole_layer = Linear(job.inputs, job.outputs, init_std=1.0, place=place_on())
    fill(whole_layer)
    weight = whole_layer.weight.detach()
    gradient = torch.zeros_like(weight)
    for position, share in enumerate(shares):
        x, arrives = of_rank(job, tp, position)
        box = box_of(job, tp, position)
        assert share.pieces["weight"].box == box, (job, position)
        close(share.out, x @ weight[box.slices].T, f"{job}: output of {position}")
        close(share.input_gradient, arrives @ weight[box.slices], f"{job}: input gradient of {position}")
        gradient[box.slices] += arrives.T @ x
        assert adjacent[position] == len(share.pieces["weight"].holders) == copies_of(job, tp)
    check_pieces([share.pieces for share in shares], {"weight": gradient})


def copies_of(job: Job, tp: int) -> int:
    if job.heads is not None:
        return max(1, tp // job.heads)
    return tp if job.cut == "none" else 1


def test_parts_of_a_cut_layer_add_up_to_the_whole_one(ranks: Ranks) -> None:
    """Rows' outputs lie beside one another, columns' outputs are summed: 11 features over three ranks."""
    rows, columns = Job(inputs=5, outputs=11, cut="rows"), Job(inputs=11, outputs=5, cut="columns")
    found = ranks.run(run_cut, 3, [rows, columns])
    for job, i in ((rows, 0), (columns, 1)):
        layer = Linear(job.inputs, job.outputs, init_std=1.0, place=place_on())
        fill(layer)
        parts = [rank[i][0].out for rank in found]
        together = torch.cat(parts, dim=1) if job is rows else torch.stack(parts).sum(0)
        close(together, draw(0, job.tokens, job.inputs) @ layer.weight.detach().T, str(job))


def test_neighbours_hold_the_same_head_where_there_are_more_ranks_than_heads(ranks: Ranks) -> None:
    """tp=4: one head lies on all four, two heads on two neighbours each."""
    jobs = [Job(inputs=5, outputs=3, heads=1), Job(inputs=5, outputs=6, heads=2), Job(inputs=5, outputs=12, heads=4)]
    held: list[list[Piece]] = [[rank[i][0].pieces["weight"] for rank in ranks.run(run_cut, 4, jobs)] for i in range(3)]
    assert [piece.holders for piece in held[0]] == [(0, 1, 2, 3)] * 4
    assert [piece.holders for piece in held[1]] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [piece.box.offset[0] for piece in held[1]] == [0, 0, 3, 3]
    assert [piece.box.offset[0] for piece in held[2]] == [0, 3, 6, 9]
    assert {piece.box.shape for pieces in held for piece in pieces} == {(3, 5)}


@pytest.mark.parametrize(("heads", "tp"), [(6, 4), (2, 5), (3, 7), (4, 3)])
def test_heads_that_ranks_would_have_to_tear_apart_are_refused(heads: int, tp: int) -> None:
    alone = one_rank()
    groups = replace(alone, tp=Group(ranks=tuple(range(tp)), position=tp - 1, handle=None))
    with pytest.raises(ValueError, match=f"{heads} heads .* {tp} ranks"):
        Linear(5, heads * 4 * tp, init_std=1.0, place=place_on(groups), heads=heads)
