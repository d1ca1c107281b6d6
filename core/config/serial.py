"""A configuration as JSON and back: the same value again, with every union named (`kind`) and every fault named by its path."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from core.config.run import RunConfig
from core.errors import RequestError

Json = Any
_KIND = "kind"


def to_json(value: Any) -> Json:
    """Dicts, lists, strings, numbers, booleans and None that `from_json` turns back into `value`.

    Every dataclass becomes an object of its fields plus `kind`, its class name, so that unions need no guessing.
    """
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
        return {_KIND: type(value).__name__, **named}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a configuration holds no {type(value).__name__}: {value!r}")


def from_json(kind: Any, data: Json, path: str = "run") -> Any:
    """The value of type `kind` that `data` stands for; fields that are missing take their declared default.

    Raises RequestError with the path of the first entry that is unknown, missing, or of another type.
    """
    if kind in (int, float, str, bool, type(None)):
        return _scalar(kind, data, path)
    origin = get_origin(kind)
    if origin is Literal:
        if data in get_args(kind) and isinstance(data, str):
            return data
        raise _wrong(path, data, "one of " + ", ".join(map(str, get_args(kind))))
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), data, path)
    if origin is tuple:
        if not isinstance(data, list):
            raise _wrong(path, data, "a list")
        return tuple(from_json(get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    return _dataclass(kind, data, path)


def run_to_json(run: RunConfig) -> Json:
    """`run` as plain JSON values."""
    return to_json(run)


def run_from_json(data: Json) -> RunConfig:
    """The run that `run_to_json` wrote. Raises RequestError where the data is not one."""
    return from_json(RunConfig, data)


def _scalar(kind: type, data: Json, path: str) -> Any:
    """A plain value; an integer is also a float, and a boolean is never a number."""
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(data, kind) and (kind is bool or not isinstance(data, bool)):
        return data
    raise _wrong(path, data, "null" if kind is type(None) else kind.__name__)


def _union(members: tuple[Any, ...], data: Json, path: str) -> Any:
    """The one member that `data` is: by its `kind` where it is an object, by its JSON type otherwise."""
    if data is None and type(None) in members:
        return None
    if isinstance(data, dict):
        for member in members:
            if is_dataclass(member) and member.__name__ == data.get(_KIND):  # type: ignore[union-attr]
                return _dataclass(member, data, path)
    else:
        plain = [member for member in members if member is not type(None) and not is_dataclass(member)]
        if len(plain) == 1:
            return from_json(plain[0], data, path)
    names = ["null" if member is type(None) else member.__name__ for member in members]
    raise _wrong(path, data, "one of " + ", ".join(names))


def _dataclass(kind: Any, data: Json, path: str) -> Any:
    if not isinstance(data, dict) or data.get(_KIND, kind.__name__) != kind.__name__:
        raise _wrong(path, data, kind.__name__)
    hints = get_type_hints(kind)
    declared = {field.name: field for field in fields(kind)}
    for name in data:
        if name != _KIND and name not in declared:
            raise RequestError(f"{path}.{name}: {kind.__name__} has no such entry. Works: {', '.join(declared)}.")
    for name, field in declared.items():
        if name not in data and field.default is MISSING:
            raise RequestError(f"{path}.{name}: is missing; {kind.__name__} needs it.")
    return kind(**{name: from_json(hints[name], data[name], f"{path}.{name}") for name in declared if name in data})


def _wrong(path: str, data: Json, expected: str) -> RequestError:
    shown = f"kind {data[_KIND]!r}" if isinstance(data, dict) and _KIND in data else repr(data)
    return RequestError(f"{path}: expected {expected}, found {shown[:80]}.")
