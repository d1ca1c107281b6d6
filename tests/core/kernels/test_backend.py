"""Which implementation runs: decided by device and dtype alone."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from core.errors import ConfigError
from core.kernels import backend
from core.kernels.backend import experts_backend, kernels_backend, matmul_backend
from tests.core.numbers import use_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_run_in_their_own_dtype(dtype: torch.dtype) -> None:
    assert matmul_backend(dtype, CPU) == "native"
    assert matmul_backend(dtype, GPU) == "native"


def test_float16_is_widened_on_a_processor_alone() -> None:
    assert matmul_backend(torch.float16, CPU) == "float32"
    assert matmul_backend(torch.float16, GPU) == "native"


def test_bfloat16_is_widened_only_on_a_processor_that_cannot_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "float32")
    assert matmul_backend(torch.bfloat16, CPU) == "float32"
    assert matmul_backend(torch.bfloat16, GPU) == "native"
    use_backend(monkeypatch, "native")
    assert matmul_backend(torch.bfloat16, CPU) == "native"


def test_a_build_without_onednn_widens_and_is_not_asked_further(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> bool:
        raise AttributeError("no such operator")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", unknown)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert matmul_backend(torch.bfloat16, CPU) == "float32"


def test_experts_run_grouped_on_a_gpu_by_torch_or_else_by_triton_and_as_a_loop_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZOO_EXPERTS", raising=False)
    monkeypatch.delenv("ZOO_KERNELS", raising=False)
    assert experts_backend(torch.bfloat16, GPU, 512, 192) == "grouped_mm"
    assert {experts_backend(d, CPU, 512, 192) for d in (torch.bfloat16, torch.float32, torch.float64)} == {"fused_loop"}
    assert experts_backend(torch.float64, GPU, 512, 192) == "fused_loop"
    not_for_torch = ((torch.bfloat16, 508, 192), (torch.bfloat16, 512, 190), (torch.float32, 512, 192))
    assert {experts_backend(dtype, GPU, *widths) for dtype, *widths in not_for_torch} == {"triton"}
    monkeypatch.setenv("ZOO_KERNELS", "reference")
    assert {experts_backend(dtype, GPU, *widths) for dtype, *widths in not_for_torch} == {"fused_loop"}


@pytest.mark.parametrize(
    ("name", "dtype", "device", "widths", "message"),
    [
        ("loop", torch.float32, CPU, (8, 8), "ZOO_EXPERTS=loop: is no grouped product. Works: grouped_mm, triton"),
        ("grouped_mm", torch.float32, CPU, (8, 6), "of these widths, whose rows must be of a multiple of 16 bytes"),
        ("grouped_mm", torch.float64, CPU, (8, 8), "does not multiply torch.float64"),
        ("triton", torch.float64, GPU, (8, 8), "does not multiply torch.float64"),
        ("transformer_engine", torch.bfloat16, GPU, (8, 8), "is not installed here. Works: transformer_engine after"),
    ],
)
def test_experts_that_cannot_run_as_asked_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    widths: tuple[int, int],
    message: str,
) -> None:
    monkeypatch.setenv("ZOO_EXPERTS", name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if "engine" in wanted else wanted)
    with pytest.raises(ConfigError, match=re.escape(message)):
        experts_backend(dtype, device, *widths)


def test_experts_run_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype, device in (
        ("fused_loop", torch.bfloat16, GPU),
        ("grouped_mm", torch.float32, CPU),
        ("triton", torch.bfloat16, GPU),
        ("transformer_engine", torch.bfloat16, GPU),
    ):
        monkeypatch.setenv("ZOO_EXPERTS", name)
        monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: wanted)
        assert experts_backend(dtype, device, 8, 8) == name


def test_triton_does_not_run_on_a_cpu_outside_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_EXPERTS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="ZOO_EXPERTS=triton: does not run on cpu tensors"):
        experts_backend(torch.float32, CPU, 8, 8)


def test_kernels_run_in_triton_where_there_is_a_gpu_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZOO_KERNELS", raising=False)
    for installed in (True, False):
        monkeypatch.setattr(backend, "_triton_is_installed", lambda answer=installed: answer)
        assert kernels_backend(GPU) == ("triton" if installed else "reference")
        assert kernels_backend(CPU) == "reference"


def test_a_variable_of_the_environment_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_triton_is_installed", lambda: True)
    monkeypatch.setenv("ZOO_KERNELS", "reference")
    assert kernels_backend(GPU) == kernels_backend(CPU) == "reference"
    monkeypatch.setenv("ZOO_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels_backend(GPU) == kernels_backend(CPU) == "triton"


@pytest.mark.parametrize(
    ("asked", "installed", "says"),
    [
        ("cuda", True, r"ZOO_KERNELS=cuda: is none of the two .* Works: triton, reference, or unset"),
        ("", True, "ZOO_KERNELS=: is none of the two"),
        ("triton", False, r"ZOO_KERNELS=triton: Triton is not installed here\. Works: triton after `pip install"),
        ("triton", True, r"do not run on cpu tensors\. Works: triton on a GPU, or, slowly, with TRITON_INTERPRET=1"),
    ],
)
def test_kernels_that_cannot_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, installed: bool, says: str
) -> None:
    monkeypatch.setattr(backend, "_triton_is_installed", lambda: installed)
    monkeypatch.setenv("ZOO_KERNELS", asked)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=says):
        kernels_backend(CPU)
