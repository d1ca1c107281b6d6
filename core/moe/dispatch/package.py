"""The package deep_ep, which moves tokens on its own: imported when it is first used, and held against the calls that are made of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import attrgetter
from types import ModuleType
from typing import Any

from core.errors import RequestError

# The parameters with which each of a package's functions is called, by its name inside the package.
Calls = Mapping[str, tuple[str, ...]]


def load_deep_ep(calls: Calls, *, dispatcher: str, install: str) -> ModuleType:
    """The package, which is imported now.

    Raises RequestError where it is not installed, saying what to install for parallel.dispatcher=`dispatcher`, and where one of the
    calls does not exist or lacks a parameter, naming it.
    """
    try:
        import deep_ep
    except ImportError as error:
        raise RequestError(
            f"parallel.dispatcher={dispatcher} needs the package deep_ep, which cannot be imported here ({error}). Install {install}, "
            "or use parallel.dispatcher=flex, which sends tokens the same way on any hardware."
        ) from error
    for path, wanted in calls.items():
        _check_call(deep_ep, path, wanted, f"the installed deep_ep does not fit parallel.dispatcher={dispatcher}")
    return deep_ep


def _check_call(package: ModuleType, path: str, wanted: tuple[str, ...], what: str) -> None:
    try:
        call: Any = attrgetter(path)(package)
    except AttributeError:
        raise RequestError(f"{what}: it has no {path}.") from None
    known = inspect.signature(call).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known):
        return
    names = [parameter.name for parameter in known]
    for name in wanted:
        if name not in names:
            raise RequestError(f"{what}: its {path} has no parameter {name}, but {', '.join(names)}.")
