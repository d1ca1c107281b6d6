"""Compile the kernels of grouped products for GPUs that are not here; what their assembly holds goes to standard output as JSON.

A program of its own: where tests run Triton interprets, and functions that it interprets are not compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from core.kernels.triton import grouped_matmul

TARGETS = {"hopper": 90, "blackwell": 100}
CONSTANTS = ("PIECES", "EXACT", "HIGH", "WIDE", "DEEP")


def compiled(kernel: Any, dtype: str, steps_of_one: tuple[str, ...], tile: tuple[int, ...], capability: int) -> Any:
    """A kernel for operands of `dtype` in aligned memory; steps_of_one: the strides that are 1."""
    high, wide, deep, warps, stages = tile
    constants: dict[str, Any] = dict.fromkeys(steps_of_one, 1) | {
        "EXACT": True,
        "HIGH": high,
        "WIDE": wide,
        "DEEP": deep,
    }
    if "PIECES" in kernel.arg_names:
        constants["PIECES"] = 16
    signature = {name: "i32" for name in kernel.arg_names}
    signature |= {name: f"*{dtype}" for name in kernel.arg_names if name.endswith("_ptr")} | {"ends_ptr": "*i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [i for i, n in enumerate(kernel.arg_names) if n not in (*constants, "rows", "experts")]
    source = ASTSource(
        kernel, signature=signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    """All kernels for the one target that is named."""
    capability = TARGETS[sys.argv[1]]
    product, of_weight = grouped_matmul._product, grouped_matmul._weight_gradient
    largest, square, float32 = grouped_matmul._TILES[0], grouped_matmul._TILES[2], grouped_matmul._TILES_OF_FLOAT32[0]
    cases = {
        "forward": (product, "bf16", ("x_column", "matrix_row"), largest),
        "of_rows": (product, "bf16", ("x_column", "matrix_column"), square),
        "of_weight": (of_weight, "bf16", ("grad_column", "x_column"), square),
        "float32": (product, "fp32", ("x_column", "matrix_row"), float32),
    }
    found = {}
    for name, case in cases.items():
        kernel = compiled(*case, capability)
        assembly = kernel.asm["ptx"]
        found[name] = {
            "tensor_cores": assembly.count("wgmma.mma_async") + assembly.count("tcgen05.mma"),
            "copies": assembly.count("cp.async.cg"),
            "single_loads": assembly.count("ld.global.b16"),
            "shared_bytes": kernel.metadata.shared,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
