"""`--explain KEY`: what a setting means, what it is and why, and what else it could be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import reduce
from typing import Any, Literal, get_args, get_origin, get_type_hints

from core.config.override import settings
from core.config.run import RunConfig
from core.errors import ConfigError, Fault
from launch.describe import setting_text
from launch.products_text import product_lines
from launch.request import Planned


def explain(planned: Planned, key: str) -> str:
    """A paragraph on one setting. Raises ConfigError naming the closest ones where there is no such setting."""
    known = {"ranks": planned.run.ranks, **settings(planned.run)}
    if key not in known:
        close = get_close_matches(key, known, n=3, cutoff=0.5)
        works = ", ".join(close) or ", ".join(sorted({name.split(".")[0] for name in known}))
        raise ConfigError([Fault(setting="--explain", value=key, rule="is not a setting of this run", works=works)])
    lines = [f"{key} = {setting_text(known[key])}", f"  from     {planned.origins[key]}"]
    found = _declared(planned.run, key)
    if found is not None:
        owner, name = found
        lines += _declaration(owner, name)
    if key == "precision.recipe":
        lines += [f"  {line}" for line in product_lines(planned.run)]
    if planned.preset is not None:
        lines.append(f"  set-up   {planned.preset.name}, {planned.preset.status}: {planned.preset.source}")
        lines += [f"  note     {note}" for note in planned.preset.notes if _names(note, key)]
    return "\n".join(lines)


def _declaration(owner: type, name: str) -> Iterator[str]:
    """Default, choices and meaning of a field."""
    field = next(each for each in fields(owner) if each.name == name)
    if field.default is not MISSING and not is_dataclass(field.default):
        yield f"  default  {setting_text(field.default)}"
    choices = _choices(get_type_hints(owner)[name])
    if choices:
        yield f"  choices  {', '.join(choices)}"
    meaning = meanings(owner).get(name)
    if meaning:
        yield f"  meaning  {meaning}"


def meanings(owner: type) -> Mapping[str, str]:
    """What a declaration's own words say of each of its fields: from the field's name and a colon to the next one."""
    text = re.sub(r"\s+", " ", inspect.getdoc(owner) or "").replace("`", "")
    names = [field.name for field in fields(owner)]
    pattern = re.compile(r"(?:^|(?<=[.:;] ))((?:" + "|".join(names) + r")(?:, (?:" + "|".join(names) + r"))*): ")
    pieces = pattern.split(text)
    found = {}
    for said, meaning in zip(pieces[1::2], pieces[2::2], strict=True):
        for name in said.split(", "):
            found[name] = meaning.strip()
    return found


def _declared(run: RunConfig, key: str) -> tuple[type, str] | None:
    """The declaration that has the setting, and the field's name there; None for what is no field, as the number of layers."""
    if key == "ranks":
        return RunConfig, "ranks"
    section, *path = key.split(".")
    values: list[Any] = [run.model] if section == "model" else [_field(run, section)]
    if section == "model" and path[0] in ("attention", "moe", "dense"):
        part = path.pop(0)
        values = [layer.attention if part == "attention" else layer.mlp for layer in run.model.layers]
    for value in values:
        holder = reduce(_field, path[:-1], value)
        if _has(holder, path[-1]):
            return type(holder), path[-1]
    return None


def _field(value: Any, name: str) -> Any:
    return next((getattr(value, each.name) for each in fields(value) if each.name == name), None) if value else None


def _has(value: Any, name: str) -> bool:
    return is_dataclass(value) and name in {field.name for field in fields(value)}


def _choices(kind: Any) -> tuple[str, ...]:
    """The words of a Literal, or of a tuple of them, or of one that may be absent."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    for member in get_args(kind):
        found = _choices(member)
        if found:
            return (*found, *(("none",) if type(None) in get_args(kind) else ()))
    return ()


def _names(note: str, key: str) -> bool:
    """Whether a note speaks of the setting, by its whole name or its last part."""
    return re.search(rf"\b({re.escape(key)}|{re.escape(key.rsplit('.', 1)[-1])})\b", note) is not None
