"""Random tiny dense models of the transformers library, as folders and as GGUF files: the truth for reading and upcycling them."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from ckpt.source import MODEL_PREFIX, Source
from core.parallel.groups import one_rank
from core.state.box import whole
from core.state.inventory import inventory
from core.transformer.stage import Stage, build_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

KINDS = ("llama", "mistral", "qwen3")
LAYERS = 4
FFN = 24
_CONFIGS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def dense_model(kind: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A model whose every weight is random, norms too, and large enough that each of its parts shows in the logits."""
    config_type, model_type = _CONFIGS[kind]
    fields = {
        "vocab_size": 61,
        "hidden_size": 36,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
        "bos_token_id": 3,
        "eos_token_id": 5,
        "tie_word_embeddings": False,
    }
    if kind == "mistral":
        fields["sliding_window"] = None
    model = model_type._from_config(config_type(**fields | changes), attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model.eval()


def tokens(count: int = 17) -> Tensor:
    """Some tokens of the small vocabulary."""
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    """[tokens, vocabulary] of a transformers model."""
    out: Tensor = model(tokens()[None]).logits[0]
    return out


@torch.no_grad()
def logits_from(source: Source, dtype: torch.dtype = torch.float32) -> Tensor:
    """[tokens, vocabulary] of the zoo's own model, computed in `dtype`, filled from a source."""
    out: Tensor = built(source, dtype)(tokens())
    return out


def built(source: Source, dtype: torch.dtype = torch.float32) -> Stage:
    """The model that a source describes, on one rank, every tensor of the source in it once."""
    described = source.describe()
    assert described is not None
    model = build_model(described.model, dtype=dtype)
    targets = inventory(model, one_rank())
    assert {MODEL_PREFIX + name for name in targets} == set(source.forms)
    for name, target in targets.items():
        assert source.forms[MODEL_PREFIX + name].shape == target.shape
        target.data.fill_(float("nan"))
        target.data.copy_(source.read(MODEL_PREFIX + name, whole(target.shape)))
    return model


def published(model: nn.Module) -> dict[str, Tensor]:
    """Its tensors by published name; a tied head is left out."""
    found = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    return found


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, model: nn.Module, kind: str, quantisation: str, metadata: dict[str, Any] | None = None
) -> None:
    """The model as llama.cpp's converter writes it: matrices quantised, the rows of llama's queries and keys in pairs."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama" if kind == "mistral" else kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for key, value in (metadata or {}).items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, _gguf_type(value))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    wanted = gguf.GGMLQuantizationType[quantisation]
    for name, tensor in published(model).items():
        data = tensor.to(torch.float32).numpy()
        for part, count in heads.items():
            if part in name and kind != "qwen3":
                # As the converter does it: [heads, 2, head_dim / 2, …] with both inner axes exchanged.
                data = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        called = reduce(lambda text, pair: text.replace(*pair), _GGUF_NAMES.items(), name)
        if data.ndim == 1:
            writer.add_tensor(called, np.ascontiguousarray(data))
        else:
            writer.add_tensor(called, gguf.quants.quantize(np.ascontiguousarray(data), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_type(value: Any) -> Any:
    import gguf

    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    return gguf.GGUFValueType[kinds[type(value)]]
