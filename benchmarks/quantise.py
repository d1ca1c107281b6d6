"""Rounding a matrix to every format and back on the CPU, ours and torchao's in turn: medians, and how many times as fast ours is.

    python -m benchmarks.quantise [--rows 8192] [--columns 7168] [--dtype bfloat16] [--rounds 5] [--threads 2]

torchao is no dependency: `pip install --no-deps torchao` in an environment of its own. Without it its column says so.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from core.precision.formats import FP8_ROWS, FP8_TENSOR, FP8_WEIGHT, MXFP8, NVFP4_ROWS, Format, quantise

There = Callable[[Tensor], Tensor]
FORMATS: dict[str, Format] = {
    "per tensor": FP8_TENSOR,
    "1 x 128": FP8_ROWS,
    "128 x 128": FP8_WEIGHT,
    "MXFP8": MXFP8,
    "NVFP4": NVFP4_ROWS,
}


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=7168)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    x = torch.randn(given.rows, given.columns, generator=torch.Generator().manual_seed(0))
    print(*lines(x.to(getattr(torch, given.dtype)), given.rounds), sep="\n")


def lines(x: Tensor, rounds: int) -> list[str]:
    """The table of quantise-dequantise of x, which has rows and columns that 128 divides."""
    peers, why = torchao_casts()
    title = (
        f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads, medians of {rounds}"
    )
    table = [
        title,
        *([] if why is None else [f"torchao: {why}"]),
        "format\tours ms\ttorchao ms\tratio\tlargest difference",
    ]
    for name, format in FORMATS.items():
        mine: list[float] = []
        theirs: list[float] = []
        differs = ""
        for _ in range(rounds):
            ours = timed(lambda x, format=format: quantise(x, format).dequantise(x.dtype), x, mine)  # type: ignore[misc]
            if name in peers:
                other = timed(peers[name], x, theirs)
                differs = f"{float((ours.float() - other.float()).abs().max()):.2g}"
        middle = statistics.median(mine)
        cells = [name, f"{middle * 1e3:.1f}", "-", "-"]
        if theirs:
            cells[2:] = [f"{statistics.median(theirs) * 1e3:.1f}", f"{statistics.median(theirs) / middle:.2f}x"]
        table.append("\t".join([*cells, differs]))
    return table


def timed(action: There, x: Tensor, seconds: list[float]) -> Tensor:
    """What an action makes of x; its seconds are appended."""
    start = time.perf_counter()
    made = action(x)
    seconds.append(time.perf_counter() - start)
    return made


def torchao_casts() -> tuple[dict[str, There], str | None]:
    """torchao's round trip for each format, and why there is none."""
    if find_spec("torchao") is None:
        return {}, "not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = importlib.import_module("torchao.float8.float8_training_tensor")
        scale = importlib.import_module("torchao.float8.float8_utils").tensor_to_scale
        scaling = importlib.import_module("torchao.float8.config").ScalingGranularity.TENSORWISE
        block = importlib.import_module("torchao.quantization.granularity").PerBlock
        float8 = importlib.import_module("torchao.quantization").Float8Tensor
        mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor").MXTensor
        rceil = importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
        nvfp4 = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    e4m3 = torch.float8_e4m3fn

    def per_tensor(x: Tensor) -> Tensor:
        made = training.hp_tensor_and_scale_to_float8(x, scale(x, e4m3, scaling_granularity=scaling), e4m3)
        back: Tensor = made.to_original_precision()
        return back

    def blocks(*sizes: int) -> There:
        return lambda x: float8.from_hp(x, float8_dtype=e4m3, granularity=block(sizes)).dequantize(x.dtype)

    def two_levels(x: Tensor) -> Tensor:
        of_tensor = x.abs().max().float() / (448.0 * 6.0)
        back: Tensor = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=of_tensor).dequantize(x.dtype)
        return back

    return {
        "per tensor": per_tensor,
        "1 x 128": blocks(1, 128),
        "128 x 128": blocks(128, 128),
        "MXFP8": lambda x: mx.to_mx(x, e4m3, 32, rceil).dequantize(x.dtype),
        "NVFP4": two_levels,
    }, None


if __name__ == "__main__":
    main()
