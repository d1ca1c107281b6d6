"""GGUF files of dense models: declared by their metadata, read by box, dequantised on the way (package `gguf`, extra `hf`)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.dense.gguf_head import Head, read_head
from ckpt.dense.published import LAYER, Published, find_kin, write_config
from ckpt.dense.tokenizer import tokenizer_files
from core.config.architecture import GQA, Dense, Layer, ModelConfig, RMSNorm, Rope, repeat
from core.config.family import DenseKin
from core.config.published import Fields
from core.errors import CheckpointError, RequestError
from core.state.box import Box
from core.state.rules import Part, Rule, plain

# The one architecture whose converter reorders the rows of queries and keys: llama.cpp rotates its neighbouring rows as pairs.
_REORDERED = "llama"
_REORDERED_TENSORS = (".attn_q.weight", ".attn_k.weight")
# What says how the file was made, not what the model computes.
_APART = ("GGUF.", "general.", "tokenizer.", "quantize.", "split.")
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_gguf(path: Path) -> Published:
    """The model in a GGUF file, nothing of which is read yet but its head.

    Raises RequestError where the package `gguf` is not installed, ConfigError where the file declares a model that the zoo does
    not have, CheckpointError where it is damaged or quantised in a way that the package cannot undo.
    """
    if importlib.util.find_spec("gguf") is None:
        raise RequestError(f"{path} is read by the package gguf, which is not installed: pip install gguf")
    head = read_head(path)
    metadata = head.metadata
    model, kin = _declared(metadata, frozenset(head.tensors), path)
    contents = _Contents(path, head, model if kin.model_type == _REORDERED else None)
    return Published(
        path=path,
        model=model,
        config=write_config(model, kin) | _token_ids(metadata),
        rules=_rules(model),
        shapes=contents.shapes,
        dtypes=contents.dtypes,
        read=contents.read,
        assets=lambda: tokenizer_files(metadata, str(path)),
    )


class _Contents:
    """The tensors of an open file; `reordered`: the model whose queries and keys must be put in order again, None for no such file."""

    def __init__(self, path: Path, head: Head, reordered: ModelConfig | None) -> None:
        self.path = path
        self._head_dim = None
        if reordered is not None:
            attention = reordered.layers[0].attention
            assert isinstance(attention, GQA), "dense models have grouped-query attention"
            self._head_dim = attention.head_dim
        self._tensors = _rows_of_blocks(path, head)
        self.shapes = {name: place.shape for name, place in head.tensors.items()}
        self.dtypes = {name: _PLAIN.get(kind.name, torch.float32) for name, (kind, _) in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """The piece `box`: the file's rows in it, of these the blocks in it, are read and dequantised."""
        import gguf

        kind, data = self._tensors[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        first, last = box.offset[-1], box.offset[-1] + box.shape[-1]
        low, high = first // elements, -(-last // elements)
        part = np.ascontiguousarray(data[self._rows(name, box), low * size : high * size])
        if kind.name == "F64":
            return torch.from_numpy(part.view(np.float64)).view(box.shape)
        values = gguf.quants.dequantize(part, kind)[:, first - low * elements : last - low * elements]
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(box.shape).to(self.dtypes[name])

    def _rows(self, name: str, box: Box) -> slice | np.ndarray:
        """Where the rows of the box stand in the file."""
        if len(box.shape) == 1:
            return slice(0, 1)
        first, last = box.offset[0], box.offset[0] + box.shape[0]
        if self._head_dim is None or not name.endswith(_REORDERED_TENSORS):
            return slice(first, last)
        # Ours: both halves of a head one after the other; theirs: row j of the first half next to row j of the second.
        head, inside = np.divmod(np.arange(first, last), self._head_dim)
        half, j = np.divmod(inside, self._head_dim // 2)
        return head * self._head_dim + 2 * j + half


def _rows_of_blocks(path: Path, head: Head) -> dict[str, tuple[Any, np.ndarray]]:
    """Type and bytes [rows, bytes of a row] of every tensor, read on use.

    Raises CheckpointError where the file ends before one of them does, and with every quantisation that cannot be undone.
    """
    import gguf

    found, unknown = {}, {}
    for name, place in head.tensors.items():
        if place.kind not in gguf.GGMLQuantizationType.__members__.values():
            unknown[f"type {place.kind}"] = name
            continue
        kind = gguf.GGMLQuantizationType(place.kind)
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = -(-place.shape[-1] // elements) * size if place.shape else size
        total = math.prod(place.shape[:-1]) * row_bytes
        data = head.content[place.start : place.start + total]
        if data.size < total:
            raise CheckpointError(f"{path} is damaged or cut short (it ends inside {name}); fetch it again")
        found[name] = kind, data.reshape(-1, row_bytes) if total else data.reshape(0, row_bytes)
        if not _can_undo(kind):
            unknown[kind.name] = name
    if unknown:
        kinds = ", ".join(f"{kind} (such as {name})" for kind, name in unknown.items())
        raise CheckpointError(f"{path}: the package gguf cannot read {kinds}; use a file of another quantisation")
    return found


def _can_undo(kind: Any) -> bool:
    """Whether the package can, found on one empty block."""
    import gguf

    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return kind.name in _PLAIN
    return True


def _declared(metadata: Mapping[str, Any], tensors: frozenset[str], path: Path) -> tuple[ModelConfig, DenseKin]:
    """The model that the metadata declares. Raises ConfigError with every field that cannot be had."""
    kind = metadata.get("general.architecture")
    fields = Fields({k: v for k, v in metadata.items() if not k.startswith(_APART)}, str(path))
    if metadata.get("split.count", 1) not in (0, 1):
        fields.fault("split.count", metadata["split.count"], "must be a whole model", "the parts merged into one file")
    kin = find_kin(fields, "general.architecture", kind)
    # Of another architecture, every field has another name.
    fields.stop()
    assert kin is not None, "an architecture that is not known is a fault"
    hidden, heads = fields.integer(f"{kind}.embedding_length"), fields.integer(f"{kind}.attention.head_count")
    norm = RMSNorm(eps=fields.number(f"{kind}.attention.layer_norm_rms_epsilon"))
    head_dim = fields.optional_integer(f"{kind}.attention.key_length") or hidden // max(heads, 1)
    attention = GQA(
        heads=heads,
        kv_heads=fields.optional_integer(f"{kind}.attention.head_count_kv") or heads,
        head_dim=head_dim,
        head_norm=norm if kin.head_norm else None,
    )
    layer = Layer(attention=attention, mlp=Dense(ffn=fields.integer(f"{kind}.feed_forward_length")))
    model = ModelConfig(
        vocab=fields.integer(f"{kind}.vocab_size", default=len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden=hidden,
        max_tokens=fields.integer(f"{kind}.context_length"),
        norm=norm,
        rope=Rope(theta=fields.number(f"{kind}.rope.freq_base", default=1e4)),
        layers=repeat(fields.integer(f"{kind}.block_count"), layer),
        tied_embeddings="output.weight" not in tensors,
    )
    fields.window(f"{kind}.attention.sliding_window", model.max_tokens)
    for name in ("attention.value_length", "rope.dimension_count"):
        fields.only(f"{kind}.{name}", head_dim)
    fields.only(f"{kind}.rope.scaling.type", "none")
    fields.only(f"{kind}.attention.causal", True)
    for name in ("expert_count", "expert_used_count"):
        fields.only(f"{kind}.{name}", 0)
    fields.ignore(f"{kind}.attention.layer_norm_epsilon")
    fields.finish()
    return model, kin


def _rules(model: ModelConfig) -> tuple[Rule, ...]:
    """How GGUF files call the tensors."""
    block = "blk.{layer}"
    names = {
        "attention_norm": "attn_norm",
        "attention.query": "attn_q",
        "attention.key": "attn_k",
        "attention.value": "attn_v",
        "attention.output": "attn_output",
        "attention.query_norm": "attn_q_norm",
        "attention.key_norm": "attn_k_norm",
        "mlp_norm": "ffn_norm",
    }
    pair = (Part(name=f"{block}.ffn_gate.weight", at=(0,)), Part(name=f"{block}.ffn_up.weight", at=(1,)))
    head = () if model.tied_embeddings else (plain("head.weight", "output.weight"),)
    return (
        plain("embedding.weight", "token_embd.weight"),
        plain("final_norm.weight", "output_norm.weight"),
        *head,
        *(plain(f"{LAYER}.{ours}.weight", f"{block}.{theirs}.weight") for ours, theirs in names.items()),
        Rule(name=f"{LAYER}.mlp.gate_up", forms=(pair,)),
        plain(f"{LAYER}.mlp.down", f"{block}.ffn_down.weight"),
    )


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The fields of a config.json that name tokens."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "unk_token_id": "unknown"}
    found = {field: metadata.get(f"tokenizer.ggml.{name}_token_id") for field, name in names.items()}
    return {field: number for field, number in found.items() if number is not None}
