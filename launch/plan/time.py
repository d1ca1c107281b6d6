"""How long a step takes: the seconds of every part, in the order of the real schedule, and what is done once a step.

docs/throughput.md says where the constants come from and how far the result can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config.flops import flops_per_token
from core.config.run import RunConfig
from core.pipeline.layout import Layout, layout_of, part_text
from core.pipeline.schedule import make_schedule
from core.pipeline.simulate import Costs, Timeline, simulate
from launch.plan.communication import handed_on
from launch.plan.copies import CopyTime, copy_time
from launch.plan.pricing import Passes, Pricing, added, added_passes
from launch.plan.result import AxisTraffic, StagePlan, StepTime
from launch.profiles import Profile


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """What is known of a step's time. timeline: the schedule's actions in time; None where it was not executed."""

    stages: tuple[StagePlan, ...]
    communication: tuple[AxisTraffic, ...]
    step: StepTime
    timeline: Timeline | None


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """The seconds of a schedule. waits: of every rank; total: until the last one ends; hidden: of every rank's exchanges."""

    total: float
    waits: tuple[float, ...]
    hidden: tuple[float, ...]
    timeline: Timeline | None

    def busy(self, rank: int) -> float:
        """Seconds in which `rank` computes or exchanges."""
        return self.total - self.waits[rank]

    @property
    def bubble(self) -> float:
        """Waiting over computing, of all ranks together."""
        busy = sum(map(self.busy, range(len(self.waits))))
        return sum(self.waits) / busy if busy else 0.0


def plan_time(run: RunConfig, profile: Profile, exact: bool = True) -> TimePlan:
    """The time of one training step.

    exact: execute the schedule; otherwise its bubble and what it hides come from a closed form, in about a millisecond.
    Raises ValueError where nothing is known of the hardware's speed (`profile.speeds` is None), where it has not the run's recipe, and
    where the mapping does not fold or the batch does not divide (core/check says it to users).
    """
    pricing = Pricing.of(run, profile)
    layout = layout_of(run.model, run.parallel)
    _check_batch(run)
    microbatches = run.microbatches
    parts = _parts(layout, pricing)
    costs = _costs(parts, pricing)
    pipeline = (_executed if exact else _estimated)(run, layout, costs, microbatches)
    ranks = range(layout.pp)
    passes = [added_passes(parts[rank :: layout.pp]) for rank in ranks]
    copies = [copy_time(layout.parts_of(rank), passes[rank], pricing, microbatches) for rank in ranks]
    slowest = max(ranks, key=lambda rank: pipeline.busy(rank) + copies[rank].exposed)
    walls = _walls(passes[slowest], pipeline, slowest, microbatches, copies)
    return TimePlan(
        stages=tuple(_stage(layout, rank, passes[rank], pipeline) for rank in ranks),
        communication=_communication(pricing, layout, passes, pipeline, copies, microbatches),
        step=_step(run, pipeline, walls),
        timeline=pipeline.timeline,
    )


def _check_batch(run: RunConfig) -> None:
    """Raises ValueError where microbatches do not divide."""
    per_step = run.train.microbatch * run.replicas
    if run.train.global_batch % per_step or not per_step:
        raise ValueError(
            f"a batch of {run.train.global_batch} does not divide into microbatches of {per_step} on all replicas"
        )


def _parts(layout: Layout, pricing: Pricing) -> list[Passes]:
    """What every stage costs; layers that are alike are priced once."""
    kinds = pricing.kinds
    priced = [pricing.layer(kind) for kind in kinds.all]
    known: dict[object, Passes] = {}
    found = []
    for part in layout.parts:
        key = (part.embedding, tuple(kinds.of[i] for i in part.layers), len(part.ahead), part.loss)
        if key not in known:
            known[key] = added_passes(pricing.part(part, priced))
        found.append(known[key])
    return found


def _costs(parts: list[Passes], pricing: Pricing) -> Costs:
    forward, backward = (tuple(p.forward.total for p in parts), tuple(p.backward.total for p in parts))
    transfer = handed_on(pricing.run, pricing.share, pricing.links)[1] if pricing.run.parallel.pp > 1 else 0.0
    return Costs(
        forward=forward,
        backward=backward,
        # A backward in two halves: what is not recomputed or exchanged divides about evenly; nothing is known of it in closed form.
        input_gradient=tuple(seconds / 2 for seconds in backward),
        weight_gradient=tuple(seconds / 2 for seconds in backward),
        transfer=transfer,
        exchanged_forward=tuple(p.forward.exchanged for p in parts),
        exchanged_backward=tuple(p.backward.exchanged for p in parts),
        hidden=pricing.speeds.overlapped if pricing.run.parallel.schedule == "combined" else 0.0,
    )


def _executed(run: RunConfig, layout: Layout, costs: Costs, microbatches: int) -> _Pipeline:
    schedule = make_schedule(run.parallel.schedule, stages=layout.pp, virtual=layout.virtual, microbatches=microbatches)
    timeline = simulate(schedule, costs)
    busy = [timeline.busy(rank) for rank in range(layout.pp)]
    plain = [microbatches * _each(costs, layout, rank) for rank in range(layout.pp)]
    return _Pipeline(
        total=timeline.total,
        waits=tuple(timeline.total - seconds for seconds in busy),
        hidden=tuple(alone - seconds for alone, seconds in zip(plain, busy, strict=True)),
        timeline=timeline,
    )


def _each(costs: Costs, layout: Layout, rank: int) -> float:
    """Seconds of one microbatch on a rank, forward and backward, one after the other."""
    assert isinstance(costs.forward, tuple) and isinstance(costs.backward, tuple), "every part has its own costs"
    return sum(costs.forward[rank :: layout.pp]) + sum(costs.backward[rank :: layout.pp])


def _estimated(run: RunConfig, layout: Layout, costs: Costs, microbatches: int) -> _Pipeline:
    """The slowest rank works through all microbatches, and waits for the first to reach it and the last to come back."""
    p, v = layout.pp, layout.virtual
    each = [_each(costs, layout, rank) for rank in range(p)]
    hidden = [0.0] * p
    if run.parallel.schedule == "combined":
        hidden = [_combined(costs, layout, rank, microbatches) for rank in range(p)]
    busy = [microbatches * seconds - saved for seconds, saved in zip(each, hidden, strict=True)]
    chunks = 3 * v if run.parallel.schedule == "zero_bubble" else v
    others = (sum(each) - each[busy.index(max(busy))]) / chunks
    total = max(busy) + others + _transfers(run, layout, microbatches) * costs.transfer
    return _Pipeline(total=total, waits=tuple(total - seconds for seconds in busy), hidden=tuple(hidden), timeline=None)


def _transfers(run: RunConfig, layout: Layout, microbatches: int) -> float:
    """How many transfers between stages a step waits for, on equal costs: what simulating the schedules gives."""
    p, v, name = layout.pp, layout.virtual, run.parallel.schedule
    if p == 1:
        return 0
    if name == "gpipe":
        return 2 * (p - 1)
    if name == "combined":  # a step of it lasts until both halves are done, and neighbours are one step apart
        return microbatches * v + 2 * (p - 2) + (v - 1) * p
    if name == "zero_bubble":
        return 4 * (p - 1) if v == 1 else 2 * (p - 1) + (v - 1) * p
    return 2 * (p * v - 1) if v > 1 else microbatches * 2 * (p - 1) / p + 2 * (p - 2)


def _combined(costs: Costs, layout: Layout, rank: int, microbatches: int) -> float:
    """Seconds of exchanges that a rank hides: in all steps but its warm-up, forwards pair with the backwards of the mirrored chunk."""
    p, v = layout.pp, layout.virtual
    ahead = 2 * (p - 1 - rank) + (v - 1) * p + 1
    pairs = max(0, microbatches * v - ahead)
    assert isinstance(costs.forward, tuple) and isinstance(costs.backward, tuple), "every part has its own costs"
    saved = 0.0
    for chunk in range(v):
        there, back = chunk * p + rank, (v - 1 - chunk) * p + rank
        saved += costs.forward[there] + costs.backward[back] - costs.combined(there, back)
    return pairs * saved / v


def _walls(
    passes: Passes, pipeline: _Pipeline, rank: int, microbatches: int, copies: list[CopyTime]
) -> dict[str, float]:
    """Seconds of a step of a rank by what they go to. A step ends when the slowest update has."""
    whole = added((passes.forward, passes.backward))
    walls = {name: microbatches * seconds for name, seconds in whole._asdict().items()}
    if whole.exchanged:
        left = 1 - pipeline.hidden[rank] / (microbatches * whole.exchanged)
        walls["ep"] *= left
        walls["etp"] *= left
    walls.update({name: exposed for name, _, _, exposed in copies[rank].axes})
    walls["bubble"] = pipeline.waits[rank]
    walls["optimizer"] = copies[rank].optimizer
    return walls


def _step(run: RunConfig, pipeline: _Pipeline, walls: dict[str, float]) -> StepTime:
    seconds = sum(walls.values())
    length = run.train.sequence_tokens
    tokens = run.train.global_batch * length / run.ranks / seconds
    return StepTime(
        seconds=seconds,
        bubble=pipeline.bubble,
        walls=walls,
        tokens_per_second=tokens,
        tflops=tokens * flops_per_token(run.model, length) / 1e12,
    )


def _stage(layout: Layout, rank: int, passes: Passes, pipeline: _Pipeline) -> StagePlan:
    busy = pipeline.busy(rank)
    return StagePlan(
        pp_rank=rank,
        parts=tuple(part_text(part) for part in layout.parts_of(rank)),
        forward_seconds=passes.forward.total,
        backward_seconds=passes.backward.total,
        bubble=pipeline.waits[rank] / busy if busy else 0.0,
    )


def _communication(
    pricing: Pricing,
    layout: Layout,
    passes: list[Passes],
    pipeline: _Pipeline,
    copies: list[CopyTime],
    microbatches: int,
) -> tuple[AxisTraffic, ...]:
    """Of every axis that anything travels over, the rank that sends most."""
    axes = pricing.links.axes
    found = []
    for name in ("tp", "cp", "ep", "etp"):
        most = max((_sent(each, name) for each in passes), default=(0.0, 0.0, 0.0))
        if most[0]:
            rank = max(range(layout.pp), key=lambda r: _sent(passes[r], name))
            share = 1.0
            whole = added((passes[rank].forward, passes[rank].backward)).exchanged
            if name in ("ep", "etp") and whole:
                share -= pipeline.hidden[rank] / (microbatches * whole)
            found.append((name, microbatches * most[0], microbatches * most[1], microbatches * most[2] * share))
    if layout.pp > 1:
        sent, seconds = handed_on(pricing.run, pricing.share, pricing.links)
        times = microbatches * max(_handed(layout, rank) for rank in range(layout.pp))
        exposed = min(_transfers(pricing.run, layout, microbatches), times) * seconds
        found.append(("pp", times * sent, times * seconds, exposed))
    for name in ("dp", "edp"):
        found.append(max(axis for each in copies for axis in each.axes if axis[0] == name))
    inside = {**{name: axis.inside for name, axis in axes.items()}, "dp": axes["replicas"].inside}
    return tuple(
        AxisTraffic(axis=name, sent_bytes=round(sent), inside=inside[name], seconds=seconds, exposed_seconds=exposed)
        for name, sent, seconds, exposed in found
        if sent
    )


def _handed(layout: Layout, rank: int) -> int:
    """How many streams of activations and of gradients a rank hands on for a microbatch: those that have begun before a stage's end."""
    streams, crossed = 0, []
    for part in layout.parts[:-1]:
        streams += part.embedding + len(part.ahead)
        crossed.append(streams)
    onward = sum(crossed[rank :: layout.pp])
    back = sum(count for stage, count in enumerate(crossed, start=1) if stage % layout.pp == rank)
    return onward + back


def _sent(passes: Passes, name: str) -> tuple[float, float, float]:
    """Bytes and seconds of one microbatch over an axis, and the seconds that nothing beside them hides."""
    sent = [(number, seconds) for axis, number, seconds in passes.sent if axis == name]
    exposed = added((passes.forward, passes.backward))._asdict()[name]
    return sum(number for number, _ in sent), sum(seconds for _, seconds in sent), exposed
