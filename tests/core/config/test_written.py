"""A published folder says all that its weights are used for, or is not written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config.architecture import (
    AuxLoss,
    Capacity,
    GeGLU,
    ModelConfig,
    MoE,
    QuantileBias,
    SharedExperts,
    Sinkhorn,
    SquaredReLU,
    ZLoss,
)
from core.config.family import Family, all_families, find_family
from core.config.written import written_config
from core.errors import RequestError


def with_moe(model: ModelConfig, **changes: object) -> ModelConfig:
    """The model with its MoE layers changed; `router_…` goes into the router."""
    layers = []
    for layer in model.layers:
        mlp = layer.mlp
        if isinstance(mlp, MoE):
            inside = {k.removeprefix("router_"): v for k, v in changes.items() if k.startswith("router_")}
            outside = {k: v for k, v in changes.items() if not k.startswith("router_")}
            router = replace(mlp.router, **inside)  # type: ignore[arg-type]
            mlp = replace(mlp, router=router, **outside)  # type: ignore[arg-type]
        layers.append(replace(layer, mlp=mlp))
    return replace(model, layers=tuple(layers))


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_what_training_alone_looks_at_need_not_be_said(family: Family) -> None:
    model = family.size("tiny").model
    router = next(layer.mlp.router for layer in model.layers if isinstance(layer.mlp, MoE))
    balance = (*router.balance, AuxLoss(scope="sequence", coefficient=0.5), ZLoss(coefficient=0.5))
    told = with_moe(
        model, capacity=Capacity(factor=1.5), router_jitter=0.1, router_dtype="float64", router_balance=balance
    )
    assert set(written_config(family, told)) == set(written_config(family, model))
    told = with_moe(model, router_selection=Sinkhorn())
    assert set(written_config(family, told)) == set(written_config(family, model))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"latent": 16}, "mlp.latent: none instead of 16"),
        ({"router_score": "sqrt_softplus"}, "router"),
        ({"router_balance": (QuantileBias(ema=0.5),)}, "router"),
        ({"activation": GeGLU(tanh=False)}, r"mlp.activation: SwiGLU\(\) instead of GeGLU"),
        ({"activation": SquaredReLU()}, "mlp.activation"),
        ({"bias": True}, "mlp.bias: False instead of True"),
        ({"shared": SharedExperts(count=1, gated=True)}, "shared|experts alone"),
    ],
)
@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_a30_what_a_folder_has_no_field_for_is_refused_by_name(
    family: Family, change: dict[str, object], named: str
) -> None:
    with pytest.raises(RequestError, match=f"cannot be written as a .* folder: .*({named})"):
        written_config(family, with_moe(family.size("tiny").model, **change))


def test_a_model_that_the_family_has_is_written() -> None:
    family = find_family("qwen3")
    model = family.size("tiny").model
    assert family.huggingface.read_config(written_config(family, model)) == model
