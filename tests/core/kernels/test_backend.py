"""Which implementation runs: decided by device and dtype alone."""

from __future__ import annotations

import pytest
import torch

from core.errors import ConfigError
from core.kernels import backend
from core.kernels.backend import experts_backend, kernels_backend, matmul_backend
from tests.core.numbers import use_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_products_run_in_their_own_dtype(dtype: torch.dtype) -> None:
    assert matmul_backend(dtype, CPU) == "native"
    assert matmul_backend(dtype, GPU) == "native"


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


def test_experts_run_grouped_on_a_gpu_in_bfloat16_and_as_a_loop_elsewhere() -> None:
    assert experts_backend(torch.bfloat16, GPU, 512, 192) == "grouped_mm"
    assert {experts_backend(d, CPU, 512, 192) for d in (torch.bfloat16, torch.float32, torch.float64)} == {"fused_loop"}
    assert experts_backend(torch.float32, GPU, 512, 192) == "fused_loop"
    assert {experts_backend(torch.bfloat16, GPU, *widths) for widths in ((508, 192), (512, 190))} == {"fused_loop"}


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
