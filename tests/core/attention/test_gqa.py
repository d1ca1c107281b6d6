"""Grouped-query attention against the published Qwen3 and Mixtral attention, values and gradients, packed, and over tp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from core.attention.gqa import GroupedQueryAttention
from core.attention.packing import packing_of
from core.attention.rope import rotated_dimensions, rotation
from core.config.architecture import GQA, Dense, Layer, ModelConfig, RMSNorm, Rope, Yarn
from core.state.inventory import declared
from tests.core.attention import spread
from tests.core.layers.places import place
from tests.core.numbers import draw, near
from tests.ranks import Ranks

HIDDEN = 12


def model_of(attention: GQA, rope: Rope | Yarn) -> ModelConfig:
    layer = Layer(attention=attention, mlp=Dense(ffn=3))
    return ModelConfig(vocab=3, hidden=HIDDEN, max_tokens=64, norm=RMSNorm(eps=1e-6), rope=rope, layers=(layer,))


def build(config: GQA, rope: Rope | Yarn, dtype: torch.dtype = torch.float32) -> GroupedQueryAttention:
    attention = GroupedQueryAttention(config, model_of(config, rope), place=place(dtype))
    for i, weight in enumerate(attention.parameters()):
        weight.data.copy_(draw(50 + i, *weight.shape) * 0.4)
    return attention


def theirs_of(ours: GroupedQueryAttention, config: GQA) -> nn.Module:
    """The published module with our weights: Qwen3's with norms, Mixtral's without."""
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralAttention
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    sizes = {
        "hidden_size": HIDDEN, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, "attn_implementation": "eager",
    }  # fmt: skip
    module = (
        Qwen3MoeAttention(Qwen3MoeConfig(**sizes), 0)
        if config.head_norm
        else MixtralAttention(MixtralConfig(**sizes), 0)
    )
    pairs = {"q_proj": ours.query, "k_proj": ours.key, "v_proj": ours.value, "o_proj": ours.output}
    if ours.query_norm is not None and ours.key_norm is not None:
        pairs |= {"q_norm": ours.query_norm, "k_norm": ours.key_norm}
    for name, layer in pairs.items():
        module.get_submodule(name).weight.data.copy_(layer.weight)
    return module


@pytest.mark.parametrize("head_norm", [RMSNorm(eps=1e-6), None])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 6), (3, 3, 2), (6, 1, 8)])
@pytest.mark.parametrize("lengths", [(7,), (1, 4, 2)])
def test_values_and_gradients_equal_the_published_attention(
    head_norm: RMSNorm | None, heads: int, kv_heads: int, head_dim: int, lengths: tuple[int, ...]
) -> None:
    config = GQA(heads=heads, kv_heads=kv_heads, head_dim=head_dim, head_norm=head_norm)
    rope = Rope(theta=1e4)
    ours = build(config, rope)
    theirs = theirs_of(ours, config)
    x = draw(0, sum(lengths), HIDDEN, dtype=torch.float32)
    grad = draw(1, sum(lengths), HIDDEN, dtype=torch.float32)
    packing = packing_of(torch.tensor([0, *torch.tensor(lengths).cumsum(0)]), sum(lengths), torch.device("cpu"))
    out = ours(x, packing, rotation(rope, config.head_dim, packing.positions_T))
    out.backward(grad)
    expected = torch.cat([_alone(theirs, piece, rope, head_dim) for piece in x.split(list(lengths))])
    expected.backward(grad)
    near(out, expected, units=32)
    near(ours.query.weight.grad, theirs.q_proj.weight.grad, units=64)
    near(ours.key.weight.grad, theirs.k_proj.weight.grad, units=64)
    near(ours.value.weight.grad, theirs.v_proj.weight.grad, units=64)
    near(ours.output.weight.grad, theirs.o_proj.weight.grad, units=64)
    if ours.query_norm is not None and ours.key_norm is not None:
        near(ours.query_norm.weight.grad, theirs.q_norm.weight.grad, units=64)
        near(ours.key_norm.weight.grad, theirs.k_norm.weight.grad, units=64)


def _alone(module: nn.Module, x: Tensor, rope: Rope, head_dim: int) -> Tensor:
    turn = rotation(rope, head_dim, torch.arange(len(x)))
    embeddings = tuple(torch.cat([v, v], -1)[None] for v in (turn.cos, turn.sin))
    mask = torch.full((len(x), len(x)), torch.finfo(torch.float32).min).triu(1)[None, None]
    return module(x[None], embeddings, mask)[0][0]


def test_yarn_changes_the_softmax_scale() -> None:
    config = GQA(heads=2, kv_heads=1, head_dim=4)
    plain, stretched = (
        build(config, r).scale
        for r in (Rope(theta=1e4), Yarn(theta=1e4, factor=4.0, trained_tokens=8, mscale_all_dim=1.0))
    )
    assert plain == 0.5 and stretched == pytest.approx(0.5 * 1.1386294361**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_tokens_pass_through_with_gradients(dtype: torch.dtype) -> None:
    config = GQA(heads=4, kv_heads=2, head_dim=6, head_norm=RMSNorm(eps=1e-6))
    ours = build(config, Rope(theta=1e4), dtype)
    packing = packing_of(None, 0, torch.device("cpu"))
    out = ours(torch.zeros(0, HIDDEN, dtype=dtype), packing, rotation(Rope(theta=1e4), 6, packing.positions_T))
    out.sum().backward()
    assert out.shape == (0, HIDDEN) and out.dtype == dtype
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())


def test_names_and_shapes_are_canonical() -> None:
    config = GQA(heads=4, kv_heads=2, head_dim=6, head_norm=RMSNorm(eps=1e-6))
    assert {name: entry.spec.shape for name, entry in declared(build(config, Rope(theta=1e4))).items()} == {
        "query.weight": (24, HIDDEN), "key.weight": (12, HIDDEN), "value.weight": (12, HIDDEN),
        "output.weight": (HIDDEN, 24), "query_norm.weight": (6,), "key_norm.weight": (6,),
    }  # fmt: skip
    without = build(GQA(heads=4, kv_heads=2, head_dim=6), Rope(theta=1e4))
    assert set(declared(without)) == {f"{n}.weight" for n in ("query", "key", "value", "output")}
    assert rotated_dimensions(config) == 6


def heads_over(heads: int, kv_heads: int, norm: bool = False) -> GQA:
    return GQA(heads=heads, kv_heads=kv_heads, head_dim=4, head_norm=RMSNorm(eps=1e-6) if norm else None)


# As many key/value heads as ranks, more, fewer, and one for all; sequences of odd lengths, one token, none.
SPREAD = {
    1: [spread.Job(attention=heads_over(4, 2, norm=True), lengths=(3, 4))],
    2: [
        spread.Job(attention=heads_over(4, kv, norm), lengths=lengths)
        for kv, norm, lengths in ((4, True, (7,)), (2, False, (1, 4, 2)), (1, True, (1,)), (1, False, ()))
    ],
    3: [spread.Job(attention=heads_over(3, kv, norm=True), lengths=(5, 1, 5)) for kv in (3, 1)],
    4: [
        spread.Job(attention=heads_over(heads, kv, norm), lengths=lengths)
        for heads, kv, norm, lengths in (
            (4, 2, True, (3, 7, 1)), (8, 2, False, (2,)), (4, 1, True, (6, 5)), (8, 8, False, (4, 4)),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_heads_and_tokens_on_several_ranks_make_what_one_rank_makes(ranks: Ranks, world: int) -> None:
    found = ranks.run(spread.run, world, SPREAD[world])
    for i, job in enumerate(SPREAD[world]):
        spread.check([rank[i] for rank in found], job)


def test_key_and_value_heads_lie_on_as_many_neighbours_as_share_them(ranks: Ranks) -> None:
    found = ranks.run(spread.run, 4, [SPREAD[4][0]])
    held = [rank[0].share.pieces for rank in found]
    for name in ("key.weight", "value.weight"):
        assert [pieces[name].holders for pieces in held] == [(0, 1), (0, 1), (2, 3), (2, 3)]
        assert [pieces[name].box.offset for pieces in held] == [(0, 0), (0, 0), (4, 0), (4, 0)]
    assert [pieces["query.weight"].box.offset for pieces in held] == [(0, 0), (4, 0), (8, 0), (12, 0)]
    assert [pieces["output.weight"].box.offset for pieces in held] == [(0, 0), (0, 4), (0, 8), (0, 12)]
    for name in ("query_norm.weight", "key_norm.weight"):
        assert [pieces[name].holders for pieces in held] == [(0, 1, 2, 3)] * 4


def test_hidden_states_are_gathered_once_and_the_sums_scattered_once_each_way(ranks: Ranks) -> None:
    jobs = [SPREAD[4][0], SPREAD[4][3]]
    found = ranks.run(spread.run, 4, jobs)
    for i in range(len(jobs)):
        spread.check_bytes([rank[i] for rank in found], spread.HIDDEN)
