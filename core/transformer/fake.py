"""What any rank of a world that is not there holds of a model: real modules on the meta device, built once for all that are alike."""

from __future__ import annotations

from dataclasses import replace

from core.config.architecture import ModelConfig
from core.config.mapping import ParallelConfig
from core.parallel.fake import plan_world
from core.parallel.groups import Groups
from core.parallel.mesh import fold
from core.pipeline.layout import layout_of
from core.state.cover import cover_faults
from core.state.inventory import Entry, declared, piece_of
from core.state.sharded import ShardedTensor
from core.transformer.stage import Stage, build_model

# Where a rank stands along tp, etp and ep.
Place3 = tuple[int, int, int]


class FakeStages:
    """The stages of every rank of a world of `ranks`, none of which needs to run.

    What a rank holds of a layer depends on the layer's declaration and on the rank's places along tp, etp and ep; which layers it
    holds, on its place along pp; which copy of a piece it has, on its groups. So a model with one layer of each kind is built for
    every (tp, etp, ep), the stage itself for one rank of every place along pp, and of each rank only the groups are made.
    every_stage: build the stage of every (tp, etp, ep, pp) instead, which takes ten times as long and has to give the same.
    """

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, ranks: int, *, every_stage: bool = False) -> None:
        """Raises ValueError where a folding does not divide the ranks, and ConfigError for an impossible layout."""
        self.model, self.parallel, self.every_stage = model, parallel, every_stage
        stages = layout_of(model, parallel).embedding_stages(model.tied_embeddings)
        self.world = plan_world(
            fold(parallel, ranks),
            heads=parallel.cp_alltoall,
            ep_per_node=parallel.ep_per_node,
            embedding_stages=stages,
        )
        # The last layer is the last of the kinds too: prediction modules are like it.
        kinds = tuple(dict.fromkeys(reversed(model.layers)))[::-1]
        self.short = replace(model, layers=kinds)
        self.kinds = tuple(kinds.index(layer) for layer in model.layers)
        self._short_entries: dict[Place3, dict[str, Entry]] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._entries: dict[tuple[Place3, int], dict[str, Entry]] = {}

    def groups(self, rank: int) -> Groups:
        """The planned groups of a rank."""
        return self.world.groups(rank)

    def stage(self, rank: int) -> Stage:
        """A rank's stage itself, on the meta device."""
        return build_model(self.model, groups=self.groups(rank), parallel=self.parallel, device="meta")

    def pieces(self, rank: int) -> dict[str, ShardedTensor]:
        """As `inventory` of the rank's stage, before FSDP shards anything, data on the meta device."""
        groups = self.groups(rank)
        entries = self._entries_of(rank, groups)
        return {name: piece_of(name, entry, entry.tensor, groups) for name, entry in entries.items()}

    @property
    def distinct(self) -> int:
        """How many different sets of pieces have been met so far."""
        return len(self._entries)

    def _entries_of(self, rank: int, groups: Groups) -> dict[str, Entry]:
        """As `declared` of the rank's stage."""
        place, pp = (groups.tp.position, groups.etp.position, groups.ep.position), groups.pp.position
        if (place, pp) not in self._entries:
            found = declared(self.stage(rank)) if self.every_stage else self._like_others(rank, place, pp)
            self._entries[place, pp] = found
        return self._entries[place, pp]

    def _like_others(self, rank: int, place: Place3, pp: int) -> dict[str, Entry]:
        """What a rank declares, from the names at its place along pp and from one layer of each kind at its other places."""
        if place not in self._short_entries:
            self._short_entries[place] = self._short_at(rank)
        short = self._short_entries[place]
        if pp not in self._names:
            built = declared(self.stage(rank))
            for name, entry in built.items():
                assert entry.spec == short[self._like(name)].spec, f"{name} is unlike others of its kind"
            self._names[pp] = tuple(built)
        return {name: short[self._like(name)] for name in self._names[pp]}

    def _short_at(self, rank: int) -> dict[str, Entry]:
        """What a rank would declare of one layer of each kind and of all else, without pp."""
        groups, parallel = self.groups(rank), replace(self.parallel, pp=1, vpp=1, layout=None)
        groups = replace(groups, pp=replace(groups.pp, ranks=(rank,), position=0))
        return declared(build_model(self.short, groups=groups, parallel=parallel, device="meta"))

    def _like(self, name: str) -> str:
        """The name in the short model of what `name` is like."""
        kind, _, rest = name.partition(".")
        if kind != "layers":
            return name
        number, _, rest = rest.partition(".")
        return f"layers.{self.kinds[int(number)]}.{rest}"


def canonical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The global shape of every tensor of a model, by canonical name."""
    return {name: entry.spec.shape for name, entry in declared(build_model(model, device="meta")).items()}


def check_cover(
    model: ModelConfig, parallel: ParallelConfig, ranks: int, *, every_stage: bool = False
) -> tuple[str, ...]:
    """Every way in which what all ranks hold does not cover the model exactly once per set of copies; a sentence each.

    Raises ValueError where a folding does not divide the ranks, and ConfigError for an impossible layout.
    """
    stages = FakeStages(model, parallel, ranks, every_stage=every_stage)
    held = ((rank, piece) for rank in range(ranks) for piece in stages.pieces(rank).values())
    return cover_faults(canonical_shapes(model), held)
