"""A model as a family's config.json, which must say all that the weights are used for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.config.architecture import AuxLoss, Dense, ExpertBias, ModelConfig, MoE, TopK, ZLoss
from core.config.difference import config_differences
from core.config.family import Family
from core.config.published import cannot_write


def written_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The config.json of `model` as a folder of `family`, proved by reading it back: what it has no field for is refused by name.

    What training alone looks at (balance losses, jitter, selection, capacity, first weights) need not be in it. Raises RequestError.
    """
    config = family.huggingface.write_config(model)
    missing = config_differences(_used(family.huggingface.read_config(config)), _used(model))
    if missing:
        raise cannot_write(family.title, f"its config.json, read back, would say {'; '.join(missing)}")
    return config


def _used(model: ModelConfig) -> ModelConfig:
    """The model without what only training looks at."""
    layers = tuple(replace(layer, mlp=_used_mlp(layer.mlp)) for layer in model.layers)
    ahead = model.predict_ahead and replace(model.predict_ahead, loss_weight=0.0)
    return replace(model, layers=layers, predict_ahead=ahead, init_std=0.0, embedding_std=None)


def _used_mlp(mlp: Dense | MoE) -> Dense | MoE:
    if isinstance(mlp, Dense):
        return mlp
    # Of what keeps the load even, a bias is part of the weights; how fast it moved is not.
    kept = (balance for balance in mlp.router.balance if not isinstance(balance, AuxLoss | ZLoss))
    balance = tuple(replace(one, rate=0.0) if isinstance(one, ExpertBias) else one for one in kept)
    router = replace(mlp.router, balance=balance, jitter=None, dtype="float32", selection=TopK())
    return replace(mlp, capacity=None, router=router)
