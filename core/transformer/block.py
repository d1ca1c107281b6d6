"""One transformer layer: norm, attention, norm, MLP or MoE, each around a residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from core.attention.gqa import GroupedQueryAttention
from core.attention.mla import MultiHeadLatentAttention
from core.attention.rope import rotated_dimensions
from core.config.architecture import GQA, Dense, Layer, ModelConfig
from core.layers.mlp import MLP
from core.layers.norm import RMSNorm
from core.layers.place import Place
from core.moe.layer import MoELayer
from core.moe.noise import jitter
from core.moe.router import RouterInputs, Routing
from core.transformer.context import Context


class Block(nn.Module):
    """[T, hidden] to [T, hidden] of this rank's tokens; `path` is its canonical name."""

    def __init__(self, layer: Layer, model: ModelConfig, path: str, place: Place) -> None:
        super().__init__()
        self.path = path
        self.rotated = rotated_dimensions(layer.attention)
        self.attention_norm = RMSNorm(model.norm, model.hidden, place=place)
        self.attention: GroupedQueryAttention | MultiHeadLatentAttention
        if isinstance(layer.attention, GQA):
            self.attention = GroupedQueryAttention(layer.attention, model, place=place)
        else:
            self.attention = MultiHeadLatentAttention(layer.attention, model, place=place)
        self.mlp_norm = RMSNorm(model.norm, model.hidden, place=place)
        if isinstance(layer.mlp, Dense):
            dense = layer.mlp
            self.mlp: MLP | MoELayer = MLP(
                model.hidden, dense.ffn, init_std=model.init_std, place=place, activation=dense.activation
            )
        else:
            self.mlp = MoELayer(layer.mlp, model.hidden, model.init_std, place)

    def forward(self, hidden_TH: Tensor, context: Context) -> tuple[Tensor, Routing | None]:
        """The layer's output, and its routing where it is an MoE layer."""
        hidden_TH = hidden_TH + self.attention(
            self.attention_norm(hidden_TH), context.packing, context.turns[self.rotated]
        )
        normed = self.mlp_norm(hidden_TH)
        if isinstance(self.mlp, MLP):
            return hidden_TH + self.mlp(normed, context.packing.rows), None
        out, routing = self.mlp(normed, self._router_inputs(self.mlp, context))
        return hidden_TH + out, routing

    def _router_inputs(self, moe: MoELayer, context: Context) -> RouterInputs:
        """What the router of this layer is told, out of what all layers share."""
        packing, mine_T = context.packing, context.packing.mine_T
        scope = noise = prescribed = None
        if context.balance is not None:
            scope = context.balance.scope(self.path, packing, context.valid_T)
            if moe.router.config.router.jitter is not None:
                noise = self._jitter(moe.router.config.router.jitter, moe.router.weight.shape[1], context)
        if context.prescribed is not None:
            prescribed = context.prescribed.of(self.path, mine_T)
        return RouterInputs(
            packing=packing, scope=scope, valid_T=context.valid_T, prescribed_TK=prescribed, noise_TH=noise
        )

    def _jitter(self, reach: float, hidden: int, context: Context) -> Tensor:
        at = context.position
        assert at is not None, f"{self.path} draws jitter in training: its microbatches need a position"
        tokens_T = context.packing.mine_T + at.first
        return jitter(reach, f"{self.path}.mlp.router.jitter", tokens_T, hidden, seed=at.seed, step=at.step)
