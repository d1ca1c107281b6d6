"""The kernels of casts compile for a GPU that is not here, to the very operations that their bits rest on."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from subprocess import run

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_casts_compile_without_roundings_of_their_own(tmp_path: Path) -> None:
    """Numbers come in whole vectors; no sum is fused with a product, and no division is approximate."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.core.precision.compile_quantise", "hopper"]
    done = run(command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    names = [kernel["kernel"] for kernel in found]
    assert names == [*["amax_largest", "amax_scales"] * 2, *["quantise_cast"] * 6]
    for kernel in found:
        assert not kernel["fused"] and not kernel["approximate_divisions"], kernel["kernel"]
        if kernel["kernel"] != "amax_scales":
            assert kernel["wide_loads"] and not kernel["single_loads"], f"{kernel['kernel']} loads number by number"
