"""Rounding matrices and rows of experts on a GPU, beside a copy of as many bytes: part of `python -m benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from core.precision.backends.rules import name_of
from core.precision.formats import (
    FP8_ROWS,
    FP8_TENSOR,
    FP8_WEIGHT,
    MXFP8,
    NVFP4,
    NVFP4_ROWS,
    NVFP4_WEIGHT,
    Format,
    PerTensor,
    Quantised,
    block_amax_of,
    block_of,
    quantise,
    quantise_both,
    quantise_with,
    scales_for,
)
from core.precision.grouped import Grouped, quantise_grouped, quantise_grouped_columns

Seconds = Callable[[Callable[[], Any]], float]
FORMATS: tuple[Format, ...] = (FP8_TENSOR, FP8_ROWS, FP8_WEIGHT, MXFP8, NVFP4_ROWS, NVFP4_WEIGHT)
OF_ROWS: tuple[Format, ...] = (FP8_TENSOR, FP8_ROWS, MXFP8, NVFP4_ROWS)
# Rows and columns of a batch of DeepSeek-V3 on one GPU.
MATRIX = (8192, 7168)


def lines(rows: int, columns: int, seconds: Seconds, copy: float, device: torch.device) -> Iterator[str]:
    """A table: every format of a matrix in bfloat16, one copy and both, and both under noise where recipes draw some.

    Bytes are what must be read and written once; scales of whole tensors take a second read, which is not counted and so shows as a
    smaller share. `bits` says whether the codes are those that torch makes on the same device.
    """
    x = _normal(rows, columns, device)
    yield f"\nrounding {rows} x {columns} of bfloat16"
    yield "format\tcopies\tms\tGB/s\tshare\tbits"
    for format in FORMATS:
        given = x.abs().amax().float().view(1, 1) if isinstance(format, PerTensor | NVFP4) else None
        truth = _reference(x, format)
        one = quantise(x, format)
        said = "equal" if torch.equal(one.codes, truth.codes) else "DIFFERENT"
        moved = x.nbytes + one.num_bytes
        yield _line(name_of(format), "one", seconds(lambda f=format: quantise(x, f)), moved, copy, said)
        if given is not None:
            taken = seconds(lambda f=format, amax=given: quantise(x, f, amax=amax))
            yield _line(name_of(format), "one, amax given", taken, moved, copy, said)
        taken = seconds(lambda f=format: quantise_both(x, f))
        yield _line(name_of(format), "both", taken, moved + one.num_bytes, copy, said)
    noise = torch.rand(x.shape, dtype=torch.float64, device=device)
    taken = seconds(lambda: quantise(x, NVFP4_ROWS, noise=noise))
    moved = x.nbytes + noise.nbytes + quantise(x, NVFP4_ROWS).num_bytes
    yield _line(name_of(NVFP4_ROWS), "one, stochastic", taken, moved, copy, "")


def grouped_lines(hidden: int, counts_E: Tensor, seconds: Seconds, copy: float) -> Iterator[str]:
    """A table: every format of rows of experts in bfloat16, row-wise and transposed."""
    rows = int(counts_E.sum())
    x = _normal(rows, hidden, counts_E.device)
    yield f"\nrounding {rows} x {hidden} of bfloat16, rows of {len(counts_E)} experts"
    yield "format\tcopy\tms\tGB/s\tshare"
    for format in OF_ROWS:
        for label, action in (("rows", quantise_grouped), ("transposed", quantise_grouped_columns)):
            made: Grouped = action(x, counts_E, format)
            taken = seconds(lambda a=action, f=format: a(x, counts_E, f))
            yield _line(name_of(format), label, taken, x.nbytes + made.num_bytes, copy, "")


def _line(name: str, label: str, taken: float, moved: int, copy: float, said: str) -> str:
    rate = moved / taken
    return f"{name}\t{label}\t{taken * 1e3:.3f}\t{rate / 1e9:,.0f}\t{rate / copy:.0%}\t{said}".rstrip()


def _reference(x: Tensor, format: Format) -> Quantised:
    """What torch's operations make of x, whatever kernels there are."""
    amax = block_amax_of(x, block_of(format, x.shape))
    return quantise_with(x, scales_for(format, amax, amax.amax((-2, -1), keepdim=True)), format)


def _normal(rows: int, columns: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator, device=device).to(torch.bfloat16)
