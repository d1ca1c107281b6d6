"""`launch plan`: the plan of a run printed, explained, written as JSON or as a page, or searched for; nothing is started."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from core.config.family import find_family
from launch.describe import describe, plan_to_json
from launch.explain import explain
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


def _show_search(planned: Planned, wanted: Wanted) -> None:
    """The best mappings, and why the others lost."""
    from launch.plan.search import search

    # What the user has asked for stays as it is: every flag and --set, by the key that it sets.
    fixed = frozenset(key for key, origin in planned.origins.items() if origin.startswith("-"))
    result = search(planned.run, planned.run.ranks, fixed=fixed)
    if wanted.as_json:
        click.echo(json.dumps(asdict(result), indent=2, allow_nan=False))
        return
    click.echo("\n".join(result.lines()))
