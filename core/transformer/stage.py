"""What one rank computes: embedding, layers, head, multi-token prediction, and the losses over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.attention.packing import Packing, packing_of
from core.attention.rope import rotated_dimensions, rotation
from core.config.architecture import ModelConfig
from core.config.mapping import ParallelConfig
from core.config.run import IGNORE
from core.layers.embedding import Vocabulary
from core.layers.norm import RMSNorm
from core.layers.place import Place
from core.moe.router import Routing
from core.parallel.groups import Groups, one_rank
from core.transformer.block import Block
from core.transformer.context import BalanceInputs, Context, StageOutput, Totals
from core.transformer.mtp import MultiTokenModule, labels_ahead


@dataclass(frozen=True, kw_only=True)
class Losses:
    """One microbatch's share of the losses of the global batch.

    total: what is differentiated. tokens: summed cross-entropy of the main head, float32, not divided. ahead: the same of each
    multi-token prediction module. balance: by `layer/loss`, coefficients applied. All but `total` are detached.
    """

    total: Tensor
    tokens: Tensor
    ahead: tuple[Tensor, ...]
    balance: dict[str, Tensor]
    routings: dict[str, Routing]


class Stage(nn.Module):
    """A whole language model on the ranks of one pipeline stage. Hidden states are [tokens, hidden], packed."""

    def __init__(self, model: ModelConfig, place: Place) -> None:
        super().__init__()
        self.config = model
        self.place = place
        # What ckpt/huggingface.py knows of the folder that the weights came from; None for a model made here.
        self.origin: object | None = None
        embedding_std = model.init_std if model.embedding_std is None else model.embedding_std
        self.embedding = Vocabulary(model.vocab, model.hidden, init_std=embedding_std, place=place)
        self.layers = nn.ModuleDict(
            {str(i): Block(layer, model, f"layers.{i}", place) for i, layer in enumerate(model.layers)}
        )
        self.final_norm = RMSNorm(model.norm, model.hidden, place=place)
        self.mtp = nn.ModuleDict(
            {str(d): MultiTokenModule(layer, model, d, place) for d, layer in enumerate(model.mtp_layers())}
        )
        self.head = None
        if not model.tied_embeddings:
            self.head = Vocabulary(model.vocab, model.hidden, init_std=model.init_std, place=place)

    @property
    def output_head(self) -> Vocabulary:
        """The matrix that gives logits: its own, or the embedding where the two are tied."""
        return self.embedding if self.head is None else self.head

    def forward(self, tokens_T: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Logits [T, vocab] float32 of the token after each; tokens [T] int64; cu_seqlens [n + 1], None for one sequence."""
        packing = packing_of(cu_seqlens, tokens_T.shape[0], tokens_T.device)
        return self.output_head.logits(self.hidden(tokens_T, packing).hidden)

    def hidden(
        self,
        tokens_T: Tensor,
        packing: Packing,
        *,
        valid_T: Tensor | None = None,
        balance: BalanceInputs | None = None,
    ) -> StageOutput:
        """The main model up to its final norm."""
        context = self._context(packing, valid_T, balance)
        hidden = self.embedding.embed(tokens_T)
        routings: dict[str, Routing] = {}
        for block in self._blocks():
            hidden, routing = block(hidden, context)
            if routing is not None:
                routings[block.path] = routing
        return StageOutput(hidden=self.final_norm(hidden), routings=routings)

    def losses(
        self,
        tokens_T: Tensor,
        labels_T: Tensor,
        packing: Packing,
        balance: BalanceInputs,
        *,
        valid_T: Tensor | None = None,
    ) -> Losses:
        """The shares of all losses that a training step adds up; labels -100 are not predicted."""
        out = self.hidden(tokens_T, packing, valid_T=valid_T, balance=balance)
        main = self.output_head.loss(out.hidden, labels_T)
        total = main / max(1, balance.totals.labels)
        routings, ahead, hidden = dict(out.routings), [], out.hidden
        context = self._context(packing, valid_T, balance) if len(self.mtp) else None
        for depth, module in enumerate(self._modules_ahead()):
            assert context is not None and self.config.predict_ahead is not None
            inputs, labels = labels_ahead(labels_T, packing.lengths, depth)
            embedded = self.embedding.embed(inputs.masked_fill(inputs == IGNORE, 0))
            hidden, routing = module(hidden, embedded, context)
            ahead.append(self.output_head.loss(hidden, labels))
            weight = self.config.predict_ahead.loss_weight / self.config.predict_ahead.depth
            total = total + ahead[-1] * (weight / max(1, balance.totals.ahead[depth]))
            if routing is not None:
                routings[module.layer.path] = routing
        shares = _balance_shares(routings)
        for share in shares.values():
            total = total + share
        return Losses(
            total=total,
            tokens=main.detach(),
            ahead=tuple(loss.detach() for loss in ahead),
            balance={name: share.detach() for name, share in shares.items()},
            routings=routings,
        )

    def totals_of(self, labels_T: Tensor, packing: Packing, valid_T: Tensor | None = None) -> Totals:
        """This microbatch's own counts; their sum over the global batch divides its losses."""
        routed = labels_T.numel() if valid_T is None else int(valid_T.sum())
        depths = range(len(self.mtp))
        ahead = (labels_ahead(labels_T, packing.lengths, depth)[1] for depth in depths)
        return Totals(tokens=routed, labels=_known(labels_T), ahead=tuple(_known(labels) for labels in ahead))

    def _blocks(self) -> list[Block]:
        return [block for block in self.layers.values() if isinstance(block, Block)]

    def _modules_ahead(self) -> list[MultiTokenModule]:
        return [module for module in self.mtp.values() if isinstance(module, MultiTokenModule)]

    def _context(self, packing: Packing, valid_T: Tensor | None, balance: BalanceInputs | None) -> Context:
        sizes = {rotated_dimensions(layer.attention) for layer in self.config.layers}
        turns = {size: rotation(self.config.rope, size, packing.positions_T) for size in sizes}
        return Context(packing=packing, valid_T=valid_T, turns=turns, balance=balance)


def build_model(
    model: ModelConfig,
    *,
    groups: Groups | None = None,
    parallel: ParallelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Stage:
    """The modules of `model` on this rank, uninitialised: `initialise` or a checkpoint fills them. On `meta` they are free."""
    place = Place(
        groups=groups or one_rank(),
        parallel=parallel or ParallelConfig(),
        dtype=dtype,
        device=torch.device(device),
    )
    return Stage(model, place)


def _known(labels_T: Tensor) -> int:
    return int((labels_T != IGNORE).sum())


def _balance_shares(routings: dict[str, Routing]) -> dict[str, Tensor]:
    """Every balance loss of every layer, by `layer/loss`."""
    return {
        f"{layer}/{name}": share
        for layer, routing in routings.items()
        if routing.balance is not None
        for name, share in routing.balance.by_name.items()
    }
