"""Compile what the launchers of fused casts launch, for a GPU that is not here; what the assembly holds goes to standard output as JSON.

A program of its own: where tests run Triton interprets, and functions that it interprets are not compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from core.kernels.casts import Cast

TARGETS = {"hopper": 90, "blackwell": 100}
NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}
ALONG: tuple[Literal[0, 1], ...] = (0, 1)
CASTS = (
    Cast(kind="tensor", element="e4m3", largest=448.0),
    Cast(kind="float32", element="e4m3", largest=448.0, block=(1, 128), exact=True),
    Cast(kind="mx", element="e4m3", largest=448.0, block=(1, 32), exact=True),
    Cast(kind="nvfp4", element="e2m1", largest=448.0, block=(1, 16)),
)


class Compiler:
    """Stands for a GPU: a launch is compiled, its strides of one and multiples of 16 known as they are then."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.found: list[dict[str, Any]] = []

    def launch(
        self,
        kernel: Any,
        *args: Any,
        grid: Any,
        warmup: bool,
        enable_fp_fusion: bool = True,
        num_warps: int = 4,
        **constants: Any,
    ) -> None:
        """As JITFunction.run."""
        known = dict(zip(kernel.arg_names, args, strict=False)) | constants
        types, fixed, attrs = {}, {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = known[name]
            if name in constants or value is None or (isinstance(value, int) and value == 1):
                fixed[(place,)], types[name] = value, "constexpr"
            elif isinstance(value, torch.Tensor):
                types[name], attrs[(place,)] = "*" + NAMES[value.dtype], [["tt.divisibility", 16]]
            else:
                types[name] = "i32"
                if value % 16 == 0:
                    attrs[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=attrs)
        text = compile(
            source, target=self.target, options={"enable_fp_fusion": enable_fp_fusion, "num_warps": num_warps}
        ).asm["ptx"]
        self.found.append(
            {
                "kernel": f"{kernel.__module__.rsplit('.', 1)[1]}{kernel.__name__}",
                "wide_loads": text.count("ld.global.v4") + text.count("ld.global.v2"),
                "single_loads": text.count("ld.global.b16"),
                "approximate_divisions": text.count("div.full.f32") + text.count("div.approx"),
                "fused": text.count("fma.rn"),
            }
        )


def main() -> None:
    """Every launcher, on bfloat16, for the one target that is named."""
    compiler = Compiler(TARGETS[sys.argv[1]])

    def launch(kernel: Any, *args: Any, **named: Any) -> None:
        compiler.launch(kernel, *args, **named)

    JITFunction.run = launch
    from core.kernels.triton import hadamard, swiglu, swiglu_quantise

    signs, x, amax_R = torch.ones(16), torch.zeros(1024, 1024, dtype=torch.bfloat16), torch.zeros(1024)
    noise = torch.zeros(1024, 1024, dtype=torch.float64)
    for along in ALONG:
        hadamard.largest_of_lines(x, signs, along=along)
        hadamard.rotate_lines(x, signs, along=along)
        hadamard.quantise_lines(x, signs, amax_R[:1], along=along)
        hadamard.quantise_lines(
            x, signs, amax_R[:64] if along == 0 else amax_R, along=along, noise=noise.T if along == 0 else noise
        )
    gate, up = x.chunk(2, dim=1)
    swiglu.forward(gate, up, amax_R)
    swiglu_quantise.largest_of_rows(gate, up, amax_R)
    for how in CASTS:
        swiglu_quantise.quantise_rows(gate, up, amax_R, how, amax_R)
    print(json.dumps(compiler.found))


if __name__ == "__main__":
    main()
