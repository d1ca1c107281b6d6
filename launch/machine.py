"""What can be asked of a machine without importing anything heavy: its tools, files, limits and installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

PATIENCE_SECONDS = 10
IMPORT_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed package: its version ("" where it does not say) and its folder."""

    version: str
    folder: str


class Probe(Protocol):
    """A machine, or what was recorded of one."""

    def run(self, *command: str) -> str | None:
        """What a tool writes, also where it ends in an error; None where it is not installed or does not answer in time."""
        ...

    def read(self, path: str) -> str | None:
        """The text of a file; None where it cannot be read."""
        ...

    def names(self, path: str) -> tuple[str, ...]:
        """The names in a folder, sorted; none where there is no folder."""
        ...

    def package(self, module: str, distribution: str = "") -> Package | None:
        """What would be imported as `module`, which is not. distribution: what it is installed as, where that is another name."""
        ...

    def imports(self, module: str) -> str | None:
        """Why importing `module` in a process of its own fails; None where it works."""
        ...

    def room(self, path: str) -> int | None:
        """The free bytes where `path` is or would be made; None where nothing can be written."""
        ...

    def size(self, path: str) -> int | None:
        """The bytes of the whole file system at `path`; None where there is none."""
        ...

    def limit(self, name: Literal["files", "locked"]) -> int | None:
        """How many files, or how many locked bytes, a process may have; None for no limit."""
        ...

    def cores(self) -> int:
        """The cores that this process may use."""
        ...

    def python(self) -> tuple[int, int]:
        """The version of Python."""
        ...

    def host(self) -> tuple[str, str | None]:
        """The machine's own name, and the address that it resolves to; None where it does not."""
        ...


class Machine:
    """The machine at hand."""

    def run(self, *command: str) -> str | None:
        if shutil.which(command[0]) is None:
            return None
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ended.stdout + ended.stderr

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(path)))
        except OSError:
            return ()

    def package(self, module: str, distribution: str = "") -> Package | None:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        try:
            version = importlib.metadata.version(distribution or module)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        folders = list(spec.submodule_search_locations or ())
        return Package(version=version, folder=folders[0] if folders else str(Path(spec.origin or "").parent))

    def imports(self, module: str) -> str | None:
        command = [sys.executable, "-c", f"import {module}"]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"it takes more than {IMPORT_SECONDS} s"
        lines = ended.stderr.strip().splitlines()
        return None if ended.returncode == 0 else lines[-1] if lines else f"it ends with code {ended.returncode}"

    def room(self, path: str) -> int | None:
        place = _existing(path)
        return shutil.disk_usage(place).free if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else None

    def size(self, path: str) -> int | None:
        return shutil.disk_usage(path).total if Path(path).is_dir() else None

    def limit(self, name: Literal["files", "locked"]) -> int | None:
        kinds = {"files": resource.RLIMIT_NOFILE, "locked": resource.RLIMIT_MEMLOCK}
        soft, _ = resource.getrlimit(kinds[name])
        return None if soft == resource.RLIM_INFINITY else soft

    def cores(self) -> int:
        # not everywhere can a process ask on which cores it may run
        return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

    def python(self) -> tuple[int, int]:
        return sys.version_info[:2]

    def host(self) -> tuple[str, str | None]:
        name = socket.gethostname()
        try:
            return name, socket.gethostbyname(name)
        except OSError:
            return name, None


def _existing(path: str) -> Path:
    """The path, or the nearest folder above it that is there."""
    place = Path(path).expanduser().absolute()
    return next(folder for folder in (place, *place.parents) if folder.exists())
