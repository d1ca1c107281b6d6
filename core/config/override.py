"""`--set key=value`: typed from the declarations, checked against what this very run has, and a new value each time.

Sections are the fields of RunConfig. Inside `model` three virtual parts, `attention`, `moe` and `dense`, stand for every
layer that has the part, and `num_layers` rewrites the depth: nobody wants to name 61 layers.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from core.config.architecture import Balance, Capacity, Dense, Layer, ModelConfig, MoE, Selection
from core.config.capacity_text import CAPACITY_EXAMPLE, capacity_text, parse_capacity
from core.config.recipe import Operand, Recipe
from core.config.recipe_text import (
    OPERAND_EXAMPLE,
    RECIPE_EXAMPLE,
    names_text,
    operand_text,
    parse_names,
    parse_operand,
    parse_recipe,
    recipe_text,
)
from core.config.router_text import (
    BALANCE_EXAMPLE,
    SELECTION_EXAMPLE,
    TextError,
    balance_text,
    parse_balance,
    parse_selection,
    selection_text,
)
from core.config.run import RunConfig
from core.errors import ConfigError, Fault

SECTIONS = ("model", "parallel", "train", "optimizer", "data", "precision", "memory", "execution", "checkpoint")
NUM_LAYERS = "model.num_layers"
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One setting as the user wrote it; `origin` is how: `--set`, or the flag's own name."""

    key: str
    text: str
    origin: str = "--set"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the virtual parts of a model: how to read it from a layer, and how to make the layer with another."""

    name: str
    read: Callable[[Layer], Any]
    write: Callable[[Layer, Any], Layer]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a union, or a tuple of several things, is written as one word: its declared type, value to text, text to value."""

    kind: Any
    show: Callable[[Any], str]
    read: Callable[[str], Any]
    example: str
    # Whether the fields of a value are settings of their own besides.
    opens: bool = False


FORMS = (
    Form(kind=tuple[Balance, ...], show=balance_text, read=parse_balance, example=BALANCE_EXAMPLE),
    Form(kind=Capacity | None, show=capacity_text, read=parse_capacity, example=CAPACITY_EXAMPLE),
    Form(kind=Selection, show=selection_text, read=parse_selection, example=SELECTION_EXAMPLE),
    Form(kind=Recipe | None, show=recipe_text, read=parse_recipe, example=RECIPE_EXAMPLE, opens=True),
    Form(kind=Operand | None, show=operand_text, read=parse_operand, example=OPERAND_EXAMPLE),
    Form(kind=tuple[str, ...], show=names_text, read=parse_names, example="layers.0.*,layers.*.attention.*, or none"),
)
PARTS = (
    Part(name="attention", read=lambda layer: layer.attention, write=lambda layer, new: replace(layer, attention=new)),
    Part(
        name="moe",
        read=lambda layer: layer.mlp if isinstance(layer.mlp, MoE) else None,
        write=lambda layer, new: replace(layer, mlp=new),
    ),
    Part(
        name="dense",
        read=lambda layer: layer.mlp if isinstance(layer.mlp, Dense) else None,
        write=lambda layer, new: replace(layer, mlp=new),
    ),
)


def parse_assignment(text: str) -> Assignment:
    """`key=value` as an assignment. Raises ConfigError where there is no `=` or no key."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(
            [
                Fault(
                    code="setting.form",
                    setting="--set",
                    value=text,
                    rule="is not of the form key=value",
                    works="train.steps=100",
                )
            ]
        )
    return Assignment(key=key.strip(), text=value.strip())


def override(run: RunConfig, assignments: Sequence[Assignment]) -> tuple[RunConfig, tuple[Fault, ...]]:
    """The run with the settings applied in turn, and a fault for each one that could not be; those leave no trace."""
    faults = list(_conflicts(assignments))
    for item in assignments:
        try:
            run = _apply(run, item)
        except ConfigError as error:
            faults.extend(error.faults)
    return run, tuple(faults)


def override_section(section: str, value: Value, assignments: Sequence[Assignment]) -> tuple[Value, tuple[Fault, ...]]:
    """As `override`, for one section of a run that is had alone: `parallel` and a ParallelConfig."""
    faults = list(_conflicts(assignments))
    for item in assignments:
        known = dict(_leaves(section, value))
        try:
            if item.key not in known:
                raise ConfigError([_unknown(item, known, (section,))])
            value = _assign(value, item.key.split(".")[1:], item)
        except ConfigError as error:
            faults.extend(error.faults)
    return value, tuple(faults)


def settings(run: RunConfig) -> dict[str, Any]:
    """Every key that `--set` accepts for this run, with its value: a tuple of several where the layers differ."""
    found: dict[str, Any] = {}
    for section in SECTIONS:
        for key, value in _leaves(section, getattr(run, section)):
            found[key] = value
        if section == "model":
            found[NUM_LAYERS] = len(run.model.layers)
            found |= _part_settings(run.model)
    return found


def _part_settings(model: ModelConfig) -> dict[str, Any]:
    seen: dict[str, list[Any]] = {}
    for part in PARTS:
        for layer in dict.fromkeys(model.layers):
            held = part.read(layer)
            for key, value in _leaves(f"model.{part.name}", held) if held is not None else ():
                values = seen.setdefault(key, [])
                if value not in values:
                    values.append(value)
    return {key: values[0] if len(values) == 1 else tuple(values) for key, values in seen.items()}


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settable keys below a dataclass value; a part that may be absent is a key too (it takes `none`)."""
    hints = get_type_hints(type(value))
    for field in fields(value):
        key, held = f"{prefix}.{field.name}", getattr(value, field.name)
        form = _form(hints[field.name])
        if form is not None:
            yield key, form.show(held)
            if form.opens and is_dataclass(held):
                yield from _leaves(key, held)
            continue
        if get_origin(hints[field.name]) is tuple:
            continue
        if is_dataclass(held):
            if type(None) in get_args(hints[field.name]):
                yield key, "present"
            yield from _leaves(key, held)
        else:
            yield key, held


def _conflicts(assignments: Iterable[Assignment]) -> Iterator[Fault]:
    """The same key asked for twice with different values."""
    first: dict[str, Assignment] = {}
    for item in assignments:
        before = first.setdefault(item.key, item)
        if before.text != item.text:
            rule = f"was also given as {before.text} by {before.origin}"
            yield Fault(code="setting.twice", setting=item.key, value=item.text, rule=rule, works="one of the two")


def _apply(run: RunConfig, item: Assignment) -> RunConfig:
    known = settings(run)
    if item.key not in known:
        raise ConfigError([_unknown(item, known)])
    section, *path = item.key.split(".")
    if item.key == NUM_LAYERS:
        return replace(run, model=_with_depth(run.model, _parse(int, item)))
    if section == "model" and path[0] in {part.name for part in PARTS}:
        return replace(run, model=_with_part(run.model, path, item))
    return replace(run, **{section: _assign(getattr(run, section), path, item)})


def _unknown(item: Assignment, known: dict[str, Any], sections: Sequence[str] = SECTIONS) -> Fault:
    """The fault of a key that is not there, with the closest ones and all keys of its section."""
    section = item.key.split(".")[0]
    close = difflib.get_close_matches(item.key, known, n=2, cutoff=0.7)
    close = close or [key for key in known if key.rsplit(".", 1)[-1] == item.key.rsplit(".", 1)[-1]][:2]
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    if section not in sections:
        near = difflib.get_close_matches(section, sections, n=1)
        hint = hint or (f" (did you mean {near[0]}.…?)" if near else "")
        rule, works = f"is in no section{hint}", ", ".join(f"{name}.…" for name in sections)
    else:
        rule = f"is not a setting of this run's {section}{hint}"
        works = ", ".join(key for key in known if key.startswith(f"{section}."))
    return Fault(code="setting.unknown", setting=item.key, value=item.text, rule=rule, works=works)


def _assign(value: Any, path: Sequence[str], item: Assignment) -> Any:
    """`value` with the setting at `path` replaced."""
    name, *rest = path
    if rest:
        return replace(value, **{name: _assign(getattr(value, name), rest, item)})
    return replace(value, **{name: _parse(get_type_hints(type(value))[name], item)})


def _has(value: Any, path: Sequence[str]) -> bool:
    """Whether the setting at `path` exists below `value`, none of its parts being absent."""
    for name in path:
        if not is_dataclass(value) or name not in {field.name for field in fields(value)}:
            return False
        value = getattr(value, name)
    return True


def _with_part(model: ModelConfig, path: Sequence[str], item: Assignment) -> ModelConfig:
    """The model with a setting replaced in every layer that has it."""
    part = next(part for part in PARTS if part.name == path[0])

    def rewritten(layer: Layer) -> Layer:
        held = part.read(layer)
        return part.write(layer, _assign(held, path[1:], item)) if _has(held, path[1:]) else layer

    return replace(model, layers=tuple(map(rewritten, model.layers)))


def _with_depth(model: ModelConfig, depth: int) -> ModelConfig:
    """The model with `depth` layers: the leading dense layers stay, the last kind of layer is repeated."""
    last = model.layers[-1]
    leading: list[Layer] = []
    for layer in model.layers:
        if not isinstance(layer.mlp, Dense) or isinstance(last.mlp, Dense):
            break
        leading.append(layer)
    if depth <= len(leading):
        rule = f"keeps the {len(leading)} leading dense layers and needs one more" if leading else "must be positive"
        raise ConfigError(
            [
                Fault(
                    code="setting.depth",
                    setting=NUM_LAYERS,
                    value=depth,
                    rule=rule,
                    works=f"{len(leading) + 1} or more",
                )
            ]
        )
    return replace(model, layers=(*leading, *(last,) * (depth - len(leading))))


def _parse(kind: Any, item: Assignment) -> Any:
    """The text as a value of the declared type. Raises ConfigError saying the type and an example."""
    form = _form(kind)
    if form is not None:
        try:
            return form.read(item.text)
        except TextError as error:
            raise _fault(item, str(error), form.example) from None
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if type(None) in members and item.text.lower() == "none":
        return None
    inner = next((member for member in members if member is not type(None)), kind)
    if is_dataclass(inner):
        raise _fault(item, "is a part of the model, not a value; it can only be left out", f"{item.key}=none")
    optional = ", or none" if type(None) in members else ""
    if get_origin(inner) is Literal:
        if item.text in get_args(inner):
            return item.text
        close = difflib.get_close_matches(item.text, get_args(inner), n=1)
        rule = "is not one of the choices" + (f" (did you mean {close[0]}?)" if close else "")
        raise _fault(item, rule, ", ".join(get_args(inner)) + optional)
    return _scalar(inner, item, optional)


def _form(kind: Any) -> Form | None:
    """How a value of this declared type is written, where it is no plain one."""
    members = get_args(kind)
    if get_origin(kind) is tuple and get_origin(members[0]) is Literal:
        known = get_args(members[0])
        return Form(kind=kind, show=_names_text, read=partial(_names, known), example=f"{known[0]},{known[1]}, or none")
    return next((form for form in FORMS if form.kind == kind), None)


def value_text(value: object) -> str:
    """A plain value as `--set` takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _names_text(names: tuple[str, ...]) -> str:
    return ",".join(names) or "none"


def _names(known: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Names out of `known`, in their order there, separated by commas; none for no name. Raises TextError."""
    given = [] if text.lower() == "none" else [name.strip() for name in text.split(",")]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise TextError(f"holds {name}, which is none of {', '.join(known)}{hint}")
    return tuple(name for name in known if name in given)


def _scalar(kind: type, item: Assignment, optional: str) -> Any:
    if kind is str and item.text:
        return item.text
    if kind is bool and item.text.lower() in ("true", "false"):
        return item.text.lower() == "true"
    try:
        if kind is int:
            return int(item.text)
        if kind is float and math.isfinite(float(item.text)):
            return float(item.text)
    except ValueError:
        pass
    name, example = {
        int: ("a whole number", "64"),
        float: ("a finite number", "0.001 or 1e-3"),
        bool: ("true or false", "true"),
        str: ("a text that is not empty", "name"),
    }[kind]
    raise _fault(item, f"must be {name}", f"for example {example}{optional}")


def _fault(item: Assignment, rule: str, works: str) -> ConfigError:
    return ConfigError([Fault(code="setting.value", setting=item.key, value=item.text, rule=rule, works=works)])
