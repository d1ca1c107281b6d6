"""The kernels of fused casts compile for a GPU that is not here, to the very operations that their bits rest on."""

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
def test_fused_casts_compile_without_roundings_of_their_own(tmp_path: Path) -> None:
    """No sum is fused with a product, no division is approximate but the sigmoid's, of which the activation alone has as many."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.core.precision.compile_casts", "hopper"]
    done = run(command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    (alone,) = (kernel for kernel in found if kernel["kernel"] == "swiglu_forward")
    assert len(found) == 14 and alone["approximate_divisions"]
    for kernel in found:
        assert kernel["wide_loads"] and not kernel["single_loads"], f"{kernel['kernel']} loads number by number"
        assert not kernel["fused"], kernel["kernel"]
        expected = alone["approximate_divisions"] if kernel["kernel"].startswith("swiglu") else 0
        assert kernel["approximate_divisions"] == expected, kernel["kernel"]
