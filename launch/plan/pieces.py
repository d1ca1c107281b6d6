"""The pieces of one rank of a run, traced: whatever a piece does not depend on is left out of its trace, so that runs share it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from core.config.architecture import Dense, Layer, ModelConfig, MoE
from core.config.run import RunConfig
from core.pipeline.layout import Part
from launch.plan.kinds import Kinds, kinds_of
from launch.plan.load import Load, load_of
from launch.plan.trace import PieceTrace, Setting, Tracer, setting_of


@dataclass(frozen=True, kw_only=True)
class PlacedTrace:
    """A piece in a part. own_input: whether its input is memory of its own, unlike what the part receives and what another piece has
    counted. kind: of a layer of experts, by its place among `Kinds.all`. loss: of the head."""

    trace: PieceTrace
    own_input: bool
    kind: int | None = None
    loss: bool = False


class Traces:
    """All that was traced so far, by what it depends on."""

    def __init__(self) -> None:
        self._tracers: dict[Setting, Tracer] = {}
        self._growth: dict[tuple[Setting, int], tuple[PieceTrace, PieceTrace, int]] = {}

    def of(self, run: RunConfig, rank: int) -> RankPieces:
        """Of one rank."""
        setting = setting_of(run, rank)
        return RankPieces(run=run, setting=setting, traces=self, kinds=kinds_of(run.model, run.precision.recipe))

    def tracer(self, setting: Setting) -> Tracer:
        """The tracer of a setting."""
        if setting not in self._tracers:
            self._tracers[setting] = Tracer(setting)
        return self._tracers[setting]

    def hot_load(self, setting: Setting, kind: int, run: RunConfig) -> Load:
        """A layer of experts when all tokens of the ep group that can come to this rank.

        Memory grows with the rows that come, in one slope for every ep: one trace tells it. With limits every ep is traced.
        """
        hot = replace(setting, hot=True)
        if _limited(setting, kind):
            return load_of(self.tracer(hot).layer(kind, final=False), run.memory)
        here, most = _rows(setting, kind)
        balanced = load_of(self.tracer(setting).layer(kind, final=False), run.memory)
        if most == here:
            return balanced
        key = _without_ep(setting), kind
        if key not in self._growth:
            pair = (self.tracer(each).layer(kind, final=False) for each in (setting, hot))
            self._growth[key] = (*pair, most - here)  # type: ignore[assignment]
        few, many, rows = self._growth[key]
        low, high = (load_of(each, run.memory) for each in (few, many))
        return balanced.plus(high, low, (most - here) / rows)


@dataclass(frozen=True, kw_only=True)
class RankPieces:
    """The pieces of one rank. shared: those that know nothing of ep. experts: layers of experts."""

    run: RunConfig
    setting: Setting
    traces: Traces
    kinds: Kinds
    _loads: dict[tuple[int, bool], Load] = field(default_factory=dict, compare=False)

    @cached_property
    def shared(self) -> Tracer:
        """The tracer of everything but layers of experts."""
        return self.traces.tracer(_shared(self.setting))

    @cached_property
    def experts(self) -> Tracer:
        """The tracer of layers of experts."""
        return self.traces.tracer(self.setting)

    def of_part(self, part: Part) -> list[PlacedTrace]:
        """The pieces of a part, in order."""
        found: list[PlacedTrace] = []
        if part.embedding:
            found.append(PlacedTrace(trace=self.shared.embedding, own_input=False))
        for i in part.layers:
            found.append(self.layer(self.kinds.of[i], own_input=bool(found)))
            if i == len(self.run.model.layers) - 1:
                found.append(PlacedTrace(trace=self.final_norm, own_input=True))
        for _ in part.ahead:
            found += self.ahead(own_input=bool(found))
        if part.loss:
            found.append(PlacedTrace(trace=self.shared.loss, own_input=bool(found), loss=True))
        return found

    def load(self, placed: PlacedTrace, *, hot: bool) -> Load:
        """What a piece keeps and needs. hot: as `Traces.hot_load`."""
        key = id(placed.trace), hot and placed.kind is not None
        if key not in self._loads:
            if hot and placed.kind is not None:
                self._loads[key] = self.traces.hot_load(self.setting, placed.kind, self.run)
            else:
                self._loads[key] = load_of(placed.trace, self.run.memory)
        return self._loads[key]

    @cached_property
    def final_norm(self) -> PieceTrace:
        """The norm behind the last layer: what a last layer does beyond one of its kind."""
        last = self.kinds.of[-1]
        final, plain = self.shared.layer(last, final=True), self.shared.layer(last, final=False)
        own = tuple(piece for piece in final.kept if piece.module == "final_norm")
        more = final.kept_bytes - plain.kept_bytes - sum(piece.num_bytes for piece in own)
        return replace(final, kept=own, keeps_input=more > 0, late=0, forward_peak=0, backward_peak=0, sent={})

    @cached_property
    def around_ahead(self) -> PieceTrace:
        """A prediction module without its layer."""
        whole = self.shared.ahead
        layer = self.shared.layer(self._ahead_kind, final=False)
        sent = {
            axis: (there - layer.sent.get(axis, (0, 0))[0], back - layer.sent.get(axis, (0, 0))[1])
            for axis, (there, back) in whole.sent.items()
        }
        own = [piece for piece in whole.kept if ".layer" not in piece.module]
        if whole.kept_bytes > layer.kept_bytes + sum(piece.num_bytes for piece in own):
            # Its last norm keeps what the layer has made.
            own.append([piece for piece in whole.kept if piece.module.endswith(".layer")][-1])
        inside = whole.kept_bytes - sum(piece.num_bytes for piece in own)
        return replace(
            whole,
            kept=tuple(own),
            late=whole.late - layer.late,
            forward_peak=whole.forward_peak - inside,
            backward_peak=whole.backward_peak - inside,
            sent=sent,
        )

    def ahead(self, *, own_input: bool) -> list[PlacedTrace]:
        """A prediction module: what stands around its layer, and that. Where all of it is made again it is one piece."""
        if "full" in self.run.memory.recompute:
            return [PlacedTrace(trace=self.experts.ahead, own_input=own_input)]
        # The layer's input is kept by what stands around it.
        return [
            PlacedTrace(trace=self.around_ahead, own_input=own_input),
            self.layer(self._ahead_kind, own_input=False),
        ]

    @property
    def _ahead_kind(self) -> int:
        assert self.kinds.ahead is not None, "a model with prediction modules"
        return self.kinds.ahead

    def layer(self, kind: int, *, own_input: bool) -> PlacedTrace:
        """A layer of a kind, by its place among `Kinds.all`."""
        if isinstance(self.kinds.all[kind].layer.mlp, Dense):
            return PlacedTrace(trace=self.shared.layer(kind, final=False), own_input=own_input)
        return PlacedTrace(trace=self.experts.layer(kind, final=False), own_input=own_input, kind=kind)


def _shared(setting: Setting) -> Setting:
    """With dense layers of next to no width in the place of experts, and no mapping of experts."""
    p = setting.parallel
    thin = tuple(_thin(layer, p.tp) for layer in setting.model.layers)
    dense = replace(p, ep=1, etp=1, ep_per_node=1, expert_budget=None, dispatcher="alltoall")
    ranks = p.tp * p.cp
    return replace(
        setting,
        model=replace(setting.model, layers=thin),
        parallel=dense,
        ranks=ranks,
        rank=setting.rank % ranks,
        hot=False,
    )


def _thin(layer: Layer, tp: int) -> Layer:
    return replace(layer, mlp=Dense(ffn=tp)) if isinstance(layer.mlp, MoE) else layer


def _without_ep(setting: Setting) -> Setting:
    """What the slope of memory by rows depends on."""
    return replace(setting, parallel=replace(setting.parallel, ep=1), ranks=0, rank=0)


def _moe(model: ModelConfig, kind: int) -> MoE:
    mlp = model.layers[kind].mlp
    assert isinstance(mlp, MoE), "a layer of experts"
    return mlp


def _limited(setting: Setting, kind: int) -> bool:
    return setting.parallel.expert_budget is not None or _moe(setting.model, kind).capacity is not None


def _rows(setting: Setting, kind: int) -> tuple[int, int]:
    """Rows for this rank's experts of each token of the ep group's ranks: balanced, and at most."""
    moe, ep = _moe(setting.model, kind), setting.parallel.ep
    return moe.top_k, ep * min(moe.top_k, moe.experts // ep)
