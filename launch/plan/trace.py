"""What one piece of a model keeps, needs and sends, by running the real modules on the meta device as one rank of a world (contract 8).

Pieces are the embedding, a decoder layer of each kind, a prediction module, and the head with its losses. Each is run as a part of
its own through `Stage.run`, forward and backward, in a world of imagined groups (core/parallel/imagined.py). Hidden states have no
data there; routing has, so that everything that the host reads is a number. What is counted is what lives (launch/plan/survivors.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from core.attention.packing import packing_of
from core.attention.rope import rotated_dimensions
from core.config.architecture import Capacity, Layer, ModelConfig, MoE
from core.config.mapping import DispatcherName, ParallelConfig
from core.config.memory import MemoryConfig, RecomputeName
from core.config.precision import ComputeName
from core.config.recipe import Recipe
from core.config.run import RunConfig
from core.moe.dispatch.protocol import experts_per_rank
from core.moe.workload import Workload
from core.parallel.fake import plan_world
from core.parallel.groups import Groups
from core.parallel.mesh import fold
from core.parallel.meter import Meter
from core.precision.imagined import Imagined
from core.state.inventory import Entry, declared
from core.transformer.context import BalanceInputs, BatchPosition, Prescription, TokenBatch, Totals
from core.transformer.quantise import quantisers
from core.transformer.stage import Stage, build_model
from launch.plan.kinds import Kinds, high_products, kinds_of
from launch.plan.survivors import Piece, Watch

FLOATS: dict[ComputeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Dispatchers that are packages of kernels are traced as the one that sends the same on any hardware.
_TRACED_AS: dict[DispatcherName, DispatcherName] = {"deepep": "flex", "hybridep": "flex"}


@dataclass(frozen=True, kw_only=True)
class PieceTrace:
    """What one piece does with one microbatch on one rank.

    kept: memory that waits for the backward, without the piece's input. keeps_input: whether its input waits too, of stream_bytes.
    late: of a schedule with halved backwards, what waits between the input's gradient and the weights'. forward_peak and
    backward_peak: the most bytes held at once in either, kept ones included. sent: bytes by axis, forward and backward.
    """

    kept: tuple[Piece, ...]
    keeps_input: bool
    stream_bytes: int
    out_bytes: int
    late: int
    forward_peak: int
    backward_peak: int
    sent: Mapping[str, tuple[int, int]]

    @cached_property
    def kept_bytes(self) -> int:
        """All that is kept but the input."""
        return sum(piece.num_bytes for piece in self.kept)

    @property
    def working(self) -> int:
        """What the fullest moment needs beyond what is kept."""
        return max(0, max(self.forward_peak, self.backward_peak) - self.kept_bytes)

    def without(self, pieces: Sequence[Piece]) -> PieceTrace:
        """The same where something else holds some of what is kept."""
        away, kept = sum(piece.num_bytes for piece in pieces), tuple(p for p in self.kept if p not in pieces)
        return replace(self, kept=kept, forward_peak=self.forward_peak - away, backward_peak=self.backward_peak - away)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a trace depends on: a model with one layer of each kind and the last one once more, its mapping without pp and with
    no more dp than the experts need, and the microbatch. recipe: of that model, naming everything that it does not take. hot: every
    token goes to this rank's experts before others."""

    model: ModelConfig
    parallel: ParallelConfig
    ranks: int
    rank: int
    lengths: tuple[int, ...]
    compute: ComputeName
    recipe: Recipe | None
    recompute: tuple[RecomputeName, ...]
    hot: bool


def kinds_by_path(model: ModelConfig) -> dict[str, str]:
    """For every layer by canonical name the first one with the same declaration."""
    first = {layer: f"layers.{i}" for i, layer in reversed(tuple(enumerate(model.layers)))}
    return {path: first[layer] for path, layer in model.all_layers()}


def _traced_recipe(model: ModelConfig, recipe: Recipe | None, kinds: Kinds) -> Recipe | None:
    """The recipe of the model that is traced, in which every layer has its kind's number, and the last one a number more."""
    if recipe is None:
        return None
    high = [name for name in high_products(model, recipe) if name.startswith("mtp.")]
    for i, kind in enumerate((*kinds.all, kinds.last)):
        high += [f"layers.{i}.{name}" for name in kind.high]
    return replace(recipe, high=tuple(high), high_first=0, high_last=0)


def setting_of(run: RunConfig, rank: int, *, hot: bool = False) -> Setting:
    """What the traces of a run's rank depend on."""
    p, model = run.parallel, run.model
    dense, expert = p.tp * p.cp, p.etp * p.ep
    dp = run.ranks // (dense * p.pp)
    # Balance over the global batch sums over dp, whose number of ranks only scales what is sent: one other stands for all.
    shown = math.lcm(dense, expert) // dense
    shown = 2 * shown if shown == 1 and dp > 1 else shown
    kinds = kinds_of(model, run.precision.recipe)
    layers = tuple(_traceable(kind.layer) for kind in (*kinds.all, kinds.last))
    ahead = model.predict_ahead.depth if model.predict_ahead else 0
    return Setting(
        model=replace(model, layers=layers),
        parallel=replace(
            p,
            pp=1,
            vpp=1,
            layout="E|" + "t|" * len(layers) + "m|" * ahead + "L",
            schedule="zero_bubble" if p.schedule == "zero_bubble" else "1f1b",
            dispatcher=_TRACED_AS.get(p.dispatcher, p.dispatcher),
            sharding="zero1",
            fsdp_replicas=1,
        ),
        ranks=dense * shown,
        rank=rank % (dense * shown),
        lengths=(run.train.sequence_tokens,) * run.train.microbatch,
        compute=run.precision.compute,
        recipe=_traced_recipe(model, run.precision.recipe, kinds),
        recompute=run.memory.recompute,
        hot=hot,
    )


def _traceable(layer: Layer) -> Layer:
    """A layer whose choices need no numbers that only a router has: an expert keeps as many by position as by weight."""
    mlp = layer.mlp
    if isinstance(mlp, MoE) and isinstance(mlp.capacity, Capacity) and mlp.capacity.drop == "weight":
        return replace(layer, mlp=replace(mlp, capacity=replace(mlp.capacity, drop="position")))
    return layer


@dataclass(frozen=True, kw_only=True)
class HotRank:
    """Experts `first` to `first + held` before all others, which share what is left; evenly among either."""

    layers: Mapping[str, MoE]
    first: int
    held: Mapping[str, int]

    def of(self, layer: str, mine_T: Tensor) -> Tensor:
        """[T, K] int64: K different experts of every token."""
        moe, held = self.layers[layer], self.held[layer]
        hot = min(moe.top_k, held)
        first = self.first * held
        others = torch.tensor([e for e in range(moe.experts) if not first <= e < first + held], dtype=torch.int64)
        found = [first + _dealt(mine_T, hot, held)]
        if moe.top_k > hot:
            found.append(others[_dealt(mine_T, moe.top_k - hot, len(others))])
        return torch.cat(found, dim=1)


@dataclass(frozen=True, kw_only=True)
class Alike:
    """A workload in which all layers of a kind are dealt the same experts. kinds: by every layer, the one that it is like."""

    workload: Workload
    kinds: Mapping[str, str]

    def of(self, layer: str, mine_T: Tensor) -> Tensor:
        """As the workload's for the layer's kind."""
        return self.workload.of(self.kinds[layer], mine_T)


def _dealt(tokens_T: Tensor, taken: int, pool: int) -> Tensor:
    return (tokens_T[:, None] * taken + torch.arange(taken)) % pool


class Tracer:
    """A rank's stage with every piece as a part of its own, and the traces of its pieces, each made when it is asked for."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.meter = Meter()
        p, model = setting.parallel, setting.model
        world = plan_world(
            fold(p, setting.ranks),
            heads=p.cp_alltoall,
            ep_per_node=p.ep_per_node,
            imagined=True,
            meter=self.meter,
        )
        self.groups = world.groups(setting.rank)
        memory, dtype = MemoryConfig(recompute=setting.recompute), FLOATS[setting.compute]
        self.stage = build_model(
            model,
            groups=self.groups,
            parallel=p,
            memory=memory,
            recipe=setting.recipe,
            dtype=dtype,
            device="meta",
        )
        for quantiser in quantisers(self.stage):
            quantiser.backend = Imagined()
        self.batch = _batch(setting, self.groups)
        self._known: dict[int, PieceTrace] = {}
        for parameter in self.stage.parameters():
            # As an optimizer does, which adds every gradient to those of other microbatches as soon as it is there.
            parameter.register_post_accumulate_grad_hook(_forget)

    @property
    def embedding(self) -> PieceTrace:
        """Of the embedding."""
        return self._piece(0)

    def layer(self, kind: int, *, final: bool) -> PieceTrace:
        """Of a decoder layer by its place among `Kinds.all`; final: with the norm behind the last one."""
        return self._piece(len(self.setting.model.layers) if final else 1 + kind)

    @property
    def ahead(self) -> PieceTrace:
        """Of a prediction module, the embedding of its inputs included."""
        return self._piece(len(self.setting.model.layers) + 1)

    @property
    def loss(self) -> PieceTrace:
        """Of the head and all its losses."""
        return self._piece(len(self.stage.parts) - 1)

    @property
    def turn_bytes(self) -> int:
        """The angles of rotary embeddings, which all layers of a part share; no piece counts them as its own."""
        return sum(2 * tokens * size * 4 for tokens, size in self._turns)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """What this rank holds of the embedding, one layer of each kind and once more the last, prediction modules, and the head."""
        return declared(self.stage)

    @property
    def tokens(self) -> int:
        """How many of a microbatch lie on this rank between attention and MLPs."""
        return self.batch.packing.mine_T.numel()

    @cached_property
    def _turns(self) -> set[tuple[int, ...]]:
        """Shapes of the angles' cosines, and sines."""
        sizes = {rotated_dimensions(layer.attention) for layer in self.setting.model.layers}
        return {(self.batch.packing.index_T.numel(), size // 2) for size in sizes}

    def _piece(self, chunk: int) -> PieceTrace:
        if chunk not in self._known:
            found = trace_part(self.stage, chunk, self.batch, self.meter)
            angles = [p for p in found.kept if p.module == "" and p.shape in self._turns and p.dtype == torch.float32]
            self._known[chunk] = found.without(angles)
        return self._known[chunk]


def trace_part(stage: Stage, chunk: int, batch: TokenBatch, meter: Meter) -> PieceTrace:
    """One part forward and backward, on whatever device the stage lies.

    A stage on a real device needs a real batch and takes part in collectives; of one on meta nothing but shapes is computed.
    """
    watch = Watch()
    watch.ignore([*stage.parameters(), *stage.buffers(), *_tensors_of(batch)])
    end = watch.name_modules(stage)
    before = Counter(meter.sent_bytes)
    try:
        with watch.watching():
            leaf, received, mark = _received(stage, chunk, batch, watch)
            edges, shapes, out_bytes = _forward(stage, chunk, batch, received)
            del received
            middle, forward_peak = Counter(meter.sent_bytes), watch.peak
            kept, keeps_input = tuple(watch.pieces()), mark is not None and watch.holds(mark)
            watch.reset_peak()
            late = _backward(stage, edges, shapes, watch, leaf)
    finally:
        end()
    passes = middle - before, Counter(meter.sent_bytes) - middle
    forward, backward = (Meter(sent_bytes=sent).by_axis() for sent in passes)
    return PieceTrace(
        kept=kept,
        keeps_input=keeps_input,
        stream_bytes=_stream_bytes(stage, batch),
        out_bytes=out_bytes,
        late=late,
        forward_peak=forward_peak,
        backward_peak=watch.peak,
        sent={axis: (forward.get(axis, 0), backward.get(axis, 0)) for axis in forward | backward},
    )


# Where a backward begins, and the shape, dtype and device of the gradients that it begins with.
_Edges = list[GradientEdge]
_Shapes = list[tuple[torch.Size, torch.dtype, torch.device]]


def _received(
    stage: Stage, chunk: int, batch: TokenBatch, watch: Watch
) -> tuple[Tensor | None, Tensor | None, int | None]:
    """A leaf, what the part receives, and the identity of its memory. Not the leaf itself, which autograd would hold in any case."""
    if stage.parts[chunk].embedding:
        return None, None, None
    shape = stage.received_shape(chunk, batch, "training")
    leaf = torch.zeros(shape, dtype=stage.place.dtype, device=stage.place.device, requires_grad=True)
    watch.ignore([leaf])
    received = leaf.clone()
    watch.ignore([received])
    return leaf, received, id(received.untyped_storage())


def _forward(stage: Stage, chunk: int, batch: TokenBatch, received: Tensor | None) -> tuple[_Edges, _Shapes, int]:
    """Where the backward begins, and the bytes of what goes to the next part; nothing else of the outputs is held."""
    made = stage.run(chunk, received, batch, purpose="training", balance=_balance(stage, batch))
    roots = [root for root in (made.out, made.share) if root is not None and root.requires_grad]
    out_bytes = 0 if made.out is None else made.out.nbytes
    return [get_gradient_edge(root) for root in roots], [(r.shape, r.dtype, r.device) for r in roots], out_bytes


def _backward(stage: Stage, edges: _Edges, shapes: _Shapes, watch: Watch, leaf: Tensor | None) -> int:
    """Run it; what is left to wait for the weights' gradients, where those are put off, without the gradient of the leaf."""
    gradients = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
    later = stage.place.later
    if later is not None:
        later.collecting = True
    torch.autograd.backward(edges, gradients)
    edges.clear()
    gradients.clear()
    if later is None:
        return 0
    later.collecting = False
    if leaf is not None:
        leaf.grad = None
    waiting = watch.current
    for add in later.take():
        add()
    stage.zero_grad(set_to_none=True)
    return waiting


def _balance(stage: Stage, batch: TokenBatch) -> BalanceInputs:
    """What balance losses need: the counts of this microbatch alone, which a plan only divides by."""
    groups, tokens = stage.place.groups, batch.packing.tokens
    totals = Totals(tokens=tokens, labels=tokens, ahead=(tokens,) * len(stage.config.mtp_layers()))
    return BalanceInputs(totals=totals, seen={}, sequence=groups.sequence, tokens=groups.tokens)


def _batch(setting: Setting, groups: Groups) -> TokenBatch:
    """A microbatch whose tokens have no data, but whose choices of experts have."""
    tokens, parallel = sum(setting.lengths), setting.parallel
    ends = torch.tensor([0, *accumulate(setting.lengths)])
    packing = packing_of(ends, tokens, torch.device("cpu"), groups)
    packing = replace(packing, positions_T=packing.positions_T.to("meta"), sequence_T=packing.sequence_T.to("meta"))
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    layers = {path: layer.mlp for path, layer in setting.model.all_layers() if isinstance(layer.mlp, MoE)}
    prescribed: Prescription
    if setting.hot:
        held = {path: experts_per_rank(moe.experts, groups.ep) for path, moe in layers.items()}
        prescribed = HotRank(layers=layers, first=groups.ep.position, held=held)
    else:
        workload = Workload(name="balanced", seed=0, step=0, first=0, layers=layers, ep=parallel.ep)
        prescribed = Alike(workload=workload, kinds=kinds_by_path(setting.model))
    position = BatchPosition(seed=0, step=0, first=0)
    return TokenBatch(tokens=ids, labels=ids, packing=packing, position=position, prescribed=prescribed)


def _stream_bytes(stage: Stage, batch: TokenBatch) -> int:
    """One stream of this rank's hidden states."""
    _, tokens, hidden = stage.received_shape(0, batch, "hidden")
    return tokens * hidden * stage.place.dtype.itemsize


def _tensors_of(batch: TokenBatch) -> list[Tensor]:
    packing = batch.packing
    return [batch.tokens, batch.labels, packing.index_T, packing.positions_T, packing.sequence_T]


def _forget(parameter: nn.Parameter) -> None:
    parameter.grad = None
