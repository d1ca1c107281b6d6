"""Every setting that a run accepts is read by what plans or runs it, or refused: none is accepted and then ignored (known fault F5)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from core.config.override import SECTIONS, override, parse_assignment
from core.config.run import RunConfig
from tests.core.rules import RUN

ROOT = Path(__file__).resolve().parents[2]
# What reads settings without using them: declarations, rules over them, and words for people. core/check/built.py is none of
# these: what it reads is refused at the start.
IDLE = ("core/config/", "core/check/", "launch/describe.py", "launch/explain.py", "launch/hardware_rules.py", "models/")


@cache
def read_names() -> frozenset[str]:
    """Every attribute that is read, and every field that a class pattern matches, in what plans or runs."""
    names: set[str] = set()
    for folder in ("core", "ckpt", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            where = str(path.relative_to(ROOT))
            if where.startswith(IDLE) and where != "core/check/built.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    names.add(node.attr)
                elif isinstance(node, ast.MatchClass):
                    names.update(node.kwd_attrs)
    return frozenset(names)


def declared(kind: Any, path: str) -> Iterator[str]:
    """The path of every field below a declaration, through unions and tuples."""
    for field in fields(kind):
        yield f"{path}{kind.__name__}.{field.name}"
        for inner in inside(get_type_hints(kind)[field.name]):
            yield from declared(inner, f"{path}{kind.__name__}.{field.name}: ")


def inside(hint: Any) -> Iterator[Any]:
    if is_dataclass(hint):
        yield hint
    elif get_origin(hint) in (Union, UnionType, tuple):
        for member in get_args(hint):
            yield from inside(member)


def test_every_declared_field_is_read_where_runs_are_planned_or_run() -> None:
    unused = [path for path in declared(RunConfig, "") if path.rsplit(".", maxsplit=1)[-1] not in read_names()]
    assert unused == []


def test_the_search_sees_every_section_and_would_see_a_field_that_nothing_reads() -> None:
    paths = list(declared(RunConfig, ""))
    assert {path.split(".")[1].split(":")[0] for path in paths} >= set(SECTIONS)
    assert sum(path.endswith("AuxLoss.coefficient") for path in paths) == 1
    assert "dispatcher_sms" in read_names() and "dispatcher_smz" not in read_names()


@pytest.mark.parametrize(
    ("text", "close"),
    [
        ("model.moe.topk=2", "model.moe.top_k"),
        ("parallel.expert_parallel=2", "parallel.expert_budget"),
        ("recompute=mlp", "memory.recompute"),
        ("execution.graph=attn", "execution.graphs"),
        ("optimiser.eps=1", "optimizer.eps"),
    ],
)
def test_f5_a_key_that_is_no_setting_is_an_error_with_the_closest_name(text: str, close: str) -> None:
    run, (fault,) = override(RUN, [parse_assignment(text)])
    assert run == RUN and fault.code == "setting.unknown"
    assert close in fault.rule, fault
