"""The products of a layer in low precision on a GPU, beside bfloat16's: part of `python -m benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from core.config.recipe import RECIPES
from core.precision.backends.choose import Kind, pairs, trial
from core.precision.backends.machine import machine_of
from core.precision.backends.rules import name_of
from core.precision.backends.scaled import Scaled
from core.precision.formats import Format, quantise
from core.precision.grouped import quantise_grouped, quantise_grouped_columns

Seconds = Callable[[Callable[[], Any]], float]


def lines(hidden: int, width: int, counts_E: Tensor, seconds: Seconds) -> Iterator[str]:
    """A table: each product of each recipe, of [rows, hidden] by [width, hidden] and of as many rows of experts, in TFLOP/s.

    Operands are rounded before, which is measured elsewhere. Beside stands how often a bfloat16 product of these sizes takes its time.
    What the GPU lacks, or computes wrongly, is a line that says why.
    """
    device, rows = counts_E.device, int(counts_E.sum())
    machine = machine_of(device)
    x, weight = _normal(rows, hidden, device), _normal(width, hidden, device)
    plain = seconds(lambda: x @ weight.T)
    operations = 2.0 * rows * hidden * width
    yield f"\nproducts in low precision: {rows} x {hidden} x {width}, bfloat16 {operations / plain / 1e12:,.0f} TFLOP/s"
    yield "recipe\tproduct\tms\tTFLOP/s\tof bfloat16's time"
    seen: set[tuple[Kind, Format, Format]] = set()
    for name, recipe in RECIPES.items():
        scaled = Scaled(machine=machine, align=recipe.align)
        for a, b, kinds in pairs(recipe):
            for kind in kinds:
                if (kind, a, b) in seen:
                    continue
                seen.add((kind, a, b))
                label = f"{name}\t{kind} of {name_of(a)} by {name_of(b)}"
                found = scaled.missing(a, b, torch.bfloat16) or trial(scaled, kind, a, b, torch.bfloat16, device)
                if found is not None:
                    yield f"{label}\t{found}"
                    continue
                taken = seconds(_action(scaled, kind, a, b, (x, weight, counts_E)))
                rate = operations / taken / 1e12
                yield f"{label}\t{taken * 1e3:.3f}\t{rate:,.0f}\t{taken / plain:.2f}"


def _action(
    scaled: Scaled, kind: Kind, a: Format, b: Format, operands: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], Tensor]:
    """One product of operands that are rounded now."""
    x, weight, counts_E = operands
    match kind:
        case "product":
            left, right = quantise(x, a), quantise(weight, b)
            return lambda: scaled.product(left, right, torch.bfloat16)
        case "of_rows":
            grouped = quantise_grouped(x, counts_E, a)
            matrices = quantise(weight.expand(len(counts_E), -1, -1), b)
            return lambda: scaled.of_rows(grouped, matrices, torch.bfloat16)
        case "of_weights":
            one = quantise_grouped_columns(x, counts_E, a)
            other = quantise_grouped_columns(_normal(len(x), len(weight), x.device), counts_E, b)
            return lambda: scaled.of_weights(one, other, torch.bfloat16)


def _normal(rows: int, columns: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32).to(torch.bfloat16)
