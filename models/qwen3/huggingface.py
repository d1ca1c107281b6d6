"""Published Qwen3 Mixture-of-Experts folders: config.json fields and tensor names, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.config.architecture import GQA, AuxLoss, Dense, Layer, ModelConfig, MoE, RMSNorm
from core.config.published import EMBEDDING_STD, Fields, cannot_write, read_rope, write_init, write_rope
from core.state.published import ends, experts, frequencies, grouped_query, norms, swiglu
from core.state.rules import Derived, Rule, plain
from models.qwen3.architecture import router

LAYER = "layers.{layer}"
PUBLISHED = "model.layers.{layer}"


class Qwen3Folder:
    """What a Qwen3 folder says; its layers may be dense where `mlp_only_layers` and `decoder_sparse_step` say so."""

    def read_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """The model that config.json declares. Raises ConfigError with every field that cannot be had."""
        fields = Fields(config)
        norm = RMSNorm(eps=fields.number("rms_norm_eps", default=1e-6))
        hidden = fields.integer("hidden_size")
        model = ModelConfig(
            vocab=fields.integer("vocab_size"),
            hidden=hidden,
            max_tokens=fields.integer("max_position_embeddings"),
            norm=norm,
            rope=read_rope(fields, default_theta=1e4, scales_softmax=False),
            layers=_read_layers(fields, hidden, norm),
            tied_embeddings=fields.flag("tie_word_embeddings", default=False),
            init_std=fields.number("initializer_range", default=0.02),
            embedding_std=fields.optional_number(EMBEDDING_STD),
        )
        # The window is used only where use_sliding_window is true.
        if config.get("use_sliding_window", False) is not False:
            fields.window("sliding_window", model.max_tokens)
        fields.ignore("use_sliding_window", "sliding_window", "max_window_layers")
        fields.only("hidden_act", "silu")
        fields.only("attention_bias", False)
        fields.only("attention_dropout", 0.0, 0)
        fields.quantization()
        fields.finish()
        return model

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """The config.json of `model`. Raises RequestError where Qwen3 cannot express it."""
        attention, moe, dense = _alike(model)
        losses = [b.coefficient for b in moe.router.balance if isinstance(b, AuxLoss)]
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "head_dim": attention.head_dim,
            "hidden_act": "silu",
            "hidden_size": model.hidden,
            **write_init(model),
            "intermediate_size": dense.ffn if dense else moe.expert_ffn * moe.top_k,
            "max_position_embeddings": model.max_tokens,
            "mlp_only_layers": [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, Dense)],
            "moe_intermediate_size": moe.expert_ffn,
            "norm_topk_prob": moe.router.normalise,
            "num_attention_heads": attention.heads,
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "num_hidden_layers": len(model.layers),
            "num_key_value_heads": attention.kv_heads,
            "rms_norm_eps": model.norm.eps,
            "router_aux_loss_coef": sum(losses, 0.0),
            "sliding_window": None,
            "tie_word_embeddings": model.tied_embeddings,
            "use_sliding_window": False,
            "vocab_size": model.vocab,
        } | write_rope(model.rope, scales_softmax=False)

    def rules(self, model: ModelConfig) -> tuple[Rule | Derived, ...]:
        """One tensor per expert and projection, or all experts of a layer in two tensors."""
        mlp = f"{PUBLISHED}.mlp"
        names = ("gate_proj", "up_proj", "down_proj")
        return (
            *ends(model),
            *norms(LAYER, PUBLISHED),
            *grouped_query(LAYER, PUBLISHED),
            *swiglu(f"{LAYER}.mlp", mlp),
            plain(f"{LAYER}.mlp.router.weight", f"{mlp}.gate.weight"),
            *experts(f"{LAYER}.mlp.experts", f"{mlp}.experts", fused=f"{mlp}.experts", names=names),
            *frequencies(),
        )


def _read_layers(fields: Fields, hidden: int, norm: RMSNorm) -> tuple[Layer, ...]:
    """Layer i has experts if (i + 1) is a multiple of decoder_sparse_step and i is not among mlp_only_layers."""
    heads = fields.integer("num_attention_heads")
    attention = GQA(
        heads=heads,
        kv_heads=fields.optional_integer("num_key_value_heads") or heads,
        head_dim=fields.optional_integer("head_dim") or hidden // max(heads, 1),
        head_norm=norm,
    )
    moe = MoE(
        experts=fields.integer("num_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        expert_ffn=fields.integer("moe_intermediate_size"),
        router=router(
            fields.number("router_aux_loss_coef", default=0.001),
            normalise=fields.flag("norm_topk_prob", default=False),
        ),
    )
    dense = Dense(ffn=fields.integer("intermediate_size"))
    step, without = fields.integer("decoder_sparse_step", default=1), fields.integers("mlp_only_layers")
    sparse = [step > 0 and (i + 1) % step == 0 and i not in without for i in range(fields.integer("num_hidden_layers"))]
    return tuple(Layer(attention=attention, mlp=moe if has else dense) for has in sparse)


def _alike(model: ModelConfig) -> tuple[GQA, MoE, Dense | None]:
    """The one attention, MoE and dense MLP of the model's layers. Raises RequestError where Qwen3 has no field for it."""
    attentions = {layer.attention for layer in model.layers}
    moes = {layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)}
    denses = {layer.mlp for layer in model.layers if isinstance(layer.mlp, Dense)}
    attention, moe = next(iter(attentions), None), next(iter(moes), None)
    if len(attentions) != 1 or len(moes) != 1 or len(denses) > 1 or model.predict_ahead:
        raise cannot_write("Qwen3", "its layers must have one attention, one kind of experts and one dense width")
    if not isinstance(attention, GQA) or attention.head_norm != model.norm or moe is None or moe.shared:
        raise cannot_write(
            "Qwen3", "it has grouped-query attention with the model's norm on heads, and no shared experts"
        )
    if moe.router.score != "softmax" or moe.router.groups or moe.router.scale != 1.0:
        raise cannot_write("Qwen3", "its router must be a softmax over all experts, without groups or a scale")
    return attention, moe, next(iter(denses), None)


HUGGINGFACE = Qwen3Folder()
