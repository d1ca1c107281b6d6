"""Quantised operands as torch's scaled product reads them: padded, scales in the order of the matrix units.

Read from torch's own checks (aten/src/ATen/native/cuda/ScaledBlas.cpp and GroupedBlas.cpp, release 2.13):

- both operands lie by rows, the second is handed over transposed;
- tensor: one float32 scale;
- blocks, of 1x128: float32 [R, S / 128], a column after another; of 128x128: the transpose of [R / 128, S / 128], its row stretched to a
  multiple of four;
- mx: E8M0 for 32 neighbours, tiles of 128 rows by 4 scales in the order "32 x 4 x 4"; every tile is whole;
- nv: E4M3 for 16 neighbours in the same order, and a float32 scale of the tensor. Weights repeat a scale for the 16 rows that share it.

All scales are what codes are multiplied by, as ours are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from core.precision.formats import MX, NVFP4, PerTensor, Quantised, block_of
from core.precision.grouped import Grouped

# How a matrix unit reads two operands. A format may be read in more ways than its own.
Way = Literal["tensor", "blocks", "mx", "nv"]


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What sizes of a product must be multiples of: its rows, its columns, and what is summed over. Zeros fill what is not."""

    rows: int
    columns: int
    summed: int


# 16 bytes of every row that is read or written; whole blocks of what shares a scale.
ALIGNMENT: dict[Way, Alignment] = {
    "tensor": Alignment(rows=1, columns=16, summed=16),
    "blocks": Alignment(rows=16, columns=16, summed=128),
    "mx": Alignment(rows=16, columns=16, summed=32),
    "nv": Alignment(rows=16, columns=16, summed=32),
}
_TILE = (128, 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """One operand [R, S] of torch's product, and how its scales are to be read."""

    data: Tensor
    scales: list[Tensor]
    kinds: list[ScalingType]
    swizzles: list[SwizzleType]


def up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def padded(x: Quantised, rows: int, summed: int) -> Quantised:
    """x [..., R, S] with zeros below and behind, up to multiples of `rows` and `summed`; itself where it has such sizes.

    A block of nothing but such zeros has a scale of zeros, whatever they mean.
    """
    *front, r, s = x.shape
    more = (up(r, rows), up(s, summed))
    if more == (r, s):
        return x
    packing = 2 if isinstance(x.format, NVFP4) else 1
    shape = (*front, *more)
    scales = x.scales
    if not isinstance(x.format, PerTensor):
        block = block_of(x.format, shape)
        scales = _filled(scales, (-(-more[0] // block[0]), -(-more[1] // block[1])))
    data = _filled(x.data, (more[0], -(-more[1] // packing)))
    return Quantised(data=data, scales=scales, tensor_scale=x.tensor_scale, format=x.format, shape=shape)


def prepared(x: Quantised, way: Way, rows: int) -> Prepared:
    """x [R, S] to be multiplied in this way, its rows padded to a multiple of `rows`."""
    x = padded(x, rows, ALIGNMENT[way].summed)
    data = x.data.contiguous()  # an expert's piece of columns is not
    match way:
        case "tensor":
            return _prepared(data, x.scales.reshape(1), ScalingType.TensorWise)
        case "blocks":
            square = block_of(x.format, x.shape)[0] != 1
            scales = _filled(x.scales, (x.scales.shape[0], up(x.scales.shape[1], 4))) if square else x.scales.T
            kind = ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128
            return _prepared(data, scales.contiguous().T, kind)
        case "mx":
            kinds, swizzles = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
            return Prepared(data=data, scales=[swizzled(mx_scales_of(x))], kinds=kinds, swizzles=swizzles)
        case "nv":
            assert x.tensor_scale is not None, "NVFP4 has a scale for the tensor"
            return Prepared(
                data=data.view(torch.float4_e2m1fn_x2),
                scales=[swizzled(row_scales(x)), x.tensor_scale.reshape(1)],
                kinds=[ScalingType.BlockWise1x16, ScalingType.TensorWise],
                swizzles=[SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
            )


def row_scales(x: Quantised) -> Tensor:
    """A scale for every row [R, scales], where several share one too."""
    rows = block_of(x.format, x.shape)[0]
    return repeated(x.scales, rows, 0)[: x.shape[0]] if rows > 1 else x.scales


def mx_scales_of(x: Quantised) -> Tensor:
    """E8M0 for every row and 32 neighbours [R, ceil(S / 32)]: MX's own, or powers of two of larger blocks, repeated."""
    if isinstance(x.format, MX):
        return x.scales
    # Exact: a power of two, or NaN, which E8M0 has too.
    small = repeated(row_scales(x).to(torch.float8_e8m0fnu), 4, 1)
    return small[:, : -(-x.shape[1] // 32)]


def repeated(scales: Tensor, times: int, dimension: int) -> Tensor:
    """Each scale `times` times in a row; of any dtype."""
    return _bytes(scales).repeat_interleave(times, dimension).view(scales.dtype)


def swizzled(scales: Tensor) -> Tensor:
    """Scales [R, C] in tiles of 128 x 4, a flat tensor: within a tile 32 rows stand after one another, each with the scales of the
    rows 32, 64 and 96 below it (cuBLAS, "1D block scaling factors layout"). Zeros fill the tiles."""
    rows, columns = up(scales.shape[0], _TILE[0]), up(scales.shape[1], _TILE[1])
    tiles = _bytes(_filled(scales, (rows, columns))).view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


def matrix(x: Quantised, index: int) -> Quantised:
    """One of the matrices of x [E, R, S]."""
    scale = None if x.tensor_scale is None else x.tensor_scale[index]
    return Quantised(
        data=x.data[index], scales=x.scales[index], tensor_scale=scale, format=x.format, shape=tuple(x.shape[1:])
    )


def swizzled_of_rows(scales: Tensor, counts_E: Tensor) -> Tensor:
    """Scales [R, C] of rows in pieces, each piece in tiles of its own, one after another: [at least all tiles' rows, up(C, 4)].

    The host waits for nothing: the rows are as many as could be needed.
    """
    rows = up(scales.shape[0] + 127 * len(counts_E), _TILE[0])
    spread = _bytes(scales).new_zeros(rows, up(scales.shape[1], _TILE[1]))
    spread[_places(counts_E, _TILE[0], scales.shape[0]), : scales.shape[1]] = _bytes(scales)
    return swizzled(spread.view(scales.dtype)).view(rows, -1)


def swizzled_of_columns(scales: Tensor, columns_E: Tensor) -> Tensor:
    """Scales [R, C] of which pieces of C belong together, each piece in tiles of its own, one after another: [up(R, 128), columns].

    columns_E: scales of a row in each piece. As many columns as could be needed.
    """
    columns = up(scales.shape[1] + 3 * len(columns_E), _TILE[1])
    rows = up(scales.shape[0], _TILE[0])
    spread = _bytes(scales).new_zeros(rows, columns)
    spread[: scales.shape[0], _places(columns_E, _TILE[1], scales.shape[1])] = _bytes(scales)
    down, along = rows // _TILE[0], columns // _TILE[1]
    tiles = _bytes(swizzled(spread.view(scales.dtype))).view(down * along, -1)
    # A piece's tiles stand together, its rows of tiles after one another; what is left behind the last one is as another piece.
    wide_E = (columns_E + 3) // 4
    wide_E = torch.cat((wide_E, along - wide_E.sum()[None]))
    end_E = wide_E.cumsum(0)
    here, below = torch.arange(along, device=scales.device), torch.arange(down, device=scales.device)[:, None]
    owner = torch.searchsorted(end_E, here, right=True)
    first = (end_E - wide_E)[owner]
    place = first * down + below * wide_E[owner] + here - first
    out = torch.empty_like(tiles)
    out[place.flatten()] = tiles
    return out.view(scales.dtype).view(rows, columns)


def expert_of_rows(grouped: Grouped) -> Tensor:
    """Which expert each row is of, int64 [R]."""
    experts = torch.arange(len(grouped.counts_E), device=grouped.data.device)
    return experts.repeat_interleave(grouped.counts_E, output_size=grouped.shape[grouped.axis])


def _places(counts_E: Tensor, multiple: int, total: int) -> Tensor:
    """Where each of `total` lines goes when every piece begins at a multiple."""
    whole_E = (counts_E + multiple - 1) // multiple * multiple
    shift_E = (whole_E.cumsum(0) - whole_E) - (counts_E.cumsum(0) - counts_E)
    return torch.arange(total, device=counts_E.device) + shift_E.repeat_interleave(counts_E, output_size=total)


def _prepared(data: Tensor, scale: Tensor, kind: ScalingType) -> Prepared:
    return Prepared(data=data, scales=[scale], kinds=[kind], swizzles=[SwizzleType.NO_SWIZZLE])


def _bytes(x: Tensor) -> Tensor:
    """Numbers of one byte as such, which every operation takes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _filled(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """x [..., R, C] with zeros below and behind."""
    more = (0, shape[1] - x.shape[-1], 0, shape[0] - x.shape[-2])
    return F.pad(_bytes(x), more).view(x.dtype) if any(more) else x
