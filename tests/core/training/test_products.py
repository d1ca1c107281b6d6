"""Whole training steps whose products run by another back end than the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config.recipe import FP8_CURRENT, MXFP8
from core.errors import ConfigError
from core.precision.backends.scaled import Scaled
from core.precision.formats import Quantised
from tests.core.tiny import Case, deepseek, train


def losses(case: Case) -> list[float]:
    return [result.loss for result in train(case).results]


def test_training_by_torchs_scaled_products_has_the_references_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 with one scale, which torch has on a processor too: the same numbers, added in another order."""
    case = Case(model=deepseek(), steps=2, dtype=torch.float32, recipe=FP8_CURRENT)
    monkeypatch.delenv("ZOO_PRODUCTS", raising=False)
    reference = losses(case)
    called = []
    product = Scaled.product

    def counted(self: Scaled, a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
        called.append(dtype)
        return product(self, a, b, dtype)

    monkeypatch.setattr(Scaled, "product", counted)
    monkeypatch.setenv("ZOO_PRODUCTS", "torch")
    assert losses(case) == pytest.approx(reference, abs=2e-5)
    assert len(called) > 100 and set(called) == {torch.float32}
    other = losses(replace(case, recipe=None))
    assert max(abs(a - b) for a, b in zip(other, reference, strict=True)) > 2e-5, "no product was rounded"


def test_a_model_is_not_built_where_the_device_has_none_of_its_recipes_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZOO_PRODUCTS", "torch")
    with pytest.raises(
        ConfigError,
        match=r"precision\.recipe=mxfp8: .* Works: fp8_delayed or fp8_current or none; or ZOO_PRODUCTS=reference",
    ):
        train(Case(model=deepseek(), steps=0, dtype=torch.float32, recipe=MXFP8))
