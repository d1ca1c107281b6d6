"""Floating-point operations of training, by the convention that published figures use (paper.md section 2)."""

from __future__ import annotations

from core.config.architecture import GQA, Attention, Dense, Layer, ModelConfig, MoE, num_halves


def flops_per_token(model: ModelConfig, sequence_tokens: int) -> float:
    """Forward and backward FLOP for one token of a sequence of `sequence_tokens`.

    6 * (matrix elements that a token is multiplied with + heads * (query/key size + value size) * sequence_tokens / 2 of each
    layer): causal attention counts half, multi-token prediction and every use of the head count, router and recomputation do
    not.
    """
    layers = (*model.layers, *model.mtp_layers())
    per_layer = sum(_layer_elements(layer, model.hidden) + _attention_work(layer, sequence_tokens) for layer in layers)
    modules = len(model.mtp_layers())
    heads = (1 + modules) * model.vocab * model.hidden
    projections = modules * 2 * model.hidden * model.hidden
    return 6.0 * (per_layer + heads + projections)


def _layer_elements(layer: Layer, hidden: int) -> int:
    """Elements of the matrices of one layer that one token meets."""
    mlp = _dense_elements(layer.mlp, hidden) if isinstance(layer.mlp, Dense) else _moe_elements(layer.mlp, hidden)
    return _attention_elements(layer.attention, hidden) + mlp


def _dense_elements(dense: Dense, hidden: int) -> int:
    return (1 + num_halves(dense.activation)) * hidden * dense.ffn


def _moe_elements(moe: MoE, hidden: int) -> int:
    """The chosen experts, the shared ones, and the projections to and from the width of latent ones; not the gates."""
    shared = moe.shared.count if moe.shared else 0
    projections = 0 if moe.latent is None else 2 * hidden * moe.latent
    widths = (1 + num_halves(moe.activation)) * moe.expert_ffn
    return widths * (moe.top_k * moe.routed_width(hidden) + shared * hidden) + projections


def _attention_elements(attention: Attention, hidden: int) -> int:
    a = attention
    if isinstance(a, GQA):
        return hidden * a.head_dim * (2 * a.heads + 2 * a.kv_heads)
    query = a.heads * (a.nope_dim + a.rope_dim)
    queries = hidden * query if a.query_rank is None else a.query_rank * (hidden + query)
    latent = hidden * (a.latent_rank + a.rope_dim) + a.latent_rank * a.heads * (a.nope_dim + a.value_dim)
    return queries + latent + a.heads * a.value_dim * hidden


def _attention_work(layer: Layer, sequence_tokens: int) -> float:
    a = layer.attention
    sizes = 2 * a.head_dim if isinstance(a, GQA) else a.nope_dim + a.rope_dim + a.value_dim
    return a.heads * sizes * sequence_tokens / 2
