"""Recipes of low-precision training as declarations: which operand of which product is rounded to what, and which layers are not.

A product sums over one dimension of both its operands: the forward over a weight's inputs, the input gradient over its outputs, the
weight gradient over the tokens. Blocks of neighbours that share a scale lie along it. The report's recipes (section 5.3) stand below;
another one is written the same way, in a file of its own, and chosen by `precision.recipe=FILE.py:NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ElementName = Literal["e4m3", "e5m2", "e2m1"]
# What shares a scale. tensor: a whole tensor (of experts, each one's), measured when it is rounded. delayed: the same, expected from the
# steps before. 1x128, 128x128: float32 for so many rows and columns. mx: E8M0 for 32 neighbours. nv, nv16x16: E4M3 for 16 neighbours, or
# for 16 × 16, under a float32 scale of the tensor.
ScalingName = Literal["tensor", "delayed", "1x128", "128x128", "mx", "nv", "nv16x16"]
RecipeName = Literal["fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4"]

BITS: dict[ElementName, int] = {"e4m3": 8, "e5m2": 8, "e2m1": 4}
# Neighbours along the summed dimension, and bytes of scales for one element.
ALONG: dict[ScalingName, int] = {
    "tensor": 1,
    "delayed": 1,
    "1x128": 128,
    "128x128": 128,
    "mx": 32,
    "nv": 16,
    "nv16x16": 16,
}
SCALE_BYTES: dict[ScalingName, float] = {
    "tensor": 0.0,
    "delayed": 0.0,
    "1x128": 4 / 128,
    "128x128": 4 / 128**2,
    "mx": 1 / 32,
    "nv": 1 / 16,
    "nv16x16": 1 / 16**2,
}
# Whose rounding of a matrix is that of its transpose: such a weight is rounded once for both of its products.
SQUARE: tuple[ScalingName, ...] = ("tensor", "delayed", "128x128", "nv16x16")
# Those with a scale of the whole tensor, which depends on all of it, whoever holds the parts.
WHOLE: tuple[ScalingName, ...] = ("tensor", "delayed", "nv", "nv16x16")
_FOUR_BIT_SCALINGS: tuple[ScalingName, ...] = ("nv", "nv16x16")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """How one operand of a product is rounded.

    stochastic: up or down at random, so that the mean is right; otherwise to nearest, ties to even. hadamard: groups of 16 along
    the summed dimension are first rotated by a random Hadamard matrix, in both operands of the product, which leaves it as it is.
    power_of_two: scales of 1x128 and 128x128 are rounded to powers of two, so that scaling rounds nothing.
    """

    element: ElementName
    scaling: ScalingName
    stochastic: bool = False
    hadamard: bool = False
    power_of_two: bool = False

    @property
    def num_bytes(self) -> float:
        """Of one element with its share of the scales; a whole tensor's scale does not count."""
        return BITS[self.element] / 8 + SCALE_BYTES[self.scaling]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """input · weight; None: stays in the run's dtype, which holds of both or of none."""

    input: Operand | None
    weight: Operand | None


@dataclass(frozen=True, kw_only=True)
class InputGradient:
    """output gradient · weight."""

    gradient: Operand | None
    weight: Operand | None


@dataclass(frozen=True, kw_only=True)
class WeightGradient:
    """output gradient · input, summed over tokens."""

    gradient: Operand | None
    input: Operand | None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The formats of all products of one kind of training.

    high: patterns of canonical weight names, as `layers.*.attention.*`, whose products stay in the run's dtype, as do those of the first
    `high_first` and last `high_last` layers. Embedding, head, router, the gate of shared experts, norms, attention itself and everything
    that is no product of a weight always do (report section 5.1). align: rows of zeros fill those of every expert up to a multiple
    of it. history: steps that `delayed` scaling remembers; margin: by how many powers of two it expects growth. dispatch: tokens
    travel to their experts as the forward's input is rounded, with its scales.
    """

    name: str
    forward: Forward
    input_gradient: InputGradient
    weight_gradient: WeightGradient
    high: tuple[str, ...] = ()
    high_first: int = 0
    high_last: int = 0
    align: int = 16
    history: int = 16
    margin: int = 0
    dispatch: bool = False

    def operands(self) -> Iterator[tuple[str, Operand]]:
        """Every operand that is rounded, by the key below `precision.recipe`."""
        for name, product in (
            ("forward", self.forward),
            ("input_gradient", self.input_gradient),
            ("weight_gradient", self.weight_gradient),
        ):
            for side, operand in vars(product).items():
                if operand is not None:
                    yield f"{name}.{side}", operand

    @property
    def scalings(self) -> frozenset[ScalingName]:
        """Every scaling that its products need of the hardware."""
        return frozenset(operand.scaling for _, operand in self.operands())

    @property
    def bits(self) -> int:
        """Of the widest element: how fast its products can be."""
        return max((BITS[operand.element] for _, operand in self.operands()), default=16)

    @property
    def held(self) -> Operand | None:
        """How a weight is rounded for all that is multiplied by it; None where it is not, or not once for both products."""
        operand, other = self.forward.weight, self.input_gradient.weight
        once = operand is not None and operand == other and not operand.hadamard and not operand.stochastic
        return operand if once else None

    @property
    def delayed(self) -> bool:
        """Whether it remembers the largest values of earlier steps."""
        return "delayed" in self.scalings


def _recipe(name: str, *, input: Operand, weight: Operand, gradient: Operand, align: int) -> Recipe:
    """Each operand in one format wherever it occurs."""
    return Recipe(
        name=name,
        forward=Forward(input=input, weight=weight),
        input_gradient=InputGradient(gradient=gradient, weight=weight),
        weight_gradient=WeightGradient(gradient=gradient, input=input),
        align=align,
    )


_TENSOR = Operand(element="e4m3", scaling="tensor")
_DELAYED = Operand(element="e4m3", scaling="delayed")
_ROWS = Operand(element="e4m3", scaling="1x128", power_of_two=True)
_MX = Operand(element="e4m3", scaling="mx")
_NV = Operand(element="e2m1", scaling="nv")
_NV_WEIGHT = Operand(element="e2m1", scaling="nv16x16")

# Gradients have more range and fewer bits: the "hybrid" choice of sections 5.3 and 5.3.1.
FP8_CURRENT = _recipe(
    "fp8_current", input=_TENSOR, weight=_TENSOR, gradient=Operand(element="e5m2", scaling="tensor"), align=16
)
FP8_DELAYED = _recipe(
    "fp8_delayed", input=_DELAYED, weight=_DELAYED, gradient=Operand(element="e5m2", scaling="delayed"), align=16
)
# Section 5.3.2 and DeepSeek-V3 (arXiv 2412.19437 section 3.3), with scales that are powers of two as Transformer Engine's are.
FP8_BLOCKWISE = _recipe(
    "fp8_blockwise",
    input=_ROWS,
    weight=Operand(element="e4m3", scaling="128x128", power_of_two=True),
    gradient=_ROWS,
    align=128,
)
# Section 5.3.3.
MXFP8 = _recipe("mxfp8", input=_MX, weight=_MX, gradient=_MX, align=32)
# Section 5.3.4 and arXiv 2509.25149: gradients are rounded stochastically, and the weight gradient's operands rotated.
NVFP4 = Recipe(
    name="nvfp4",
    forward=Forward(input=_NV, weight=_NV_WEIGHT),
    input_gradient=InputGradient(gradient=Operand(element="e2m1", scaling="nv", stochastic=True), weight=_NV_WEIGHT),
    weight_gradient=WeightGradient(
        gradient=Operand(element="e2m1", scaling="nv", stochastic=True, hadamard=True),
        input=Operand(element="e2m1", scaling="nv", hadamard=True),
    ),
    align=32,
)

RECIPES: dict[RecipeName, Recipe] = {
    "fp8_delayed": FP8_DELAYED,
    "fp8_current": FP8_CURRENT,
    "fp8_blockwise": FP8_BLOCKWISE,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}
