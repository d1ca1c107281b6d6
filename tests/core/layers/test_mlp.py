"""The dense MLP against the published models', against numpy, and cut over tp against itself on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from core.config.mapping import ParallelConfig
from core.layers.mlp import MLP
from core.parallel.groups import groups_for
from core.parallel.meter import Meter
from core.state.spec import Normal
from tests.core.layers.places import place
from tests.core.numbers import draw, near
from tests.core.shares import Share, check_pieces, close, fill, gradients_of, pieces_of, place_on
from tests.ranks import Ranks


def build(hidden: int, ffn: int, dtype: torch.dtype) -> MLP:
    mlp = MLP(hidden, ffn, init_std=0.1, place=place(dtype))
    mlp.gate_up.data.copy_(draw(0, 2, ffn, hidden))
    mlp.down.data.copy_(draw(1, hidden, ffn))
    return mlp


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(("hidden", "ffn"), [(5, 3), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gate_comes_first(tokens: int, hidden: int, ffn: int, dtype: torch.dtype) -> None:
    mlp, x = build(hidden, ffn, dtype), draw(2, tokens, hidden, dtype=dtype)
    wide = x.double().numpy()
    gate, up = (wide @ w.T for w in mlp.gate_up.detach().double().numpy())
    truth = gate / (1 + np.exp(-gate)) * up @ mlp.down.detach().double().numpy().T
    near(mlp(x, (tokens,)).detach(), torch.from_numpy(truth), units=4 if dtype == torch.bfloat16 else 32)


def test_values_and_gradients_equal_the_published_models() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

    mlp, theirs = build(5, 7, torch.float32), DeepseekV3MLP(DeepseekV3Config(hidden_size=5), intermediate_size=7)
    theirs.gate_proj.weight.data.copy_(mlp.gate_up[0])
    theirs.up_proj.weight.data.copy_(mlp.gate_up[1])
    theirs.down_proj.weight.data.copy_(mlp.down)
    x, y = (draw(2, 11, 5, dtype=torch.float32).requires_grad_() for _ in range(2))
    grad = draw(3, 11, 5, dtype=torch.float32)
    mlp(x, (11,)).backward(grad)
    theirs(y).backward(grad)
    assert mlp.gate_up.grad is not None
    near(mlp.gate_up.grad, torch.stack([theirs.gate_proj.weight.grad, theirs.up_proj.weight.grad]), units=16)
    near(mlp.down.grad, theirs.down_proj.weight.grad, units=16)
    near(x.grad, y.grad, units=16)


def test_both_weights_are_declared() -> None:
    specs = build(5, 7, torch.float32).specs()
    assert {name: spec.shape for name, spec in specs.items()} == {"gate_up": (2, 7, 5), "down": (5, 7)}
    assert all(spec.init == Normal(std=0.1) and spec.decay for spec in specs.values())


@dataclass(frozen=True, kw_only=True)
class Job:
    """An MLP, and how many tokens each rank of tp has."""

    hidden: int
    ffn: int
    rows: tuple[int, ...]


# 7 tokens over two ranks (C9), ranks without tokens, none at all; ffn that does not divide, or is less than the ranks.
JOBS = {
    1: [Job(hidden=5, ffn=7, rows=(7,))],
    2: [Job(hidden=5, ffn=f, rows=rows) for f in (7, 8, 1) for rows in ((4, 3), (0, 5), (3, 3), (0, 0))],
    3: [Job(hidden=4, ffn=f, rows=rows) for f in (7, 2) for rows in ((1, 0, 0), (2, 3, 2), (0, 4, 1))],
    4: [Job(hidden=5, ffn=f, rows=rows) for f in (7, 3) for rows in ((1, 2, 2, 2), (0, 0, 6, 0))],
}


def run_cut(rank: int, world: int, jobs: Sequence[Job]) -> list[tuple[Share, list[dict[str, int]]]]:
    """Each MLP on this rank's tokens, and the bytes that were sent in forward and in backward."""
    meter = Meter()
    groups = groups_for(ParallelConfig(tp=world), meter=meter)
    found = []
    for job in jobs:
        mlp = MLP(job.hidden, job.ffn, init_std=1.0, place=place_on(groups))
        fill(mlp)
        tokens = sum(job.rows)
        x = draw(0, tokens, job.hidden).split(job.rows)[rank].clone().requires_grad_()
        sent = []
        meter.sent_bytes.clear()
        out = mlp(x, job.rows)
        sent.append({f"{axis} {name}": n for (axis, name), n in meter.sent_bytes.items()})
        meter.sent_bytes.clear()
        (out * draw(1, tokens, job.hidden).split(job.rows)[rank]).sum().backward()
        sent.append({f"{axis} {name}": n for (axis, name), n in meter.sent_bytes.items()})
        assert x.grad is not None
        found.append((Share(out=out, input_gradient=x.grad, pieces=pieces_of(mlp, groups), extra={}), sent))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_c9_ranks_of_tp_with_any_numbers_of_tokens_make_what_one_rank_makes(ranks: Ranks, world: int) -> None:
    found = ranks.run(run_cut, world, JOBS[world])
    for i, job in enumerate(JOBS[world]):
        mlp = MLP(job.hidden, job.ffn, init_std=1.0, place=place_on())
        fill(mlp)
        tokens = sum(job.rows)
        x = draw(0, tokens, job.hidden).requires_grad_()
        out = mlp(x, (tokens,))
        (out * draw(1, tokens, job.hidden)).sum().backward()
        assert x.grad is not None
        shares = [rank[i][0] for rank in found]
        for share, y, gradient in zip(shares, out.split(job.rows), x.grad.split(job.rows), strict=True):
            close(share.out, y.detach(), f"{job}: output")
            close(share.input_gradient, gradient, f"{job}: input gradient")
        check_pieces([share.pieces for share in shares], gradients_of(mlp))


def test_it_sends_its_tokens_once_and_the_sums_of_the_others_tokens_once_each_way(ranks: Ranks) -> None:
    jobs = [Job(hidden=5, ffn=7, rows=(2, 2, 2)), Job(hidden=5, ffn=7, rows=(4, 0, 3))]
    for rank, of_jobs in enumerate(ranks.run(run_cut, 3, jobs)):
        for job, (_, (forward, backward)) in zip(jobs, of_jobs, strict=True):
            mine, all_of_them = job.rows[rank], sum(job.rows)
            gather, scatter = 2 * mine * job.hidden * 8, (all_of_them - mine) * job.hidden * 8
            assert forward == backward == {"tp all_gather": gather, "tp reduce_scatter": scatter}, (job, rank)
