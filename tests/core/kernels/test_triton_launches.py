"""What the launchers of routing and cross-entropy launch compiles for a GPU, on a machine without one.

Triton's interpreter accepts what its compiler refuses; here every launch goes to the compiler instead of a device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.7")

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.uint8: "u8"}
compiled = set()


def launch(kernel, *args, grid, warmup, num_warps, **constants):
    known, types = dict(zip(kernel.arg_names, args, strict=False)) | constants, {}
    for name, value in known.items():
        if isinstance(value, torch.Tensor):
            types[name] = "*" + NAMES[value.dtype]
        else:
            types[name] = "constexpr" if name in constants else "fp32" if isinstance(value, float) else "i32"
    fixed = {(place,): known[name] for place, name in enumerate(kernel.arg_names) if name in constants}
    source = ASTSource(fn=kernel, signature={name: types[name] for name in kernel.arg_names}, constexprs=fixed)
    assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["cubin"]
    compiled.add(kernel.__name__)


JITFunction.run = launch

from core.config.architecture import Groups, Router
from core.kernels.triton import cross_entropy, routing

tokens, valid = 8, torch.ones(8, dtype=torch.bool)
for score, experts, top_k, groups in (
    ("softmax", 128, 8, None), ("sigmoid", 256, 8, Groups(total=8, kept=4)), ("sqrt_softplus", 300, 32, None),
    ("softmax_after_top_k", 12, 3, Groups(total=3, kept=2)),
):
    router, logits = Router(score=score, normalise=True, groups=groups), torch.zeros(tokens, experts)
    ids, weights, kept = routing.route_forward(logits, router, top_k, torch.zeros(experts), valid)
    routing.route_backward(weights, ids, kept, router, experts)
    scores, _, total = routing.balance_forward(logits, score, top_k, valid)
    routing.balance_backward(scores, scores, total, score)
for piece in (None, torch.zeros(tokens, dtype=torch.int64)):
    routing.auxiliary_forward(scores, scores[:3], torch.zeros(3), piece)
    routing.auxiliary_backward(torch.zeros(()), scores[:3], torch.zeros(3), piece, tokens)
for dtype in (torch.bfloat16, torch.float32):
    logits, label = torch.zeros(tokens, 151_936, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
    cross_entropy.loss_and_gradient_(logits, label, valid, gradient=True)
    largest, sums, _ = cross_entropy.row_sums(logits, label)
    cross_entropy.gradient_(logits, label, valid, largest, sums)
print(*sorted(compiled))
"""


def test_every_launch_of_routing_and_cross_entropy_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = tmp_path / "compile_launches.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = "auxiliary_backward auxiliary_forward balance_backward balance_forward gradient route_backward route_forward row"
    assert done.stdout.split() == [f"_{name}" for name in kernels.split()]
