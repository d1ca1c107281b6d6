"""Compile what the launchers of casts launch, for a GPU that is not here; see compile_casts.py, whose stand-in for a GPU this takes."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from core.kernels.casts import Cast
from tests.core.precision.compile_casts import TARGETS, Compiler

ROWS = Cast(kind="float32", element="e4m3", largest=448.0, block=(1, 128))
WEIGHT = Cast(kind="float32", element="e4m3", largest=448.0, block=(128, 128))
MX = Cast(kind="mx", element="e4m3", largest=448.0, block=(1, 32), exact=True)
NVFP4 = Cast(kind="nvfp4", element="e2m1", largest=2688.0, block=(1, 16))
TENSOR = Cast(kind="tensor", element="e5m2", largest=57344.0)


def main() -> None:
    """On bfloat16, for the one target that is named."""
    compiler = Compiler(TARGETS[sys.argv[1]])

    def launch(kernel: Any, *args: Any, **named: Any) -> None:
        compiler.launch(kernel, *args, **named)

    JITFunction.run = launch
    from core.kernels.triton import amax, quantise

    x, noise = torch.zeros(1, 256, 256, dtype=torch.bfloat16), torch.zeros(1, 256, 256, dtype=torch.float64)
    counts_E = torch.tensor([128, 0, 128])
    one, experts = amax.of_matrices(x, TENSOR, torch.ones(1)), amax.of_experts(x[0], counts_E, NVFP4, torch.ones(3))
    for how in (ROWS, WEIGHT, MX):
        quantise.cast(x, how, None, rows=True, turned=how is not ROWS, noise=None)
    quantise.cast(x, TENSOR, one, rows=True, turned=True, noise=None)
    quantise.cast(x, NVFP4, experts, rows=True, turned=False, noise=None)
    quantise.cast(x, NVFP4, experts, rows=False, turned=True, noise=None, turned_noise=noise.mT)
    print(json.dumps(compiler.found))


if __name__ == "__main__":
    main()
