"""The Triton kernels of rows compile for a GPU on a machine without one; Triton's interpreter accepts what its compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.7")

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from core.kernels.triton import permute, swiglu

TILE = {"HIGH": 2, "WIDE": 1024}
# Types of the pointers; the other arguments are 32-bit numbers, but for those in capitals, which are known when compiling.
KERNELS = [
    (permute._rank, {"experts": "i64", "rank": "i32", "before": "i32"}, {"BLOCK": 128}),
    (permute._scan, {"before": "i32", "routed": "i32"}, {"BLOCK": 1024}),
    (permute._starts, {"routed": "i32", "counts": "i64", "starts": "i64"}, {"FIXED": True, "BLOCK": 256}),
    (permute._starts, {"routed": "i32", "counts": "i64", "starts": "i64"}, {"FIXED": False, "BLOCK": 256}),
    (permute._place, {**dict.fromkeys(["experts", "counts", "starts", "row", "order"], "i64"), "rank": "i32",
        "before": "i32"}, {"BLOCK": 128}),
    (permute._scatter, {"x": "bf16", "row": "i64", "order": "i64", "weight": "fp32", "out": "bf16", "out_weight": "fp32"},
        {"K": 2, "PADDED": True, "WEIGHTED": True, **TILE}),
    (permute._scatter, {"x": "fp32", "row": "i64", "out": "fp32"}, {"K": 1, "PADDED": False, "WEIGHTED": False, **TILE}),
    (permute._sum, {"rows": "bf16", "row": "i64", "weight": "fp32", "of_row": "fp32", "out": "bf16", "of_choice": "fp32"},
        {"K": 2, "WEIGHTED": True, "BRING": True, "SUM": tl.float32, **TILE}),
    (permute._sum, {"rows": "fp64", "row": "i64", "out": "fp64"},
        {"K": 1, "WEIGHTED": False, "BRING": False, "SUM": tl.float64, **TILE}),
    (permute._weighted_backward, {"grad": "bf16", "rows": "bf16", "row": "i64", "order": "i64", "weight": "fp32",
        "of_rows": "bf16", "of_weight": "fp32"}, {"K": 2, "PADDED": True, "SUM": tl.float32, **TILE}),
    (swiglu._forward, {"gate": "bf16", "up": "bf16", "weight": "fp32", "out": "bf16"},
        {"WEIGHTED": True, "SUM": tl.float32, **TILE}),
    (swiglu._backward, {**dict.fromkeys(["grad", "gate", "up", "out_gate", "out_up", "act"], "bf16"), "weight": "fp32",
        "of_weight": "fp32"}, {"WEIGHTED": True, "ACTIVATION": True, "SUM": tl.float32, **TILE}),
    (swiglu._backward, dict.fromkeys(["grad", "gate", "up", "out_gate", "out_up"], "fp64"),
        {"WEIGHTED": False, "ACTIVATION": False, "SUM": tl.float64, **TILE}),
]
for kernel, pointers, known in KERNELS:
    signature, constants = {}, {}
    for place, name in enumerate(kernel.arg_names):
        pointer = name.removesuffix("_ptr")
        if name.endswith("_ptr") and pointer in pointers:
            signature[name] = "*" + pointers[pointer]
        elif name.endswith("_ptr") or name in known:
            signature[name], constants[place,] = "constexpr", known.get(name)
        else:
            signature[name] = "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
print(len(KERNELS), "compiled")
"""


def test_the_kernels_of_rows_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = tmp_path / "compile_kernels.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "13 compiled\n"
