"""Latent attention against the published DeepSeek-V3 attention, values and gradients, packed, with and without YaRN, and over tp."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from core.attention.mla import MultiHeadLatentAttention
from core.attention.packing import packing_of
from core.attention.rope import rotated_dimensions, rotation
from core.config.architecture import MLA, Dense, Layer, ModelConfig, RMSNorm, Rope, Yarn
from core.state.inventory import declared
from tests.core.attention import spread
from tests.core.layers.places import place
from tests.core.numbers import draw, near
from tests.ranks import Ranks

HIDDEN = 12
PLAIN, STRETCHED = Rope(theta=1e4), Yarn(theta=1e4, factor=40.0, trained_tokens=64, mscale=1.0, mscale_all_dim=1.0)


def mla(query_rank: int | None, value_dim: int = 5) -> MLA:
    return MLA(
        heads=3, query_rank=query_rank, latent_rank=7, nope_dim=6, rope_dim=4, value_dim=value_dim,
        latent_norm=RMSNorm(eps=1e-6),
    )  # fmt: skip


def build(config: MLA, rope: Rope | Yarn, dtype: torch.dtype = torch.float32) -> MultiHeadLatentAttention:
    layer = Layer(attention=config, mlp=Dense(ffn=3))
    model = ModelConfig(vocab=3, hidden=HIDDEN, max_tokens=64, norm=RMSNorm(eps=1e-6), rope=rope, layers=(layer,))
    attention = MultiHeadLatentAttention(config, model, place=place(dtype))
    for i, weight in enumerate(attention.parameters()):
        weight.data.copy_(draw(50 + i, *weight.shape) * 0.5)
    return attention


def pairs_of(ours: MultiHeadLatentAttention) -> dict[str, nn.Module]:
    """Their name of each of our layers."""
    names = {
        "kv_a_proj_with_mqa": ours.latent_down, "kv_a_layernorm": ours.latent_norm, "kv_b_proj": ours.latent_up,
        "o_proj": ours.output,
    }  # fmt: skip
    if ours.config.query_rank is None:
        return {"q_proj": ours.query, **names}
    return {"q_a_proj": ours.query_down, "q_a_layernorm": ours.query_norm, "q_b_proj": ours.query_up, **names}


def theirs_of(ours: MultiHeadLatentAttention, rope: Rope | Yarn) -> nn.Module:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    c = ours.config
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": rope.theta}
    if isinstance(rope, Yarn):
        parameters = {
            "rope_type": "yarn", "rope_theta": rope.theta, "factor": rope.factor, "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim, "original_max_position_embeddings": rope.trained_tokens,
        }  # fmt: skip
    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=c.heads, num_key_value_heads=c.heads, q_lora_rank=c.query_rank,
        kv_lora_rank=c.latent_rank, qk_nope_head_dim=c.nope_dim, qk_rope_head_dim=c.rope_dim, v_head_dim=c.value_dim,
        max_position_embeddings=2560, rope_parameters=parameters, attn_implementation="eager",
    )  # fmt: skip
    module = DeepseekV3Attention(config, 0)
    for name, layer in pairs_of(ours).items():
        module.get_submodule(name).weight.data.copy_(layer.get_parameter("weight"))
    return module


@pytest.mark.parametrize("query_rank", [5, None])
@pytest.mark.parametrize("rope", [PLAIN, STRETCHED])
@pytest.mark.parametrize("lengths", [(7,), (1, 4, 2), (3, 3)])
def test_values_and_gradients_equal_the_published_attention(
    query_rank: int | None, rope: Rope | Yarn, lengths: tuple[int, ...]
) -> None:
    ours = build(mla(query_rank), rope)
    theirs = theirs_of(ours, rope)
    x, grad = (draw(i, sum(lengths), HIDDEN, dtype=torch.float32) for i in range(2))
    packing = packing_of(torch.tensor([0, *torch.tensor(lengths).cumsum(0)]), sum(lengths), torch.device("cpu"))
    out = ours(x, packing, rotation(rope, 4, packing.positions_T))
    out.backward(grad)
    expected = torch.cat([_alone(theirs, piece, rope) for piece in x.split(list(lengths))])
    expected.backward(grad)
    near(out, expected, units=64)
    for name, layer in pairs_of(ours).items():
        near(layer.get_parameter("weight").grad, theirs.get_submodule(name).weight.grad, units=128)


def _alone(module: nn.Module, x: Tensor, rope: Rope | Yarn) -> Tensor:
    turn = rotation(rope, 4, torch.arange(len(x)))
    embeddings = tuple(torch.cat([v, v], -1)[None] for v in (turn.cos, turn.sin))
    mask = torch.full((len(x), len(x)), torch.finfo(torch.float32).min).triu(1)[None, None]
    return module(x[None], embeddings, mask)[0][0]


@pytest.mark.parametrize("value_dim", [5, 10, 13])
def test_values_may_be_narrower_or_wider_than_queries(value_dim: int) -> None:
    ours = build(mla(5, value_dim), PLAIN, torch.float64)
    packing = packing_of(torch.tensor([0, 2, 5]), 5, torch.device("cpu"))
    out = ours(draw(0, 5, HIDDEN), packing, rotation(PLAIN, 4, packing.positions_T))
    alone = packing_of(None, 3, torch.device("cpu"))
    near(out[2:], ours(draw(0, 5, HIDDEN)[2:], alone, rotation(PLAIN, 4, alone.positions_T)), units=64)


@pytest.mark.parametrize("query_rank", [5, None])
def test_no_tokens_pass_through_with_gradients(query_rank: int | None) -> None:
    ours, packing = build(mla(query_rank), PLAIN), packing_of(None, 0, torch.device("cpu"))
    out = ours(torch.zeros(0, HIDDEN), packing, rotation(PLAIN, 4, packing.positions_T))
    out.sum().backward()
    assert out.shape == (0, HIDDEN)
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())


def test_names_and_shapes_are_canonical() -> None:
    shared = {
        "latent_down.weight": (11, HIDDEN), "latent_norm.weight": (7,), "latent_up.weight": (33, 7),
        "output.weight": (HIDDEN, 15),
    }  # fmt: skip
    compressed = {"query_down.weight": (5, HIDDEN), "query_norm.weight": (5,), "query_up.weight": (30, 5)}
    for query_rank, queries in ((5, compressed), (None, {"query.weight": (30, HIDDEN)})):
        found = declared(build(mla(query_rank), PLAIN))
        assert {name: entry.spec.shape for name, entry in found.items()} == {**queries, **shared}
    assert rotated_dimensions(mla(None)) == 4


def over(heads: int, query_rank: int | None) -> MLA:
    return replace(mla(query_rank), heads=heads, latent_rank=3, nope_dim=5, rope_dim=2, value_dim=4)


SPREAD = {
    1: [spread.Job(attention=over(3, 5), lengths=(3, 4))],
    2: [
        spread.Job(attention=over(heads, query_rank), lengths=lengths)
        for heads, query_rank, lengths in ((2, 5, (7,)), (4, None, (1, 4, 2)), (2, None, (1,)), (2, 5, ()))
    ],
    3: [spread.Job(attention=over(3, query_rank), lengths=(5, 1, 5)) for query_rank in (5, None)],
    4: [spread.Job(attention=over(4, 5), lengths=(3, 7, 1)), spread.Job(attention=over(8, None), lengths=(4, 4))],
}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_heads_and_tokens_on_several_ranks_make_what_one_rank_makes(ranks: Ranks, world: int) -> None:
    found = ranks.run(spread.run, world, SPREAD[world])
    for i, job in enumerate(SPREAD[world]):
        spread.check([rank[i] for rank in found], job)


def test_up_projections_and_output_are_cut_between_heads_and_the_rest_is_on_every_rank(ranks: Ranks) -> None:
    held = [rank[0].share.pieces for rank in ranks.run(spread.run, 4, [SPREAD[4][0]])]
    rows = {"query_up.weight": 7, "latent_up.weight": 9}
    for name in ("query_down.weight", "query_norm.weight", "latent_down.weight", "latent_norm.weight"):
        assert [pieces[name].holders for pieces in held] == [(0, 1, 2, 3)] * 4, name
    for name, each in rows.items():
        assert [pieces[name].box.offset[0] for pieces in held] == [0, each, 2 * each, 3 * each], name
        assert [pieces[name].holders for pieces in held] == [(0,), (1,), (2,), (3,)], name
    assert [pieces["output.weight"].box.offset for pieces in held] == [(0, 0), (0, 4), (0, 8), (0, 12)]


def test_only_latents_are_gathered(ranks: Ranks) -> None:
    """Of each token query_rank + latent_rank + rope_dim numbers; the hidden states only where queries rise from them."""
    jobs = [SPREAD[4][0], SPREAD[4][1]]
    found = ranks.run(spread.run, 4, jobs)
    for i, queries in enumerate((5, spread.HIDDEN)):
        spread.check_bytes([rank[i] for rank in found], queries + 3 + 2)
