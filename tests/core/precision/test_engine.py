"""Products by Transformer Engine of our codes and scales, with a stand-in of its published signatures that multiplies for real."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.config.recipe import RECIPES
from core.errors import ConfigError
from core.precision.backends.choose import Kind, pairs, trial
from core.precision.backends.machine import Machine
from core.precision.backends.transformer_engine import alignment_of, load
from core.precision.formats import MXFP8, NVFP4, NVFP4_ROWS, NVFP4_WEIGHT, Blocks, Format, quantise
from core.precision.products import Reference
from tests.core.precision.engine_case import general_gemm, install
from tests.core.precision.test_choose import BLACKWELL, CPU, HOPPER, KINDS
from tests.core.precision.test_scaled import (
    ANY_SQUARES,
    ANY_TILES,
    GRADIENT,
    SHAPES,
    SQUARES,
    TENSOR,
    TILES,
    all_products,
    check,
    experts,
    numbers,
)

PAIRS = [(TENSOR, TENSOR), (GRADIENT, TENSOR), (TILES, SQUARES), (ANY_TILES, ANY_SQUARES), (TILES, TILES), (MXFP8, MXFP8), (NVFP4_ROWS, NVFP4_ROWS), (NVFP4_ROWS, NVFP4_WEIGHT)]  # fmt: skip


def lost(format: Format) -> float:
    """What NVFP4's scale of a tensor loses on its way through the amax that the package makes it of."""
    return 2.0**-20 if isinstance(format, NVFP4) else 0.0


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_the_references(
    monkeypatch: pytest.MonkeyPatch, a: Format, b: Format, shape: tuple[int, int, int]
) -> None:
    install(monkeypatch)
    m, n, s = shape
    left, right = quantise(numbers(1, m, s), a), quantise(numbers(2, n, s), b)
    got = load(BLACKWELL).product(left, right, torch.bfloat16)
    check(got, Reference().product(left, right, torch.float64), torch.bfloat16, lost(a))


@pytest.mark.parametrize("kind", ["of_rows", "of_weights"])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_experts_products_are_the_references(monkeypatch: pytest.MonkeyPatch, kind: Kind, a: Format, b: Format) -> None:
    if kind == "of_weights" and b in (SQUARES, ANY_SQUARES, NVFP4_WEIGHT):
        return  # blocks of several rows are for weights
    install(monkeypatch)
    whole = kind == "of_weights" and isinstance(a, Blocks)
    for counts in [(128, 0, 256), (0, 0)] if whole else [(32, 0, 160, 96), (0, 0)]:
        operands = experts(kind, counts, a, b, 37, 389)
        truth = all_products(Reference(), kind, operands, torch.float64)
        check(all_products(load(HOPPER), kind, operands, torch.bfloat16), truth, torch.bfloat16, lost(a))


def test_every_recipe_passes_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    engine = load(BLACKWELL)
    for recipe in RECIPES.values():
        for a, b, kinds in pairs(recipe):
            assert engine.missing(a, b, torch.bfloat16) is None
            assert [trial(engine, kind, a, b, torch.bfloat16, CPU) for kind in kinds] == [None] * len(kinds)
    assert len(KINDS) == 3


def test_what_a_machine_lacks_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert "capability 10.0 or newer, and H200 has 9.0" in str(load(HOPPER).missing(MXFP8, MXFP8, torch.bfloat16))
    processor = Machine(kind="cpu", name="this processor")
    assert "not on this processor" in str(load(processor).missing(TENSOR, TENSOR, torch.bfloat16))


def test_every_recipes_rows_are_aligned_or_filled_up() -> None:
    """A recipe's multiple is what experts' rows have; what its blocks sum over is whole in it, and padding does the rest."""
    for recipe in RECIPES.values():
        for a, _, kinds in pairs(recipe):
            if "of_weights" in kinds:
                assert recipe.align % alignment_of(a).summed == 0


def fewer(A: Any, B: Any, out_dtype: Any = None) -> None:
    """A product without what is asked of it."""


def other_default(
    A: Any, B: Any, out_dtype: Any = None, quantization_params: Any = None, layout: str = "NN", out: Any = None, use_split_accumulator: bool = False
) -> None:  # fmt: skip
    """Another layout where none is said."""


class MXFP8TensorStorage:
    """A tensor that wants more."""

    def __new__(cls, *, rowwise_data: Any, rowwise_scale_inv: Any, columnwise_data: Any, columnwise_scale_inv: Any, fp8_dtype: Any, quantizer: Any, with_gemm_swizzled_scales: bool, fake_dtype: Any, axis: int) -> MXFP8TensorStorage:  # fmt: skip
        raise AssertionError("is not made")


@pytest.mark.parametrize(
    ("name", "thing"),
    [("general_gemm", fewer), ("general_gemm", other_default), ("general_grouped_gemm", fewer), ("MXFP8TensorStorage", MXFP8TensorStorage)],
)  # fmt: skip
def test_another_interface_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, thing: Callable[..., Any]
) -> None:
    install(monkeypatch, **{name: thing})
    said = rf"ZOO_PRODUCTS=transformer_engine: its {name}\(.*\) is not that of release 2\.20\.2.*pip install"
    with pytest.raises(ConfigError, match=said):
        load(HOPPER)


def test_a_signature_that_grew_by_defaults_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [*inspect.signature(general_gemm).parameters.values()]
    more = inspect.Parameter("epilogue", inspect.Parameter.KEYWORD_ONLY, default=None)

    def newer(*operands: Any, **options: Any) -> Any:
        return general_gemm(*operands, **options)

    newer.__signature__ = inspect.Signature([*parameters, more])  # type: ignore[attr-defined]
    install(monkeypatch, general_gemm=newer)
    assert load(HOPPER).gemm is newer


def test_where_it_is_not_installed_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ConfigError, match=re.escape("ZOO_PRODUCTS=transformer_engine: cannot be loaded here")):
        load(HOPPER)
