"""Random tiny models of the transformers library: the independent truth for ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor, nn

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FAMILIES = ("mixtral", "qwen3", "deepseek_v3")


@st.composite
def ropes(draw: st.DrawFn, *, latent: bool) -> dict[str, Any]:
    """`rope_parameters`: plain or YaRN, with every way of saying its magnitude."""
    theta = draw(st.sampled_from([1e4, 5e5]))
    if draw(st.booleans()):
        return {"rope_type": "default", "rope_theta": theta}
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": draw(st.sampled_from([2.0, 4.0, 40.0]))}
    rope |= {"original_max_position_embeddings": draw(st.sampled_from([8, 16]))}
    rope |= draw(st.sampled_from([{}, {"beta_fast": 8.0, "beta_slow": 2.0}]))
    ways = [
        {},
        {"attention_factor": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 0.7},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
    ]
    if latent:
        ways += [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale_all_dim": 1.0}]
    return rope | draw(st.sampled_from(ways))


@st.composite
def settings_of(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """The fields of a random tiny config of `family`."""
    experts = draw(st.sampled_from([1, 3, 5, 12, 13]))
    common = {
        "vocab_size": draw(st.sampled_from([31, 64, 97])),
        "hidden_size": draw(st.sampled_from([24, 40])),
        "intermediate_size": draw(st.sampled_from([12, 29])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_experts_per_tok": draw(st.integers(1, min(experts, 4))),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "rope_parameters": draw(ropes(latent=family == "deepseek_v3")),
    }
    if family == "deepseek_v3":
        return common | draw(_deepseek(common))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    common |= {"num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * draw(st.integers(1, 3))}
    common |= {"head_dim": draw(st.sampled_from([2, 6, 8])), "num_local_experts": experts}
    if family == "mixtral":
        return common
    dense = draw(st.sampled_from([{}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}]))
    if common["num_hidden_layers"] == 1:
        dense = {}
    return (
        common
        | dense
        | {"moe_intermediate_size": draw(st.sampled_from([7, 16])), "norm_topk_prob": draw(st.booleans())}
    )


@st.composite
def _deepseek(draw: st.DrawFn, common: dict[str, Any]) -> dict[str, Any]:
    heads, groups, per_group = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([2, 3, 5])),
    )
    kept = draw(st.integers(1, groups))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw(st.sampled_from([None, 7, 16])),
        "kv_lora_rank": draw(st.sampled_from([5, 12])),
        "qk_nope_head_dim": draw(st.sampled_from([3, 8])),
        "qk_rope_head_dim": draw(st.sampled_from([2, 6])),
        "v_head_dim": draw(st.sampled_from([4, 9])),
        "n_group": groups,
        "topk_group": kept,
        "n_routed_experts": groups * per_group,
        "num_experts_per_tok": draw(st.integers(1, min(4, kept * per_group))),
        "n_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.sampled_from([7, 16])),
        "first_k_dense_replace": draw(st.integers(0, common["num_hidden_layers"])),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "num_nextn_predict_layers": 0,
    }


def config_of(family: str, settings: dict[str, Any]) -> Any:
    """The transformers config of a model of `family`."""
    kinds = {"mixtral": "Mixtral", "qwen3": "Qwen3Moe", "deepseek_v3": "DeepseekV3"}
    return getattr(transformers, f"{kinds[family]}Config")(**settings)


def transformers_model(family: str, settings: dict[str, Any], *, seed: int = 0) -> nn.Module:
    """The transformers model with random weights, in float32; routers are wide, so that no choice is near a tie."""
    config = config_of(family, settings)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1.0 + 0.2 * noise)
            elif "correction_bias" in name:
                tensor.copy_(0.3 * noise)
            elif "inv_freq" not in name:
                tensor.copy_(noise * (2.0 if ".gate.weight" in name else 1.0) * tensor.shape[-1] ** -0.5)
    return model


def save(family: str, settings: dict[str, Any], folder: Path, *, seed: int = 0, **how: Any) -> nn.Module:
    """Write a random model to `folder` as transformers does, and return it."""
    model = transformers_model(family, settings, seed=seed)
    model.save_pretrained(folder, **how)
    return model


def logits_apart(model: nn.Module, tokens_T: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Logits [T, vocab] of sequences that are each run alone."""
    return torch.cat([model(part[None], use_cache=False).logits[0] for part in tokens_T.split(lengths)])
