"""Parameter counts: the declaration's arithmetic, the real modules on the meta device, and the published numbers agree."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from core.config.architecture import (
    GQA,
    Activation,
    Dense,
    GeGLU,
    Layer,
    ModelConfig,
    MoE,
    RMSNorm,
    Rope,
    Router,
    SharedExperts,
    SquaredReLU,
)
from core.config.counts import count_parameters
from core.config.family import Family, Size, all_families, find_family
from core.parallel.groups import one_rank
from core.state.inventory import inventory
from core.transformer.stage import build_model

# main, active with embedding and head, prediction modules: arithmetic over the tensors of the released files.
PUBLISHED = {
    "deepseek-ai/DeepSeek-V3": (671_026_419_200, 37_552_297_472, 11_610_068_224),
    "moonshotai/Moonlight-16B-A3B": (15_960_110_208, 2_914_776_192, 0),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704, 0),
    "Qwen/Qwen3-235B-A22B": (235_093_634_560, 22_190_763_520, 0),
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, 12_879_925_248, 0),
    "mistralai/Mixtral-8x22B-v0.1": (140_620_634_112, 39_152_031_744, 0),
}
SIZES = [pytest.param(f, s, id=f"{f.name}-{s.name}") for f in all_families() for s in f.sizes]


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_counts_are_those_of_the_real_modules_and_of_the_published_files(family: Family, size: Size) -> None:
    counts = count_parameters(size.model)
    tensors = inventory(build_model(size.model, groups=one_rank(), device="meta"), one_rank())
    sizes = {name: prod(tensor.shape) for name, tensor in tensors.items()}
    ahead = sum(count for name, count in sizes.items() if name.startswith("mtp."))
    assert (counts.predict_ahead, counts.main) == (ahead, sum(sizes.values()) - ahead)
    if size.published:
        assert (counts.main, counts.active, counts.predict_ahead) == PUBLISHED[size.published]


@pytest.mark.parametrize(
    ("activation", "of_expert"),
    [
        # gate, up and down of 5 neurons that see 7 features, and their biases
        (GeGLU(tanh=True), 3 * 5 * 7 + 2 * 5 + 7),
        (SquaredReLU(), 2 * 5 * 7 + 5 + 7),
    ],
)
@pytest.mark.parametrize("latent", [None, 7])
def test_experts_of_any_activation_and_with_biases_are_counted_as_the_real_modules_have_them(
    activation: Activation, of_expert: int, latent: int | None
) -> None:
    hidden = 7 if latent is None else 12
    attention = GQA(heads=2, kv_heads=1, head_dim=4)
    router = Router(score="softmax", normalise=True)
    moe = MoE(
        experts=3,
        top_k=2,
        expert_ffn=5,
        router=router,
        latent=latent,
        activation=activation,
        bias=True,
        shared=SharedExperts(count=2),
    )
    model = ModelConfig(
        vocab=257,
        hidden=hidden,
        max_tokens=8,
        norm=RMSNorm(eps=1e-6),
        rope=Rope(theta=1e4),
        layers=(
            Layer(attention=attention, mlp=Dense(ffn=11, activation=activation)),
            Layer(attention=attention, mlp=moe),
        ),
    )
    counts = count_parameters(model)
    tensors = inventory(build_model(model, groups=one_rank(), device="meta"), one_rank())
    assert counts.main == sum(prod(tensor.shape) for tensor in tensors.values())
    assert counts.main - counts.active == (3 - 2) * of_expert


def test_every_published_size_is_declared() -> None:
    assert {size.published for family in all_families() for size in family.sizes if size.published} == set(PUBLISHED)


@pytest.mark.parametrize(("family", "size"), [p for p in SIZES if p.values[1].name == "tiny"])
def test_tiny_sizes_suit_two_cores(family: Family, size: Size) -> None:
    assert 10e6 < count_parameters(size.model).total < 15e6
    assert {preset.hardware for preset in family.presets} >= {"cpu", "gpu"}
    assert all(preset.size in {s.name for s in family.sizes} for preset in family.presets)


def test_counts_of_layers_that_no_published_size_has_are_those_of_the_modules() -> None:
    """Latent experts and a gated shared expert: declared arithmetic against the built modules, and by hand."""
    moe = MoE(
        experts=6,
        top_k=2,
        expert_ffn=5,
        router=Router(score="softmax", normalise=True),
        shared=SharedExperts(count=2, gated=True),
        latent=3,
    )
    size = find_family("mixtral").size("tiny").model
    model = replace(
        size, hidden=8, layers=(replace(size.layers[0], attention=GQA(heads=2, kv_heads=1, head_dim=4), mlp=moe),)
    )
    counts = count_parameters(model)
    tensors = inventory(build_model(model, groups=one_rank(), device="meta"), one_rank())
    assert counts.total == sum(prod(tensor.shape) for tensor in tensors.values())
    # router, projections to and from the latent width, shared expert and its gate; then experts of 3 * 3 * 5 numbers
    always = 6 * 8 + 2 * 8 * 3 + 3 * 8 * 10 + 8
    around = 2 * model.vocab * 8 + 8 + 2 * 8 + 2 * 8 * 4 * (2 + 1)
    assert (counts.total, counts.active) == (around + always + 6 * 45, around + always + 2 * 45)
