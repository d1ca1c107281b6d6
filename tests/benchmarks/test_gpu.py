"""The script that checks and times all kernels on a GPU, run in Triton's interpreter: it must not rot where there is none."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import SHAPES, run, small
from core.kernels.triton import permute

MIXTRAL = small(next(shape for shape in SHAPES if shape.name == "mixtral"))
CPU = torch.device("cpu")


def test_every_kernel_is_what_its_reference_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([MIXTRAL], 5, CPU) == []
    table = capsys.readouterr().out
    for name in ("top-k", "row map", "unpermute", "SwiGLU x weight backward", "weight gradient", "cross-entropy"):
        assert name in table
    # What this processor has in low precision, and what it lacks.
    assert "product of e5m2 with one scale by e4m3 with one scale\t0." in table
    assert "of_weights of MX e4m3 by MX e4m3\tit needs compute capability 10.0" in table


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = permute.sum_of_rows

    def doubled(*args: object, **more: object) -> object:
        out, other = right(*args, **more)  # type: ignore[arg-type]
        return 2 * out, other

    monkeypatch.setattr(permute, "sum_of_rows", doubled)
    wrong = run([MIXTRAL], 5, CPU)
    assert len(wrong) == 1 and wrong[0].startswith("mixtral/unpermute")
