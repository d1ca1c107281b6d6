"""Tensors without data are laid out as quantising lays them out, and their products have the results' shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.config.recipe import RECIPES, Operand
from core.precision.formats import Quantised, quantise
from core.precision.grouped import Grouped, quantise_grouped, quantise_grouped_columns
from core.precision.imagined import Imagined, imagined, imagined_rows
from core.precision.operands import format_of
from core.precision.products import Reference

OPERANDS = tuple(dict.fromkeys(operand for recipe in RECIPES.values() for _, operand in recipe.operands()))
META = torch.device("meta")


def layout(made: Quantised | Grouped) -> list[tuple[torch.Size, torch.dtype]]:
    scale = made.tensor_scale if isinstance(made, Quantised) else made.tensor_scale_E
    return [(each.shape, each.dtype) for each in (made.data, made.scales, scale) if isinstance(each, Tensor)]


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (37, 129), (3, 160, 7), (0, 64), (64, 0)], ids=str)
def test_a_tensor_without_data_is_laid_out_as_a_quantised_one(operand: Operand, shape: tuple[int, ...]) -> None:
    format = format_of(operand)
    found, wanted = imagined(shape, format, META), quantise(torch.ones(shape), format)
    assert layout(found) == layout(wanted)
    assert found.num_bytes == wanted.num_bytes and found.shape == wanted.shape
    assert found.data.is_meta and found.scales.is_meta


@pytest.mark.parametrize("operand", [o for o in OPERANDS if o.scaling not in ("128x128", "nv16x16")], ids=str)
@pytest.mark.parametrize("counts", [(128, 0, 384), (0, 0), (128,)], ids=str)
def test_rows_of_experts_without_data_are_laid_out_as_quantised_ones(operand: Operand, counts: tuple[int, ...]) -> None:
    format, counts_E, rows = format_of(operand), torch.tensor(counts), torch.ones(sum(counts), 37)
    for axis, made in ((0, quantise_grouped), (1, quantise_grouped_columns)):
        wanted = made(rows, counts_E, format)
        shape = (wanted.shape[0], wanted.shape[1])
        found = imagined_rows(shape, counts_E, format, axis, META)  # type: ignore[arg-type]
        assert layout(found) == layout(wanted)
        assert found.axis == wanted.axis == axis


def test_products_without_data_have_the_shapes_of_the_definition() -> None:
    format, counts_E = format_of(RECIPES["mxfp8"].weight_gradient.gradient or OPERANDS[0]), torch.tensor([32, 0, 64])
    a, b, matrices = torch.ones(5, 64), torch.ones(7, 64), torch.ones(3, 9, 64)
    rows = torch.ones(96, 64)
    nothing, real = Imagined(), Reference()
    assert (
        nothing.product(quantise(a, format), quantise(b, format), torch.bfloat16).shape
        == real.product(quantise(a, format), quantise(b, format), torch.bfloat16).shape
    )
    grouped, weights = quantise_grouped(rows, counts_E, format), quantise(matrices, format)
    columns = quantise_grouped_columns(rows, counts_E, format)
    found = nothing.of_rows(grouped, weights, torch.bfloat16), nothing.of_weights(columns, columns, torch.bfloat16)
    wanted = real.of_rows(grouped, weights, torch.bfloat16), real.of_weights(columns, columns, torch.bfloat16)
    assert [each.shape for each in found] == [each.shape for each in wanted]
    assert {each.dtype for each in found} == {torch.bfloat16}
