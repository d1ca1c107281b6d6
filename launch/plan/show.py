"""`launch plan`: the plan of a run printed, explained, written as JSON or as a page, or searched for; nothing is started."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from core.check.built import not_built
from core.config.counts import count_parameters
from core.config.family import find_family
from core.config.serial import run_to_json
from launch.describe import describe, variables_of
from launch.explain import explain
from launch.plan.result import Plan
from launch.request import Planned, Request, new_run


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `launch plan` is to give: a setting explained, JSON instead of tables, a page, or the best mapping of all."""

    key: str | None = None
    as_json: bool = False
    page: Path | None = None
    search: bool = False


def show_plan(model: str, request: Request, wanted: Wanted) -> None:
    """Print it. Raises ConfigError with every fault of the request."""
    planned = new_run(request, find_family(model))
    if wanted.key is not None:
        click.echo(explain(planned, wanted.key))
        return
    if wanted.search:
        _show_search(planned, wanted)
        return
    from launch.plan.make import make_plan

    plan = make_plan(planned.run)
    if wanted.page is not None:
        from launch.plan.page import write_page

        write_page(planned.run, planned.origins, plan, wanted.page)
    if wanted.as_json:
        click.echo(json.dumps(plan_to_json(planned, plan), indent=2, allow_nan=False))
        return
    click.echo(describe(planned, plan))
    if wanted.page is not None:
        click.echo(f"page: {wanted.page}")


def plan_to_json(planned: Planned, plan: Plan) -> dict[str, Any]:
    """Everything that is known of a run before it starts, as plain values: sizes in bytes, times in seconds."""
    counts = count_parameters(planned.run.model)
    return {
        "run": run_to_json(planned.run),
        "origins": dict(planned.origins),
        "parameters": asdict(counts),
        "environment": [asdict(variable) for variable in variables_of(planned)],
        "cannot_start": [str(fault) for fault in not_built(planned.run)],
        "worst_rank": plan.worst_rank.rank,
        "headroom": plan.headroom,
        "plan": asdict(plan),
    }


def _show_search(planned: Planned, wanted: Wanted) -> None:
    """The best mappings, and why the others lost."""
    from launch.plan.search import search

    result = search(planned.run, planned.run.ranks)
    if wanted.as_json:
        click.echo(json.dumps(asdict(result), indent=2, allow_nan=False))
        return
    click.echo("\n".join(result.lines()))
