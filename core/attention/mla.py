"""Multi-head latent attention (arXiv 2412.19437 section 2.1.1): keys and values rise from one small latent per token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core.attention.packing import Packing
from core.attention.rope import Rotation, rotate_neighbours, softmax_scale
from core.attention.softmax import causal_attention
from core.config.architecture import MLA, ModelConfig
from core.layers.linear import Linear
from core.layers.norm import RMSNorm
from core.layers.place import Place


class MultiHeadLatentAttention(nn.Module):
    """Heads of nope_dim + rope_dim (values: value_dim); the rotated part of the key is shared by all heads."""

    def __init__(self, config: MLA, model: ModelConfig, *, place: Place) -> None:
        super().__init__()
        self.config = config
        head_dim = config.nope_dim + config.rope_dim
        self.scale = softmax_scale(head_dim, model.rope)

        def linear(rows: int, columns: int) -> Linear:
            return Linear(columns, rows, init_std=model.init_std, place=place)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(config.latent_norm, size, place=place)

        if config.query_rank is None:
            self.query = linear(config.heads * head_dim, model.hidden)
        else:
            self.query_down = linear(config.query_rank, model.hidden)
            self.query_norm = norm(config.query_rank)
            self.query_up = linear(config.heads * head_dim, config.query_rank)
        self.latent_down = linear(config.latent_rank + config.rope_dim, model.hidden)
        self.latent_norm = norm(config.latent_rank)
        self.latent_up = linear(config.heads * (config.nope_dim + config.value_dim), config.latent_rank)
        self.output = linear(model.hidden, config.heads * config.value_dim)

    def forward(self, x_TH: Tensor, packing: Packing, turn: Rotation) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        c = self.config
        q = self._queries(x_TH).unflatten(-1, (c.heads, -1))
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], dim=-1)
        latent, k_rope = self.latent_down(x_TH).split([c.latent_rank, c.rope_dim], dim=-1)
        kv = self.latent_up(self.latent_norm(latent)).unflatten(-1, (c.heads, -1))
        k_nope, v = kv.split([c.nope_dim, c.value_dim], dim=-1)
        shared_key = rotate_neighbours(k_rope[:, None, :], turn).expand(-1, c.heads, -1)
        q = torch.cat([q_nope, rotate_neighbours(q_rope, turn)], dim=-1)
        k = torch.cat([k_nope, shared_key], dim=-1)
        return self.output(causal_attention(q, k, v, packing, self.scale).flatten(1))

    def _queries(self, x_TH: Tensor) -> Tensor:
        """All heads' queries: [T, heads * (nope_dim + rope_dim)]."""
        if self.config.query_rank is None:
            return self.query(x_TH)
        return self.query_up(self.query_norm(self.query_down(x_TH)))
