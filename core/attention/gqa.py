"""Grouped-query attention (arXiv 2305.13245), with per-head query and key norms where declared (Qwen3)."""

from __future__ import annotations

from torch import Tensor, nn

from core.attention.context import context_attention
from core.attention.packing import Packing
from core.attention.rope import Rotation, rotate_halves, softmax_scale
from core.config.architecture import GQA, ModelConfig
from core.layers.linear import Linear, together
from core.layers.norm import RMSNorm
from core.layers.place import Place


class GroupedQueryAttention(nn.Module):
    """heads query heads share kv_heads key/value heads.

    tp cuts between heads. Where it has more ranks than there are key/value heads, neighbours hold the same one: each gets a part of
    its gradient, from its own query heads.
    """

    def __init__(self, config: GQA, model: ModelConfig, *, place: Place) -> None:
        super().__init__()
        self.place, self.again = place, place.again("core_attn")
        self.head_dim = config.head_dim
        self.scale = softmax_scale(config.head_dim, model.rope)

        def heads(number: int) -> Linear:
            rows = number * config.head_dim
            return Linear(model.hidden, rows, init_std=model.init_std, place=place, heads=number)

        width = config.heads * config.head_dim
        self.query, self.key, self.value = heads(config.heads), heads(config.kv_heads), heads(config.kv_heads)
        self.output = Linear(width, model.hidden, init_std=model.init_std, place=place, cut="columns")
        norm = config.head_norm
        self.query_norm = RMSNorm(norm, config.head_dim, place=place) if norm else None
        self.key_norm = RMSNorm(norm, config.head_dim, place=place) if norm else None

    def forward(self, x_TH: Tensor, packing: Packing, turn: Rotation) -> Tensor:
        """[my tokens, hidden] to the same. An all-gather and a reduce-scatter over tp, and what the context needs over cp."""
        q, k, v = self.place.with_sequence(x_TH, packing.rows, self._heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        groups = self.place.groups
        q, k = rotate_halves(q, turn), rotate_halves(k, turn)
        out = context_attention(q, k, v, packing, self.scale, ring=groups.ring, heads=groups.heads, again=self.again)
        return self.place.scatter_sequence(self.output(out.flatten(1)), packing.rows)

    def _heads(self, everyone_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, A, D], keys and values [T, G, D] of all tokens of the context rank."""
        flat = together(everyone_TH, self.query, self.key, self.value)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in flat)
        return q, k, v
