"""FLOP per token against the published figures of the three models and a count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config.architecture import (
    GQA,
    MLA,
    Dense,
    Layer,
    ModelConfig,
    MoE,
    MultiToken,
    RMSNorm,
    Rope,
    Router,
    SharedExperts,
    SquaredReLU,
)
from core.config.flops import flops_per_token
from models.deepseek_v3.architecture import V3_671B
from models.qwen3.architecture import QWEN3_235B_A22B

NORM = RMSNorm(eps=1e-6)
ROUTER = Router(score="softmax", normalise=True)


def model(layer: Layer, depth: int = 0) -> ModelConfig:
    ahead = MultiToken(depth=depth, loss_weight=0.3) if depth else None
    return ModelConfig(
        vocab=101, hidden=10, max_tokens=64, norm=NORM, rope=Rope(theta=1e4), layers=(layer,), predict_ahead=ahead
    )


@pytest.mark.parametrize(
    ("declared", "tokens", "gigaflop", "within"),
    [
        (V3_671B, 4096, 259.99, 0.005),
        (QWEN3_235B_A22B, 4096, 148.034814, 1e-6),
        (QWEN3_235B_A22B, 131072, 734.700503, 1e-6),
    ],
)
def test_the_accounting_of_published_figures_is_met_to_its_last_digit(
    declared: ModelConfig, tokens: int, gigaflop: float, within: float
) -> None:
    assert flops_per_token(declared, tokens) / 1e9 == pytest.approx(gigaflop, abs=within)


def test_a_dense_model_is_counted_by_hand() -> None:
    layer = Layer(attention=GQA(heads=4, kv_heads=2, head_dim=3, head_norm=NORM), mlp=Dense(ffn=7))
    projections = 10 * 12 + 2 * 10 * 6 + 12 * 10
    matrices = projections + 3 * 10 * 7 + 101 * 10
    assert flops_per_token(model(layer), 0) == 6 * matrices
    # Each token meets half of the 8 tokens with 4 heads, by keys and by values of size 3.
    assert flops_per_token(model(layer), 8) == 6 * (matrices + 4 * (3 + 3) * 4)


def test_mlps_without_a_gate_have_two_matrices_and_biases_are_no_products() -> None:
    attention = GQA(heads=4, kv_heads=2, head_dim=3)
    projections = 10 * 12 + 2 * 10 * 6 + 12 * 10
    dense = Layer(attention=attention, mlp=Dense(ffn=7, activation=SquaredReLU()))
    assert flops_per_token(model(dense), 0) == 6 * (projections + 2 * 10 * 7 + 101 * 10)
    moe = MoE(
        experts=5,
        top_k=2,
        expert_ffn=3,
        router=ROUTER,
        shared=SharedExperts(count=1),
        activation=SquaredReLU(),
        bias=True,
    )
    sparse = Layer(attention=attention, mlp=moe)
    assert flops_per_token(model(sparse), 0) == 6 * (projections + (2 + 1) * 2 * 10 * 3 + 101 * 10)


@pytest.mark.parametrize("query_rank", [5, None])
def test_latent_attention_and_experts_are_counted_by_hand(query_rank: int | None) -> None:
    attention = MLA(
        heads=4, query_rank=query_rank, latent_rank=6, nope_dim=3, rope_dim=2, value_dim=7, latent_norm=NORM
    )
    experts = MoE(experts=16, top_k=3, expert_ffn=8, router=ROUTER, shared=SharedExperts(count=2))
    query = 10 * 5 + 5 * 20 if query_rank else 10 * 20
    latent = 10 * (6 + 2) + 6 * 4 * (3 + 7) + 4 * 7 * 10
    layer = query + latent + (3 + 2) * 3 * 10 * 8 + 4 * (5 + 7) * 9 / 2
    declared = model(Layer(attention=attention, mlp=experts))
    assert flops_per_token(declared, 9) == 6 * (layer + 101 * 10)
    # Two prediction modules: a layer, the projection of both halves and a further use of the head each.
    ahead = replace(declared, predict_ahead=MultiToken(depth=2, loss_weight=0.1))
    assert flops_per_token(ahead, 9) == 6 * (3 * layer + 3 * 101 * 10 + 2 * 2 * 10 * 10)


def test_tied_matrices_and_experts_that_rest_cost_the_same() -> None:
    layer = Layer(
        attention=GQA(heads=1, kv_heads=1, head_dim=2), mlp=MoE(experts=4, top_k=2, expert_ffn=3, router=ROUTER)
    )
    wider = replace(layer, mlp=MoE(experts=400, top_k=2, expert_ffn=3, router=ROUTER))
    assert flops_per_token(model(layer), 4) == flops_per_token(model(wider), 4)
    assert flops_per_token(replace(model(layer), tied_embeddings=True), 4) == flops_per_token(model(layer), 4)
