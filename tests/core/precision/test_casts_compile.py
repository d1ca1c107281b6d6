"""The kernels of fused casts compile for a GPU that is not here, to the very operations that their bits rest on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.core.precision.compiled import compiled


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_fused_casts_compile_without_roundings_of_their_own(tmp_path: Path) -> None:
    """No sum is fused with a product, no division is approximate but the sigmoid's, of which the activation alone has as many."""
    found = compiled("compile_casts", tmp_path)
    (alone,) = (kernel for kernel in found if kernel["kernel"] == "swiglu_forward")
    assert len(found) == 14 and alone["approximate_divisions"]
    for kernel in found:
        assert kernel["wide_loads"] and not kernel["single_loads"], f"{kernel['kernel']} loads number by number"
        assert not kernel["fused"], kernel["kernel"]
        expected = alone["approximate_divisions"] if kernel["kernel"].startswith("swiglu") else 0
        assert kernel["approximate_divisions"] == expected, kernel["kernel"]
