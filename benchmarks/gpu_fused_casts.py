"""Operands that one pass rotates, activates and rounds, beside the same steps one by one: part of `python -m benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.config.architecture import SWIGLU
from core.kernels.activation import rounded_forward
from core.precision.activation import swiglu_amax, swiglu_quantised
from core.precision.formats import FP8_ROWS, FP8_TENSOR, MXFP8, NVFP4_ROWS, Format, PerTensor
from core.precision.grouped import Grouped, quantise_grouped, quantise_grouped_columns
from core.precision.hadamard import hadamard, hadamard_signs
from core.precision.rotated import quantise_rotated_columns, rotated_amax

Seconds = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One pass and the steps that it stands for, which give the same bits; and what must be read and written once, in bytes."""

    name: str
    ours: Callable[[], Tensor | Grouped]
    steps: Callable[[], Tensor | Grouped]
    moved_bytes: int


def lines(hidden: int, width: int, counts_E: Tensor, seconds: Seconds, copy: float) -> Iterator[str]:
    """A table for rows of experts, [rows, hidden] rotated and [rows, width] activated; copy: bytes a second that a copy moves."""
    yield f"\noperands in one pass: {int(counts_E.sum())} rows, {hidden} rotated, {width // 2} activated"
    yield "operand\tms\tsteps ms\tratio\tachieved\tshare of a copy\tbits"
    for pair in (*_rotations(hidden, counts_E), *_activations(width, counts_E)):
        mine, steps = seconds(pair.ours), seconds(pair.steps)
        rate = pair.moved_bytes / mine
        cells = [
            pair.name,
            f"{mine * 1e3:.3f}",
            f"{steps * 1e3:.3f}",
            f"{steps / mine:.2f}x",
            f"{rate / 1e9:,.0f} GB/s",
        ]
        yield "\t".join([*cells, f"{rate / copy:.0%}", "same" if _same(pair.ours(), pair.steps()) else "DIFFERENT"])


def _rotations(hidden: int, counts_E: Tensor) -> Iterator[Pair]:
    x_RH = _normal(int(counts_E.sum()), hidden, counts_E.device)
    signs = hadamard_signs(0, "benchmark").to(x_RH.device)
    noise = torch.rand(x_RH.T.shape, dtype=torch.float64, device=x_RH.device).clamp_(min=2.0**-33)

    def turned() -> Tensor:
        return hadamard(x_RH.T.contiguous(), signs)

    def amax() -> Tensor:
        pieces = turned().abs().split(counts_E.tolist(), 1)
        return torch.stack([piece.amax() if piece.numel() else piece.sum() for piece in pieces])

    measured = partial(rotated_amax, x_RH, signs, along=0, counts_E=counts_E)
    yield Pair(name="amax of the rotated transpose", ours=measured, steps=amax, moved_bytes=x_RH.nbytes)
    amax_E = measured()
    for name, given in (("", None), (", stochastic", noise)):
        one = partial(quantise_rotated_columns, x_RH, counts_E, signs, amax_E=amax_E, noise=given)

        def steps(given: Tensor | None = given) -> Grouped:
            return quantise_grouped_columns(turned().T, counts_E, NVFP4_ROWS, amax_E=amax_E, noise=given)

        moved = x_RH.nbytes + one().num_bytes + (0 if given is None else given.nbytes)
        yield Pair(name=f"rotated transpose in NVFP4{name}", ours=one, steps=steps, moved_bytes=moved)


def _activations(width: int, counts_E: Tensor) -> Iterator[Pair]:
    product = _normal(int(counts_E.sum()), width // 2 * 2, counts_E.device)
    weight_R = _normal(len(product), 1, counts_E.device).float().abs()[:, 0]
    formats: dict[str, Format] = {"one scale": FP8_TENSOR, "1 x 128": FP8_ROWS, "MXFP8": MXFP8, "NVFP4": NVFP4_ROWS}
    for name, format in formats.items():
        whole = format == NVFP4_ROWS or isinstance(format, PerTensor)
        amax_E = swiglu_amax(product, weight_R, counts_E) if whole else None
        one = partial(swiglu_quantised, product, weight_R, counts_E, format, amax_E=amax_E)

        def steps(format: Format = format, amax_E: Tensor | None = amax_E) -> Grouped:
            return quantise_grouped(rounded_forward(product, SWIGLU, weight_R), counts_E, format, amax_E=amax_E)

        yield Pair(
            name=f"SwiGLU x weight in {name}", ours=one, steps=steps, moved_bytes=product.nbytes + one().num_bytes
        )


def _same(one: Tensor | Grouped, other: Tensor | Grouped) -> bool:
    """Whether they mean the same numbers."""
    if isinstance(one, Grouped):
        one = one.dequantise()
    if isinstance(other, Grouped):
        other = other.dequantise()
    return torch.equal(one, other)


def _normal(rows: int, columns: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32).to(torch.bfloat16)
