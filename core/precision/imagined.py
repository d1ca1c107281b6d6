"""What quantising and its products make of tensors without data: memory of the right shapes and nothing beside it, as fused kernels
make it. A plan runs modules on the meta device with these (launch/plan/trace.py); tests hold the shapes against `quantise`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.precision.elements import E4M3
from core.precision.formats import MX, NVFP4, Format, PerTensor, Quantised, block_of, element_of
from core.precision.grouped import Axis, Grouped


def imagined(shape: Sequence[int], format: Format, device: torch.device) -> Quantised:
    """A tensor of `shape` [..., R, C] as `quantise` lays it out, uninitialised."""
    *front, rows, columns = shape
    height, width = block_of(format, tuple(shape))
    grid = (1, 1) if isinstance(format, PerTensor) else (-(-rows // height), -(-columns // width))
    return Quantised(
        data=_data(shape, format, device),
        scales=torch.empty(*front, *grid, dtype=_scale_dtype(format), device=device),
        tensor_scale=torch.empty(*front, 1, 1, device=device) if isinstance(format, NVFP4) else None,
        format=format,
        shape=tuple(shape),
    )


def imagined_rows(
    shape: tuple[int, int], counts_E: Tensor, format: Format, axis: Axis, device: torch.device
) -> Grouped:
    """Rows of experts of `shape` [R, C], or [C, R] where axis is 1, as core/precision/grouped.py lays them out, uninitialised."""
    experts = len(counts_E)
    height, width = block_of(format, shape)
    grid = (experts,) if isinstance(format, PerTensor) else (-(-shape[0] // height), -(-shape[1] // width))
    return Grouped(
        data=_data(shape, format, device),
        scales=torch.empty(grid, dtype=_scale_dtype(format), device=device),
        tensor_scale_E=torch.empty(experts, device=device) if isinstance(format, NVFP4) else None,
        counts_E=counts_E,
        axis=axis,
        format=format,
        shape=shape,
    )


class Imagined:
    """Products of operands without data: their results alone."""

    def product(self, a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        return torch.empty(a_MS.shape[-2], b_NS.shape[-2], dtype=dtype, device=a_MS.data.device)

    def of_rows(self, a_RS: Grouped, b_ENS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        return torch.empty(a_RS.shape[0], b_ENS.shape[-2], dtype=dtype, device=a_RS.data.device)

    def of_weights(self, a_NR: Grouped, b_KR: Grouped, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        experts = len(a_NR.counts_E)
        return torch.empty(experts, a_NR.shape[0], b_KR.shape[0], dtype=dtype, device=a_NR.data.device)


def _data(shape: Sequence[int], format: Format, device: torch.device) -> Tensor:
    element = element_of(format)
    stored = (*shape[:-1], -(-shape[-1] // 2)) if element.bits == 4 else tuple(shape)
    return torch.empty(stored, dtype=element.dtype, device=device)


def _scale_dtype(format: Format) -> torch.dtype:
    match format:
        case MX():
            return torch.float8_e8m0fnu
        case NVFP4():
            return E4M3.dtype
        case _:
            return torch.float32
