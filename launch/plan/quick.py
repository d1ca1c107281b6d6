"""Memory of many set-ups of one model in a moment: a few traces, and arithmetic between them; what a search and a page go by.

Everything scales with a rank's tokens, so one trace serves all microbatches. Each tp, cp and ep that is met is traced once without any
recomputation; what a recomputed part changes is traced for each tp and cp, and added up as if the others were not there.
tests/launch/plan/test_quick.py holds the sums against the plan's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

from core.config.architecture import MoE
from core.config.mapping import ParallelConfig, ScheduleName
from core.config.memory import RecomputeName
from core.config.precision import BYTES, PrecisionConfig, state_bytes
from core.config.products import quantised_products
from core.config.recipe import Recipe
from core.config.run import RunConfig
from core.optim.buckets import BUCKET_BYTES
from core.parallel.mesh import fold
from core.pipeline.layout import Part, layout_of
from core.pipeline.schedule import make_schedule
from core.state.inventory import Entry
from launch.plan.kinds import Kinds, kinds_of
from launch.plan.load import Load, PartLoad, PlacedPiece, load_of, part_load
from launch.plan.moments import Fullest, State, enough, fullest_of, states, takes_turns
from launch.plan.pieces import RankPieces, Traces
from launch.plan.result import MemoryParts, RankMemory
from launch.plan.trace import PieceTrace
from launch.plan.weights import held_bytes, primary_operand

# Attention that is made again keeps the queries, keys and values that it begins with, which would otherwise be made again too.
TOGETHER: tuple[RecomputeName, ...] = ("core_attn", "mla_up_proj")
# What whole layers or whole experts computed again leave nothing of to compute again.
COVERS: dict[RecomputeName, tuple[RecomputeName, ...]] = {"moe": ("moe_act", "shared_experts")}


@dataclass(frozen=True, kw_only=True)
class Elements:
    """Of one owner of parameters on one rank: what copies of attention's folding hold, what experts' do, buffers in bytes.

    quantised: of both, what a recipe's primary weights replace. largest: of one tensor, largest_expert: of one of all experts.
    """

    dense: float = 0.0
    experts: float = 0.0
    quantised_dense: float = 0.0
    quantised_experts: float = 0.0
    buffers: int = 0
    largest: float = 0.0
    largest_expert: float = 0.0


class QuickMemory:
    """Prices set-ups of one run's model, sequence and batch. It is what a search asks, and what a page is made of."""

    def __init__(self, run: RunConfig, traces: Traces | None = None) -> None:
        plain = replace(run.memory, recompute=(), offload=())
        self._run = replace(run, memory=plain, train=replace(run.train, microbatch=1))
        self._traces = traces or Traces()
        self._pieces: dict[tuple[object, ...], dict[str, PieceTrace]] = {}
        self._common: dict[ParallelConfig, tuple[int, int]] = {}
        self._loads: dict[tuple[object, ...], dict[str, Load]] = {}
        self._elements: dict[tuple[int, Recipe | None], dict[str, Elements]] = {}
        self._kinds: dict[Recipe | None, Kinds] = {}

    def kinds(self, recipe: Recipe | None) -> Kinds:
        """The different layers of the model."""
        if recipe not in self._kinds:
            self._kinds[recipe] = kinds_of(self._run.model, recipe)
        return self._kinds[recipe]

    def of(self, run: RunConfig) -> tuple[RankMemory, ...]:
        """As MemoryPlanner.of; `worst` repeats `balanced`, and every place is its first rank."""
        p, layout = run.parallel, layout_of(run.model, run.parallel)
        microbatches, turns = enough(p, run.microbatches), takes_turns(p)
        found, made = [], self._parts(run, layout.parts)
        for rank in range(p.pp):
            parts = layout.parts_of(rank)
            loads = [made[part] for part in parts]
            moments = states_of(p.schedule, p.pp, layout.virtual, microbatches, rank)
            fullest = fullest_of(moments, loads, turns=turns)
            memory = self._memory(run, parts, fullest)
            place = rank * (run.ranks // p.pp)
            found.append(
                RankMemory(pp_rank=rank, rank=place, balanced=memory, worst=memory, in_flight=fullest.in_flight)
            )
        return tuple(found)

    # ------------------------------------------------------------------------------------------------- activations

    def loads(self, run: RunConfig) -> dict[str, Load]:
        """What each piece of the model keeps and needs of a microbatch of one sequence."""
        p, recipe, memory = run.parallel, run.precision.recipe, run.memory
        key = (self._traceable(p), recipe, memory.recompute, memory.offload)
        if key not in self._loads:
            found = {name: load_of(each, memory) for name, each in self._traced(p, recipe, ()).items()}
            own = self._run.parallel
            like = replace(own, tp=p.tp, cp=p.cp, cp_alltoall=p.cp_alltoall, schedule=p.schedule)
            for parts in units(memory.recompute):
                before, after = (self._traced(like, recipe, again) for again in ((), parts))
                for name, load in found.items():
                    if name not in after:
                        continue
                    low, high = (load_of(each[name], memory) for each in (before, after))
                    found[name] = _not_negative(load.plus(high, low, 1.0))
                if "ahead and its layer" in after:
                    # A prediction module is then made again as a whole: one piece.
                    found["ahead and its layer"] = load_of(after["ahead and its layer"], memory)
            self._loads[key] = found
        return self._loads[key]

    def stream(self, p: ParallelConfig) -> int:
        """Bytes of one stream of hidden states of a microbatch of one sequence."""
        return self._whatever(p)[0]

    def turns(self, p: ParallelConfig) -> int:
        """Bytes of the angles of rotary embeddings, likewise."""
        return self._whatever(p)[1]

    def _whatever(self, p: ParallelConfig) -> tuple[int, int]:
        """Bytes of a stream and of the angles: whatever the recipe, and so of one that is traced already."""
        mapping = self._traceable(p)
        if mapping not in self._common:
            self._traced(p, self._run.precision.recipe, ())
        return self._common[mapping]

    def _parts(self, run: RunConfig, parts: Sequence[Part]) -> dict[Part, PartLoad]:
        """Every stage; those that hold as much of everything are counted once."""
        p, sequences = run.parallel, run.train.microbatch
        loads = {name: _times(load, sequences) for name, load in self.loads(run).items()}
        stream, turns = self.stream(p) * sequences, self.turns(p) * sequences
        kinds, whole = self.kinds(run.precision.recipe), "full" in run.memory.recompute
        known: dict[tuple[object, ...], PartLoad] = {}
        found, before = {}, 1
        for part in parts:
            names = tuple(self.named(part, kinds, whole=whole))
            key = (names, before, len(part.ahead), part.embedding, part.loss)
            if key not in known:
                placed = [PlacedPiece(load=loads[name], own_input=own, loss=name == "loss") for name, own in names]
                known[key] = part_load(
                    placed,
                    received=0 if part.embedding else before * stream,
                    out=0 if part.loss else (before + len(part.ahead)) * stream,
                    shared=turns if part.layers or part.ahead else 0,
                )
            found[part] = known[key]
            before += len(part.ahead)
        return found

    def named(self, part: Part, kinds: Kinds, *, whole: bool) -> Iterator[tuple[str, bool]]:
        """The pieces of a stage by name, and whether their input is memory of their own. whole: prediction modules are one piece."""
        layers, count = self._run.model.layers, 0
        if part.embedding:
            yield "embedding", False
        for i in part.layers:
            yield f"layer {kinds.of[i]}", part.embedding or count > 0
            count += 1
            if i == len(layers) - 1:
                yield "final norm", True
        for _ in part.ahead:
            yield ("ahead and its layer" if whole else "ahead"), part.embedding or count > 0
            if not whole:
                yield f"layer {kinds.ahead}", False
            count += 1
        if part.loss:
            yield "loss", part.embedding or count > 0

    def _traced(
        self, p: ParallelConfig, recipe: Recipe | None, recompute: tuple[RecomputeName, ...]
    ) -> dict[str, PieceTrace]:
        """Every piece by name; with recomputed parts, those that they may change."""
        mapping = self._traceable(p)
        key = (mapping, recipe, recompute)
        if key not in self._pieces:
            pieces = self._at(p, recipe, recompute)
            found = {}
            for number, kind in enumerate(self.kinds(recipe).all):
                tracer = pieces.experts if isinstance(kind.layer.mlp, MoE) else pieces.shared
                found[f"layer {number}"] = tracer.layer(number, final=False)
            if not recompute:
                found |= {"embedding": pieces.shared.embedding, "loss": pieces.shared.loss}
                found["final norm"] = pieces.final_norm
            if self._run.model.predict_ahead and "full" in recompute:
                found["ahead and its layer"] = pieces.experts.ahead
            elif self._run.model.predict_ahead and recompute in ((), ("layernorm",)):
                found["ahead"] = pieces.around_ahead
            self._pieces[key] = found
            self._common[mapping] = pieces.shared.embedding.stream_bytes, pieces.shared.turn_bytes
        return self._pieces[key]

    def _at(self, p: ParallelConfig, recipe: Recipe | None, recompute: tuple[RecomputeName, ...]) -> RankPieces:
        """The first rank of the mapping with some replicas: what they sum up is the same for any number of them."""
        ranks = 2 * lcm(p.ep * p.etp, p.tp * p.cp)
        run = replace(
            self._run,
            parallel=self._traceable(p),
            ranks=ranks,
            memory=replace(self._run.memory, recompute=recompute),
            precision=replace(self._run.precision, recipe=recipe),
        )
        return self._traces.of(run, 0)

    def _traceable(self, p: ParallelConfig) -> ParallelConfig:
        """What traces depend on of a mapping: everything inside a stage, and whether weight gradients are put off."""
        schedule: ScheduleName = "zero_bubble" if p.schedule == "zero_bubble" else "1f1b"
        own = self._run.parallel
        return replace(
            p, pp=1, vpp=1, layout=None, schedule=schedule, sharding="zero1", fsdp_replicas=1, dispatcher=own.dispatcher
        )

    # ---------------------------------------------------------------------------------------------------- residents

    def elements(self, tp: int, recipe: Recipe | None) -> dict[str, Elements]:
        """What a rank of tp holds, by owner: embedding, head, final norm, layers by kind, prediction modules."""
        key = (tp, recipe)
        if key not in self._elements:
            own = self._run.parallel
            tracer = self._at(replace(own, tp=tp), recipe, ()).experts
            traced = tracer.setting
            low = () if traced.recipe is None else quantised_products(traced.recipe, traced.model)
            self._elements[key] = _by_owner(tracer.entries, {product.name for product in low}, own.ep * own.etp)
        return self._elements[key]

    def owners(self, parts: Iterable[Part], kinds: Kinds) -> Iterator[str]:
        """The owners on a pipeline rank, each as often as it is there."""
        model, parts = self._run.model, tuple(parts)
        if any(part.embedding or part.ahead or (part.loss and model.tied_embeddings) for part in parts):
            yield "embedding"
        for part in parts:
            for i in part.layers:
                yield f"layers.{kinds.of[i]}"
                if i == len(model.layers) - 1:
                    yield "final_norm"
            yield from (f"mtp.{d}" for d in part.ahead)
        if not model.tied_embeddings and any(part.loss for part in parts):
            yield "head"

    def _memory(self, run: RunConfig, parts: Sequence[Part], fullest: Fullest) -> MemoryParts:
        p, precision, mesh = run.parallel, run.precision, fold(run.parallel, run.ranks)
        table = self.elements(p.tp, precision.recipe)
        owners = [table[name] for name in self.owners(parts, self.kinds(precision.recipe))]
        copies = mesh.dense.size("dp") * p.cp, mesh.expert.size("edp")
        spread = p.ep * p.etp
        dense, experts = sum(e.dense for e in owners), sum(e.experts for e in owners) / spread
        saved = primary_saved(precision)
        low = sum(e.quantised_dense for e in owners) + sum(e.quantised_experts for e in owners) / spread
        element, gradient = BYTES[precision.compute], BYTES[precision.main_gradients]
        states = state_bytes(precision) * (dense / copies[0] + experts / copies[1])
        weights = element * (dense + experts) - saved * low
        if primary_operand(precision) is not None and precision.compute == "float32":
            # The masters are no longer the parameters.
            low_dense, low_experts = sum(e.quantised_dense for e in owners), sum(e.quantised_experts for e in owners)
            states += 4 * (low_dense / copies[0] + low_experts / spread / copies[1])
        gradients = gradient * (dense + experts)
        if p.sharding == "fsdp":
            shards = copies[0] / p.fsdp_replicas, max(1.0, copies[1] / p.fsdp_replicas)
            numbers = dense / shards[0] + experts / shards[1]
            weights, gradients = 4 * numbers, gradient * numbers
        bucket = BUCKET_BYTES / element
        travelling = 0.0
        if copies[0] > 1:
            travelling = max([min(dense, bucket), *(e.largest for e in owners)])
        if copies[1] > 1:
            travelling = max([travelling, min(experts, bucket), *(e.largest_expert / spread for e in owners)])
        buffers = 2 * self.stream(p) * run.train.microbatch if p.pp > 1 else 0
        return MemoryParts(
            parameters=round(weights) + sum(e.buffers for e in owners),
            gradients=round(gradients),
            optimizer=round(states * (1 - run.memory.optimizer_offload) + travelling * gradient),
            activations=fullest.activations,
            logits=fullest.logits,
            working=fullest.working + buffers,
        )


def effective(recompute: Sequence[RecomputeName]) -> tuple[RecomputeName, ...]:
    """The recomputed parts without those that others cover."""
    if "full" in recompute:
        return ("full",)
    covered = {each for name in recompute for each in COVERS.get(name, ())}
    return tuple(name for name in recompute if name not in covered)


def units(recompute: Sequence[RecomputeName]) -> list[tuple[RecomputeName, ...]]:
    """The recomputed parts, each alone; those that change what the other keeps, together."""
    found = effective(recompute)
    together = tuple(name for name in found if name in TOGETHER)
    alone: list[tuple[RecomputeName, ...]] = [
        (name,) for name in found if name not in TOGETHER or len(together) < len(TOGETHER)
    ]
    return [*alone, together] if len(together) == len(TOGETHER) else alone


def primary_saved(precision: PrecisionConfig) -> float:
    """Bytes of an element that primary weights of a recipe save; below zero where both roundings take more than the element."""
    return BYTES[precision.compute] - held_bytes(precision)


@lru_cache(maxsize=4096)
def states_of(name: ScheduleName, stages: int, virtual: int, microbatches: int, rank: int) -> tuple[State, ...]:
    """The moments of a rank's step that hold no less than every other one with the same parts running."""
    found: dict[tuple[tuple[int, bool], ...], list[State]] = {}
    schedule = make_schedule(name, stages=stages, virtual=virtual, microbatches=microbatches)
    for state in states(schedule.ranks[rank], virtual):
        kept = found.setdefault(state.running, [])
        if not any(state.within(other) for other in kept):
            kept[:] = [other for other in kept if not other.within(state)] + [state]
    return tuple(state for kept in found.values() for state in kept)


def _by_owner(entries: dict[str, Entry], taken: Collection[str], whole: int) -> dict[str, Elements]:
    """Elements of the entries of a model with a layer of each kind; those of experts of all ranks together. taken: by the recipe."""
    found: dict[str, Elements] = {}
    for name, entry in entries.items():
        words = name.split(".")
        owner = ".".join(words[: 2 if words[0] in ("layers", "mtp") else 1])
        size, expert = float(entry.tensor.numel()), entry.spec.replicas == "expert"
        before = found.get(owner, Elements())
        if not entry.spec.trained:
            found[owner] = replace(before, buffers=before.buffers + entry.tensor.nbytes)
            continue
        low = size if name in taken else 0.0
        found[owner] = replace(
            before,
            dense=before.dense + (0.0 if expert else size),
            experts=before.experts + (size * whole if expert else 0.0),
            quantised_dense=before.quantised_dense + (0.0 if expert else low),
            quantised_experts=before.quantised_experts + (low * whole if expert else 0.0),
            largest=max(before.largest, 0.0 if expert else size),
            largest_expert=max(before.largest_expert, size * whole if expert else 0.0),
        )
    return found


def _times(load: Load, sequences: int) -> Load:
    return Load(**{name: sequences * value for name, value in vars(load).items()})


def _not_negative(load: Load) -> Load:
    return Load(**{name: max(0, value) for name, value in vars(load).items()})
