"""Which back end multiplies a recipe's operands, and what it does not: said once by name, and then the reference computes it.

A back end is believed of no product before it has shown it: a first small one of the same formats is compared with the reference
(`trial`), for wrong orders of scales, or hardware that only reports what it supports, give wrong numbers and no error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from core.config.recipe import RECIPES, Recipe
from core.errors import ConfigError, Fault
from core.kernels.backend import products_backend
from core.precision.backends.machine import Machine, machine_of
from core.precision.backends.scaled import Scaled
from core.precision.formats import Format, PerTensor, Quantised, block_of, element_of, quantise
from core.precision.grouped import Grouped, quantise_grouped, quantise_grouped_columns
from core.precision.operands import format_of
from core.precision.products import ProductsBackend, Reference

Kind = Literal["product", "of_rows", "of_weights"]
# Of the sum of an element's terms' sizes: matrix units add up with 14 bits or more before they add to float32.
_LOST = 2.0**-10


class Hardware(ProductsBackend, Protocol):
    """A back end that has some products."""

    def missing(self, a: Format, b: Format, dtype: torch.dtype) -> str | None:
        """Why a product is not to be had; None where it is."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Tried:
    """A ProductsBackend: of `hardware` what it has and computes rightly, of the reference the rest, which a warning names once.

    found: what is known so far of products by kind, formats and dtype: None, or why the reference computes them.
    """

    name: str
    hardware: Hardware
    found: dict[tuple[Kind, Format, Format, torch.dtype], str | None] = field(default_factory=dict)

    def product(self, a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        return self._for("product", a_MS, b_NS, dtype).product(a_MS, b_NS, dtype)

    def of_rows(self, a_RS: Grouped, b_ENS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        return self._for("of_rows", a_RS, b_ENS, dtype).of_rows(a_RS, b_ENS, dtype)

    def of_weights(self, a_NR: Grouped, b_KR: Grouped, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        return self._for("of_weights", a_NR, b_KR, dtype).of_weights(a_NR, b_KR, dtype)

    def has(self, kind: Kind, a: Format, b: Format, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the hardware computes such a product, which is tried when it is first asked for."""
        key = (kind, a, b, dtype)
        if key not in self.found:
            reason = self.hardware.missing(a, b, dtype) or trial(self.hardware, kind, a, b, dtype, device)
            self.found[key] = reason
            if reason is not None:
                warnings.warn(
                    f"{self.name} does not compute {_WORDS[kind]} of {element_of(a).name} and {element_of(b).name} to {dtype}: {reason}. "
                    "The reference does, exactly and slowly.",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return self.found[key] is None

    def _for(
        self, kind: Kind, a: Quantised | Grouped, b: Quantised | Grouped, dtype: torch.dtype
    ) -> Hardware | Reference:
        # Of numbers without values, as a plan has, and of float64, which is for proofs, nothing is to be said.
        if dtype == torch.float64 or a.data.is_meta:
            return Reference()
        return self.hardware if self.has(kind, a.format, b.format, dtype, a.data.device) else Reference()


_WORDS: dict[Kind, str] = {
    "product": "products",
    "of_rows": "experts' products",
    "of_weights": "experts' weight gradients",
}


def products_for(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> ProductsBackend:
    """The back end that `products_backend` names, for the products of `recipe` whose results are of `dtype`.

    On a device all of them are tried now. Raises ConfigError where it has none of the recipe's formats, with the recipes that it has, and
    where the named back end is not installed or of another interface.
    """
    if device.type == "meta":
        return Reference()
    name = products_backend(device)
    if name == "reference":
        return Reference()
    machine = machine_of(device)
    hardware = _hardware(name, machine, recipe.align)
    reasons = [hardware.missing(a, b, torch.bfloat16) for a, b, _ in pairs(recipe)]
    if reasons and None not in reasons:
        able = [known for known, other in RECIPES.items() if _has_one(name, machine, other)]
        works = " or ".join((*able, "none"))
        raise ConfigError(
            [
                Fault(
                    setting="precision.recipe",
                    value=recipe.name,
                    rule=f"has no product that {name} has on {machine.name}: {reasons[0]}",
                    works=f"{works}; or ZOO_PRODUCTS=reference, which computes it exactly and slowly",
                )
            ]
        )
    tried = Tried(name=name, hardware=hardware)
    if dtype != torch.float64:
        for a, b, kinds in pairs(recipe):
            for kind in kinds:
                tried.has(kind, a, b, dtype, device)
    return tried


def pairs(recipe: Recipe) -> Iterator[tuple[Format, Format, tuple[Kind, ...]]]:
    """The formats of the two operands of each product of a recipe that is taken in low precision, each once for its kinds of products."""
    forward, back, weights = recipe.forward, recipe.input_gradient, recipe.weight_gradient
    rows: tuple[Kind, ...] = ("product", "of_rows")
    columns: tuple[Kind, ...] = ("product", "of_weights")
    for a, b, kinds in (
        (forward.input, forward.weight, rows),
        (back.gradient, back.weight, rows),
        (weights.gradient, weights.input, columns),
    ):
        if a is not None and b is not None:
            one, other = format_of(a), format_of(b)
            both = (one, other) if kinds is columns else (one,)
            yield one, other, kinds if all(_has_rows(format) for format in both) else ("product",)


def _has_rows(format: Format) -> bool:
    """Whether rows of experts can be rounded so: not in blocks of several rows, which could lie in two experts."""
    return isinstance(format, PerTensor) or block_of(format, (1, 1))[0] == 1


def trial(
    hardware: ProductsBackend, kind: Kind, a: Format, b: Format, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is wrong with a small product of such operands, beside the reference's; None where nothing is.

    Its sizes are no multiples of what matrix units want, one expert has no rows, and neighbours differ in size by powers of two, so
    that a scale in a wrong place is off by more than rounding.
    """
    operands = _operands(kind, a, b, device)
    try:
        match kind:
            case "product":
                got = hardware.product(operands[0], operands[1], dtype)  # type: ignore[arg-type]
            case "of_rows":
                got = hardware.of_rows(operands[0], operands[1], dtype)  # type: ignore[arg-type]
            case "of_weights":
                got = hardware.of_weights(operands[0], operands[1], dtype)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, TypeError) as error:
        return "it says: " + str(error).strip().split("\n", 1)[0]
    truth, sizes = _truth(kind, operands)
    bound = _LOST * sizes + torch.finfo(dtype).eps * truth.abs()
    if got.shape != truth.shape or got.dtype != dtype:
        return f"it gives {tuple(got.shape)} of {got.dtype}"
    worst = float(((got.double() - truth).abs() / bound.clamp(min=1e-30)).nan_to_num(nan=math.inf).max())
    return None if worst <= 1 else f"a first one was wrong by {worst:.3g} times what rounding explains"


def _operands(
    kind: Kind, a: Format, b: Format, device: torch.device
) -> tuple[Quantised | Grouped, Quantised | Grouped]:
    """Two operands for a kind of product."""
    if kind == "product":
        return quantise(_numbers((75, 328), device, 1), a), quantise(_numbers((203, 328), device, 2), b)
    if kind == "of_rows":
        counts_E = torch.tensor([32, 0, 160, 96], device=device)
        matrices = torch.stack([_numbers((203, 328), device, 3 + e) * 3.0**e for e in range(len(counts_E))])
        return quantise_grouped(_numbers((288, 328), device, 2), counts_E, a), quantise(matrices, b)
    counts_E = torch.tensor([128, 0, 384, 256], device=device)
    left, right = _numbers((768, 75), device, 1), _numbers((768, 203), device, 2)
    return quantise_grouped_columns(left, counts_E, a), quantise_grouped_columns(right, counts_E, b)


def _numbers(shape: tuple[int, int], device: torch.device, seed: int) -> Tensor:
    """Numbers of both signs without a pattern, and sizes that differ from row to row, and between blocks of 16 and of 128."""
    rows, columns = (torch.arange(size, dtype=torch.float64, device=device) for size in shape)
    rows = rows[:, None]
    sizes = rows % 5 - 2
    for block in (16, 128):
        down, along = (
            rows.div(block, rounding_mode="floor") + seed,
            columns.div(block, rounding_mode="floor") + 2 * seed,
        )
        sizes = sizes + (3 * torch.sin(7.3 * down * down + 3.1 * along * along + down * along)).round()
    places = rows * shape[1] + columns + seed
    return (torch.sin(places * places * 0.7 + places) * torch.exp2(sizes)).float()


def _truth(kind: Kind, operands: tuple[Quantised | Grouped, Quantised | Grouped]) -> tuple[Tensor, Tensor]:
    """The product in float64, and that of the sizes of its terms."""
    a, b = (operand.dequantise(torch.float64) for operand in operands)
    if kind == "product":
        return a @ b.T, a.abs() @ b.abs().T
    grouped = operands[0]
    assert isinstance(grouped, Grouped), "experts have rows"
    counts = grouped.counts_E.tolist()
    if kind == "of_rows":
        pieces = list(zip(a.split(counts), b, strict=True))
        return torch.cat([x @ y.T for x, y in pieces]), torch.cat([x.abs() @ y.abs().T for x, y in pieces])
    pieces = list(zip(a.split(counts, 1), b.split(counts, 1), strict=True))
    return torch.stack([x @ y.T for x, y in pieces]), torch.stack([x.abs() @ y.abs().T for x, y in pieces])


def _hardware(name: Literal["torch", "transformer_engine"], machine: Machine, align: int) -> Hardware:
    if name == "torch":
        return Scaled(machine=machine, align=align)
    from core.precision.backends.transformer_engine import load

    return load(machine)


def _has_one(name: Literal["torch", "transformer_engine"], machine: Machine, recipe: Recipe) -> bool:
    hardware = _hardware(name, machine, recipe.align)
    return any(hardware.missing(a, b, torch.bfloat16) is None for a, b, _ in pairs(recipe))
