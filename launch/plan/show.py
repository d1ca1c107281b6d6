"""`launch plan`: the plan of a run printed, explained, written as JSON or as a page, or searched for; nothing is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from core.config.family import find_family
from core.config.run import RunConfig
from core.errors import ConfigError, Fault
from launch.describe import describe, plan_to_json
from launch.explain import explain
from launch.job import job_environment
from launch.plan.text import GIB, table
from launch.request import Planned, Request, new_run


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `launch plan` is to give: a setting explained, JSON instead of tables, a page, the best mapping of all, or memory as Table 3 of
    the report counts it. startable: search only among what can start today."""

    key: str | None = None
    as_json: bool = False
    page: Path | None = None
    search: bool = False
    table3: bool = False
    startable: bool = False


def show_plan(model: str, request: Request, wanted: Wanted) -> None:
    """Print it. Raises ConfigError with every fault of the request."""
    planned = new_run(request, find_family(model))
    if wanted.key is not None:
        click.echo(explain(planned, wanted.key))
        return
    if wanted.table3:
        click.echo("\n".join(_table3(planned.run)))
        return
    if wanted.search or wanted.startable:
        _show_search(planned, wanted)
        return
    from launch.plan.make import make_plan
    from launch.plan.memory import MemoryPlanner

    planner, variables = MemoryPlanner(), job_environment(planned, None)
    plan = make_plan(planned.run, planner)
    if wanted.page is not None:
        from launch.plan.page import write_page

        write_page(planned.run, planned.origins, plan, wanted.page, planner)
    if wanted.as_json:
        click.echo(json.dumps(plan_to_json(planned, plan, variables), indent=2, allow_nan=False))
        return
    click.echo(describe(planned, plan, variables=variables))
    if wanted.page is not None:
        click.echo(f"page: {wanted.page}")


def _show_search(planned: Planned, wanted: Wanted) -> None:
    """The best mappings, and why the others lost."""
    from launch.plan.search import search

    # What the user has asked for stays as it is: every flag and --set, by the key that it sets.
    fixed = frozenset(key for key, origin in planned.origins.items() if origin.startswith("-"))
    result = search(planned.run, planned.run.ranks, fixed=fixed, buildable_only=wanted.startable)
    if wanted.as_json:
        click.echo(json.dumps(asdict(result), indent=2, allow_nan=False))
        return
    click.echo("\n".join(result.lines()))


def _table3(run: RunConfig) -> Iterator[str]:
    """The run's memory by the accounting of the report's Table 3. Raises ConfigError for models of which it says nothing."""
    from launch.plan.table3 import as_printed, by_rank

    try:
        rows = [as_printed(run), *by_rank(run)]
    except ValueError as error:
        rule = f"shows what Table 3 of the report counts, and {error}"
        fault = Fault(code="plan.table3", setting="MODEL", value=run.family, rule=rule, works="deepseek_v3 --size 671b")
        raise ConfigError([fault]) from None
    yield "memory as Table 3 of arXiv 2603.07685 counts it, GiB; its first row is the table's own, idealised rank (docs/memory.md)"
    columns = ("rank", "weights and gradients", "master and optimizer", "activations", "total")
    numbers = ((each.weights_and_gradients, each.optimizer, each.activations, each.total) for each in rows)
    names = ["-" if each.rank is None else str(each.rank) for each in rows]
    yield from table(
        columns, [(name, *(f"{n / GIB:.1f}" for n in row)) for name, row in zip(names, numbers, strict=True)]
    )
