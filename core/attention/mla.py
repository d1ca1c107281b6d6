"""Multi-head latent attention (arXiv 2412.19437 section 2.1.1): keys and values rise from one small latent per token."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from core.attention.context import ContextAttention
from core.attention.packing import Packing
from core.attention.rope import Rotation, rotate_neighbours, softmax_scale
from core.config.architecture import MLA, ModelConfig
from core.layers.linear import Linear, together
from core.layers.norm import RMSNorm
from core.layers.place import Place
from core.memory.recompute import discard, recompute


class MultiHeadLatentAttention(nn.Module):
    """Heads of nope_dim + rope_dim (values: value_dim); the rotated part of the key is shared by all heads.

    tp cuts the up-projections and the output between heads. The down-projections are whole on every rank, which applies them to its
    own tokens only; what is gathered over tp are the latents, several times narrower than the hidden states.

    memory.recompute=mla_up_proj makes what the attention keeps of queries, keys and values again from the latents, which the
    up-projections keep: once more through these, the rotation, and what comes between them and the attention itself, under
    parallel.cp_alltoall an all-to-all too. core_attn makes the attention again from queries, keys and values; layernorm the normed
    latents, and under tp their all-gather.
    """

    def __init__(self, config: MLA, model: ModelConfig, *, place: Place) -> None:
        super().__init__()
        self.config = config
        self.place = place
        head_dim = config.nope_dim + config.rope_dim
        self.scale = softmax_scale(head_dim, model.rope)

        def linear(columns: int, rows: int, heads: int | None = None) -> Linear:
            return Linear(columns, rows, init_std=model.init_std, place=place, heads=heads)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(config.latent_norm, size, place=place)

        if config.query_rank is None:
            self.query = linear(model.hidden, config.heads * head_dim, config.heads)
        else:
            self.query_down = linear(model.hidden, config.query_rank)
            self.query_norm = norm(config.query_rank)
            self.query_up = linear(config.query_rank, config.heads * head_dim, config.heads)
        self.latent_down = linear(model.hidden, config.latent_rank + config.rope_dim)
        self.latent_norm = norm(config.latent_rank)
        width = config.nope_dim + config.value_dim
        self.latent_up = linear(config.latent_rank, config.heads * width, config.heads)
        self.output = Linear(
            config.heads * config.value_dim, model.hidden, init_std=model.init_std, place=place, cut="columns"
        )

    def forward(self, x_TH: Tensor, packing: Packing, turn: Rotation) -> Tensor:
        """[my tokens, hidden] to the same. An all-gather and a reduce-scatter over tp, and what the context needs over cp."""
        groups, values = self.place.groups, (self.config.value_dim, x_TH.dtype)
        steps = ContextAttention(packing, self.scale, ring=groups.ring, heads=groups.heads, values=values)

        def attend(queries: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
            return self._attend(steps, turn, (queries, latent, k_rope))

        down = self._down(x_TH)
        if self.place.again("layernorm"):
            out = discard(lambda *down: self._latents(*down, rows=packing.rows), down, attend)
        else:
            out = attend(*self._latents(*down, rows=packing.rows))
        return self.place.scatter_sequence(self.output(steps.home(out).flatten(1)), packing.rows)

    def _attend(self, steps: ContextAttention, turn: Rotation, latents: tuple[Tensor, ...]) -> Tensor:
        """The attention of what rises from the latents, by the steps that are kept or made again."""
        whole_again, up_again = self.place.again("core_attn"), self.place.again("mla_up_proj")

        def arrive(*latents: Tensor) -> tuple[Tensor, ...]:
            return steps.arrive(*self._up(*latents, turn=turn))

        if whole_again:
            attend = partial(recompute, steps.whole)
            return discard(arrive, latents, attend) if up_again else attend(*arrive(*latents))
        if up_again:
            return discard(lambda *latents: steps.operands(*arrive(*latents)), latents, steps.attend)
        return steps.whole(*arrive(*latents))

    def _up(self, queries: Tensor, latent: Tensor, k_rope: Tensor, *, turn: Rotation) -> tuple[Tensor, ...]:
        """Queries [T, A, nope + rope], the keys' own part [T, A, nope], values [T, A, value], and the part that all keys share [T, rope]."""
        c = self.config
        up = self.query if c.query_rank is None else self.query_up
        q = up(queries).unflatten(-1, (-1, c.nope_dim + c.rope_dim))
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], dim=-1)
        kv = self.latent_up(latent).unflatten(-1, (-1, c.nope_dim + c.value_dim))
        k_nope, v = kv.split([c.nope_dim, c.value_dim], dim=-1)
        q = torch.cat([q_nope, rotate_neighbours(q_rope, turn)], dim=-1)
        shared_key = rotate_neighbours(k_rope[:, None, :], turn).squeeze(1)
        return q, k_nope, v, shared_key

    def _down(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Of my tokens: what the queries rise from before its norm, and the latent with the key's part to be rotated."""
        if self.config.query_rank is None:
            return x_TH, self.latent_down(x_TH)
        queries, latent = together(x_TH, self.query_down, self.latent_down)
        return queries, latent

    def _latents(self, queries: Tensor, latent: Tensor, *, rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Of all tokens of the context rank: what the queries rise from, the normed latent, and the key's part to be rotated."""
        c = self.config
        if c.query_rank is not None:
            queries = self.query_norm(queries)
        latent, k_rope = latent.split([c.latent_rank, c.rope_dim], dim=-1)
        mine = [queries, self.latent_norm(latent), k_rope]
        if self.place.groups.tp.size == 1:
            return mine[0], mine[1], mine[2]
        everyone = self.place.gather_sequence(torch.cat(mine, dim=-1), rows)
        queries, latent, k_rope = everyone.split([part.shape[-1] for part in mine], dim=-1)
        return queries, latent, k_rope
