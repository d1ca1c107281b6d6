"""Two models, field by field."""

from __future__ import annotations

from dataclasses import replace

from core.config.architecture import Layer, ModelConfig, MoE, Rope
from core.config.difference import config_differences
from tests.core.tiny import deepseek, mixtral, qwen3


def rerouted(model: ModelConfig, layers: tuple[int, ...], **router: object) -> ModelConfig:
    """The model with other routers in some layers."""
    found = list(model.layers)
    for i in layers:
        mlp = found[i].mlp
        assert isinstance(mlp, MoE)
        found[i] = replace(found[i], mlp=replace(mlp, router=replace(mlp.router, **router)))  # type: ignore[arg-type]
    return replace(model, layers=tuple(found))


def test_equal_models_have_no_difference() -> None:
    assert config_differences(deepseek(), deepseek()) == ()


def test_one_routing_field_is_named_with_both_values() -> None:
    changed = rerouted(deepseek(), (1,), scale=1.5, groups=None)
    assert config_differences(changed, deepseek()) == (
        "layers[1].mlp.router.groups: none instead of Groups(total=4, kept=2, best=2)",
        "layers[1].mlp.router.scale: 1.5 instead of 2.5",
    )


def test_layers_with_the_same_difference_share_a_line() -> None:
    model = replace(qwen3(), layers=qwen3().layers * 3)
    changed = rerouted(model, (0, 2, 3, 4), normalise=False)
    assert config_differences(changed, model) == ("layers[0, 2..4].mlp.router.normalise: False instead of True",)


def test_other_kinds_and_other_depths_are_said_as_they_are() -> None:
    dense = deepseek().layers[0]
    swapped = replace(deepseek(), layers=(dense, Layer(attention=dense.attention, mlp=dense.mlp)), rope=Rope(theta=1e4))
    lines = config_differences(swapped, deepseek())
    assert lines[0].startswith("rope: Rope(theta=10000.0) instead of Yarn(")
    assert lines[1].startswith("layers[1].mlp: Dense(ffn=24, activation=SwiGLU()) instead of MoE(")
    shorter = replace(mixtral(), layers=mixtral().layers[:1], vocab=7)
    assert config_differences(shorter, mixtral()) == ("vocab: 7 instead of 31", "layers: 1 instead of 2")
