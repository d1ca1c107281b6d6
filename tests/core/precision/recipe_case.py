"""What the recipes say, said once more in tests: the formats of their operands, the errors that those allow, and weights under them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.config.recipe import RECIPES, RecipeName
from core.parallel.groups import one_rank
from core.precision.elements import E2M1, E4M3, E5M2, Element
from core.precision.formats import MX, NVFP4, Blocks, Format, PerTensor, quantise
from core.precision.history import AmaxHistory
from core.precision.products import Reference
from core.precision.quantiser import Quantiser
from core.precision.rounding import content_noise
from core.state.box import Box

NAMES: tuple[RecipeName, ...] = ("fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4")
SEED = 5
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0])


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Of activations, weights and gradients."""

    rows: Format
    weight: Format
    gradient: Format


_TENSOR = PerTensor(element=E4M3)
_TENSORS = Formats(rows=_TENSOR, weight=_TENSOR, gradient=PerTensor(element=E5M2))
_TILES = Blocks(element=E4M3, block=(1, 128), power_of_two=True)
_MX = MX(element=E4M3, rounding="up")
_NV = NVFP4(block=(1, 16))
FORMATS: dict[RecipeName, Formats] = {
    "fp8_delayed": _TENSORS,
    "fp8_current": _TENSORS,
    "fp8_blockwise": Formats(
        rows=_TILES, weight=Blocks(element=E4M3, block=(128, 128), power_of_two=True), gradient=_TILES
    ),
    "mxfp8": Formats(rows=_MX, weight=_MX, gradient=_MX),
    "nvfp4": Formats(rows=_NV, weight=NVFP4(block=(16, 16)), gradient=_NV),
}
# Neighbours along the summed dimension that share a scale, and how many rows do; none: all of them.
BLOCKS: dict[RecipeName, tuple[int, int]] = {"fp8_blockwise": (128, 128), "mxfp8": (32, 1), "nvfp4": (16, 16)}


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of many sizes, with a few outliers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator)
    return x * torch.randn(shape, generator=generator).mul(1.5).exp()


def quantiser_of(name: RecipeName, weight: str = "layers.0.mlp.down", experts: int = 0) -> Quantiser:
    """A weight's under a shipped recipe."""
    recipe = RECIPES[name]
    history = None
    if recipe.delayed:
        make = partial(AmaxHistory, recipe.history, one_rank(), torch.device("cpu"))
        held = Box(offset=(0, 0), shape=(experts, 1))
        history = make(experts=experts, held=held) if experts else make()
    return Quantiser(name=weight, recipe=recipe, seed=SEED, signs=SIGNS, backend=Reference(), history=history)


def sylvester() -> Tensor:
    """The Hadamard matrix of 16 points by its definition, over four, after the signs: [16, 16] float64; rows in, rows out."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.diag(SIGNS.double()) @ matrix / 4


def rotated(x_RS: Tensor) -> Tensor:
    """Groups of 16 along the last dimension, which zeros fill, rotated: [R, S filled up] float64."""
    rows, summed = x_RS.shape
    filled = torch.zeros(rows, -(-summed // 16) * 16, dtype=torch.float64)
    filled[:, :summed] = x_RS
    return (filled.view(rows, -1, 16) @ sylvester()).view(rows, -1)


def operands(name: RecipeName, x: Tensor, w: Tensor, g: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Both operands of each product of x [T, K], w [N, K] and g [T, N] as the recipe rounds them, rows times rows, in float64."""
    formats, four = FORMATS[name], name == "nvfp4"

    def back(x: Tensor, format: Format, noise: Tensor | None = None) -> Tensor:
        return quantise(x.contiguous(), format, noise=noise).dequantise().double()

    noise = content_noise(SEED, "layers.0.mlp.down:gradient.rows", g) if four else None
    of_columns = (g.T, x.T)
    column_noise = None
    if four:
        filled = torch.cat([g, g.new_zeros(-g.shape[0] % 16, g.shape[1])])
        column_noise = content_noise(SEED, "layers.0.mlp.down:gradient.columns", filled).T
        of_columns = (rotated(g.T).float(), rotated(x.T).float())
    return {
        "forward": (back(x, formats.rows), back(w, formats.weight)),
        "input_gradient": (back(g, formats.gradient, noise), back(w.T, formats.weight)),
        "weight_gradient": (back(of_columns[0], formats.gradient, column_noise), back(of_columns[1], formats.rows)),
    }


def rounding_error(x_RS: Tensor, name: RecipeName, *, weight: bool, gradient: bool) -> Tensor:
    """What each number may lose at most, by the definition of its format: [R, S] float64.

    Half a unit of the last place, a whole one where rounding is stochastic; half the smallest number of its block, as scaled, below
    that; and of four bits what a block scale loses that lies below E4M3's normal numbers.
    """
    element: Element = E4M3
    if name == "nvfp4":
        element = E2M1
    elif gradient and name in ("fp8_current", "fp8_delayed"):
        element = E5M2
    x = x_RS.double().abs()
    largest = _largest_of_blocks(x, name, weight=weight)
    scale = 2 * largest / element.largest  # a power of two may lie above what is wanted by up to that
    units = 2 if gradient and name == "nvfp4" else 1
    unit = 2.0**-element.mantissa_bits / 2
    smallest = 2.0 ** (element.min_exponent - element.mantissa_bits) / 2
    lost = units * (unit * x + smallest * scale)
    if name == "nvfp4":
        lost = lost + units * 6 * x.amax() / (6 * 448) * 2.0**-10
    return lost * (1 + 1e-5)


def _largest_of_blocks(x: Tensor, name: RecipeName, *, weight: bool) -> Tensor:
    if name not in BLOCKS:
        return x.amax().expand_as(x)
    along, across = BLOCKS[name]
    out = torch.empty_like(x)
    for i in range(0, x.shape[0], across if weight else 1):
        rows = slice(i, i + (across if weight else 1))
        for j in range(0, x.shape[1], along):
            out[rows, j : j + along] = x[rows, j : j + along].amax()
    return out
