"""torch's scaled products as its sources and cuBLAS's documents describe them, by plain loops in float64: for a machine without them.

They refuse what torch refuses (aten/src/ATen/native/cuda/ScaledBlas.cpp, GroupedBlas.cpp), and read scales by their documented places.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]).double()


def ceil(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple


def numbers(data: Tensor) -> Tensor:
    """The numbers of codes, float64 [R, S]; of E2M1 two to a byte, the first in the low half."""
    if data.dtype != torch.float4_e2m1fn_x2:
        return data.double()
    codes = data.view(torch.uint8).int()
    return torch.stack((E2M1[codes % 16], E2M1[codes // 16]), -1).flatten(-2)


def tiled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """What stands for each row and column in tiles of 128 x 4: cuBLAS, "1D block scaling factors layout"."""
    wide = ceil(columns, 4)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    tile = row // 128 * wide + column // 4
    inside = row % 128 % 32 * 16 + row % 128 // 32 * 4 + column % 4
    return scales.flatten().view(torch.uint8)[tile * 512 + inside].view(scales.dtype).double()


def one_scale(data: Tensor, scale: list[Tensor], kind: list[ScalingType], swizzle: list[SwizzleType]) -> Tensor:
    """data [R, S] times its scales, in float64."""
    x = numbers(data)
    r, s = x.shape
    if kind == [ScalingType.TensorWise]:
        assert scale[0].numel() == 1 and scale[0].dtype == torch.float32 and data.dtype.itemsize == 1
        return x * scale[0].double()
    if kind == [ScalingType.BlockWise1x128]:
        assert scale[0].shape == (r, ceil(s, 128)) and scale[0].dtype == torch.float32
        assert scale[0].stride(0) == 1 and scale[0].stride(1) in ({r} if ceil(s, 128) > 1 else {1, r})
        return x * scale[0].double().repeat_interleave(128, 1)[:, :s]
    if kind == [ScalingType.BlockWise128x128]:
        long = 4 * ceil(ceil(s, 128), 4)
        assert scale[0].shape == (long, ceil(r, 128)) and scale[0].dtype == torch.float32
        assert scale[0].stride(0) == 1 and scale[0].stride(1) in ({long} if ceil(r, 128) > 1 else {1, long})
        return x * scale[0].T.double().repeat_interleave(128, 0)[:r].repeat_interleave(128, 1)[:, :s]
    assert swizzle[0] == SwizzleType.SWIZZLE_32_4_4 and scale[0].is_contiguous()
    along = 32 if kind == [ScalingType.BlockWise1x32] else 16
    assert scale[0].dtype == (torch.float8_e8m0fnu if along == 32 else torch.float8_e4m3fn)
    assert scale[0].numel() == 128 * ceil(r, 128) * 4 * ceil(ceil(s, along), 4)
    x = x * tiled(scale[0], r, ceil(s, along)).repeat_interleave(along, 1)[:, :s]
    if along == 16:
        assert kind == [ScalingType.BlockWise1x16, ScalingType.TensorWise] and len(swizzle) == 2
        assert scale[1].dtype == torch.float32 and scale[1].numel() == 1
        x = x * scale[1].double()
    return x


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: list[Tensor],
    scale_recipe_a: list[ScalingType],
    scale_b: list[Tensor],
    scale_recipe_b: list[ScalingType],
    swizzle_a: list[SwizzleType],
    swizzle_b: list[SwizzleType],
    bias: None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Tensor:
    """The product of mat_a [M, K] by rows and mat_b [K, N] by columns."""
    assert not more and bias is None
    assert mat_a.is_contiguous() and mat_b.T.is_contiguous(), "Hopper multiplies rows by columns alone"
    packed = 2 if mat_a.dtype == torch.float4_e2m1fn_x2 else 1
    assert mat_a.shape[1] * packed % 16 == 0 and mat_b.shape[0] * packed % 16 == 0 and mat_b.shape[1] % 16 == 0
    assert min(*mat_a.shape, *mat_b.shape) > 0, "nothing is asked of a kernel"
    blocks = [ScalingType.BlockWise128x128]
    assert not (scale_recipe_a == blocks and scale_recipe_b == blocks)
    a = one_scale(mat_a, scale_a, scale_recipe_a, swizzle_a)
    b = one_scale(mat_b.T, scale_b, scale_recipe_b, swizzle_b)
    return (a @ b.T).to(output_dtype)


def scaled_grouped_mm(  # noqa: PLR0913, PLR0917
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: ScalingType,
    scale_b: Tensor,
    scale_recipe_b: ScalingType,
    swizzle_a: SwizzleType | None = None,
    swizzle_b: SwizzleType | None = None,
    bias: None = None,
    offs: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Rows of mat_a [R, K] times their piece of mat_b [E, K, N], or pieces of columns of mat_a [M, R] times rows of mat_b [R, N]."""
    assert offs is not None and offs.dtype == torch.int32 and output_dtype == torch.bfloat16 and bias is None
    assert mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn and scale_recipe_a == scale_recipe_b
    assert mat_a.is_contiguous() and mat_b.mT.is_contiguous()
    assert mat_a.shape[-1] % 16 == 0 and mat_b.shape[-2] % 16 == 0 and mat_b.shape[-1] % 16 == 0
    mx = scale_recipe_a == ScalingType.BlockWise1x32
    assert not mx or swizzle_a == swizzle_b == SwizzleType.SWIZZLE_32_4_4
    ends = [0, *offs.tolist()]
    pieces = list(pairwise(ends))
    if mat_b.dim() == 3:
        return _of_rows(mat_a, mat_b, scale_a, scale_b, pieces, mx)
    return _of_weights(mat_a, mat_b, scale_a, scale_b, pieces, mx)


Pieces = list[tuple[int, int]]


def _of_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, pieces: Pieces, mx: bool) -> Tensor:
    experts, k, n = b.shape
    out, tile = torch.full((len(a), n), float("nan"), dtype=torch.bfloat16), 0
    if mx:
        assert scale_a.dim() == 2 and scale_a.shape[0] >= len(a)
        assert scale_b.shape == (experts, 4 * ceil(k // 32, 4) * 128 * ceil(n, 128))
    else:
        assert scale_a.shape == (len(a),) and scale_b.shape == (experts, n) and scale_b.stride(1) == 1
    for e, (first, end) in enumerate(pieces):
        x, y = a[first:end].double(), b[e].double()
        if mx:
            long = 128 * ceil(end - first, 128) * 4 * ceil(k // 32, 4)
            own = scale_a.flatten()[tile : tile + long]
            tile += long
            x = x * tiled(own, end - first, k // 32).repeat_interleave(32, 1)
            y = y * tiled(scale_b[e], n, k // 32).repeat_interleave(32, 1).T
        else:
            x, y = x * scale_a[first:end, None].double(), y * scale_b[e].double()
        out[first:end] = (x @ y).to(torch.bfloat16)
    return out


def _of_weights(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, pieces: Pieces, mx: bool) -> Tensor:
    m, n = a.shape[0], b.shape[1]
    # What a sum over no rows leaves is not defined.
    out, tile = torch.full((len(pieces), m, n), float("nan"), dtype=torch.bfloat16), 0
    if mx:
        assert scale_a.dim() == scale_b.dim() == 2 and scale_a.shape[0] >= m and scale_b.shape[0] >= n
    else:
        assert scale_a.shape == (m * len(pieces),) and scale_b.shape == (n * len(pieces),)
    for e, (first, end) in enumerate(pieces):
        if first == end:
            continue
        assert first % 16 == 0 and (end - first) % (32 if mx else 16) == 0, (
            "rows begin at 16 bytes, and blocks are whole"
        )
        x, y = a[:, first:end].double(), b[first:end].double()
        if mx:
            columns = (end - first) // 32
            wide = 4 * ceil(columns, 4)
            own_a = scale_a.flatten()[128 * ceil(m, 128) * tile :][: 128 * ceil(m, 128) * wide]
            own_b = scale_b.flatten()[128 * ceil(n, 128) * tile :][: 128 * ceil(n, 128) * wide]
            tile += wide
            x = x * tiled(own_a, m, columns).repeat_interleave(32, 1)
            y = y * tiled(own_b, n, columns).repeat_interleave(32, 1).T
        else:
            x, y = x * scale_a.view(-1, m)[e][:, None].double(), y * scale_b.view(-1, n)[e].double()
        out[e] = (x @ y).to(torch.bfloat16)
    return out
