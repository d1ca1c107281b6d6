"""Calling a cluster's own commands, and how they are missed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from core.errors import RequestError

ANSWER_SECONDS = 120


def need(tool: str, backend: str, otherwise: str) -> None:
    """Raises RequestError where the command is not on this machine's path."""
    if shutil.which(tool) is None:
        raise RequestError(
            f"--backend {backend}: needs `{tool}`, which is not on this machine. {otherwise}, or take --backend print for "
            "the script alone."
        )


def answer(command: Sequence[str]) -> str:
    """What the command prints. Raises RequestError with its own words where it fails, is not there, or does not answer."""
    shown = " ".join(command[:2])
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
    except FileNotFoundError as error:
        raise RequestError(f"`{command[0]}` is not on this machine.") from error
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"`{shown}` has not answered for {ANSWER_SECONDS} seconds.") from error
    if made.returncode:
        said = made.stderr.strip() or made.stdout.strip() or f"exit code {made.returncode}"
        raise RequestError(f"`{shown}` failed: {said}")
    return made.stdout
