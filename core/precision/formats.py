"""Tensors in low precision: how their elements share scales, and the values that come out. Exact on every device; the definition.

A tensor is a matrix [R, C], or several of them [..., R, C], each of which is quantised by itself, as the experts of a weight
[experts, out, in] are. Scales lie on a grid [..., ceil(R / rows), ceil(C / columns)] of blocks [rows, columns]. The last block of
a row or column is short where blocks do not divide; it is quantised as if zeros filled it, and none is stored. What hardware asks
for beyond that is not the business of a format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.backend import wide_dtype
from core.kernels.casts import Cast
from core.precision import fast
from core.precision.bands import Band, bands_of, each_band, matrices
from core.precision.elements import E2M1, E4M3, E5M2, Element, codes_of, decode, encode, store
from core.precision.scales import MXRounding, Scales, float32_scales, mx_scales, nvfp4_scales


@dataclass(frozen=True, kw_only=True)
class PerTensor:
    """One float32 scale for a matrix of eight-bit elements: current where `quantise` measures, delayed where amax is given."""

    element: Element

    def __post_init__(self) -> None:
        if self.element.bits != 8:
            raise ValueError(f"one scale for a whole tensor needs an element of 8 bits; {self.element.name} has 4")


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A float32 scale for each block (DeepSeek-V3, arXiv 2412.19437 section 3.3), or a power of two in float32."""

    element: Element
    block: tuple[int, int]
    power_of_two: bool


@dataclass(frozen=True, kw_only=True)
class MX:
    """An E8M0 scale for 32 neighbours of a row (OCP MX 1.0)."""

    element: Element
    rounding: MXRounding


@dataclass(frozen=True, kw_only=True)
class NVFP4:
    """E2M1 with an E4M3 scale for 16 neighbours of a row, or for 16 × 16, and a float32 scale for the matrix (arXiv 2509.25149)."""

    block: tuple[int, int]


Format = PerTensor | Blocks | MX | NVFP4

FP8_TENSOR = PerTensor(element=E4M3)
FP8_TENSOR_GRADIENT = PerTensor(element=E5M2)  # of the report's "hybrid" choice
FP8_ROWS = Blocks(element=E4M3, block=(1, 128), power_of_two=False)
FP8_WEIGHT = Blocks(element=E4M3, block=(128, 128), power_of_two=False)
MXFP8 = MX(element=E4M3, rounding="up")
NVFP4_ROWS = NVFP4(block=(1, 16))
NVFP4_WEIGHT = NVFP4(block=(16, 16))

_MX_BLOCK = (1, 32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantised:
    """A tensor of `shape` [..., R, C] in low precision.

    data: [..., R, C] in the element's dtype, or uint8 [..., R, ceil(C / 2)] of two E2M1 each, the first in the low half.
    scales: on the grid of blocks, [..., 1, 1] where there is one for a matrix. tensor_scale: [..., 1, 1] float32, of NVFP4 alone.
    """

    data: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    format: Format
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What data and all scales take."""
        return self.data.nbytes + self.scales.nbytes + (0 if self.tensor_scale is None else self.tensor_scale.nbytes)

    @property
    def codes(self) -> Tensor:
        """The bits of every element, uint8 of `shape`."""
        return codes_of(self.data, element_of(self.format), self.shape[-1])

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the codes and scales mean, of `shape`: scales multiplied first, in float32 or wider, rounded once to dtype."""
        wide = wide_dtype(dtype)
        scales = self.scales.to(wide)
        if self.tensor_scale is not None:
            scales = scales * self.tensor_scale.to(wide)
        block = block_of(self.format, self.shape)
        return decode_scaled(self.data, scales, block, element_of(self.format), self.shape, dtype)

    def transposed(self) -> Quantised:
        """The same numbers as [..., C, R]. Raises ValueError for blocks that are not square: those must be quantised again."""
        rows, columns = block_of(self.format, self.shape)
        if rows != columns and not isinstance(self.format, PerTensor):
            raise ValueError(f"blocks of {rows} × {columns} cannot be transposed: quantise the transposed tensor")
        return Quantised(
            data=store(self.codes.mT.contiguous(), element_of(self.format)),
            scales=self.scales.mT.contiguous(),
            tensor_scale=self.tensor_scale,
            format=self.format,
            shape=(*self.shape[:-2], self.shape[-1], self.shape[-2]),
        )


def quantise(x: Tensor, format: Format, *, amax: Tensor | None = None, noise: Tensor | None = None) -> Quantised:
    """x [..., R, C] in `format`, each matrix by itself.

    amax: what stands for the largest size in each matrix, [..., 1, 1] or one for all, instead of measuring it: of earlier steps, or
    over all ranks that hold pieces; for PerTensor and NVFP4. noise: see `encode`, of x's shape; rounds to the nearest, ties to
    even, without. Raises ValueError for fewer than two dimensions, other shapes, and an amax for another format.
    """
    if x.dim() < 2:
        raise ValueError(f"quantises matrices [..., R, C], not {tuple(x.shape)}")
    how = cast_of(format)
    if fast.runs_kernels(x, how):
        _check_amax(amax, format, x.shape)
        return _of_made(fast.cast(x, how, amax=amax, noise=noise), format, x.shape)
    x = x.contiguous()
    block_amax = block_amax_of(x, block_of(format, x.shape))
    tensor_amax = None
    if isinstance(format, PerTensor | NVFP4):
        tensor_amax = _largest(block_amax, (-2, -1), keep=True)
        if amax is not None:
            tensor_amax = given_amax(amax, tensor_amax)
    else:
        _check_amax(amax, format, x.shape)
    return quantise_with(x, scales_for(format, block_amax, tensor_amax), format, noise=noise)


def quantise_both(
    x: Tensor,
    format: Format,
    *,
    amax: Tensor | None = None,
    noise: Tensor | None = None,
    column_noise: Tensor | None = None,
) -> tuple[Quantised, Quantised]:
    """The row-wise copy of x [..., R, C] and the column-wise one, which is [..., C, R] with blocks along R.

    Where blocks are square, both have the same codes and scales. column_noise: [..., C, R], of those that are rounded apart.
    """
    how = cast_of(format)
    if x.dim() >= 2 and fast.runs_kernels(x, how):
        _check_amax(amax, format, x.shape)
        one, other = fast.cast_both(x, how, amax=amax, noise=noise, turned_noise=column_noise)
        return _of_made(one, format, x.shape), _of_made(other, format, x.mT.shape)
    rows = quantise(x, format, amax=amax, noise=noise)
    if is_symmetric(format):
        return rows, rows.transposed()
    return rows, quantise(x.mT, format, amax=amax, noise=column_noise)


def cast_of(format: Format) -> Cast:
    """A format as kernels know it."""
    match format:
        case PerTensor(element=element):
            return Cast(kind="tensor", element=element.name, largest=element.largest)
        case Blocks(element=element, block=block, power_of_two=exact):
            return Cast(kind="float32", element=element.name, largest=element.largest, block=block, exact=exact)
        case MX(element=element, rounding=rounding):
            up = rounding == "up"
            return Cast(kind="mx", element=element.name, largest=element.largest, block=_MX_BLOCK, exact=up)
        case NVFP4(block=block):
            return Cast(kind="nvfp4", element=E2M1.name, largest=E2M1.largest * E4M3.largest, block=block)


def stored_scales(scales: Tensor, format: Format) -> Tensor:
    """Scales that kernels wrote, in the dtype of the format's."""
    if isinstance(format, MX):
        return scales.view(torch.float8_e8m0fnu)
    return scales.view(E4M3.dtype) if isinstance(format, NVFP4) else scales


def _of_made(made: fast.Made, format: Format, shape: torch.Size) -> Quantised:
    return Quantised(
        data=made.data.view(element_of(format).dtype),
        scales=stored_scales(made.scales, format),
        tensor_scale=made.tensor_scale,
        format=format,
        shape=tuple(shape),
    )


def _check_amax(amax: Tensor | None, format: Format, shape: torch.Size) -> None:
    """Raises ValueError for an amax of a format that measures its own, or of a shape that does not fit."""
    if amax is not None and not isinstance(format, PerTensor | NVFP4):
        raise ValueError(
            f"{type(format).__name__} measures the amax of every block; only PerTensor and NVFP4 can be given one"
        )
    if amax is not None and amax.dim() and amax.shape != (*shape[:-2], 1, 1):
        raise ValueError(f"an amax of shape {tuple(amax.shape)} for scales of shape {(*shape[:-2], 1, 1)}")


def scales_for(format: Format, block_amax: Tensor, tensor_amax: Tensor | None) -> Scales:
    """The scales of blocks of these largest sizes; tensor_amax: of PerTensor, whose one block it is, and NVFP4."""
    match format:
        case PerTensor(element=element):
            return float32_scales(block_amax if tensor_amax is None else tensor_amax, element.largest)
        case Blocks(element=element, power_of_two=power_of_two):
            return float32_scales(block_amax, element.largest, power_of_two=power_of_two)
        case MX(element=element, rounding=rounding):
            return mx_scales(block_amax, element, rounding)
        case NVFP4():
            assert tensor_amax is not None, "NVFP4 has a scale for the tensor"
            return nvfp4_scales(block_amax, tensor_amax)


def quantise_with(x: Tensor, scales: Scales, format: Format, *, noise: Tensor | None = None) -> Quantised:
    """x [..., R, C] under scales that were made before, on its grid of blocks."""
    return Quantised(
        data=encode_scaled(x, scales.factor, block_of(format, x.shape), element_of(format), noise),
        scales=scales.stored,
        tensor_scale=scales.tensor_scale,
        format=format,
        shape=tuple(x.shape),
    )


def encode_scaled(x: Tensor, factor: Tensor, block: tuple[int, int], element: Element, noise: Tensor | None) -> Tensor:
    """x times its blocks' factors, rounded, as it is stored."""
    bands = bands_of(tuple(x.shape), block, x.device)
    if not bands or (noise is not None and noise.shape != x.shape):
        wide = x.to(wide_dtype(x.dtype))
        return store(encode(scaled(wide, factor, block), element, noise=noise), element)
    columns = -(-x.shape[-1] // 2) if element.bits == 4 else x.shape[-1]
    data = torch.empty(*x.shape[:-1], columns, dtype=element.dtype)
    xs, factors, out = matrices(x), matrices(factor), matrices(data)
    noises = None if noise is None else matrices(noise)

    def one(band: Band) -> Tensor:
        at, rows = band.matrix, band.rows
        wide = xs[at, rows].to(wide_dtype(x.dtype))
        product = scaled(wide, factors[at, band.lines], band.block)
        codes = encode(product, element, noise=None if noises is None else noises[at, rows])
        return out[at, rows].copy_(store(codes, element))

    each_band(bands, one)
    return data


def decode_scaled(
    data: Tensor, scales: Tensor, block: tuple[int, int], element: Element, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The numbers of `shape` that stored codes mean, times their blocks' scales (float32 or wider), rounded once to dtype."""
    bands = bands_of(shape, block, data.device)
    if not bands:
        return scaled(decode(codes_of(data, element, shape[-1]), element, scales.dtype), scales, block).to(dtype)
    values = torch.empty(shape, dtype=dtype)
    stored, grid, out = matrices(data), matrices(scales), matrices(values)

    def one(band: Band) -> Tensor:
        at, rows = band.matrix, band.rows
        numbers = decode(codes_of(stored[at, rows], element, shape[-1]), element, scales.dtype)
        return out[at, rows].copy_(scaled(numbers, grid[at, band.lines], band.block))

    each_band(bands, one)
    return values


def element_of(format: Format) -> Element:
    """What the codes are."""
    return E2M1 if isinstance(format, NVFP4) else format.element


def block_of(format: Format, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that share a scale in a tensor of `shape`; at least one of each."""
    match format:
        case PerTensor():
            return max(1, shape[-2]), max(1, shape[-1])
        case MX():
            return _MX_BLOCK
        case Blocks(block=block) | NVFP4(block=block):
            return block


def is_symmetric(format: Format) -> bool:
    """Whether a matrix and its transpose have the same scales, and so the same codes."""
    return isinstance(format, PerTensor) or (isinstance(format, Blocks | NVFP4) and format.block[0] == format.block[1])


def block_amax_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest size in each block of x [..., R, C], on the grid, float32 or wider; NaN where there is one."""
    bands = bands_of(tuple(x.shape), block, x.device)
    if not bands:
        return _largest(_tiles(x.abs(), block), (-3, -1), keep=False).to(wide_dtype(x.dtype))
    xs = matrices(x)
    parts = each_band(bands, lambda band: _band_amax(xs[band.matrix, band.rows], band.block))
    front, columns = x.shape[:-2], parts[0].shape[-1]
    if block[0] < x.shape[-2]:
        return torch.cat(parts).view(*front, -1, columns).to(wide_dtype(x.dtype))
    of_bands = torch.cat(parts).view(*front, -1, columns)
    return of_bands.amax(-2, keepdim=True).to(wide_dtype(x.dtype))


def _band_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    return _tiles(x.abs(), block).amax((-3, -1))


def given_amax(amax: Tensor, measured: Tensor) -> Tensor:
    """amax instead of what was measured, but NaN where that is not finite. Raises ValueError for a shape that does not fit."""
    if amax.dim() and amax.shape != measured.shape:
        raise ValueError(f"an amax of shape {tuple(amax.shape)} for scales of shape {tuple(measured.shape)}")
    return torch.where(measured.isfinite(), amax.to(measured), math.nan)


def scaled(x: Tensor, grid: Tensor, block: tuple[int, int]) -> Tensor:
    """x [..., R, C] times the number of each element's block, `grid` [..., ceil(R / rows), ceil(C / columns)]."""
    rows, columns = x.shape[-2:]
    product = _tiles(x, block) * grid[..., :, None, :, None]
    return product.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[..., R, C] as [..., R / rows, rows, C / columns, columns], zeros filling the last blocks."""
    (rows, columns), (height, width) = x.shape[-2:], block
    down, right = -(-rows // height), -(-columns // width)
    if rows % height or columns % width:
        x = F.pad(x, (0, right * width - columns, 0, down * height - rows))
    return x.reshape(*x.shape[:-2], down, height, right, width)


def _largest(x: Tensor, dimensions: tuple[int, int], *, keep: bool) -> Tensor:
    """amax over two dimensions, zero where they have no elements; keep: they stay, as ones."""
    return x.amax(dimensions, keepdim=keep) if x.numel() else x.sum(dimensions, keepdim=keep)
