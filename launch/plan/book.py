"""The numbers with which a page counts memory again for other mappings: tables of launch/plan/quick.py, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from core.config.mapping import ParallelConfig
from core.config.memory import RecomputeName
from core.config.precision import state_bytes
from core.config.run import RunConfig
from core.optim.buckets import BUCKET_BYTES
from core.parallel.mesh import fold
from core.pipeline.layout import Layout, Part, layout_of, layout_text
from launch.plan.candidates import Choices, divisors, expert_degrees, tensor_degrees
from launch.plan.load import Load
from launch.plan.options import recomputable
from launch.plan.quick import BYTES, TOGETHER, QuickMemory, primary_saved
from launch.profiles import find_profile

# A sequence is worth cutting from here (report section 9.1.2); every cp and ep that can be chosen is traced once.
WORTH_CUTTING = 8192
MOST_CP, MOST_PP = 8, 32
FIELDS = ("kept", "stream", "forward", "backward", "late")


def book(run: RunConfig, memory: QuickMemory) -> dict[str, Any]:
    """Everything that page.js reads. memory: of this very run, so that the plan's own place is exact."""
    p, layout = run.parallel, layout_of(run.model, run.parallel)
    profile = find_profile(run.hardware)
    plain = replace(run, memory=replace(run.memory, recompute=()))
    options = _options(run, layout)
    names, kinds = recomputable(run.model), memory.kinds(run.precision.recipe)

    def at(parallel: ParallelConfig, again: tuple[RecomputeName, ...] = ()) -> dict[str, Load]:
        return memory.loads(replace(plain, parallel=parallel, memory=replace(plain.memory, recompute=again)))

    changes = {
        tp: {
            "+".join(parts): _changes(at(replace(p, tp=tp)), at(replace(p, tp=tp), parts))
            for parts in _recomputed(names)
        }
        for tp in options["tp"]
    }
    whole = {tp: at(replace(p, tp=tp), ("full",)).get("ahead and its layer") for tp in options["tp"]}
    trade = {cp: cp if p.cp_alltoall > 1 else 1 for cp in options["cp"]}
    experts = [f"layer {kind}" for kind in range(len(kinds.all))]
    mesh = fold(p, run.ranks)
    return {
        "ranks": run.ranks,
        "capacity": None if profile.chip is None else int(profile.chip.memory),
        "etp": p.etp,
        "schedule": p.schedule,
        "fsdp": p.fsdp_replicas if p.sharding == "fsdp" else 0,
        "onHost": run.memory.optimizer_offload,
        "tied": run.model.tied_embeddings,
        "planned": _planned(run, layout, mesh.dense.size("dp")),
        "kinds": list(kinds.of),
        "aheadKind": kinds.ahead,
        "bytes": _bytes(run),
        "stream": memory.stream(p),
        "turns": memory.turns(p),
        "byTp": {tp: _plain(at(replace(p, tp=tp))) for tp in options["tp"]},
        "byCp": {cp: _plain(at(replace(p, cp=cp, cp_alltoall=trade[cp]))) for cp in options["cp"]},
        "byEp": {ep: _plain(_some(at(_spread(p, ep)), experts)) for ep in options["ep"]},
        "recompute": changes,
        "wholeAhead": {tp: _numbers(load) for tp, load in whole.items() if load is not None},
        "recomputable": list(names),
        "elements": {
            tp: {name: asdict(held) for name, held in memory.elements(tp, run.precision.recipe).items()}
            for tp in options["tp"]
        },
        "options": options,
        "layouts": {pp: {vpp: _layout(run, pp, vpp, layout) for vpp in _chunks(run, pp)} for pp in options["pp"]},
    }


def _recomputed(names: Sequence[RecomputeName]) -> list[tuple[RecomputeName, ...]]:
    """What is traced: every part alone, and those together that change one another."""
    pair = [TOGETHER] if set(TOGETHER) <= set(names) else []
    return [*((name,) for name in names), *pair]


def _planned(run: RunConfig, layout: Layout, dp: int) -> dict[str, Any]:
    p, train = run.parallel, run.train
    return {
        **{"tp": p.tp, "cp": p.cp, "pp": p.pp, "vpp": layout.virtual, "ep": p.ep, "dp": dp},
        "microbatch": train.microbatch,
        "batch": train.global_batch,
        "recompute": list(run.memory.recompute),
    }


def _options(run: RunConfig, layout: Layout) -> dict[str, list[int]]:
    """What each slider offers, the run's own value among it."""
    p, train, profile = run.parallel, run.train, find_profile(run.hardware)
    longest = MOST_CP if train.sequence_tokens >= WORTH_CUTTING else 1
    pipelines = divisors(run.ranks, min(MOST_PP, len(run.model.layers)))
    chunks = {vpp for pp in {*pipelines, p.pp} for vpp in _chunks(run, pp)}
    batches = [max(1, train.global_batch * number // 8) for number in (1, 2, 4, 6, 8, 12, 16, 32)]
    offered = {
        "tp": [*tensor_degrees(run.model, run.ranks, profile), p.tp],
        "cp": [*divisors(run.ranks, longest), p.cp],
        "pp": [*pipelines, p.pp],
        "vpp": [*chunks, layout.virtual],
        "ep": [*expert_degrees(run.model, run.ranks), p.ep],
        "microbatch": [1, 2, 4, 8, train.microbatch],
        "batch": [*batches, train.global_batch],
    }
    return {name: sorted(set(values)) for name, values in offered.items()}


def _chunks(run: RunConfig, pp: int) -> list[int]:
    """vpp to choose from on so many pipeline ranks."""
    own = layout_of(run.model, run.parallel)
    found = {
        vpp
        for vpp, _ in Choices(run=replace(run, parallel=replace(run.parallel, layout=None)), fixed=frozenset()).layouts(
            pp
        )
    }
    return sorted({*found, *([own.virtual] if pp == own.pp else [])})


def _layout(run: RunConfig, pp: int, vpp: int, planned: Layout) -> dict[str, Any]:
    """The stages of a choice: the plan's own where it is the plan's, otherwise balanced by cost."""
    layout = planned
    if (pp, vpp) != (planned.pp, planned.virtual):
        choices = Choices(run=replace(run, parallel=replace(run.parallel, layout=None)), fixed=frozenset())
        text = dict(choices.layouts(pp)).get(vpp)
        layout = layout_of(run.model, replace(run.parallel, pp=pp, vpp=vpp, layout=text))
    return {"text": layout_text(layout), "stages": [_stage(part) for part in layout.parts]}


def _stage(part: Part) -> dict[str, Any]:
    return {"embedding": part.embedding, "layers": list(part.layers), "ahead": len(part.ahead), "loss": part.loss}


def _bytes(run: RunConfig) -> dict[str, float]:
    """Of one parameter: the weight, what primary weights save of it, its gradient, its masters and moments; and of a bucket."""
    precision = run.precision
    return {
        "element": BYTES[precision.compute],
        "saved": primary_saved(precision),
        "gradient": BYTES[precision.main_gradients],
        "states": state_bytes(precision),
        "bucket": BUCKET_BYTES,
    }


def _spread(p: ParallelConfig, ep: int) -> ParallelConfig:
    return replace(p, ep=ep, ep_per_node=min(p.ep_per_node, ep))


def _some(loads: dict[str, Load], names: Sequence[str]) -> dict[str, Load]:
    return {name: load for name, load in loads.items() if name in names}


def _changes(base: dict[str, Load], after: dict[str, Load]) -> dict[str, dict[str, int]]:
    """What a recomputed part changes of the pieces that it changes."""
    found = {}
    for name, load in base.items():
        numbers, plain = _numbers(after[name]), _numbers(load)
        difference = {field: numbers[field] - plain[field] for field in FIELDS}
        if any(difference.values()):
            found[name] = difference
    return found


def _plain(loads: dict[str, Load]) -> dict[str, dict[str, int]]:
    return {name: _numbers(load) for name, load in loads.items()}


def _numbers(load: Load) -> dict[str, int]:
    return {field: value for field, value in vars(load).items() if field in FIELDS}
