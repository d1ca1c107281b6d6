"""Rows on their way between ranks in low precision: codes and scales of a row side by side as bytes, so that one message carries both
(report section 5.3, DeepSeek-V3 section 3.3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.config.recipe import Recipe
from core.precision.formats import MX, Format, Quantised, element_of, quantise
from core.precision.imagined import imagined
from core.precision.operands import format_of


@dataclass(frozen=True, kw_only=True)
class Parcels:
    """Rows as bytes, and back; see core.parallel.collectives.Packing. Every row has scales of its own, all of them powers of two: what
    has come out once goes in and comes out as it is, however many ways a row travels."""

    format: Format

    def pack(self, x_RH: Tensor) -> Tensor:
        """[R, bytes] uint8: the codes of a row, then its scales."""
        nothing = x_RH.is_meta or not x_RH.numel()
        made = imagined(x_RH.shape, self.format, x_RH.device) if nothing else quantise(x_RH, self.format)
        return torch.cat([made.data.view(torch.uint8), made.scales.view(torch.uint8)], dim=1)

    def unpack(self, bytes_RB: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """What `pack` was given, rounded: [R, columns] in dtype."""
        shape, element = (bytes_RB.shape[0], columns), element_of(self.format)
        if bytes_RB.is_meta or not bytes_RB.numel():
            return bytes_RB.new_empty(shape, dtype=dtype)
        of_codes = -(-columns * element.bits // 8)
        of_scale = torch.float8_e8m0fnu if isinstance(self.format, MX) else torch.float32
        # New memory, at whose beginning numbers of four bytes may lie.
        data, scales = (
            part.clone(memory_format=torch.contiguous_format)
            for part in (bytes_RB[:, :of_codes], bytes_RB[:, of_codes:])
        )
        made = Quantised(
            data=data if element.bits == 4 else data.view(element.dtype),
            scales=scales.view(of_scale),
            tensor_scale=None,
            format=self.format,
            shape=shape,
        )
        return made.dequantise(dtype)


def parcels_of(recipe: Recipe) -> Parcels | None:
    """How a recipe's tokens travel to their experts; None for in the run's dtype. core/check says which recipes can have it."""
    operand = recipe.forward.input
    if not recipe.dispatch or operand is None:
        return None
    return Parcels(format=format_of(operand))
