"""`launch schedule`: the pipeline schedule of a run proved, timed and drawn, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path

import click

from core.config.architecture import ModelConfig
from core.config.family import find_family
from core.config.flops import flops_per_token
from core.config.run import RunConfig
from core.errors import ConfigError, Fault
from core.pipeline.layout import Layout, layout_of, part_text
from core.pipeline.prove import faults, peak_live
from core.pipeline.schedule import make_schedule
from core.pipeline.simulate import Costs, Timeline, simulate
from launch.request import Request, new_run
from launch.schedule_picture import bubble_text, draw_schedule
from launch.tables import print_table

EQUAL = "equal"
UNIT = "forward passes of an average part"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What --costs says. costs: by action, in forward passes of an average part. equal: every part is an average one."""

    costs: Costs
    equal: bool


def show_schedule(model: str, request: Request, microbatches: int | None, costs: str, out: Path | None) -> None:
    """Print what every pipeline rank of the run holds, keeps and waits for, and write the picture to `out`.

    microbatches: of one step (None: as many as the run has). Raises ZooError for a request that cannot be.
    """
    weights = parse_costs(costs)
    run = new_run(request, find_family(model)).run
    timeline = time_schedule(run, microbatches, weights)
    layout = layout_of(run.model, run.parallel)
    print_table(("rank", "parts", "peak live microbatches", "computes", "bubble"), list(rows(timeline, layout)))
    title = headline(run, timeline)
    click.echo(f"{title}\ntotal {timeline.total:.2f} {UNIT}")
    click.echo("proved: complete, in order, free of deadlock")
    if out is not None:
        draw_schedule(timeline, out, title, UNIT)
        click.echo(f"picture: {out}")


def time_schedule(run: RunConfig, microbatches: int | None, weights: Weights) -> Timeline:
    """The timeline of one step of the run, of a schedule that is proved. Raises ConfigError with every fault."""
    layout = layout_of(run.model, run.parallel)
    number = run.microbatches if microbatches is None else max(microbatches, 1)
    schedule = make_schedule(run.parallel.schedule, stages=layout.pp, virtual=layout.virtual, microbatches=number)
    found = faults(schedule)
    assert not found, "a schedule of ours is wrong:\n" + "\n".join(found)
    work = (1.0,) * len(layout.parts) if weights.equal else part_work(run.model, layout, run.train.sequence_tokens)
    return simulate(schedule, scaled(weights.costs, work))


def part_work(model: ModelConfig, layout: Layout, sequence_tokens: int) -> tuple[float, ...]:
    """The operations of every part in those of an average one: layers by their kind, modules with their head, the head."""
    bare = replace(model, layers=(), predict_ahead=None)
    head = flops_per_token(bare, sequence_tokens)
    layers = [
        flops_per_token(replace(bare, layers=(layer,)), sequence_tokens) - head
        for layer in (*model.layers, *model.mtp_layers())
    ]
    # what a module adds to its layer, once for all of them
    module = flops_per_token(model, sequence_tokens) - head - sum(layers)
    modules = len(model.mtp_layers())
    work = []
    for part in layout.parts:
        ahead = [layers[len(model.layers) + depth] + module / modules for depth in part.ahead]
        work.append(sum(layers[i] for i in part.layers) + sum(ahead) + head * part.loss)
    average = sum(work) / len(work)
    return tuple(each / average for each in work)


def scaled(costs: Costs, work: tuple[float, ...]) -> Costs:
    """The costs of parts that do so much work each, from those of an average part."""
    names = ("forward", "backward", "input_gradient", "weight_gradient")
    given = {"forward": costs.forward, "backward": costs.backward}
    given |= {"input_gradient": costs.input_gradient, "weight_gradient": costs.weight_gradient}
    tuples = {name: tuple(_single(given[name]) * each for each in work) for name in names}
    return replace(costs, **tuples)  # type: ignore[arg-type]


def parse_costs(text: str) -> Weights:
    """Weights from `equal,forward=1,backward=2,transfer=0.1`, any of them or none. Raises ConfigError with every fault."""
    known = [field.name for field in fields(Costs)]
    values: dict[str, float] = {}
    found = []
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if item == EQUAL:
            continue
        if name not in known:
            works = f"{EQUAL}, or a number for any of {', '.join(known)}, as in backward=2"
            found.append(Fault(setting="--costs", value=item, rule="is not a cost", works=works))
            continue
        number = _number(value)
        most = 1.0 if name == "overlap" else float("inf")
        if number is None or not 0 <= number <= most:
            works = f"{name}=0.1, or another number from 0" + (" to 1" if name == "overlap" else " on")
            found.append(Fault(setting="--costs", value=item, rule="needs a number that is not negative", works=works))
        else:
            values[name] = number
    if found:
        raise ConfigError(found)
    return Weights(costs=Costs(**values), equal=EQUAL in text.split(","))


def rows(timeline: Timeline, layout: Layout) -> Iterator[tuple[str, str, str, str, str]]:
    """Rank, parts in the language of layouts, most live microbatches, time it computes, share of that which it waits."""
    live = peak_live(timeline.schedule)
    for rank in range(layout.pp):
        parts = " | ".join(part_text(part) or "nothing" for part in layout.parts_of(rank))
        yield (
            *(str(rank), parts, str(live[rank]), f"{timeline.busy(rank):.2f}"),
            bubble_text(timeline.bubble_of(rank)),
        )


def headline(run: RunConfig, timeline: Timeline) -> str:
    """Model, schedule, sizes and bubble in one line."""
    s = timeline.schedule
    sizes = [_counted(s.stages, "pipeline rank"), *([f"{s.virtual} chunks each"] if s.virtual > 1 else [])]
    sizes.append(_counted(s.microbatches, "microbatch", "microbatches"))
    return f"{run.family} {run.size}: {s.name}, {', '.join(sizes)}: bubble {bubble_text(timeline.bubble)}"


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _single(cost: float | tuple[float, ...]) -> float:
    assert not isinstance(cost, tuple), "costs of an average part are single numbers"
    return cost


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
