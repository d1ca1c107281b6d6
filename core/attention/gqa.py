"""Grouped-query attention (arXiv 2305.13245), with per-head query and key norms where declared (Qwen3)."""

from __future__ import annotations

from torch import Tensor, nn

from core.attention.packing import Packing
from core.attention.rope import Rotation, rotate_halves, softmax_scale
from core.attention.softmax import causal_attention
from core.config.architecture import GQA, ModelConfig
from core.layers.linear import Linear
from core.layers.norm import RMSNorm
from core.layers.place import Place


class GroupedQueryAttention(nn.Module):
    """heads query heads share kv_heads key/value heads."""

    def __init__(self, config: GQA, model: ModelConfig, *, place: Place) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = softmax_scale(config.head_dim, model.rope)
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def linear(rows: int, columns: int) -> Linear:
            return Linear(columns, rows, init_std=model.init_std, place=place)

        self.query = linear(width, model.hidden)
        self.key = linear(kv_width, model.hidden)
        self.value = linear(kv_width, model.hidden)
        self.output = linear(model.hidden, width)
        norm = config.head_norm
        self.query_norm = RMSNorm(norm, config.head_dim, place=place) if norm else None
        self.key_norm = RMSNorm(norm, config.head_dim, place=place) if norm else None

    def forward(self, x_TH: Tensor, packing: Packing, turn: Rotation) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        q, k, v = (layer(x_TH).unflatten(-1, (-1, self.head_dim)) for layer in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        out = causal_attention(rotate_halves(q, turn), rotate_halves(k, turn), v, packing, self.scale)
        return self.output(out.flatten(1))
