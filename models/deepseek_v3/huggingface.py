"""Published DeepSeek-V3 folders: config.json fields and tensor names, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.config.architecture import (
    MLA,
    AuxLoss,
    Dense,
    ExpertBias,
    Groups,
    Layer,
    ModelConfig,
    MoE,
    MultiToken,
    RMSNorm,
    SharedExperts,
    repeat,
)
from core.config.published import EMBEDDING_STD, Fields, cannot_write, read_rope, write_init, write_rope
from core.state.published import ends, experts, frequencies, latent, norms, swiglu
from core.state.rules import Derived, Rule, plain
from models.deepseek_v3.architecture import LATENT_NORM, PREDICTION_WEIGHT, SEQUENCE_LOSS, router


class DeepSeekFolder:
    """What a DeepSeek-V3 folder says; multi-token prediction stands behind the last layer, as further layers."""

    def read_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """The model that config.json declares. Raises ConfigError with every field that cannot be had."""
        fields = Fields(config)
        depth = fields.optional_integer("num_nextn_predict_layers", "num_mtp_layers") or 0
        model = ModelConfig(
            vocab=fields.integer("vocab_size"),
            hidden=fields.integer("hidden_size"),
            max_tokens=fields.integer("max_position_embeddings"),
            norm=RMSNorm(eps=fields.number("rms_norm_eps", default=1e-6)),
            rope=read_rope(fields, default_theta=1e4, scales_softmax=True),
            layers=_read_layers(fields),
            tied_embeddings=fields.flag("tie_word_embeddings", default=False),
            init_std=fields.number("initializer_range", default=0.02),
            embedding_std=fields.optional_number(EMBEDDING_STD),
            predict_ahead=MultiToken(depth=depth, loss_weight=PREDICTION_WEIGHT) if depth else None,
        )
        if depth and not (model.layers and isinstance(model.layers[-1].mlp, MoE)):
            fields.fault("num_nextn_predict_layers", depth, "needs a last layer with experts, which it repeats", "0")
        fields.only("hidden_act", "silu")
        fields.only("attention_bias", False)
        fields.only("attention_dropout", 0.0, 0)
        fields.only("scoring_func", "sigmoid")
        fields.only("topk_method", "noaux_tc")
        fields.only("moe_layer_freq", 1)
        fields.only("rope_interleave", True, None)
        fields.only("num_key_value_heads", None, config.get("num_attention_heads"))
        # Widths that follow from others, and the scope of a loss.
        fields.ignore("head_dim", "qk_head_dim", "seq_aux")
        fields.quantization()
        fields.finish()
        return model

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """The config.json of `model`. Raises RequestError where DeepSeek-V3 cannot express it."""
        attention, dense, moe = _alike(model)
        groups = moe.router.groups or Groups(total=1, kept=1)
        losses = [b.coefficient for b in moe.router.balance if isinstance(b, AuxLoss)]
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "aux_loss_alpha": sum(losses, 0.0),
            "first_k_dense_replace": sum(isinstance(layer.mlp, Dense) for layer in model.layers),
            "hidden_act": "silu",
            "hidden_size": model.hidden,
            **write_init(model),
            "intermediate_size": dense.ffn if dense else moe.expert_ffn * moe.top_k,
            "kv_lora_rank": attention.latent_rank,
            "max_position_embeddings": model.max_tokens,
            "moe_intermediate_size": moe.expert_ffn,
            "moe_layer_freq": 1,
            "n_group": groups.total,
            "n_routed_experts": moe.experts,
            "n_shared_experts": moe.shared.count if moe.shared else 0,
            "norm_topk_prob": moe.router.normalise,
            "num_attention_heads": attention.heads,
            "num_experts_per_tok": moe.top_k,
            "num_hidden_layers": len(model.layers),
            "num_key_value_heads": attention.heads,
            "num_nextn_predict_layers": model.predict_ahead.depth if model.predict_ahead else 0,
            "q_lora_rank": attention.query_rank,
            "qk_nope_head_dim": attention.nope_dim,
            "qk_rope_head_dim": attention.rope_dim,
            "rms_norm_eps": model.norm.eps,
            "routed_scaling_factor": moe.router.scale,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "tie_word_embeddings": model.tied_embeddings,
            "topk_group": groups.kept,
            "topk_method": "noaux_tc",
            "v_head_dim": attention.value_dim,
            "vocab_size": model.vocab,
        } | write_rope(model.rope, scales_softmax=True)

    def rules(self, model: ModelConfig) -> tuple[Rule | Derived, ...]:
        """Prediction module d is published as layer number (layers + d), with copies of the embedding and the head."""
        depth = model.predict_ahead.depth if model.predict_ahead else 0
        ahead = [(f"mtp.{d}", f"model.layers.{len(model.layers) + d}") for d in range(depth)]
        return (
            *ends(
                model,
                embedding_copies=tuple(f"{theirs}.embed_tokens.weight" for _, theirs in ahead),
                head_copies=tuple(f"{theirs}.shared_head.head.weight" for _, theirs in ahead),
            ),
            *_layer("layers.{layer}", "model.layers.{layer}"),
            *(
                rule
                for ours, theirs in ahead
                for rule in (*_layer(f"{ours}.layer", theirs), *_prediction(ours, theirs))
            ),
            *frequencies(),
        )


def _layer(ours: str, theirs: str) -> tuple[Rule, ...]:
    """One layer, dense or with experts."""
    mlp, names = f"{theirs}.mlp", ("gate_proj", "up_proj", "down_proj")
    return (
        *norms(ours, theirs),
        *latent(ours, theirs),
        *swiglu(f"{ours}.mlp", mlp),
        plain(f"{ours}.mlp.router.weight", f"{mlp}.gate.weight"),
        plain(f"{ours}.mlp.router.bias", f"{mlp}.gate.e_score_correction_bias"),
        *experts(f"{ours}.mlp.experts", f"{mlp}.experts", fused=f"{mlp}.experts", names=names),
        *swiglu(f"{ours}.mlp.shared", f"{mlp}.shared_experts"),
    )


def _prediction(ours: str, theirs: str) -> tuple[Rule, ...]:
    """What a prediction module has beside its layer; the projection takes the embedding's half first, as ours does."""
    return (
        plain(f"{ours}.embedding_norm.weight", f"{theirs}.enorm.weight"),
        plain(f"{ours}.hidden_norm.weight", f"{theirs}.hnorm.weight"),
        plain(f"{ours}.projection.weight", f"{theirs}.eh_proj.weight"),
        plain(f"{ours}.final_norm.weight", f"{theirs}.shared_head.norm.weight"),
    )


def _read_layers(fields: Fields) -> tuple[Layer, ...]:
    """The first `first_k_dense_replace` layers are dense, the others have experts."""
    attention = MLA(
        heads=fields.integer("num_attention_heads"),
        query_rank=fields.optional_integer("q_lora_rank"),
        latent_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        latent_norm=LATENT_NORM,
    )
    total, kept = fields.optional_integer("n_group") or 1, fields.optional_integer("topk_group") or 1
    shared = fields.optional_integer("n_shared_experts") or 0
    moe = MoE(
        experts=fields.integer("n_routed_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        expert_ffn=fields.integer("moe_intermediate_size"),
        shared=SharedExperts(count=shared) if shared else None,
        router=router(
            groups=Groups(total=total, kept=kept) if total > 1 else None,
            scale=fields.number("routed_scaling_factor", default=1.0),
            normalise=fields.flag("norm_topk_prob", default=True),
            coefficient=fields.number("aux_loss_alpha", default=SEQUENCE_LOSS),
        ),
    )
    dense = Dense(ffn=fields.integer("intermediate_size"))
    first, count = fields.integer("first_k_dense_replace", default=0), fields.integer("num_hidden_layers")
    first = min(first, count)
    return repeat(first, Layer(attention=attention, mlp=dense)) + repeat(
        count - first, Layer(attention=attention, mlp=moe)
    )


def _alike(model: ModelConfig) -> tuple[MLA, Dense | None, MoE]:
    """The one attention, dense MLP and MoE of the model's layers. Raises RequestError where DeepSeek-V3 has no field for it."""
    attentions = {layer.attention for layer in model.layers}
    denses = tuple(layer.mlp for layer in model.layers if isinstance(layer.mlp, Dense))
    moes = tuple(layer.mlp for layer in model.layers[len(denses) :])
    attention, moe = next(iter(attentions), None), moes[0] if moes else None
    if len(attentions) != 1 or len(set(denses)) > 1 or len(set(moes)) != 1 or not isinstance(moe, MoE):
        raise cannot_write("DeepSeek-V3", "its layers must be equal dense ones first and then equal ones with experts")
    if not isinstance(attention, MLA) or attention.latent_norm != LATENT_NORM:
        raise cannot_write("DeepSeek-V3", f"its attention must be latent, with {LATENT_NORM} on the latents")
    if moe.router.groups and moe.router.groups.best != 2:
        raise cannot_write("DeepSeek-V3", "a group of its experts must count its best 2 scores")
    biased = any(isinstance(balance, ExpertBias) for balance in moe.router.balance)
    if moe.router.score != "sigmoid" or not biased:
        raise cannot_write("DeepSeek-V3", "its router must score by sigmoid and have an expert bias")
    return attention, denses[0] if denses else None, moe


HUGGINGFACE = DeepSeekFolder()
