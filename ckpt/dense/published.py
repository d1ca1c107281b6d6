"""What dense models say of themselves, and how their tensors are called: config.json in both directions, and rules as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.config.architecture import GQA, Dense, Layer, ModelConfig, RMSNorm, repeat
from core.config.family import DenseKin, all_families
from core.config.published import EMBEDDING_STD, Fields, read_rope, write_init, write_rope
from core.state.box import Box
from core.state.published import ends, frequencies, grouped_query, norms, swiglu
from core.state.rules import Derived, Rule

LAYER = "layers.{layer}"
# How a conversion script, a browser runtime or a training library signs a config: nothing that the model computes.
_SIGNATURES = ("is_llama_config", "transformers.js_config", "_flash_attn_2_enabled", "unsloth_version", "unsloth_fixed")


@dataclass(frozen=True, kw_only=True)
class Published:
    """An open folder or file of a dense model, nothing of which is read yet.

    model: what it declares. config: as its config.json, or what that of a GGUF file would be. shapes, dtypes: of the tensors by
    published name, as `read(name, box)` gives them. rules: between those names and ours. assets: reads the other files.
    """

    path: Path
    model: ModelConfig
    config: Mapping[str, Any]
    rules: tuple[Rule | Derived, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str, Box], Tensor]
    assets: Callable[[], Mapping[str, bytes]]


def find_kin(fields: Fields, name: str, value: Any) -> DenseKin | None:
    """The dense models that carry `value` in the field `name`; None, with a fault, where the zoo reads no such models."""
    kins = [kin for family in all_families() for kin in family.dense]
    works = ", ".join(kin.model_type for kin in kins if not kin.attention_bias)
    for kin in kins:
        if kin.model_type == value and not kin.attention_bias:
            return kin
        if kin.model_type == value:
            fields.fault(
                name, value, "adds biases to queries, keys and values, which no attention of the zoo has", works
            )
            return None
    fields.fault(name, value, "is not a dense model that the zoo reads", works)
    return None


def read_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a config.json declares; `where` is its path. Raises ConfigError with every field that cannot be had."""
    fields = Fields(config, where)
    kin = find_kin(fields, "model_type", config.get("model_type"))
    # Of another kind of model, no other field means what it says here.
    fields.stop()
    assert kin is not None, "a model of no kind is a fault"
    norm = RMSNorm(eps=fields.number("rms_norm_eps", default=1e-6))
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    attention = GQA(
        heads=heads,
        kv_heads=fields.optional_integer("num_key_value_heads") or heads,
        head_dim=fields.optional_integer("head_dim") or hidden // max(heads, 1),
        head_norm=norm if kin.head_norm else None,
    )
    layer = Layer(attention=attention, mlp=Dense(ffn=fields.integer("intermediate_size")))
    model = ModelConfig(
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        max_tokens=fields.integer("max_position_embeddings"),
        norm=norm,
        rope=read_rope(fields, default_theta=1e4, scales_softmax=False),
        layers=repeat(fields.integer("num_hidden_layers"), layer),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        init_std=fields.number("initializer_range", default=0.02),
        embedding_std=fields.optional_number(EMBEDDING_STD),
    )
    # Some kinds use the window only where use_sliding_window is true; the others have no such field.
    if config.get("use_sliding_window", True) is not False:
        fields.window("sliding_window", model.max_tokens)
    fields.ignore("use_sliding_window", "sliding_window", "max_window_layers", *_SIGNATURES)
    fields.only("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "rope_interleaved"):
        fields.only(name, False)
    fields.only("attention_dropout", 0.0, 0)
    fields.quantization()
    fields.finish()
    return model


def write_config(model: ModelConfig, kin: DenseKin) -> dict[str, Any]:
    """The config.json of a dense `model` of that kind, without what only files and tokenizers know."""
    layer = model.layers[0]
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, GQA) and isinstance(mlp, Dense), "what was read as a dense model is one"
    return {
        "model_type": kin.model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        **write_init(model),
        "intermediate_size": mlp.ffn,
        "max_position_embeddings": model.max_tokens,
        "num_attention_heads": attention.heads,
        "num_hidden_layers": len(model.layers),
        "num_key_value_heads": attention.kv_heads,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.tied_embeddings,
        "vocab_size": model.vocab,
    } | write_rope(model.rope, scales_softmax=False)


def folder_rules(model: ModelConfig) -> tuple[Rule | Derived, ...]:
    """How folders call the tensors."""
    theirs = f"model.{LAYER}"
    return (
        *ends(model),
        *norms(LAYER, theirs),
        *grouped_query(LAYER, theirs),
        *swiglu(f"{LAYER}.mlp", f"{theirs}.mlp"),
        *frequencies(),
    )
