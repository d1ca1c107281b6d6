"""Published Mixtral folders: config.json fields and tensor names, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.config.architecture import GQA, AuxLoss, Layer, ModelConfig, MoE, RMSNorm, repeat
from core.config.published import EMBEDDING_STD, Fields, cannot_write, read_rope, write_init, write_rope
from core.state.published import ends, experts, frequencies, grouped_query, norms
from core.state.rules import Derived, Part, Rule
from models.mixtral.architecture import router

LAYER = "layers.{layer}"
PUBLISHED = "model.layers.{layer}"


class MixtralFolder:
    """What a Mixtral folder says. Published files call the MoE block block_sparse_moe; transformers 5 calls it mlp in memory."""

    def read_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """The model that config.json declares. Raises ConfigError with every field that cannot be had."""
        fields = Fields(config)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        attention = GQA(
            heads=heads,
            kv_heads=fields.optional_integer("num_key_value_heads") or heads,
            head_dim=fields.optional_integer("head_dim") or hidden // max(heads, 1),
        )
        moe = MoE(
            experts=fields.integer("num_local_experts", "num_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            expert_ffn=fields.integer("intermediate_size"),
            router=router(fields.number("router_aux_loss_coef", default=0.001)),
        )
        model = ModelConfig(
            vocab=fields.integer("vocab_size"),
            hidden=hidden,
            max_tokens=fields.integer("max_position_embeddings"),
            norm=RMSNorm(eps=fields.number("rms_norm_eps", default=1e-5)),
            rope=read_rope(fields, default_theta=1e6, scales_softmax=False),
            layers=repeat(fields.integer("num_hidden_layers"), Layer(attention=attention, mlp=moe)),
            tied_embeddings=fields.flag("tie_word_embeddings", default=False),
            init_std=fields.number("initializer_range", default=0.02),
            embedding_std=fields.optional_number(EMBEDDING_STD),
        )
        fields.window("sliding_window", model.max_tokens)
        fields.only("hidden_act", "silu")
        fields.only("attention_bias", False)
        fields.only("attention_dropout", 0.0, 0)
        fields.only("router_jitter_noise", 0.0, 0)
        fields.quantization()
        fields.finish()
        return model

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """The config.json of `model`. Raises RequestError where Mixtral cannot express it."""
        layer = model.layers[0]
        attention, moe = layer.attention, layer.mlp
        if not isinstance(attention, GQA) or attention.head_norm or not isinstance(moe, MoE) or moe.shared:
            raise cannot_write(
                "Mixtral", "its layers must be grouped-query attention without head norms, and experts alone"
            )
        if moe.router.score != "softmax_after_top_k" or moe.router.groups or moe.router.scale != 1.0:
            raise cannot_write(
                "Mixtral", "its router must be a softmax over the chosen experts, without groups or a scale"
            )
        if any(other != layer for other in model.layers) or model.predict_ahead:
            raise cannot_write("Mixtral", "its layers must be equal, without multi-token prediction")
        losses = [b.coefficient for b in moe.router.balance if isinstance(b, AuxLoss)]
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "attention_dropout": 0.0,
            "head_dim": attention.head_dim,
            "hidden_act": "silu",
            "hidden_size": model.hidden,
            **write_init(model),
            "intermediate_size": moe.expert_ffn,
            "max_position_embeddings": model.max_tokens,
            "num_attention_heads": attention.heads,
            "num_experts_per_tok": moe.top_k,
            "num_hidden_layers": len(model.layers),
            "num_key_value_heads": attention.kv_heads,
            "num_local_experts": moe.experts,
            "rms_norm_eps": model.norm.eps,
            "router_aux_loss_coef": sum(losses, 0.0),
            "sliding_window": None,
            "tie_word_embeddings": model.tied_embeddings,
            "vocab_size": model.vocab,
        } | write_rope(model.rope, scales_softmax=False)

    def rules(self, model: ModelConfig) -> tuple[Rule | Derived, ...]:
        """w1 is the gate, w3 the up and w2 the down projection of an expert."""
        block, fused = f"{PUBLISHED}.block_sparse_moe", f"{PUBLISHED}.mlp"
        gate = ((Part(name=f"{block}.gate.weight"),), (Part(name=f"{fused}.gate.weight"),))
        return (
            *ends(model),
            *norms(LAYER, PUBLISHED),
            *grouped_query(LAYER, PUBLISHED),
            Rule(name=f"{LAYER}.mlp.router.weight", forms=gate),
            *experts(f"{LAYER}.mlp.experts", f"{block}.experts", fused=f"{fused}.experts", names=("w1", "w3", "w2")),
            *frequencies(),
        )


HUGGINGFACE = MixtralFolder()
