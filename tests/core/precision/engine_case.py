"""A stand-in for transformer-engine 2.20.2: its signatures, and products of its tensors as its sources read them, in float64."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.precision.scaled_case import E2M1, ceil


class DType(IntEnum):
    """Those of transformer_engine.pytorch.constants that are used."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


@dataclass
class Storage:
    """What a tensor of the package is, whatever its class: float64 numbers that it stands for."""

    numbers: Tensor


def fp8(data: Tensor, kind: DType) -> Tensor:
    assert data.dtype == torch.uint8 and data.is_contiguous() and isinstance(kind, DType)
    return data.view(_TORCH[kind]).double()


class Float8TensorStorage(Storage):
    def __new__(
        cls,
        *args: Any,
        data: Tensor | None,
        fp8_scale_inv: Tensor,
        fp8_dtype: DType,
        fake_dtype: torch.dtype | None = None,
        data_transpose: Tensor | None = None,
        quantizer: Any = None,
        transpose_invalid: bool | None = None,
        **kwargs: Any,
    ) -> Storage:
        assert data is not None and fp8_scale_inv.shape == (1,) and fp8_scale_inv.dtype == torch.float32
        assert data.shape[0] % 8 == 0 and data.shape[1] % 16 == 0
        return Storage(fp8(data, fp8_dtype) * fp8_scale_inv.double())


class Float8BlockwiseQTensorStorage(Storage):
    def __new__(
        cls,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Any,
        is_2D_scaled: bool,
        *args: Any,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Storage:
        assert rowwise_data is not None and rowwise_scale_inv is not None and rowwise_scale_inv.is_contiguous()
        assert rowwise_scale_inv.dtype == torch.float32
        (r, s), scales = rowwise_data.shape, rowwise_scale_inv.double()
        assert r % 8 == 0 and s % 16 == 0
        if is_2D_scaled:
            assert scales.shape == (ceil(r, 128), 4 * ceil(ceil(s, 128), 4))
            grid = scales.repeat_interleave(128, 0)[:r].repeat_interleave(128, 1)[:, :s]
        else:
            assert scales.shape == (ceil(s, 128), 4 * ceil(r, 4))
            grid = scales.T[:r].repeat_interleave(128, 1)[:, :s]
        return Storage(fp8(rowwise_data, fp8_dtype) * grid)


class MXFP8TensorStorage(Storage):
    def __new__(
        cls,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
        *args: Any,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Storage:
        assert rowwise_data is not None and rowwise_scale_inv is not None and not with_gemm_swizzled_scales
        r, s = rowwise_data.shape
        assert r % 32 == 0 and s % 32 == 0 and rowwise_scale_inv.dtype == torch.uint8
        assert rowwise_scale_inv.shape == (128 * ceil(r, 128), 4 * ceil(s // 32, 4))
        # By E8M0's rule: 2^(code - 127), and NaN for the last code.
        codes = rowwise_scale_inv.double()
        scales = torch.where(codes == 255, torch.nan, torch.exp2(codes - 127))
        return Storage(fp8(rowwise_data, fp8_dtype) * scales[:r, : s // 32].repeat_interleave(32, 1))


class NVFP4TensorStorage(Storage):
    def __new__(  # noqa: PLR0913
        cls,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        amax_rowwise: Tensor,
        amax_columnwise: Tensor | None,
        fp4_dtype: DType,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
        *args: Any,
        fake_dtype: torch.dtype | None = None,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        **kwargs: Any,
    ) -> Storage:
        assert rowwise_data is not None and fp4_dtype == DType.kFloat4E2M1 and not with_gemm_swizzled_scales
        r, s = rowwise_data.shape[0], 2 * rowwise_data.shape[1]
        assert rowwise_data.dtype == rowwise_scale_inv.dtype == torch.uint8 and r % 16 == 0 and s % 32 == 0
        assert rowwise_scale_inv.shape == (128 * ceil(r, 128), 4 * ceil(s // 16, 4))
        codes = rowwise_data.int()
        numbers = torch.stack((E2M1[codes % 16], E2M1[codes // 16]), -1).flatten(-2)
        scales = rowwise_scale_inv.view(torch.float8_e4m3fn).double()[:r, : s // 16].repeat_interleave(16, 1)
        assert amax_rowwise.shape == (1,) and amax_rowwise.dtype == torch.float32
        return Storage(numbers * scales * amax_rowwise.double() / 2688)


def general_gemm(  # noqa: PLR0913, PLR0917
    A: Storage,
    B: Storage,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor | None, ...]:
    assert (
        layout == "TN" and use_split_accumulator and out is not None and out.is_contiguous() and out.dtype == out_dtype
    )
    assert not (gelu or accumulate or grad or quantization_params) and alpha == 1 and beta is None and bias is None
    out.copy_(B.numbers @ A.numbers.T)
    return out, None, None, None


def general_grouped_gemm(  # noqa: PLR0913, PLR0917
    A: list[Storage],
    B: list[Storage],
    out: list[Tensor],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[list[Tensor], ...]:
    assert len(A) == len(B) == len(out) == len(quantization_params) and not single_output
    # The binding takes a list of numbers, and nothing else.
    assert m_splits == [len(b.numbers) for b in B]
    for a, b, y in zip(A, B, out, strict=True):
        general_gemm(a, b, out_dtype, layout=layout, out=y, use_split_accumulator=use_split_accumulator)
    return out, [], []


STORAGES = {
    "float8_tensor_storage": Float8TensorStorage,
    "float8_blockwise_tensor_storage": Float8BlockwiseQTensorStorage,
    "mxfp8_tensor_storage": MXFP8TensorStorage,
    "nvfp4_tensor_storage": NVFP4TensorStorage,
}


def install(monkeypatch: pytest.MonkeyPatch, **instead: Any) -> None:
    """A package of that name, until the test ends; `instead` stands for what it has of those names."""
    base = "transformer_engine.pytorch"
    modules = {
        name: types.ModuleType(name)
        for name in ("transformer_engine", base, f"{base}.cpp_extensions", f"{base}.constants", f"{base}.tensor", f"{base}.tensor.storage")
    }  # fmt: skip
    found: dict[str, Any] = {"general_gemm": general_gemm, "general_grouped_gemm": general_grouped_gemm} | instead
    for name in ("general_gemm", "general_grouped_gemm"):
        setattr(modules[f"{base}.cpp_extensions"], name, found[name])
    modules[f"{base}.constants"].DType = DType  # type: ignore[attr-defined]
    for name, kind in STORAGES.items():
        module = types.ModuleType(f"{base}.tensor.storage.{name}")
        setattr(module, kind.__name__, found.get(kind.__name__, kind))
        modules[module.__name__] = module
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
