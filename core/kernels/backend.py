"""Which implementation of an operation runs on a device, decided by what the device has and said by name."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import torch

from core.errors import ConfigError, Fault

MatmulBackend = Literal["native", "float32"]
KernelsBackend = Literal["reference", "triton"]
ExpertsBackend = Literal["fused_loop", "grouped_mm", "triton", "transformer_engine"]
ProductsName = Literal["reference", "torch", "transformer_engine"]


def matmul_backend(dtype: torch.dtype, device: torch.device) -> MatmulBackend:
    """`native`: the product runs in `dtype`. `float32`: operands are widened, the product runs in float32 and is rounded once.

    A processor without bfloat16 instructions multiplies bfloat16 matrices over a hundred times slower than float32 ones;
    widening gives the same products (exact in float32) and the same single rounding at the end. float16 is widened on every CPU.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return "native"
    if dtype == torch.float16:
        return "float32"
    # A build without oneDNN does not know the question either.
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "native" if fast else "float32"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, statistics and losses over values of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which matrices of `dtype` are multiplied on `device`, as `matmul_backend` says."""
    return torch.float32 if matmul_backend(dtype, device) == "float32" else dtype


def experts_backend(dtype: torch.dtype, device: torch.device, hidden: int, ffn: int) -> ExpertsBackend:
    """How experts of [ffn, hidden] run: on a GPU torch's grouped product in bfloat16, Triton's where that does not fit; one fused
    loop over experts elsewhere, and in float64.

    Torch's product wants rows of a multiple of 16 bytes. The environment variable ZOO_EXPERTS names another one; it is how
    `transformer_engine` is chosen. Raises ConfigError where what it names is not installed or cannot run there.
    """
    fits = hidden * dtype.itemsize % 16 == 0 and ffn * dtype.itemsize % 16 == 0
    asked = os.environ.get("ZOO_EXPERTS")
    if asked is not None:
        return _asked_experts(asked, dtype, device, fits)
    if device.type == "meta":  # of a plan, which asks for what a GPU would need
        return "grouped_mm" if dtype == torch.bfloat16 and fits else "fused_loop"
    if device.type != "cuda" or dtype == torch.float64:
        return "fused_loop"
    if dtype == torch.bfloat16 and fits:
        return "grouped_mm"
    return "triton" if kernels_backend(device) == "triton" else "fused_loop"


def _asked_experts(asked: str, dtype: torch.dtype, device: torch.device, fits: bool) -> ExpertsBackend:
    """The named back end, if it can run."""
    works = "fused_loop, or unset for what the device has"
    engine = importlib.util.find_spec("transformer_engine") is not None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    # Whether it is installed, whether it runs on the device, and whether it takes the operands.
    known: dict[ExpertsBackend, tuple[bool, bool, bool]] = {
        "fused_loop": (True, True, True),
        "grouped_mm": (True, True, fits and dtype != torch.float64),
        "triton": (_triton_is_installed(), device.type == "cuda" or interpreted, dtype != torch.float64),
        "transformer_engine": (engine, device.type == "cuda", dtype != torch.float64),
    }
    found = next((name for name in known if name == asked), None)
    if found is None:
        rule, works = "is no grouped product", f"grouped_mm, triton, transformer_engine, {works}"
    else:
        installed, here, fitting = known[found]
        if installed and here and fitting:
            return found
        package = "'transformer-engine[pytorch]'" if found == "transformer_engine" else "'triton>=3.7'"
        if not installed:
            rule, works = "is not installed here", f"{found} after `pip install {package}`, {works}"
        elif not here:
            rule = f"does not run on {device.type} tensors"
        else:
            rule = f"does not multiply {dtype} of these widths"
            rule += ", whose rows must be of a multiple of 16 bytes" if not fits and found == "grouped_mm" else ""
    raise ConfigError([Fault(setting="ZOO_EXPERTS", value=asked, rule=rule, works=works)])


def products_backend(device: torch.device) -> ProductsName:
    """What multiplies operands in low precision: `torch` on a GPU, by its scaled products; `reference`, exact and slow, elsewhere.

    The environment variable ZOO_PRODUCTS names another one; it is how `transformer_engine` is chosen, and how a recipe runs on a GPU that
    lacks its formats. What a back end then has on the device is for core/precision/backends to find out.
    Raises ConfigError for another value, and for transformer_engine where it is not installed or `device` is no GPU.
    """
    asked = os.environ.get("ZOO_PRODUCTS")
    if asked is None:
        return "torch" if device.type == "cuda" else "reference"
    if asked == "reference":
        return "reference"
    if asked == "torch":
        return "torch"
    rule, works = None, "reference, torch, or unset for what the device has"
    if asked != "transformer_engine":
        rule, works = "multiplies nothing", f"transformer_engine, {works}"
    elif device.type != "cuda":
        rule = f"does not run on {device.type} tensors"
    elif importlib.util.find_spec("transformer_engine") is None:
        rule = "is not installed here"
        works = f"transformer_engine after `pip install 'transformer-engine[pytorch]==2.20.2'`, {works}"
    if rule is not None:
        raise ConfigError([Fault(setting="ZOO_PRODUCTS", value=asked, rule=rule, works=works)])
    return "transformer_engine"


def kernels_backend(device: torch.device) -> KernelsBackend:
    """`triton`: the kernels of core/kernels/triton run, as they do on a GPU where Triton is installed. `reference`: torch's own.

    The environment variable ZOO_KERNELS, reference or triton, overrides that.
    Raises ConfigError for another value, and for triton where it is not installed or cannot run on `device`.
    """
    asked = os.environ.get("ZOO_KERNELS")
    if asked is None:
        return "triton" if device.type == "cuda" and _triton_is_installed() else "reference"
    if asked == "reference":
        return "reference"
    rule, works = None, "reference, or unset for what the device has"
    if asked != "triton":
        rule, works = "is none of the two implementations of the kernels", f"triton, {works}"
    elif not _triton_is_installed():
        rule, works = "Triton is not installed here", f"triton after `pip install 'triton>=3.7'`, {works}"
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        rule = f"Triton's kernels do not run on {device.type} tensors"
        works = f"triton on a GPU, or, slowly, with TRITON_INTERPRET=1 set before the start; {works}"
    if rule is not None:
        raise ConfigError([Fault(setting="ZOO_KERNELS", value=asked, rule=rule, works=works)])
    return "triton"


def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
