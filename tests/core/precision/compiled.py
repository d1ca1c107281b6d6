"""What a program of tests/core/precision makes of kernels that it compiles for a GPU that is not here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import run
from typing import Any

ROOT = Path(__file__).parents[3]


def compiled(program: str, cache: Path) -> list[dict[str, Any]]:
    """The findings of `program` for Hopper, kernel by kernel, in a process of its own in which Triton does not interpret."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", f"tests.core.precision.{program}", "hopper"]
    done = run(command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
