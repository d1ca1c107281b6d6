"""A planned run in words: folder, mapping, batch arithmetic, parameters, and every setting with its origin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from core.check.built import not_built
from core.config.counts import Counts, count_parameters
from core.config.family import Family, Published
from core.config.mapping import ParallelConfig
from core.config.override import settings, value_text
from core.config.run import RunConfig
from core.config.serial import run_to_json
from core.parallel.mesh import DENSE_AXES, EXPERT_AXES, Folding, Mesh, fold
from core.pipeline.layout import Layout, Part, layout_of, layout_text
from launch.choice import DEFAULT_PRESET
from launch.environment import EnvironmentVariable
from launch.folder import Init
from launch.hardware_rules import advice
from launch.plan.communication import Links
from launch.plan.result import Plan
from launch.plan.text import plan_lines
from launch.products_text import product_lines
from launch.profiles import find_profile
from launch.request import Planned

SHOWN_GROUPS = 4
SHOWN_PIPELINE_RANKS = 8
NAME_WIDTH = 12
SHOWN_AXES = (*DENSE_AXES, *EXPERT_AXES)
Variables = Sequence[EnvironmentVariable]


def describe(planned: Planned, plan: Plan, out: Path | None = None, variables: Variables = ()) -> str:
    """What would run, and all that is known of it beforehand.

    out: the folder of the run, None where none is asked for. variables: the environment of every rank.
    """
    return "\n".join(
        [
            *head_lines(planned, out),
            "",
            *plan_lines(planned.run, plan),
            *_block("formats of products", product_lines(planned.run)),
            *_block(
                "what would make it faster or safer", map(str, advice(planned.run, find_profile(planned.run.hardware)))
            ),
            *_block("cannot start yet, here or anywhere", map(str, not_built(planned.run))),
            *_block("environment of every rank", _environment(variables)),
            *_block("notes on the set-up", planned.preset.notes if planned.preset else ()),
            *_block("settings (and where each comes from)", _settings(planned)),
        ]
    )


def plan_to_json(planned: Planned, plan: Plan, variables: Variables) -> dict[str, Any]:
    """Everything that is known of a run before it starts, as plain values: sizes in bytes, times in seconds. variables: of every rank."""
    counts = count_parameters(planned.run.model)
    return {
        "run": run_to_json(planned.run),
        "origins": dict(planned.origins),
        "parameters": asdict(counts),
        "environment": [asdict(variable) for variable in variables],
        "cannot_start": [str(fault) for fault in not_built(planned.run)],
        "worst_rank": plan.worst_rank.rank,
        "headroom": plan.headroom,
        "plan": asdict(plan),
    }


def head_lines(planned: Planned, out: Path | None) -> Iterator[str]:
    """What is to run: set-up, parameters, both foldings, pipeline, batch, data."""
    run = planned.run
    counts = count_parameters(run.model)
    device = "rank" if find_profile(run.hardware).device == "cpu" else "GPU"
    yield f"{run.family} {run.size} on {run.hardware}, {_counted(run.ranks, device)}"
    if out is not None:
        yield f"  run folder   {out}"
    if planned.preset is not None and planned.preset.figure is not None:
        yield f"  measured     {_figure(planned.preset.figure)}"
    if planned.preset is not None and planned.preset.name != DEFAULT_PRESET:
        yield f"  set-up       {planned.preset.name} ({planned.preset.status}): {planned.preset.source}"
    yield from weights_lines(planned.init)
    yield f"  parameters   {parameters(counts)}, {short(counts.active)} active a token"
    yield from mapping_lines(run)
    yield from (f"  {'NVLink':<{NAME_WIDTH}} {text}" for text in _domains(run))
    yield from (f"  {line}" for line in _batch(run))
    yield from (f"  {'routing':<{NAME_WIDTH}} {text}" for text in forced_words(run))
    yield f"  data         {run.data.path or 'the Python standard library of this interpreter'}"


def _domains(run: RunConfig) -> Iterator[str]:
    """Which axes stay inside an NVLink domain and which leave it, where the hardware has some."""
    fabric = find_profile(run.hardware).fabric
    if fabric is None:
        return
    axes = {name: axis for name, axis in Links.of(run, fabric).axes.items() if axis.size > 1 and name in SHOWN_AXES}
    inside = [f"{name} {axis.size}" for name, axis in axes.items() if axis.inside]
    outside = [
        f"{name} {axis.size}" + (f" ({axis.near} together)" if axis.near > 1 else "")
        for name, axis in axes.items()
        if not axis.inside
    ]
    yield f"domains of {fabric.domain} GPUs: inside {', '.join(inside) or 'none'}; across them {', '.join(outside) or 'none'}"


def _block(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A part under its title, nothing where there are no lines."""
    held = list(lines)
    if held:
        yield from ("", title, *(f"  {line}" for line in held))


def _figure(figure: Published) -> str:
    numbers = [f"{figure.tokens_per_second:,.0f} tokens/s"] if figure.tokens_per_second else []
    numbers += [f"{figure.tflops:,.0f} TFLOPS"] if figure.tflops else []
    return f"{' and '.join(numbers)} a GPU by {figure.source}, of the set-up as it is published"


def _environment(variables: Variables) -> Iterator[str]:
    texts = [(f"{each.name}={each.value}", each.why) for each in variables]
    width = max((len(text) for text, _ in texts), default=0)
    yield from (f"{text:<{width}}  {why}" for text, why in texts)


def _settings(planned: Planned) -> Iterator[str]:
    shown = {"ranks": planned.run.ranks, **settings(planned.run)}
    texts = {key: setting_text(value) for key, value in shown.items()}
    width, values = max(map(len, shown)), max(map(len, texts.values()))
    yield from (f"{key:<{width}}  {texts[key]:<{values}}  {planned.origins[key]}" for key in shown)


def setting_text(value: object) -> str:
    """A setting's value as --set takes it; several, where the layers differ."""
    if isinstance(value, tuple):
        return ", ".join(map(setting_text, value)) or "none"
    return value_text(value)


def parameters(counts: Counts) -> str:
    """The published count of a model, and what its prediction modules add to it."""
    ahead = f" (+ {short(counts.predict_ahead)} to predict ahead)" if counts.predict_ahead else ""
    return short(counts.main) + ahead


def short(number: int) -> str:
    """A count in three or four digits: 671.0 B, 46.7 B, 12.3 M, 850."""
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def list_rows(families: tuple[Family, ...]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Model, size, hardware with the names of its set-ups, total, active, published checkpoint: one row a size."""
    for family in families:
        for size in family.sizes:
            counts = count_parameters(size.model)
            yield (
                family.name,
                size.name,
                "\n".join(_set_ups(family, size.name)) or "-",
                parameters(counts),
                short(counts.active),
                size.published or "-",
            )


def _set_ups(family: Family, size: str) -> Iterator[str]:
    """Kinds of hardware and the names of their set-ups, the one that is taken first; neighbours with the same names in one line."""
    names: dict[str, list[str]] = {}
    for preset in family.presets:
        if preset.size == size:
            names.setdefault(preset.hardware, []).append(preset.name)
    for same, group in groupby(names.items(), key=lambda item: item[1]):
        hardware = ", ".join(kind for kind, _ in group)
        yield hardware if same == [DEFAULT_PRESET] else f"{hardware}: {', '.join(same)}"


def weights_lines(init: Init | None) -> Iterator[str]:
    """Where the first weights come from, for a terminal; nothing for random ones."""
    if init is not None:
        yield f"  {'weights':<{NAME_WIDTH}} from {init.address}, {init.what}; the optimizer begins anew"


def forced_words(run: RunConfig) -> Iterator[str]:
    """That routing is forced, where it is."""
    if run.train.forced_routing is not None:
        yield f"forced ({run.train.forced_routing}): the run measures speed and memory, its losses mean nothing"


def mapping_lines(run: RunConfig) -> Iterator[str]:
    """The mapping for a terminal: each fact behind its name, further lines of it below."""
    for name, first, *more in mapping_facts(run):
        yield f"  {name:<{NAME_WIDTH}} {first}"
        yield from (f"  {'':<{NAME_WIDTH}} {line}" for line in more)


def mapping_facts(run: RunConfig) -> Iterator[tuple[str, ...]]:
    """Both foldings, what every pipeline rank holds where there are several parts, and what is sharded: name and lines of each."""
    mesh, parallel = fold(run.parallel, run.ranks), run.parallel
    yield "attention", _folding(mesh.dense), *_groups(mesh.dense, "dp")
    nodes = f", nodes of {parallel.ep_per_node} ranks" if parallel.ep_per_node > 1 else ""
    dispatcher = f"{_folding(mesh.expert)}, {parallel.dispatcher} dispatcher{nodes}"
    yield "experts", dispatcher, *_groups(mesh.expert, "ep")
    layout = layout_of(run.model, parallel)
    if len(layout.parts) > 1:
        stages = f" of {layout.virtual} virtual stages" if layout.virtual > 1 else ""
        first = f"{_counted(parallel.pp, 'rank')}{stages}, schedule {parallel.schedule}, layout {layout_text(layout)}"
        yield "pipeline", first, *_held(layout)
    yield "sharding", _sharding(parallel, mesh)


def _held(layout: Layout) -> Iterator[str]:
    """What each pipeline rank holds, stage by stage."""
    for pp_rank in range(min(layout.pp, SHOWN_PIPELINE_RANKS)):
        yield f"rank {pp_rank}: " + " | ".join(map(_part, layout.parts_of(pp_rank)))
    if layout.pp > SHOWN_PIPELINE_RANKS:
        yield f"and {layout.pp - SHOWN_PIPELINE_RANKS} more"


def _part(part: Part) -> str:
    words = [*(["embedding"] if part.embedding else []), *_range("layer", part.layers)]
    words += [*_range("prediction module", part.ahead), *(["loss"] if part.loss else [])]
    return ", ".join(words) or "nothing"


def _range(name: str, numbers: tuple[int, ...]) -> Iterator[str]:
    if len(numbers) == 1:
        yield f"{name} {numbers[0]}"
    elif numbers:
        yield f"{name}s {numbers[0]}–{numbers[-1]}"


def _sharding(parallel: ParallelConfig, mesh: Mesh) -> str:
    """What lies apart of what tp cuts, and of experts, and over how many ranks."""
    dense, expert = mesh.dense.size("cp") * mesh.dense.size("dp"), mesh.expert.size("edp")
    if parallel.sharding == "zero1":
        return f"zero1: optimizer states over {_counted(dense, 'rank')}, of experts over {expert}"
    copies = parallel.fsdp_replicas
    over = f"{_counted(dense // copies, 'rank')}, of experts over {expert // math.gcd(expert, copies)}"
    return f"fsdp: parameters and optimizer states over {over}" + (f"; {copies} copies" if copies > 1 else "")


def _counted(number: int, name: str, plural: str = "") -> str:
    return f"{number} {name}" if number == 1 else f"{number} {plural or name + 's'}"


def _folding(folding: Folding) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in zip(folding.axes, folding.sizes, strict=True))


def _groups(folding: Folding, axis: str) -> Iterator[str]:
    """The ranks of each group over an axis, where there is more than one rank in it and few enough to read."""
    groups = folding.groups((axis,))
    if folding.size(axis) > 1 and folding.world <= 64 and len(groups) <= SHOWN_GROUPS:
        yield f"{axis} groups of ranks " + ", ".join("{" + ", ".join(map(str, group)) + "}" for group in groups)


def _batch(run: RunConfig) -> Iterator[str]:
    train = run.train
    tokens = train.global_batch * train.sequence_tokens
    yield (
        f"batch        {train.global_batch} sequences × {train.sequence_tokens} tokens = {tokens:,} tokens a step: "
        f"{run.replicas} data-parallel × {_counted(run.microbatches, 'microbatch', 'microbatches')} × "
        f"{_counted(train.microbatch, 'sequence')}"
    )
    schedule = "" if train.schedule_steps in (None, train.steps) else f", of a schedule of {train.schedule_steps}"
    yield f"length       {train.steps} steps{schedule}, {tokens * train.steps:,} tokens"
