"""Products by torch's scaled ones, `torch.nn.functional.scaled_mm` and `scaled_grouped_mm`: FP8, MXFP8 and NVFP4 on matrix units.

What a device has is asked before (`missing`); sizes that its matrix units do not take are filled up with zeros, and cut off again.
They multiply the same numbers as the reference does, and add them in another order and with fewer bits: the error of an element stays
below 2^-10 of the sum of its terms' sizes, and is rounded once to the result's dtype (core/precision/backends/choose.py holds each to it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from core.precision.backends.layouts import (
    ALIGNMENT,
    Way,
    expert_of_rows,
    matrix,
    mx_scales_of,
    padded,
    prepared,
    swizzled,
    swizzled_of_columns,
    swizzled_of_rows,
)
from core.precision.backends.machine import Machine
from core.precision.backends.rules import missing
from core.precision.elements import E4M3
from core.precision.formats import MX, NVFP4, Blocks, Format, PerTensor, Quantised, element_of
from core.precision.grouped import Grouped


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A ProductsBackend. align: what every expert's rows are a multiple of (Recipe.align), on which it depends whether products that sum
    over them run in one call. grouped: products of all experts in one call, where torch has one for the two formats; one by one otherwise.
    """

    machine: Machine
    align: int
    grouped: bool = True

    def missing(self, a: Format, b: Format, dtype: torch.dtype) -> str | None:
        """Why the device does not multiply a by b to `dtype`; None where it does."""
        return missing(self.machine, a, b, dtype)

    def way(self, a: Format) -> Way:
        """How an operand is read where nothing is missing. Blocks are read as MX where only that is there, which is exact."""
        match a:
            case PerTensor():
                return "tensor"
            case Blocks():
                return "blocks" if self.machine.capability[0] == 9 else "mx"
            case MX():
                return "mx"
            case NVFP4():
                return "nv"

    def product(self, a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        (m, s), n = a_MS.shape, b_NS.shape[0]
        if not (m and n and s):
            return torch.zeros(m, n, dtype=dtype, device=a_MS.data.device)
        way = self.way(a_MS.format)
        a = prepared(a_MS, way, ALIGNMENT[way].rows)
        b = prepared(b_NS, way, ALIGNMENT[way].columns)
        scales = (a.scales, a.kinds, b.scales, b.kinds, a.swizzles, b.swizzles)
        return F.scaled_mm(a.data, b.data.T, *scales, output_dtype=dtype)[:m, :n]

    def of_rows(self, a_RS: Grouped, b_ENS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend; the host waits for the counts where experts are multiplied one by one."""
        rows, n = a_RS.shape[0], b_ENS.shape[1]
        if rows and n and a_RS.shape[1] and self._in_one(a_RS.format, b_ENS.format, dtype):
            return self._of_rows_in_one(a_RS, b_ENS)
        out = torch.empty(rows, n, dtype=dtype, device=a_RS.data.device)
        known = replace(a_RS, counts_E=a_RS.counts_E.cpu())
        counts = known.counts_E.tolist()
        for e, (count, y) in enumerate(zip(counts, out.split(counts), strict=True)):
            if count:
                y.copy_(self.product(known.expert(e), matrix(b_ENS, e), dtype))
        return out

    def of_weights(self, a_NR: Grouped, b_KR: Grouped, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend; the host waits for the counts where experts are multiplied one by one."""
        whole = self.align % ALIGNMENT[self.way(a_NR.format)].summed == 0
        if whole and min(*a_NR.shape, *b_KR.shape) and self._in_one(a_NR.format, b_KR.format, dtype):
            return self._of_weights_in_one(a_NR, b_KR)
        experts = len(a_NR.counts_E)
        out = torch.empty(experts, a_NR.shape[0], b_KR.shape[0], dtype=dtype, device=a_NR.data.device)
        counts = a_NR.counts_E.cpu()
        a, b = replace(a_NR, counts_E=counts), replace(b_KR, counts_E=counts)
        for e, y in enumerate(out):
            y.copy_(self.product(a.expert(e), b.expert(e), dtype))
        return out

    def _in_one(self, a: Format, b: Format, dtype: torch.dtype) -> bool:
        """Whether torch has a product of all experts: of E4M3 by a scale for a row, or MX, to bfloat16."""
        there = self.grouped and dtype == torch.bfloat16 and self.machine.capability[0] in (9, 10)
        if not (there and element_of(a) == element_of(b) == E4M3):
            return False
        return self.way(a) == "tensor" or (self.way(a) == "mx" and self.machine.capability[0] == 10)

    def _of_rows_in_one(self, a_RS: Grouped, b_ENS: Quantised) -> Tensor:
        way = self.way(a_RS.format)
        align, n = ALIGNMENT[way], b_ENS.shape[1]
        b = padded(b_ENS, align.columns, align.summed)
        # Rows lie beside each other whatever expert they are of, and their number is not padded.
        one = Quantised(
            data=a_RS.data, scales=_rows_scales(a_RS), tensor_scale=None, format=a_RS.format, shape=a_RS.shape
        )
        ends_E = a_RS.counts_E.cumsum(0).to(torch.int32)
        wide = padded(one, 1, align.summed)
        if way == "tensor":
            of_b = b.scales.view(-1, 1).expand(-1, b.shape[1]).contiguous()
            return _grouped(wide.data, b.data.mT, one.scales, of_b, ends_E)[:, :n]
        tiles_b = [swizzled(mx_scales_of(matrix(b, e))).view(torch.uint8) for e in range(len(b.data))]
        tiles_a = swizzled_of_rows(mx_scales_of(wide), a_RS.counts_E)
        return _grouped(wide.data, b.data.mT, tiles_a, torch.stack(tiles_b).view(tiles_a.dtype), ends_E)[:, :n]

    def _of_weights_in_one(self, a_NR: Grouped, b_KR: Grouped) -> Tensor:
        """Rows of an expert are a multiple of a block, as `quantise_grouped_columns` demands, and of 16 (Recipe.align)."""
        way, counts_E = self.way(a_NR.format), a_NR.counts_E
        ends_E = counts_E.cumsum(0).to(torch.int32)
        a, b = (padded(_one(x), 16, 1) for x in (a_NR, b_KR))
        if way == "tensor":
            sides = ((a_NR.scales, a), (b_KR.scales, b))
            of_a, of_b = (scale_E.view(-1, 1).expand(-1, x.shape[0]).flatten() for scale_E, x in sides)
        else:
            of_a, of_b = (swizzled_of_columns(mx_scales_of(x), counts_E // 32) for x in (a, b))
        out = _grouped(a.data, b.data.mT, of_a, of_b, ends_E)
        # What a sum over no rows leaves is not defined.
        out = out.masked_fill_((counts_E == 0)[:, None, None], 0)
        return out[:, : a_NR.shape[0], : b_KR.shape[0]]


def _rows_scales(a_RS: Grouped) -> Tensor:
    """Those of blocks, or each row's own of experts with one scale."""
    return a_RS.scales[expert_of_rows(a_RS)] if isinstance(a_RS.format, PerTensor) else a_RS.scales


def _one(x: Grouped) -> Quantised:
    """All experts' pieces as one tensor; of those with one scale for each only the codes count."""
    scales = x.scales.new_ones(1, 1) if isinstance(x.format, PerTensor) else x.scales
    return Quantised(data=x.data, scales=scales, tensor_scale=None, format=x.format, shape=x.shape)


def _grouped(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, ends_E: Tensor) -> Tensor:
    """Torch's product of all experts: scales of rows in float32, or E8M0 in tiles."""
    tiles = of_a.dtype == torch.float8_e8m0fnu
    kind = F.ScalingType.BlockWise1x32 if tiles else F.ScalingType.RowWise
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if tiles else F.SwizzleType.NO_SWIZZLE
    return F.scaled_grouped_mm(  # type: ignore[attr-defined, no-any-return]
        a, b, of_a, kind, of_b, kind, swizzle, swizzle, offs=ends_E, output_dtype=torch.bfloat16
    )
