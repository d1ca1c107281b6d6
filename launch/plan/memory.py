"""How much memory every rank of a run needs: what it holds from step to step, and what its schedule keeps at the fullest moment.

Parameters are counted on the real modules, activations by tracing them (launch/plan/trace.py), and the moments by executing the real
schedule (core/pipeline/schedule.py): each forward of a part adds what its pieces keep, each backward frees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from core.attention.packing import held_tokens
from core.config.architecture import MoE
from core.config.products import quantised_products
from core.config.run import RunConfig
from core.parallel.fake import PlannedWorld, plan_world
from core.parallel.groups import Groups
from core.parallel.mesh import fold
from core.pipeline.action import Action
from core.pipeline.layout import Layout, Part, layout_of
from core.pipeline.schedule import make_schedule
from core.state.box import ends
from launch.plan.load import PartLoad, PlacedPiece, part_load
from launch.plan.moments import Fullest, enough, fullest_of, states, takes_turns
from launch.plan.pieces import RankPieces, Traces
from launch.plan.resident import Resident, fsdp, gathers_of, held_names, zero1
from launch.plan.result import MemoryParts, RankMemory
from launch.plan.trace import FLOATS


def plan_memory(run: RunConfig) -> tuple[RankMemory, ...]:
    """The fullest rank at each place of the pipeline. For several runs, one planner traces what they have in common only once.

    Raises ConfigError for an impossible layout, ValueError where a folding does not divide the ranks.
    """
    return MemoryPlanner().of(run)


class MemoryPlanner:
    """Plans the memory of runs; what was traced for one run is known for all others.

    A layer of experts is traced for each tp, cp, ep, etp, dispatcher, microbatch, compute format, recipe and recomputation that it
    meets; everything else not even for each ep, etp and dispatcher. pp, vpp, dp, layout, schedule, sharding, formats of gradients and
    moments, and offloading cost no trace.
    """

    def __init__(self) -> None:
        self.traces = Traces()

    def of(self, run: RunConfig) -> tuple[RankMemory, ...]:
        """As `plan_memory`."""
        place = Place(run=run)
        return tuple(self._rank(place, rank) for rank in place.fullest_ranks())

    def rank(self, run: RunConfig, rank: int) -> RankMemory:
        """One rank of a run."""
        return self._rank(Place(run=run), rank)

    def resident(self, run: RunConfig, rank: int) -> Resident:
        """What one rank holds from step to step."""
        return self._resident(Place(run=run), self.traces.of(run, rank), rank)

    def parts(self, run: RunConfig, rank: int, *, hot: bool = False) -> tuple[PartLoad, ...]:
        """What one rank's parts keep and need, by virtual stage. hot: all tokens of the ep group that can come to this rank."""
        return _parts(Place(run=run), self.traces.of(run, rank), rank, hot=hot)

    def traffic(self, run: RunConfig, rank: int) -> dict[str, int]:
        """What one rank sends in a step, by axis: what its parts send for every microbatch, what travels along the pipeline, and copies
        of parameters and gradients; not the few numbers that a step's report sums up."""
        place, pieces = Place(run=run), self.traces.of(run, rank)
        resident = self._resident(place, pieces, rank)
        sent: dict[str, float] = dict(resident.sent)
        for part in place.parts(rank):
            for placed in pieces.of_part(part):
                for axis, both in placed.trace.sent.items():
                    each = sum(both) * place.whole_world(axis, pieces.setting.ranks)
                    sent[axis] = sent.get(axis, 0) + each * run.microbatches
            travels = place.leaving(part) * pieces.shared.embedding.stream_bytes
            sent["pp"] = sent.get("pp", 0) + travels * run.microbatches
        for axis, count in resident.sent_by_units.items():
            sent[axis] = sent.get(axis, 0) + count * run.microbatches
        return {axis: round(count) for axis, count in sent.items() if count}

    def _rank(self, place: Place, rank: int) -> RankMemory:
        run, pieces = place.run, self.traces.of(place.run, rank)
        resident = self._resident(place, pieces, rank)
        moments = tuple(states(place.actions(rank), place.layout.virtual))
        turns = takes_turns(run.parallel)
        balanced = worst = fullest_of(moments, _parts(place, pieces, rank, hot=False), turns=turns)
        if any(isinstance(kind.layer.mlp, MoE) for kind in pieces.kinds.all) and run.parallel.ep > 1:
            hot = fullest_of(moments, _parts(place, pieces, rank, hot=True), turns=turns)
            worst = max(balanced, hot, key=lambda each: each.total)
        away = resident.on_host
        # One activation is received ahead, and one gradient may not have left yet.
        buffers = 2 * pieces.shared.embedding.stream_bytes if run.parallel.pp > 1 else 0
        needs = resident.gathered + buffers
        return RankMemory(
            pp_rank=place.pp_rank(rank),
            rank=rank,
            balanced=_memory_parts(resident, balanced, away, needs),
            worst=_memory_parts(resident, worst, away, needs),
            in_flight=balanced.in_flight,
            on_host=balanced.on_host + away,
        )

    def _resident(self, place: Place, pieces: RankPieces, rank: int) -> Resident:
        run = place.run
        parts, tied, dtype = place.parts(rank), run.model.tied_embeddings, FLOATS[run.precision.compute]
        named = held_names(parts, pieces.experts.entries, pieces.kinds, tied)
        if run.parallel.sharding == "zero1":
            taken = _taken(run) if run.precision.primary else frozenset()
            return zero1(named, place.groups(rank), dtype, run.precision, taken, run.memory.optimizer_offload)
        gathers = gathers_of(parts, tied, len(run.model.mtp_layers()))
        away = run.memory.optimizer_offload
        return fsdp(named, place.groups(rank), dtype, run.precision, gathers, away)


def _taken(run: RunConfig) -> frozenset[str]:
    """The names of the weights that a run's recipe takes."""
    recipe = run.precision.recipe
    return frozenset(() if recipe is None else (product.name for product in quantised_products(recipe, run.model)))


def _parts(place: Place, pieces: RankPieces, rank: int, *, hot: bool) -> tuple[PartLoad, ...]:
    stream, found = pieces.shared.embedding.stream_bytes, []
    for part in place.parts(rank):
        placed = [
            PlacedPiece(load=pieces.load(each, hot=hot), own_input=each.own_input, loss=each.loss)
            for each in pieces.of_part(part)
        ]
        coming, going = place.streams(part)
        turns = pieces.shared.turn_bytes if part.layers or part.ahead else 0
        found.append(part_load(placed, received=coming * stream, out=going * stream, shared=turns))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A run's layout and world, as far as ranks are asked about."""

    run: RunConfig

    @cached_property
    def layout(self) -> Layout:
        """The stages."""
        return layout_of(self.run.model, self.run.parallel)

    @cached_property
    def world(self) -> PlannedWorld:
        """The groups of all ranks."""
        p = self.run.parallel
        return plan_world(
            fold(p, self.run.ranks),
            heads=p.cp_alltoall,
            ep_per_node=p.ep_per_node,
            embedding_stages=self.layout.embedding_stages(self.run.model.tied_embeddings),
            fsdp_replicas=p.fsdp_replicas if p.sharding == "fsdp" else None,
        )

    @property
    def stage_ranks(self) -> int:
        """Ranks at one place of the pipeline."""
        return self.run.ranks // self.run.parallel.pp

    def groups(self, rank: int) -> Groups:
        """The groups of a rank."""
        return self.world.groups(rank)

    def pp_rank(self, rank: int) -> int:
        """Its place along the pipeline."""
        return rank // self.stage_ranks

    def parts(self, rank: int) -> tuple[Part, ...]:
        """What it holds."""
        return self.layout.parts_of(self.pp_rank(rank))

    def fullest_ranks(self) -> Iterator[int]:
        """At each place of the pipeline the first rank with the most tokens, and of those the largest stretch of the vocabulary."""
        p = self.run.parallel
        shares = [(self._tokens(rank), self._vocabulary(rank % p.tp), -rank) for rank in range(p.tp * p.cp)]
        first = -max(shares)[2]
        yield from range(first, self.run.ranks, self.stage_ranks)

    def streams(self, part: Part) -> tuple[int, int]:
        """How many streams of hidden states a part receives, and makes for the next; none at the ends."""
        parts = self.layout.parts
        at = parts.index(part)
        before = 1 + sum(len(each.ahead) for each in parts[:at])
        return 0 if part.embedding else before, 0 if part.loss else before + len(part.ahead)

    def leaving(self, part: Part) -> int:
        """How many streams a part sends to other ranks: activations on, and gradients back."""
        coming, going = self.streams(part)
        return coming + going if self.run.parallel.pp > 1 else 0

    def whole_world(self, axis: str, traced: int) -> float:
        """By how much more than in the traced world, whose stage has fewer ranks, a rank sends over an axis: only balance over the
        global batch goes beyond a microbatch, with all-reduces of one size."""
        if axis != "tokens" or traced == 1:
            return 1.0
        return (1 - 1 / self.stage_ranks) / (1 - 1 / traced)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """What the rank does, long enough to meet its fullest moment."""
        p = self.run.parallel
        microbatches = enough(p, self.run.microbatches)
        schedule = make_schedule(p.schedule, stages=p.pp, virtual=self.layout.virtual, microbatches=microbatches)
        return schedule.ranks[self.pp_rank(rank)]

    def _tokens(self, rank: int) -> int:
        """Of a sequence, on one of the ranks of tp * cp."""
        p = self.run.parallel
        place, ring = rank // p.tp, p.cp // p.cp_alltoall
        held = held_tokens(
            self.run.train.sequence_tokens, (place // p.cp_alltoall, ring), (place % p.cp_alltoall, p.cp_alltoall)
        )
        bounds = ends(held * self.run.train.microbatch, p.tp)
        return bounds[rank % p.tp + 1] - bounds[rank % p.tp]

    def _vocabulary(self, position: int) -> int:
        bounds = ends(self.run.model.vocab, self.run.parallel.tp)
        return bounds[position + 1] - bounds[position]


def _memory_parts(resident: Resident, fullest: Fullest, away: int, needs: int) -> MemoryParts:
    """away: of the optimizer, in host memory. needs: beside what the schedule keeps and layers need."""
    return MemoryParts(
        parameters=resident.parameters,
        gradients=resident.gradients,
        optimizer=resident.optimizer - away + resident.travelling,
        activations=fullest.activations,
        logits=fullest.logits,
        working=fullest.working + needs,
    )
