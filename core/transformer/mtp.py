"""Multi-token prediction (arXiv 2412.19437 section 2.2): module d predicts, at token i, token i + d + 2.

Embedding and head are the main model's own; only norms, projection and one layer belong to a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from core.config.architecture import Layer, ModelConfig
from core.config.run import IGNORE
from core.layers.linear import Linear
from core.layers.norm import RMSNorm
from core.layers.place import Place
from core.memory.recompute import recompute_with
from core.moe.router import Routing
from core.transformer.block import Block
from core.transformer.context import Context


class MultiTokenModule(nn.Module):
    """Joins the hidden state of token i with the embedding of token i + d + 1 and runs one layer over it.

    With memory.recompute=full all of it is made again in the backward.
    """

    def __init__(self, layer: Layer, model: ModelConfig, depth: int, place: Place) -> None:
        super().__init__()
        self.again = place.again("full")
        place = place.inside("full")
        self.embedding_norm = RMSNorm(model.norm, model.hidden, place=place)
        self.hidden_norm = RMSNorm(model.norm, model.hidden, place=place)
        self.projection = Linear(2 * model.hidden, model.hidden, init_std=model.init_std, place=place)
        self.layer = Block(layer, model, f"mtp.{depth}.layer", place)
        self.final_norm = RMSNorm(model.norm, model.hidden, place=place)

    def forward(self, hidden_TH: Tensor, embedded_TH: Tensor, context: Context) -> tuple[Tensor, Routing | None]:
        """hidden: of the main model or of the module before, after its final norm. Returns the same for this module."""
        half = partial(self._outward, context=context)
        (out, *losses), routing = (
            recompute_with(half, hidden_TH, embedded_TH) if self.again else half(hidden_TH, embedded_TH)
        )
        return out, _with_losses(routing, losses)

    def _outward(
        self, hidden_TH: Tensor, embedded_TH: Tensor, context: Context
    ) -> tuple[tuple[Tensor, ...], Routing | None]:
        """The stream, the balance losses of its layer, and the routing."""
        joined = torch.cat([self.embedding_norm(embedded_TH), self.hidden_norm(hidden_TH)], dim=-1)
        out, routing = self.layer(self.projection(joined), context)
        losses = () if routing is None or routing.balance is None else tuple(routing.balance.by_name.values())
        return (self.final_norm(out), *losses), routing


def _with_losses(routing: Routing | None, losses: Sequence[Tensor]) -> Routing | None:
    """The routing with other tensors for its balance losses, in their order."""
    if routing is None or routing.balance is None:
        return routing
    named = dict(zip(routing.balance.by_name, losses, strict=True))
    return replace(routing, balance=replace(routing.balance, by_name=named))


def shift_labels(labels_T: Tensor, lengths: tuple[int, ...], steps: int) -> Tensor:
    """labels moved `steps` tokens earlier within each sequence; -100 where the sequence ends first: [T] int64."""
    if steps == 0:
        return labels_T
    shifted = torch.full_like(labels_T, IGNORE)
    start = 0
    for length in lengths:
        if length > steps:
            shifted[start : start + length - steps] = labels_T[start + steps : start + length]
        start += length
    return shifted


def labels_ahead(labels_T: Tensor, lengths: tuple[int, ...], depth: int) -> tuple[Tensor, Tensor]:
    """For module `depth`: the tokens whose embeddings it is given, and the labels that it predicts, both [T] int64.

    labels hold, at token i, token i + 1, so those shifted by `depth` are the inputs and by one more the labels. An unknown
    input is -100 in both.
    """
    inputs = shift_labels(labels_T, lengths, depth)
    return inputs, shift_labels(labels_T, lengths, depth + 1).masked_fill(inputs == IGNORE, IGNORE)
