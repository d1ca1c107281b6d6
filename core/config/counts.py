"""How many parameters a model has, from its declaration alone, so that `launch list` answers at once.

tests/models/test_counts.py holds this arithmetic against the real modules and against the published counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config.architecture import GQA, MLA, Attention, Dense, Layer, ModelConfig, MoE, num_halves


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The numbers that a model is made of: its parameters and, as published counts have it, the bias of every expert.

    main: everything but the prediction modules, as published sizes count. predict_ahead: the prediction modules.
    active: of `main`, what one token passes, embedding and head included.
    """

    main: int
    predict_ahead: int
    active: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.main + self.predict_ahead


def count_parameters(model: ModelConfig) -> Counts:
    """The parameter counts of `model`."""
    ends = model.vocab * model.hidden * (1 if model.tied_embeddings else 2) + model.hidden
    each = [_layer(layer, model.hidden) for layer in model.layers]
    # A prediction module: three norms, the projection of both halves, and one layer.
    around = 3 * model.hidden + 2 * model.hidden**2
    ahead = sum(around + _layer(layer, model.hidden)[0] for layer in model.mtp_layers())
    return Counts(
        main=ends + sum(total for total, _ in each),
        predict_ahead=ahead,
        active=ends + sum(active for _, active in each),
    )


def _layer(layer: Layer, hidden: int) -> tuple[int, int]:
    """All and active parameters of one layer with its two norms."""
    around = _attention(layer.attention, hidden) + 2 * hidden
    total, active = _mlp(layer.mlp, hidden)
    return around + total, around + active


def _attention(attention: Attention, hidden: int) -> int:
    """Projections and inner norms."""
    if isinstance(attention, GQA):
        norms = 2 * attention.head_dim if attention.head_norm else 0
        return 2 * hidden * attention.head_dim * (attention.heads + attention.kv_heads) + norms
    return _latent(attention, hidden)


def _latent(mla: MLA, hidden: int) -> int:
    """Latent attention, with a compressed query or without."""
    wide = mla.heads * (mla.nope_dim + mla.rope_dim)
    query = hidden * wide if mla.query_rank is None else mla.query_rank * (hidden + 1 + wide)
    down = hidden * (mla.latent_rank + mla.rope_dim) + mla.latent_rank
    up = mla.heads * (mla.nope_dim + mla.value_dim) * mla.latent_rank
    return query + down + up + mla.heads * mla.value_dim * hidden


def _mlp(mlp: Dense | MoE, hidden: int) -> tuple[int, int]:
    """All and active numbers; router, bias and shared experts are active for every token."""
    if isinstance(mlp, Dense):
        return ((1 + num_halves(mlp.activation)) * hidden * mlp.ffn,) * 2
    expert = mlp.expert_parameters(hidden)
    bias = mlp.experts if mlp.router.biased else 0
    matrices = (1 + num_halves(mlp.activation)) * hidden * mlp.expert_ffn
    shared = mlp.shared.count * matrices + mlp.shared.gated * hidden if mlp.shared else 0
    latent = 0 if mlp.latent is None else 2 * hidden * mlp.latent
    always = hidden * mlp.experts + bias + shared + latent
    return always + mlp.experts * expert, always + mlp.top_k * expert
