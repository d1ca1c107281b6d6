"""SwiGLU times a row's weight in low precision, as the second product of experts reads it (report section 4.3.4).

Torch's form, the activation rounded to the run's dtype and then to a format, is the definition; Triton's does both in one pass, and gives
the bits that its own activation and `quantise_grouped` give one after the other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.config.architecture import SWIGLU
from core.kernels.activation import rounded_forward
from core.kernels.backend import kernels_backend
from core.precision.formats import NVFP4, Format, PerTensor, block_of, cast_of, element_of, stored_scales
from core.precision.grouped import Grouped, largest_of_experts, quantise_grouped
from core.precision.scales import float32_scales

# Blocks of so many fit a program's tile.
_LARGEST_BLOCK = 1024


def swiglu_quantised(
    product_R2F: Tensor, weight_R: Tensor | None, counts_E: Tensor, format: Format, *, amax_E: Tensor | None = None
) -> Grouped:
    """silu(gate) * up, times weight_R where given, of rows sorted by expert, rounded to `format` along F: [R, F].

    product_R2F: [R, 2 * F], gate first. counts_E: [E] int64, summing to R. amax_E: [E], instead of measuring each expert's, for PerTensor
    and NVFP4; without it Triton's form reads the product twice. An expert that is not finite has no scale that is a number; its codes,
    and scales of blocks, then mean nothing. Raises ValueError as `quantise_grouped` does, but not for counts that lie on a GPU.
    """
    if not _fuses(product_R2F, counts_E, format, amax_E):
        act = rounded_forward(product_R2F, SWIGLU, weight_R)
        return quantise_grouped(act, counts_E, format, amax_E=amax_E)
    return _fused(product_R2F, weight_R, counts_E, format, amax_E)


def swiglu_amax(product_R2F: Tensor, weight_R: Tensor | None, counts_E: Tensor) -> Tensor:
    """The largest size in each expert's rows of the activation, [E] float32 at least; zero without rows."""
    if runs_kernels(product_R2F):
        from core.kernels.triton.swiglu_quantise import largest_of_rows

        gate, up = product_R2F.chunk(2, dim=1)
        return largest_of_experts(largest_of_rows(gate, up, weight_R), counts_E)
    sizes = rounded_forward(product_R2F, SWIGLU, weight_R).abs()
    largest_R = sizes.amax(1) if sizes.numel() else sizes.sum(1)
    return largest_of_experts(largest_R.to(torch.promote_types(largest_R.dtype, torch.float32)), counts_E)


def runs_kernels(product: Tensor) -> bool:
    """Whether kernels round the activation of this product without writing it."""
    return product.dtype != torch.float64 and not product.is_meta and kernels_backend(product.device) == "triton"


def _fuses(product: Tensor, counts_E: Tensor, format: Format, amax_E: Tensor | None) -> bool:
    """Whether there is a kernel for it; what is refused is refused by `quantise_grouped`."""
    if not runs_kernels(product):
        return False
    if isinstance(format, PerTensor):
        fits = True
    else:
        high, wide = block_of(format, (1, 1))
        fits = high == 1 and wide & (wide - 1) == 0 and wide <= _LARGEST_BLOCK
        fits = fits and (amax_E is None or isinstance(format, NVFP4))
    # The host waits for no GPU to count.
    fits = fits and (counts_E.device.type != "cpu" or int(counts_E.sum()) == product.shape[0])
    return fits and (amax_E is None or amax_E.shape in ((), counts_E.shape))


def _fused(
    product_R2F: Tensor, weight_R: Tensor | None, counts_E: Tensor, format: Format, amax_E: Tensor | None
) -> Grouped:
    from core.kernels.triton.swiglu_quantise import largest_of_rows, quantise_rows

    gate, up = product_R2F.chunk(2, dim=1)
    how, amax_R, of_experts = cast_of(format), None, None
    if isinstance(format, PerTensor | NVFP4):
        if amax_E is None:
            amax_E = largest_of_experts(largest_of_rows(gate, up, weight_R), counts_E)
        amax_E = amax_E.float().expand(len(counts_E))
        amax_R = amax_E.repeat_interleave(counts_E, output_size=len(gate))
    codes, scales, largest_R = quantise_rows(gate, up, weight_R, how, amax_R)
    if amax_E is not None:
        finite_E = largest_of_experts(largest_R, counts_E).isfinite()
        of_experts = float32_scales(torch.where(finite_E, amax_E, math.nan), how.largest).stored
    stored = of_experts if scales is None else stored_scales(scales, format)
    assert stored is not None, "every format has scales"
    return Grouped(
        data=codes if isinstance(format, NVFP4) else codes.view(element_of(format).dtype),
        scales=stored,
        tensor_scale_E=of_experts if isinstance(format, NVFP4) else None,
        counts_E=counts_E,
        axis=0,
        format=format,
        shape=(gate.shape[0], gate.shape[1]),
    )
