"""An attention layer whose heads and tokens lie on the ranks of tp, against the same layer on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from core.attention.gqa import GroupedQueryAttention
from core.attention.mla import MultiHeadLatentAttention
from core.attention.packing import Packing, packing_of
from core.attention.rope import rotated_dimensions, rotation
from core.config.architecture import GQA, MLA, Dense, Layer, ModelConfig, RMSNorm, Rope
from core.config.mapping import ParallelConfig
from core.layers.place import Place
from core.parallel.groups import Groups, groups_for
from core.parallel.meter import Meter
from tests.core.numbers import draw
from tests.core.shares import Share, check_pieces, close, fill, gradients_of, pieces_of, place_on

HIDDEN = 10
ROPE = Rope(theta=100.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """An attention layer, and the lengths of the packed sequences that go through it."""

    attention: GQA | MLA
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What one rank has: its share, how many tokens every rank holds, and bytes by collective, forward and backward."""

    share: Share
    rows: tuple[int, ...]
    forward: dict[str, int]
    backward: dict[str, int]


def layer_of(attention: GQA | MLA, place: Place) -> nn.Module:
    layers = (Layer(attention=attention, mlp=Dense(ffn=3)),)
    model = ModelConfig(vocab=3, hidden=HIDDEN, max_tokens=64, norm=RMSNorm(eps=1e-6), rope=ROPE, layers=layers)
    if isinstance(attention, GQA):
        module: nn.Module = GroupedQueryAttention(attention, model, place=place)
    else:
        module = MultiHeadLatentAttention(attention, model, place=place)
    fill(module)
    return module


def packing_on(job: Job, groups: Groups | None) -> Packing:
    bounds = torch.tensor([0, *accumulate(job.lengths)])
    return packing_of(bounds, job.tokens, torch.device("cpu"), groups)


def through(module: nn.Module, job: Job, packing: Packing) -> tuple[Tensor, Tensor]:
    """This rank's tokens and the layer's output on them."""
    x = draw(0, job.tokens, HIDDEN)[packing.mine_T].requires_grad_()
    turn = rotation(ROPE, rotated_dimensions(job.attention), packing.positions_T)
    return x, module(x, packing, turn)


def backward(out: Tensor, job: Job, packing: Packing) -> None:
    (out * draw(1, job.tokens, HIDDEN)[packing.mine_T]).sum().backward()


def run(rank: int, world: int, jobs: Sequence[Job]) -> list[Spread]:
    """Every job with all ranks in tp."""
    meter = Meter()
    groups = groups_for(ParallelConfig(tp=world), meter=meter)
    found = []
    for job in jobs:
        module, packing = layer_of(job.attention, place_on(groups)), packing_on(job, groups)
        sent = []
        meter.sent_bytes.clear()
        x, out = through(module, job, packing)
        sent.append({f"{axis} {name}": n for (axis, name), n in meter.sent_bytes.items()})
        meter.sent_bytes.clear()
        backward(out, job, packing)
        sent.append({f"{axis} {name}": n for (axis, name), n in meter.sent_bytes.items()})
        assert x.grad is not None
        share = Share(out=out, input_gradient=x.grad, pieces=pieces_of(module, groups), extra={})
        found.append(Spread(share=share, rows=packing.rows, forward=sent[0], backward=sent[1]))
    return found


def check(found: Sequence[Spread], job: Job) -> None:
    """All ranks together equal one rank: outputs, gradients of the input and of every weight."""
    module, packing = layer_of(job.attention, place_on()), packing_on(job, None)
    x, out = through(module, job, packing)
    backward(out, job, packing)
    assert x.grad is not None
    rows = found[0].rows
    assert sum(rows) == job.tokens and max(rows) - min(rows) <= 1
    for spread, y, gradient in zip(found, out.detach().split(rows), x.grad.split(rows), strict=True):
        assert spread.rows == rows
        close(spread.share.out, y, f"{job}: output", size=largest(out.detach()))
        close(spread.share.input_gradient, gradient, f"{job}: input gradient", size=largest(x.grad))
    check_pieces([spread.share.pieces for spread in found], gradients_of(module))


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check_bytes(found: Sequence[Spread], gathered: int) -> None:
    """Forward gathers `gathered` numbers of each token and scatters sums of HIDDEN; backward does the transpose of both."""
    for rank, spread in enumerate(found):
        mine, others = spread.rows[rank], sum(spread.rows) - spread.rows[rank]
        copies, size = len(spread.rows) - 1, torch.float64.itemsize
        assert spread.forward == {
            "tp all_gather": mine * gathered * size * copies,
            "tp reduce_scatter": others * HIDDEN * size,
        }
        assert spread.backward == {
            "tp all_gather": mine * HIDDEN * size * copies,
            "tp reduce_scatter": others * gathered * size,
        }
