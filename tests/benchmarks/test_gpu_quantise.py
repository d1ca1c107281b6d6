"""The tables of casts on a GPU, made in Triton's interpreter: they must not rot where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import gpu_quantise
from tests.core.kernels.triton_case import CPU, kernels

pytest.importorskip("triton", minversion="3.7")


def millisecond(action: Callable[[], Any]) -> float:
    """What every action takes here, once it has run."""
    action()
    return 1e-3


def test_every_cast_has_a_line_and_the_bits_of_torch() -> None:
    with kernels("triton"):
        table = list(gpu_quantise.lines(3, 130, millisecond, 1e6, CPU))
    cells = [line.split("\t") for line in table[2:]]
    assert len(cells) == 16
    assert [row[5] for row in cells[:-1]] == ["equal"] * 15
    # 390 numbers of 2 bytes in, 390 codes and a scale out, in a millisecond; a copy would take 1.17.
    assert cells[0] == ["e4m3 with one scale", "one", "1.000", "0", "117%", "equal"]


def test_other_bits_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_quantise.quantise

    def flipped(x: torch.Tensor, format: gpu_quantise.Format, **more: torch.Tensor) -> gpu_quantise.Quantised:
        made = right(x, format, **more)
        made.data.view(torch.uint8)[0, 0] ^= 1
        return made

    monkeypatch.setattr(gpu_quantise, "quantise", flipped)
    table = gpu_quantise.lines(2, 16, lambda _: 1.0, 1e9, CPU)
    assert {line.split("\t")[5] for line in list(table)[2:-1]} == {"DIFFERENT"}


def test_rows_of_experts_have_lines_of_both_copies() -> None:
    with kernels("triton"):
        table = list(gpu_quantise.grouped_lines(5, torch.tensor([128, 0]), lambda _: 1e-6, 1e9))
    assert [line.split("\t")[1] for line in table[2:]] == ["rows", "transposed"] * 4
    # 640 numbers of 2 bytes in, 640 codes and two scales out, in a microsecond; a copy would take 1.9.
    assert table[2].split("\t")[2:] == ["0.001", "2", "193%"]
