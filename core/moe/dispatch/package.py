"""Packages that move tokens on their own, found when they are first used and held against the calls that are made of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from core.errors import RequestError

# The parameters with which each of a package's functions is called, by its name inside the package.
Calls = Mapping[str, tuple[str, ...]]


def load_package(name: str, calls: Calls, *, dispatcher: str, install: str) -> ModuleType:
    """The package, which is imported now.

    Raises RequestError where it is not installed, saying what to install for parallel.dispatcher=`dispatcher`, and where one of the
    calls does not exist or lacks a parameter, naming it.
    """
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        raise RequestError(
            f"parallel.dispatcher={dispatcher} needs the package {name}, which cannot be imported here ({error}). Install {install}, "
            "or use parallel.dispatcher=flex, which sends tokens the same way on any hardware."
        ) from error
    for path, wanted in calls.items():
        _check_call(package, path, wanted, f"the installed {name} does not fit parallel.dispatcher={dispatcher}")
    return package


def _check_call(package: ModuleType, path: str, wanted: tuple[str, ...], what: str) -> None:
    call: Any = package
    for part in path.split("."):
        if not hasattr(call, part):
            raise RequestError(f"{what}: it has no {path}.")
        call = getattr(call, part)
    known = inspect.signature(call).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known):
        return
    names = [parameter.name for parameter in known]
    for name in wanted:
        if name not in names:
            raise RequestError(f"{what}: its {path} has no parameter {name}, but {', '.join(names)}.")
