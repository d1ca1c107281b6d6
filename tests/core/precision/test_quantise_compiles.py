"""The kernels of casts compile for a GPU that is not here, to the very operations that their bits rest on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.core.precision.compiled import compiled


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_casts_compile_without_roundings_of_their_own(tmp_path: Path) -> None:
    """Numbers come in whole vectors; no sum is fused with a product, and no division is approximate."""
    found = compiled("compile_quantise", tmp_path)
    names = [kernel["kernel"] for kernel in found]
    assert names == [*["amax_largest", "amax_scales"] * 2, *["quantise_cast"] * 6]
    for kernel in found:
        assert not kernel["fused"] and not kernel["approximate_divisions"], kernel["kernel"]
        if kernel["kernel"] != "amax_scales":
            assert kernel["wide_loads"] and not kernel["single_loads"], f"{kernel['kernel']} loads number by number"
