"""What one pipeline rank holds of a language model, and what each of its parts makes of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from core.attention.packing import packing_of
from core.attention.rope import rotated_dimensions, rotation
from core.config.architecture import ModelConfig
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.recipe import Recipe
from core.config.run import IGNORE
from core.kernels.deferred import Deferred
from core.layers.embedding import Vocabulary
from core.layers.norm import RMSNorm
from core.layers.place import Place
from core.moe.router import Routing
from core.parallel.groups import Groups, one_rank
from core.pipeline.layout import Layout, Part, layout_of
from core.transformer.block import Block
from core.transformer.context import BalanceInputs, Context, TokenBatch, Totals
from core.transformer.mtp import MultiTokenModule, labels_ahead
from core.transformer.quantise import quantise_model

# What a microbatch is run for: all losses of training; the loss of the main head alone; the hidden states that give logits.
Purpose = Literal["training", "loss", "hidden"]


@dataclass(frozen=True, kw_only=True)
class PartOutput:
    """What one part makes of a microbatch.

    out: [streams, my tokens, hidden] for the next part, None behind the last. share: this rank's share of everything that is
    differentiated, None where the part has no loss. tokens: summed cross-entropy of the main head over my tokens, not divided;
    ahead: the same of each multi-token prediction module; balance: by `layer/loss`, coefficients applied; all three detached.
    """

    out: Tensor | None
    share: Tensor | None
    tokens: Tensor | None = None
    ahead: tuple[Tensor, ...] = ()
    balance: dict[str, Tensor] = field(default_factory=dict)
    routings: dict[str, Routing] = field(default_factory=dict)


class Stage(nn.Module):
    """The parts of a model that lie on one pipeline rank, one for each of its virtual stages.

    Between parts travel streams of hidden states: the main one, and behind every multi-token prediction module that has run
    its own. Behind the last decoder layer streams are normed.
    """

    def __init__(self, model: ModelConfig, layout: Layout, place: Place) -> None:
        super().__init__()
        self.config = model
        self.layout = layout
        self.place = place
        self.parts = layout.parts_of(place.groups.pp.position)
        # Called with the canonical name of a module before its parameters are used: a distributed optimizer may still gather them.
        self.wait_for: Callable[[str], None] = _nothing
        # What ckpt/huggingface.py knows of the folder that the weights came from; None for a model made here.
        self.origin: object | None = None
        std, tied = model.init_std, model.tied_embeddings
        embedding_std = std if model.embedding_std is None else model.embedding_std
        self.embedding = None
        if any(part.embedding or part.ahead or (part.loss and tied) for part in self.parts):
            self.embedding = Vocabulary(
                model.vocab, model.hidden, init_std=embedding_std, place=place, replicas="embedding"
            )
        held = [i for part in self.parts for i in part.layers]
        self.layers = nn.ModuleDict({str(i): Block(model.layers[i], model, f"layers.{i}", place) for i in held})
        last = len(model.layers) - 1
        self.final_norm = RMSNorm(model.norm, model.hidden, place=place) if last in held else None
        modules, depths = model.mtp_layers(), [d for part in self.parts for d in part.ahead]
        self.mtp = nn.ModuleDict({str(d): MultiTokenModule(modules[d], model, d, place) for d in depths})
        self.head = None
        if not tied and any(part.loss for part in self.parts):
            self.head = Vocabulary(model.vocab, model.hidden, init_std=std, place=place, replicas="dense")

    @property
    def output_head(self) -> Vocabulary:
        """The matrix that gives logits: its own, or the embedding where the two are tied."""
        head = self.embedding if self.head is None else self.head
        assert head is not None, "this pipeline rank holds no head"
        return head

    @property
    def whole(self) -> bool:
        """Whether this rank holds a part of every layer, so that nothing travels between pipeline ranks."""
        return self.layout.pp == 1

    def forward(self, tokens_T: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Logits [T, vocab] float32 of the token after each; tokens [T] int64; cu_seqlens [n + 1], None for one sequence.

        Of a model without pipeline and context parallelism: those spread what is given here.
        """
        assert self.whole and self.place.groups.cp.size == 1, (
            "logits of all tokens lie on no single rank of this mapping"
        )
        batch = self.batch(tokens_T, torch.full_like(tokens_T, IGNORE), cu_seqlens)
        hidden = None
        for chunk in range(len(self.parts)):
            hidden = self.run(chunk, hidden, batch, purpose="hidden").out
        assert hidden is not None
        return self.output_head.logits(hidden[0], batch.packing.rows)

    def batch(self, tokens_T: Tensor, labels_T: Tensor, cu_seqlens: Tensor | None = None) -> TokenBatch:
        """A microbatch as this rank needs it."""
        packing = packing_of(cu_seqlens, tokens_T.shape[0], tokens_T.device, self.place.groups)
        return TokenBatch(tokens=tokens_T, labels=labels_T, packing=packing)

    def run(
        self,
        chunk: int,
        received: Tensor | None,
        batch: TokenBatch,
        *,
        purpose: Purpose,
        balance: BalanceInputs | None = None,
    ) -> PartOutput:
        """What part `chunk` of this rank makes of a microbatch; received: the previous part's `out`, None for the first."""
        part = self.parts[chunk]
        context = self._context(batch, balance)
        streams = [] if received is None else list(received.unbind(0))
        routings: dict[str, Routing] = {}
        if part.embedding:
            streams.append(self._embed(batch.tokens, batch))
        for i in part.layers:
            streams[0] = self._layer(i, streams[0], context, routings)
        if purpose == "training":
            for depth in part.ahead:
                streams.append(self._ahead(depth, streams[-1], batch, context, routings))
        shares = _balance_shares(routings)
        if part.loss and purpose != "hidden":
            tokens, ahead, total = self._losses(part, streams, batch, balance)
        else:
            tokens, ahead, total = None, (), None
        for share in shares.values():
            total = share if total is None else total + share
        return PartOutput(
            out=torch.stack(streams) if tokens is None else None,
            share=total,
            tokens=tokens,
            ahead=ahead,
            balance={name: share.detach() for name, share in shares.items()},
            routings=routings,
        )

    def received_shape(self, chunk: int, batch: TokenBatch, purpose: Purpose) -> tuple[int, int, int]:
        """The shape of what part `chunk` receives of a microbatch: [streams, my tokens, hidden]."""
        before = self.layout.parts[: chunk * self.layout.pp + self.place.groups.pp.position]
        streams = 1 + sum(len(part.ahead) for part in before) if purpose == "training" else 1
        mine = batch.packing.rows[self.place.groups.tp.position]
        return streams, mine, self.config.hidden

    def passes(self, microbatches: int) -> dict[str, int]:
        """How many backward passes of so many microbatches reach each parameter, by canonical name: one for each part that uses it."""
        tied = self.config.tied_embeddings
        users = sum(part.embedding or bool(part.ahead) or (tied and part.loss) for part in self.parts)
        names = (name for name, _ in self.named_parameters())
        return {name: microbatches * (users if name == "embedding.weight" else 1) for name in names}

    def totals_of(self, batch: TokenBatch) -> Totals:
        """A whole microbatch's counts; their sum over the global batch divides its losses. Every rank can tell, whatever it holds."""
        labels = batch.labels
        routed = labels.numel() if batch.valid is None else int(batch.valid.sum())
        depths = range(len(self.config.mtp_layers()))
        ahead = (labels_ahead(labels, batch.packing.lengths, depth)[1] for depth in depths)
        return Totals(tokens=routed, labels=_known(labels), ahead=tuple(_known(shifted) for shifted in ahead))

    def _embed(self, tokens_T: Tensor, batch: TokenBatch) -> Tensor:
        """The embeddings of my tokens, out of ids of the whole microbatch."""
        assert self.embedding is not None, "this pipeline rank holds no embedding"
        self.wait_for("embedding")
        return self.embedding.embed(tokens_T[batch.packing.index_T], batch.packing.rows)

    def _layer(self, i: int, hidden: Tensor, context: Context, routings: dict[str, Routing]) -> Tensor:
        block = self.layers[str(i)]
        assert isinstance(block, Block)
        self.wait_for(block.path)
        hidden, routing = block(hidden, context)
        if routing is not None:
            routings[block.path] = routing
        if i < len(self.config.layers) - 1:
            return hidden
        assert self.final_norm is not None
        self.wait_for("final_norm")
        return self.final_norm(hidden)

    def _ahead(
        self, depth: int, hidden: Tensor, batch: TokenBatch, context: Context, routings: dict[str, Routing]
    ) -> Tensor:
        """The stream of module `depth`, from that of the module before or of the main model."""
        module = self.mtp[str(depth)]
        assert isinstance(module, MultiTokenModule)
        inputs, _ = labels_ahead(batch.labels, batch.packing.lengths, depth)
        embedded = self._embed(inputs.masked_fill(inputs == IGNORE, 0), batch)
        self.wait_for(f"mtp.{depth}")
        hidden, routing = module(hidden, embedded, context)
        if routing is not None:
            routings[module.layer.path] = routing
        return hidden

    def _losses(
        self, part: Part, streams: list[Tensor], batch: TokenBatch, balance: BalanceInputs | None
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """The head's losses on all streams, detached, and in training their share of what is differentiated."""
        packing, head = batch.packing, self.output_head
        self.wait_for("embedding" if self.head is None else "head")
        main = head.loss(streams[0], batch.labels[packing.index_T], packing.rows)
        if balance is None:
            return main.detach(), (), None
        total, ahead = main / max(1, balance.totals.labels), []
        for depth, hidden in enumerate(streams[1:]):
            _, labels = labels_ahead(batch.labels, packing.lengths, depth)
            ahead.append(head.loss(hidden, labels[packing.index_T], packing.rows))
            assert self.config.predict_ahead is not None
            weight = self.config.predict_ahead.loss_weight / self.config.predict_ahead.depth
            total = total + ahead[-1] * (weight / max(1, balance.totals.ahead[depth]))
        return main.detach(), tuple(loss.detach() for loss in ahead), total

    def _context(self, batch: TokenBatch, balance: BalanceInputs | None) -> Context:
        sizes = {rotated_dimensions(layer.attention) for layer in self.config.layers}
        turns = {size: rotation(self.config.rope, size, batch.packing.positions_T) for size in sizes}
        valid = None if batch.valid is None else batch.valid[batch.packing.mine_T]
        return Context(
            packing=batch.packing,
            valid_T=valid,
            turns=turns,
            balance=balance,
            position=batch.position,
            prescribed=batch.prescribed,
        )


def build_model(
    model: ModelConfig,
    *,
    groups: Groups | None = None,
    parallel: ParallelConfig | None = None,
    memory: MemoryConfig | None = None,
    dispatcher_sms: int | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Stage:
    """This rank's modules of `model`, uninitialised: `initialise` or a checkpoint fills them. On `meta` they are free.

    memory: what is made again in the backward; it changes no result. (What it says of host memory is for whoever can do that.)
    dispatcher_sms: as of a Place. recipe: of the products in layers; seed: of the run, for what a recipe draws at random.
    """
    parallel = parallel or ParallelConfig()
    place = Place(
        groups=groups or one_rank(),
        parallel=parallel,
        dtype=dtype,
        device=torch.device(device),
        later=Deferred() if parallel.schedule == "zero_bubble" else None,
        memory=memory or MemoryConfig(),
        dispatcher_sms=dispatcher_sms,
    )
    stage = Stage(model, layout_of(model, parallel), place)
    if recipe is not None:
        quantise_model(stage, model, recipe, place, seed)
    return stage


def _nothing(name: str) -> None:
    """Parameters are there."""


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
