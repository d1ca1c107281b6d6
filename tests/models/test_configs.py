"""config.json of the released checkpoints and of transformers, read and written."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings

from core.config.architecture import AuxLoss, Layer, ModelConfig, MoE, Yarn
from core.config.family import Family, Size, all_families, find_family
from core.errors import ConfigError, RequestError
from tests.models import oracle

FAMILIES = {family.name: family for family in all_families()}
SIZES = [pytest.param(f, s, id=f"{f.name}-{s.name}") for f in all_families() for s in f.sizes]

# The fields that the released config.json of each checkpoint has, as far as they say what is computed.
RELEASED: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "moonshotai/Moonlight-16B-A3B": {
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "Qwen/Qwen3-30B-A3B": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
}
RELEASED["Qwen/Qwen3-235B-A22B"] = RELEASED["Qwen/Qwen3-30B-A3B"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
RELEASED["mistralai/Mixtral-8x22B-v0.1"] = RELEASED["mistralai/Mixtral-8x7B-v0.1"] | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
    "router_aux_loss_coef": 0.001,
}


@pytest.mark.parametrize(("family", "size"), [p for p in SIZES if p.values[1].published])
def test_the_released_config_declares_the_size_that_the_family_declares(family: Family, size: Size) -> None:
    assert family.huggingface.read_config(RELEASED[str(size.published)]) == size.model


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_a_written_config_declares_the_same_model(family: Family, size: Size) -> None:
    assert family.huggingface.read_config(family.huggingface.write_config(size.model)) == size.model


@pytest.mark.parametrize("name", oracle.FAMILIES)
def test_transformers_reads_a_written_config_as_the_same_model(name: str) -> None:
    @settings(max_examples=25, database=None)
    @given(config=oracle.settings_of(name))
    def compare(config: dict[str, Any]) -> None:
        kind = type(oracle.config_of(name, config))
        first = FAMILIES[name].huggingface.read_config(oracle.config_of(name, config).to_dict())
        assume(any(isinstance(layer.mlp, MoE) for layer in first.layers))
        written = FAMILIES[name].huggingface.write_config(first)
        again = FAMILIES[name].huggingface.read_config(kind(**written).to_dict())
        # YaRN's magnitude may be written in another of the equal forms, rounded once more.
        if isinstance(first.rope, Yarn) and isinstance(again.rope, Yarn):
            assert again.rope.mscale == pytest.approx(first.rope.mscale, rel=1e-12)
            again = replace(again, rope=replace(again.rope, mscale=first.rope.mscale))
        # What transformers has no field for comes back as the family's own value.
        assert without_losses(again) == without_losses(first)

    compare()


def without_losses(model: ModelConfig) -> ModelConfig:
    """The model with the losses that only some folders state taken away."""
    return replace(model, layers=tuple(_without_losses(layer) for layer in model.layers))


def _without_losses(layer: Layer) -> Layer:
    if not isinstance(layer.mlp, MoE):
        return layer
    balance = tuple(b for b in layer.mlp.router.balance if not isinstance(b, AuxLoss))
    return replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, balance=balance)))


def test_every_unknown_field_and_every_foreign_piece_of_mathematics_is_listed_at_once() -> None:
    config = RELEASED["deepseek-ai/DeepSeek-V3"] | {
        "hidden_act": "gelu",
        "scoring_func": "softmax",
        "attention_bias": True,
        "index_topk": 2048,
        "moe_layer_freq": 2,
        "rope_interleave": False,
        "num_key_value_heads": 8,
    }
    with pytest.raises(ConfigError) as raised:
        FAMILIES["deepseek_v3"].huggingface.read_config(config)
    wrong = {fault.setting.removeprefix("config.json: ") for fault in raised.value.faults}
    assert wrong == {
        "hidden_act", "scoring_func", "attention_bias", "index_topk", "moe_layer_freq", "rope_interleave", "num_key_value_heads"
    }  # fmt: skip


CASES = [
    ("mixtral", {"sliding_window": 4096}, "sliding_window"),
    ("mixtral", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("mixtral", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("mixtral", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "rope_scaling.truncate"),
    ("mixtral", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
    ("mixtral", {"vocab_size": "32000"}, "vocab_size"),
    ("mixtral", {"vocab_size": True}, "vocab_size"),
    ("mixtral", {"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ("mixtral", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
    ("qwen3", {"attention_dropout": 0.1}, "attention_dropout"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"first_k_dense_replace": 61}, "num_nextn_predict_layers"),
]  # fmt: skip
REPOSITORIES = {
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3": "Qwen/Qwen3-30B-A3B",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
}


@pytest.mark.parametrize(("name", "change", "field"), CASES)
def test_a_field_that_asks_for_other_mathematics_is_refused_by_name(
    name: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        FAMILIES[name].huggingface.read_config(RELEASED[REPOSITORIES[name]] | change)
    assert [fault.setting for fault in raised.value.faults] == [f"config.json: {field}"]


def test_missing_fields_are_all_named() -> None:
    with pytest.raises(ConfigError) as raised:
        FAMILIES["mixtral"].huggingface.read_config(
            {"model_type": "mixtral", "hidden_size": 8, "max_position_embeddings": 8}
        )
    named = " ".join(fault.setting for fault in raised.value.faults)
    for field in ("vocab_size", "num_attention_heads", "num_hidden_layers", "num_local_experts", "intermediate_size"):
        assert field in named


def test_fields_that_change_nothing_are_tolerated() -> None:
    released = RELEASED["Qwen/Qwen3-30B-A3B"]
    more = {
        "bos_token_id": 3,
        "_name_or_path": "x",
        "torch_dtype": "float16",
        "max_window_layers": 5,
        "pruned_heads": {},
    }
    read = FAMILIES["qwen3"].huggingface.read_config
    assert read(released | more) == read(released)


def test_a_family_refuses_to_write_a_model_that_it_cannot_express() -> None:
    for writer in all_families():
        for owner in all_families():
            for size in owner.sizes:
                if writer is not owner:
                    with pytest.raises(RequestError, match="cannot be written as a"):
                        writer.huggingface.write_config(size.model)


def test_families_are_found_by_name_and_by_model_type() -> None:
    assert find_family("qwen3") is find_family("qwen3_moe")
    with pytest.raises(ConfigError, match="deepseek_v3, mixtral, qwen3"):
        find_family("gpt2")


def test_declarations_load_without_torch() -> None:
    code = "import sys; from core.config.family import all_families; all_families(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code + "; import core.config.counts, core.state.rules"], check=True)
