"""What a layer keeps for its backward, to the byte: every name drops what it promises, and nothing else appears instead.

Numbers follow from shapes, on a CPU in float32: tokens T, hidden H, latent sizes q and l, heads A of n + r dimensions (values v),
widths F of a dense MLP, f of an expert and of the shared one, rows R = T * top_k.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from core.config.architecture import GQA, MLA, Dense, Layer, ModelConfig, MoE, SharedExperts
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig, RecomputeName
from core.kernels.grouped_matmul import expert_mlp
from core.parallel.groups import groups_for, one_rank
from core.state.inventory import initialise
from core.transformer.block import Block
from core.transformer.context import BalanceInputs
from core.transformer.stage import build_model
from tests.core.memory.alive import Made
from tests.core.numbers import draw
from tests.core.tiny import NORM, batch_of, deepseek
from tests.ranks import Ranks

T, H = 24, 20
A, Q, L, N, R, V = 4, 7, 9, 8, 4, 6
D = N + R
F, f, K = 26, 10, 2
DENSE, SPARSE, GROUPED = 0, 1, 2
G, GD = 1, 8
GA = 2
BYTES = 4


def model() -> ModelConfig:
    """A dense and an MoE layer as DeepSeek-V3 has them, and a dense one with grouped queries."""
    base = deepseek()
    moe = base.layers[1].mlp
    assert isinstance(moe, MoE)
    moe = replace(moe, experts=6, top_k=K, expert_ffn=f, shared=SharedExperts(count=1))
    moe = replace(moe, router=replace(moe.router, groups=None))
    latent = MLA(heads=A, query_rank=Q, latent_rank=L, nope_dim=N, rope_dim=R, value_dim=V, latent_norm=NORM)
    grouped = Layer(attention=GQA(heads=GA, kv_heads=G, head_dim=GD), mlp=Dense(ffn=F))
    layers = (Layer(attention=latent, mlp=Dense(ffn=F)), Layer(attention=latent, mlp=moe), grouped)
    return replace(base, hidden=H, layers=layers, predict_ahead=None)


def kept(kind: int, names: tuple[RecomputeName, ...], parallel: ParallelConfig | None = None) -> int:
    """Bytes that a layer keeps besides its input and output; under tp what one rank does."""
    groups = one_rank() if parallel is None else groups_for(parallel)
    memory = MemoryConfig(recompute=names)
    stage = build_model(model(), groups=groups, parallel=parallel, memory=memory)
    initialise(stage, 7)
    block = stage.layers[str(kind)]
    assert isinstance(block, Block)
    batch = batch_of(list(range(T)), list(range(T)), [T // 2] * 2, groups)
    packing = batch.packing
    balance = BalanceInputs(totals=stage.totals_of(batch), seen={}, sequence=groups.sequence, tokens=groups.tokens)
    context = stage._context(batch, balance)
    hidden = draw(3, packing.mine_T.numel(), H, dtype=torch.float32).requires_grad_()
    turns = [x for turn in context.turns.values() for x in (turn.cos, turn.sin)]
    there = (packing.index_T, packing.mine_T, packing.sequence_T, packing.positions_T)
    with Made([*stage.parameters(), *stage.buffers(), hidden, *turns, *there]) as made:
        out, routing = block(hidden, context)
        # As the stage does: the losses stay, the routing goes.
        losses = list(routing.balance.by_name.values()) if routing is not None and routing.balance is not None else []
        del routing
        if parallel is None:
            return made.alive(out, *losses)
        # A thread of gloo lets go of what it has sent some moments after the call has returned.
        readings = []
        for _ in range(10):
            time.sleep(0.02)
            readings.append(made.alive(out, *losses))
        return min(readings)


@cache
def plain(kind: int) -> int:
    return kept(kind, ())


NORMS = T * (2 * H + Q + L)
UP = T * 3 * A * D
# Keys and values as the kernel wants them, its result and a number for each of its rows; left are values and keys as they rose, and the key that heads share.
CORE = T * (A * (3 * D + 1) - A * (N + V) - R)
# The first product twice over, because torch's form of SwiGLU keeps its sigmoid linear unit, and the activation.
DENSE_MLP, SHARED = T * 4 * F, T * 4 * f


def test_what_a_layer_with_latents_keeps_is_known_to_the_byte() -> None:
    """Both norms' outputs and one number a token, the latents before and behind theirs, what the attention keeps, its result
    once more as the output product wants it, the residual stream in the middle, and the MLP."""
    latents = Q + 1 + Q + (L + R) + 1 + L
    attention = 3 * A * D + (A * D + A) + A * V
    assert plain(DENSE) == BYTES * T * (1 + H + latents + attention + H + 1 + H + 4 * F)


@pytest.mark.parametrize(
    ("kind", "names", "dropped"),
    [
        (DENSE, ("layernorm",), NORMS),
        (SPARSE, ("layernorm",), NORMS),
        (DENSE, ("mla_up_proj",), UP),
        (SPARSE, ("mla_up_proj",), UP),
        (DENSE, ("core_attn",), CORE),
        (DENSE, ("mlp",), DENSE_MLP),
        (SPARSE, ("mlp",), 0),
        (SPARSE, ("shared_experts",), SHARED),
        (DENSE, ("shared_experts", "moe", "moe_act"), 0),
        (SPARSE, ("moe_act",), 0),
        # Together: each its own. The attention made again needs nothing but the latents where those make its operands.
        (DENSE, ("layernorm", "mla_up_proj", "mlp"), NORMS + UP + DENSE_MLP),
        (SPARSE, ("layernorm", "mla_up_proj", "shared_experts"), NORMS + UP + SHARED),
        (DENSE, ("core_attn", "mla_up_proj"), UP + T * A * (D + 1)),
        # Keys and values of a head each for its queries, result and its numbers; left are those of the key heads.
        (GROUPED, ("core_attn",), T * (2 * GA * GD + GA - 2 * G * GD)),
        (GROUPED, ("layernorm",), T * 2 * H),
        (GROUPED, ("mla_up_proj",), 0),
    ],
)
def test_a_name_drops_what_it_promises_to_the_byte(kind: int, names: tuple[RecomputeName, ...], dropped: int) -> None:
    assert plain(kind) - kept(kind, names) == BYTES * dropped


@pytest.mark.parametrize("kind", [DENSE, GROUPED])
def test_full_keeps_the_input_of_a_layer_alone(kind: int) -> None:
    assert kept(kind, ("full",)) == 0


def test_of_experts_made_again_stays_where_their_rows_go() -> None:
    """Eight bytes a row say which token it belongs to; and with the norm's output, which is the input, what the attention keeps."""
    rows = 8 * T * K
    assert kept(SPARSE, ("full",)) == rows
    attention = plain(DENSE) - BYTES * DENSE_MLP
    assert kept(SPARSE, ("moe",)) == attention + rows
    assert kept(SPARSE, ("moe", "layernorm")) == attention + rows - BYTES * NORMS
    assert kept(SPARSE, ("moe", "moe_act", "shared_experts")) == attention + rows


@pytest.mark.parametrize("backend", ["fused_loop", "grouped_mm", "triton"])
def test_experts_never_keep_their_activation_nor_their_output(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """So memory.recompute=moe_act holds of itself: kept are the rows, which were there before, and the first product."""
    monkeypatch.setenv("ZOO_EXPERTS", backend)
    counts, hidden, ffn = (5, 0, 3), 16, 8
    rows = draw(1, 8, hidden, dtype=torch.float32).requires_grad_()
    weights = draw(2, 8, dtype=torch.float32).requires_grad_()
    gate_up = draw(3, 3, 2, ffn, hidden, dtype=torch.float32).requires_grad_()
    down = draw(4, 3, hidden, ffn, dtype=torch.float32).requires_grad_()
    with Made([rows, weights, gate_up, down]) as made:
        out = expert_mlp(rows, weights, gate_up, down, counts)
        gc.collect()  # Triton's interpreter holds what it was called with in a circle
        places = 0 if backend == "fused_loop" else 3 * 4  # where every expert's rows end, int32
        assert made.alive(out) == BYTES * 8 * 2 * ffn + places


def over_two(rank: int, world: int, kind: int, names: tuple[RecomputeName, ...]) -> tuple[int, int]:
    parallel = ParallelConfig(tp=world)
    return kept(kind, (), parallel), kept(kind, names, parallel)


@pytest.mark.parametrize(
    ("kind", "dropped"),
    [
        # Both norms' outputs of my tokens lie behind what is gathered, which nobody would keep either.
        (GROUPED, 2 * T * H),
        # The attention's norm is read by my own tokens' products; the latents behind their norms are gathered, with the key's part.
        (DENSE, T // 2 * H + T * (Q + L + R) + T * H),
    ],
)
def test_under_tp_what_is_gathered_of_a_norms_output_is_not_kept(ranks: Ranks, kind: int, dropped: int) -> None:
    for before, after in ranks.run(over_two, 2, kind, ("layernorm",)):
        assert before - after == BYTES * dropped
