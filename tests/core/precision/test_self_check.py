"""The trial of a quantiser, and what it catches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from core.errors import ZooError
from core.precision import self_check as module
from core.precision.formats import NVFP4_ROWS, Format, Quantised, quantise
from core.precision.self_check import self_check
from tests.core.precision.test_formats import FORMATS

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tall"])
def test_every_format_passes_on_a_cpu(name: str) -> None:
    self_check(FORMATS[name], CPU)


def test_zeros_of_stochastic_rounding_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What some hardware did that reported support; broken on both sides here, so that only the mean can show it."""

    def zeros(x: torch.Tensor, format: Format, **more: Any) -> Quantised:
        made = quantise(x, format, **more)
        return made if more["noise"] is None else replace(made, data=torch.zeros_like(made.data))

    monkeypatch.setattr(module, "quantise", zeros)
    with pytest.raises(ZooError, match=r"NVFP4.* on cpu rounds 1\.3 stochastically to 0\.0000"):
        self_check(NVFP4_ROWS, CPU)


def test_one_wrong_bit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def wrong_once(x: torch.Tensor, format: Format, **more: Any) -> Quantised:
        made = quantise(x, format, **more)
        calls.append(made)
        if len(calls) == 1:
            made.data.view(torch.uint8)[3, 5] ^= 1
        return made

    monkeypatch.setattr(module, "quantise", wrong_once)
    with pytest.raises(ZooError, match=r"NVFP4.* on cpu rounds to the nearest to other bits"):
        self_check(NVFP4_ROWS, CPU)
