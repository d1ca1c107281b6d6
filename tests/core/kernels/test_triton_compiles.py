"""The kernels of grouped products compile for GPUs that are not here, as kernels that keep tensor cores fed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from subprocess import run

import pytest

ROOT = Path(__file__).parents[3]
# What a multiprocessor of either has for one block, in bytes.
SHARED_BYTES = 227 * 1024


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("target", ["hopper", "blackwell"])
def test_grouped_products_compile_to_tensor_cores_and_whole_vectors(target: str, tmp_path: Path) -> None:
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.core.kernels.compile_grouped_matmul", target]
    done = run(command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"forward", "of_rows", "of_weight", "float32"}
    for name, kernel in found.items():
        # float32 is multiplied as it is, for which there are no tensor cores
        assert bool(kernel["tensor_cores"]) == (name != "float32"), name
        assert kernel["copies"] and not kernel["single_loads"], f"{name} loads number by number"
        assert kernel["shared_bytes"] <= SHARED_BYTES, name
