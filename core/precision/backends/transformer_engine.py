"""Products by NVIDIA's Transformer Engine of operands that were rounded here: its tensors are made of our codes and scales.

So what is multiplied stays the definition's, and its own quantisers are not called. The interfaces are those of release 2.20.2
(`cpp_extensions.general_gemm`, `general_grouped_gemm`, and the storages of `tensor.storage`), and are compared with that when they are
loaded: a call whose arguments have come to mean something else would be silently wrong.

Its layout TN multiplies b @ a.T of matrices that lie by rows, which is all that is asked of it here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import ConfigError, Fault
from core.kernels.transformer_engine import SIGNATURE as GROUPED
from core.precision.backends.layouts import Alignment, matrix, padded, row_scales, up
from core.precision.backends.machine import Machine
from core.precision.backends.rules import missing
from core.precision.elements import E2M1, E4M3
from core.precision.formats import MX, NVFP4, Blocks, Format, PerTensor, Quantised, block_of, element_of
from core.precision.grouped import Grouped

_RELEASE = "2.20.2"
# The parameters that are passed, with their defaults ("" where something must be).
GEMM = (
    ("A", ""),
    ("B", ""),
    ("out_dtype", "None"),
    ("quantization_params", "None"),
    ("layout", "'TN'"),
    ("out", "None"),
    ("use_split_accumulator", "False"),
)
# Those of the storages, all of which are passed by name.
STORAGES: Mapping[str, tuple[str, ...]] = {
    "Float8TensorStorage": ("data", "fp8_scale_inv", "fp8_dtype", "fake_dtype"),
    "Float8BlockwiseQTensorStorage": (
        "rowwise_data",
        "rowwise_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
        "fp8_dtype",
        "quantizer",
        "is_2D_scaled",
        "fake_dtype",
    ),
    "MXFP8TensorStorage": (
        "rowwise_data",
        "rowwise_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
        "fp8_dtype",
        "quantizer",
        "with_gemm_swizzled_scales",
        "fake_dtype",
    ),
    "NVFP4TensorStorage": (
        "rowwise_data",
        "rowwise_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
        "amax_rowwise",
        "amax_columnwise",
        "fp4_dtype",
        "quantizer",
        "with_gemm_swizzled_scales",
        "fake_dtype",
    ),
}


def alignment_of(format: Format) -> Alignment:
    """What Transformer Engine wants sizes to be multiples of: whole blocks of 32 in every direction of MX and NVFP4, 16 otherwise."""
    if isinstance(format, MX | NVFP4):
        return Alignment(rows=32, columns=32, summed=32)
    return Alignment(rows=16, columns=16, summed=128 if isinstance(format, Blocks) else 16)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A ProductsBackend by the package's functions, classes (by name) and dtypes. The host waits for the counts of experts' rows."""

    machine: Machine
    gemm: Callable[..., Any]
    grouped: Callable[..., Any]
    storages: Mapping[str, Callable[..., Any]]
    dtypes: Any

    def missing(self, a: Format, b: Format, dtype: torch.dtype) -> str | None:
        """Why the device does not multiply a by b to `dtype`; None where it does."""
        if self.machine.kind != "cuda":
            return f"Transformer Engine runs on NVIDIA's GPUs, and not on {self.machine.name}"
        return missing(self.machine, a, b, dtype)

    def product(self, a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        (m, s), n = a_MS.shape, b_NS.shape[0]
        if not (m and n and s):
            return torch.zeros(m, n, dtype=dtype, device=a_MS.data.device)
        a, b, out = self._operands(a_MS, b_NS, dtype)
        self.gemm(b, a, out_dtype=dtype, quantization_params=None, layout="TN", out=out, use_split_accumulator=True)
        return out[:m, :n]

    def of_rows(self, a_RS: Grouped, b_ENS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        known = replace(a_RS, counts_E=a_RS.counts_E.cpu())
        out = torch.zeros(a_RS.shape[0], b_ENS.shape[1], dtype=dtype, device=a_RS.data.device)
        counts = known.counts_E.tolist()
        experts = range(len(counts))
        self._all([known.expert(e) for e in experts], [matrix(b_ENS, e) for e in experts], out.split(counts))
        return out

    def of_weights(self, a_NR: Grouped, b_KR: Grouped, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        counts_E = a_NR.counts_E.cpu()
        a, b = replace(a_NR, counts_E=counts_E), replace(b_KR, counts_E=counts_E)
        out = torch.zeros(len(counts_E), a.shape[0], b.shape[0], dtype=dtype, device=a.data.device)
        experts = range(len(counts_E))
        self._all([a.expert(e) for e in experts], [b.expert(e) for e in experts], tuple(out))
        return out

    def _all(self, left: Sequence[Quantised], right: Sequence[Quantised], outs: Sequence[Tensor]) -> None:
        """Every left @ right.T into its own part of the result, in one call; those without numbers are left out."""
        held = [(a, b, y) for a, b, y in zip(left, right, outs, strict=True) if a.data.numel() and b.data.numel()]
        if not held:
            return
        made = [self._operands(a, b, y.dtype) for a, b, y in held]
        lefts, rights, results = ([row[side] for row in made] for side in range(3))
        rows = [len(result) for result in results]
        nothing = [None] * len(held)
        dtype = results[0].dtype
        self.grouped(rights, lefts, results, nothing, dtype, layout="TN", m_splits=rows, use_split_accumulator=True)
        for (_, _, y), result in zip(held, results, strict=True):
            y.copy_(result[: y.shape[0], : y.shape[1]])

    def _operands(self, a: Quantised, b: Quantised, dtype: torch.dtype) -> tuple[Any, Any, Tensor]:
        """Both as tensors of the package, and a place for their product, of aligned sizes."""
        align = alignment_of(a.format)
        a, b = padded(a, align.rows, align.summed), padded(b, align.columns, align.summed)
        out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.data.device)
        return self._tensor(a, dtype), self._tensor(b, dtype), out

    def _tensor(self, x: Quantised, dtype: torch.dtype) -> Any:
        """x [R, S], whose sizes are aligned, as a tensor of the package that is read by rows alone."""
        data = x.data.contiguous().view(torch.uint8)
        if isinstance(x.format, PerTensor):
            kind = self._element(x.format)
            scale = x.scales.reshape(1)
            return self.storages["Float8TensorStorage"](
                data=data, fp8_scale_inv=scale, fp8_dtype=kind, fake_dtype=dtype
            )
        more: dict[str, Any] = {
            "rowwise_data": data,
            "columnwise_data": None,
            "columnwise_scale_inv": None,
            "quantizer": None,
            "fake_dtype": dtype,
        }
        match x.format:
            case Blocks():
                more |= {"rowwise_scale_inv": _block_scales(x), "fp8_dtype": self._element(x.format)}
                square = block_of(x.format, x.shape)[0] != 1
                return self.storages["Float8BlockwiseQTensorStorage"](is_2D_scaled=square, **more)
            case MX():
                more |= {"rowwise_scale_inv": _whole_tiles(x.scales), "fp8_dtype": self._element(x.format)}
                return self.storages["MXFP8TensorStorage"](with_gemm_swizzled_scales=False, **more)
            case NVFP4():
                assert x.tensor_scale is not None, "NVFP4 has a scale for the tensor"
                more |= {
                    "rowwise_scale_inv": _whole_tiles(row_scales(x)),
                    "fp4_dtype": self.dtypes.kFloat4E2M1,
                    # It takes the largest number, and makes the scale of it: amax / (6 * 448).
                    "amax_rowwise": x.tensor_scale.reshape(1) * (E2M1.largest * E4M3.largest),
                    "amax_columnwise": None,
                }
                return self.storages["NVFP4TensorStorage"](with_gemm_swizzled_scales=False, **more)

    def _element(self, format: Format) -> Any:
        return self.dtypes.kFloat8E4M3 if element_of(format) == E4M3 else self.dtypes.kFloat8E5M2


def load(machine: Machine) -> Engine:
    """The installed Transformer Engine. Raises ConfigError where there is none, or one whose interfaces are others."""
    try:
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.cpp_extensions import general_gemm as gemm
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm as grouped

        storages = _storages()
    except (ImportError, OSError) as error:
        raise _refused(f"cannot be loaded here ({error})") from None
    found = _parameters(gemm)
    if list(found)[:2] != ["A", "B"] or any(found.get(name) != default for name, default in GEMM):
        raise _refused(_other("general_gemm", found))
    found = _parameters(grouped)
    if tuple(found.items())[: len(GROUPED)] != GROUPED:
        raise _refused(_other("general_grouped_gemm", found))
    for name, passed in STORAGES.items():
        found = _parameters(storages[name].__new__)
        needed = {key for key, default in found.items() if not default} - {"cls"}
        if not set(passed) <= set(found) or not needed <= set(passed):
            raise _refused(_other(name, found))
    return Engine(machine=machine, gemm=gemm, grouped=grouped, storages=storages, dtypes=DType)


def _storages() -> dict[str, Callable[..., Any]]:
    """The package's classes of tensors, by name."""
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    kinds = (Float8TensorStorage, Float8BlockwiseQTensorStorage, MXFP8TensorStorage, NVFP4TensorStorage)
    return {kind.__name__: kind for kind in kinds}


def _parameters(call: Callable[..., Any]) -> dict[str, str]:
    """The parameters of a function that can be passed by name, with their defaults, "" for those without one."""
    known = inspect.signature(call).parameters.values()
    return {
        given.name: "" if given.default is inspect.Parameter.empty else repr(given.default)
        for given in known
        if given.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }


def _other(name: str, found: Mapping[str, str]) -> str:
    shown = ", ".join(f"{key}={default}" if default else key for key, default in found.items())
    return f"its {name}({shown}) is not that of release {_RELEASE}, which is called here"


def _refused(rule: str) -> ConfigError:
    works = f"transformer_engine after `pip install 'transformer-engine[pytorch]=={_RELEASE}'`, reference, torch, or unset for what the device has"
    return ConfigError([Fault(setting="ZOO_PRODUCTS", value="transformer_engine", rule=rule, works=works)])


def _block_scales(x: Quantised) -> Tensor:
    """Of 128 x 128: [R / 128, up(S / 128, 4)]. Of 1 x 128: [S / 128, up(R, 4)], a row after another of the transpose."""
    scales = x.scales if block_of(x.format, x.shape)[0] != 1 else x.scales.T
    return F.pad(scales, (0, -scales.shape[1] % 4)).contiguous()


def _whole_tiles(scales: Tensor) -> Tensor:
    """Bytes of scales [R, C] with zeros up to [up(R, 128), up(C, 4)], in rows: the package orders them itself."""
    rows, columns = scales.shape
    return F.pad(scales.view(torch.uint8), (0, up(columns, 4) - columns, 0, up(rows, 128) - rows))
