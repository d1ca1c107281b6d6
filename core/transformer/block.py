"""One transformer layer: norm, attention, norm, MLP or MoE, each around a residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from core.attention.gqa import GroupedQueryAttention
from core.attention.mla import MultiHeadLatentAttention
from core.attention.rope import rotated_dimensions
from core.config.architecture import GQA, Dense, Layer, ModelConfig
from core.layers.mlp import MLP
from core.layers.norm import RMSNorm
from core.layers.place import Place
from core.memory.recompute import discard, recompute_with
from core.moe.layer import MoELayer, Outbound
from core.moe.noise import jitter
from core.moe.router import RouterInputs, Routing
from core.transformer.context import Context

T = TypeVar("T")


class Block(nn.Module):
    """[T, hidden] to [T, hidden] of this rank's tokens; `path` is its canonical name.

    With memory.recompute=full all of it is made again in the backward from its input, except that rows of experts, or the parts of
    an MLP's sum, come home once. With layernorm the norms' outputs are.
    """

    def __init__(self, layer: Layer, model: ModelConfig, path: str, place: Place) -> None:
        super().__init__()
        self.path = path
        self.again = place.again("full")
        self.place = place = place.inside("full")
        self.norms_again = place.again("layernorm")
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
                model.hidden,
                dense.ffn,
                init_std=model.init_std,
                place=place,
                activation=dense.activation,
                again=place.again("mlp"),
            )
        else:
            self.mlp = MoELayer(layer.mlp, model.hidden, model.init_std, place)

    def forward(self, hidden_TH: Tensor, context: Context) -> tuple[Tensor, Routing | None]:
        """The layer's output, and its routing where it is an MoE layer."""
        inputs = None if isinstance(self.mlp, MLP) else self._router_inputs(self.mlp, context)
        if self.again:
            return self._made_again(hidden_TH, context, inputs)
        hidden_TH = self._attended(hidden_TH, context)

        def mlp(normed_TH: Tensor) -> tuple[Tensor, Routing | None]:
            if isinstance(self.mlp, MLP):
                return self.mlp(normed_TH, context.packing.rows), None
            return self.mlp(normed_TH, inputs)

        out, routing = self._normed(self.mlp_norm, hidden_TH, mlp)
        return hidden_TH + out, routing

    def _made_again(
        self, hidden_TH: Tensor, context: Context, inputs: RouterInputs | None
    ) -> tuple[Tensor, Routing | None]:
        """`forward` that keeps its input alone: what comes home afterwards needs nothing for its backward but where it went."""
        rows = context.packing.rows

        def outward(hidden_TH: Tensor) -> tuple[tuple[Tensor, ...], Outbound | None]:
            hidden_TH = self._attended(hidden_TH, context)
            normed_TH = self.mlp_norm(hidden_TH)
            if isinstance(self.mlp, MLP):
                return (hidden_TH, self.mlp.partial(normed_TH, rows)), None
            assert inputs is not None
            tensors, outbound = self.mlp.to_experts(normed_TH, inputs)
            return (hidden_TH, *tensors), outbound

        (hidden_TH, *tensors), outbound = recompute_with(outward, hidden_TH)
        if isinstance(self.mlp, MLP):
            return hidden_TH + self.place.scatter_sequence(tensors[0], rows), None
        assert outbound is not None
        out, routing = self.mlp.from_experts(tuple(tensors), outbound)
        return hidden_TH + out, routing

    def _attended(self, hidden_TH: Tensor, context: Context) -> Tensor:
        """The residual stream behind the attention."""

        def attend(normed_TH: Tensor) -> Tensor:
            return self.attention(normed_TH, context.packing, context.turns[self.rotated])

        return hidden_TH + self._normed(self.attention_norm, hidden_TH, attend)

    def _normed(self, norm: RMSNorm, hidden_TH: Tensor, consumer: Callable[[Tensor], T]) -> T:
        """`consumer` of a norm's output, which is kept or not."""
        if not self.norms_again:
            return consumer(norm(hidden_TH))
        return discard(lambda x: (norm(x),), (hidden_TH,), consumer)

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
