"""Rows of all experts quantised at once: bit for bit what each expert's rows give alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.precision.elements import E5M2
from core.precision.formats import (
    FP8_ROWS,
    FP8_TENSOR,
    FP8_WEIGHT,
    MX,
    MXFP8,
    NVFP4_ROWS,
    NVFP4_WEIGHT,
    Format,
    PerTensor,
    quantise,
)
from core.precision.grouped import quantise_grouped, quantise_grouped_columns
from tests.core.precision.test_formats import draw, same

FORMATS: dict[str, tuple[Format, int]] = {
    "tensor": (FP8_TENSOR, 1),
    "tensor_e5m2": (PerTensor(element=E5M2), 1),
    "rows_128": (FP8_ROWS, 128),
    "mxfp8": (MXFP8, 32),
    "mxfp8_down": (MX(element=E5M2, rounding="down"), 32),
    "nvfp4": (NVFP4_ROWS, 16),
}


def rows_of(counts: list[int], columns: int) -> Tensor:
    """Rows of experts whose sizes differ by orders."""
    x = draw(sum(counts), columns)
    return x * torch.logspace(-3, 3, len(counts)).repeat_interleave(torch.tensor(counts))[:, None]


@pytest.mark.parametrize("counts", [[3, 0, 7, 1], [0, 0], [5], [0, 11, 0], [1] * 11])
@pytest.mark.parametrize("columns", [1, 47, 160])
@pytest.mark.parametrize("name", FORMATS)
def test_each_expert_has_the_bits_that_its_rows_give_alone(name: str, columns: int, counts: list[int]) -> None:
    format, _ = FORMATS[name]
    x = rows_of(counts, columns)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for drawn in (None, noise):
        got = quantise_grouped(x, torch.tensor(counts), format, noise=drawn)
        back = got.dequantise()
        assert back.shape == x.shape
        for index, (part, values) in enumerate(zip(x.split(counts), back.split(counts), strict=True)):
            alone = quantise(part, format, noise=None if drawn is None else drawn.split(counts)[index])
            same(got.expert(index), alone)
            assert torch.equal(values, alone.dequantise())


@pytest.mark.parametrize("blocks", [[1, 0, 2, 1], [0, 0], [3], [0, 1, 0]])
@pytest.mark.parametrize("columns", [1, 37])
@pytest.mark.parametrize("name", FORMATS)
def test_the_column_wise_copy_is_that_of_each_expert_transposed(name: str, columns: int, blocks: list[int]) -> None:
    format, multiple = FORMATS[name]
    counts = [multiple * n for n in blocks]
    x = rows_of(counts, columns)
    noise = torch.rand(columns, sum(counts), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for drawn in (None, noise):
        got = quantise_grouped_columns(x, torch.tensor(counts), format, noise=drawn)
        back = got.dequantise()
        assert back.shape == (columns, sum(counts))
        for index, part in enumerate(x.split(counts)):
            alone = quantise(
                part.T.contiguous(), format, noise=None if drawn is None else drawn.split(counts, 1)[index]
            )
            same(got.expert(index), alone)
            assert torch.equal(back.split(counts, 1)[index], alone.dequantise())


@pytest.mark.parametrize("name", ["tensor", "nvfp4"])
def test_each_expert_can_be_given_an_amax(name: str) -> None:
    format, _ = FORMATS[name]
    counts, amax = [16, 0, 32], torch.tensor([2.0, 3.0, 500.0])
    x = rows_of(counts, 32)
    got = quantise_grouped(x, torch.tensor(counts), format, amax_E=amax)
    columns = quantise_grouped_columns(x, torch.tensor(counts), format, amax_E=amax)
    for index, part in enumerate(x.split(counts)):
        same(got.expert(index), quantise(part, format, amax=amax[index]))
        same(columns.expert(index), quantise(part.T.contiguous(), format, amax=amax[index]))


@pytest.mark.parametrize("name", ["tensor", "nvfp4"])
def test_an_expert_that_is_not_finite_leaves_the_others_as_they_are(name: str) -> None:
    format, _ = FORMATS[name]
    counts = [4, 3, 5]
    for bad in (torch.inf, torch.nan):
        x = rows_of(counts, 48)
        x[5, 40] = bad
        for amax in (None, torch.tensor([9.0, 9.0, 9.0])):
            back = quantise_grouped(x, torch.tensor(counts), format, amax_E=amax).dequantise()
            assert back[4:7].isnan().all() and back[:4].isfinite().all() and back[7:].isfinite().all()


def test_bytes_are_those_of_data_and_one_scale_for_each_expert() -> None:
    counts = torch.tensor([16, 0, 32])
    x = rows_of([16, 0, 32], 64)
    assert quantise_grouped(x, counts, FP8_TENSOR).num_bytes == 48 * 64 + 3 * 4
    assert quantise_grouped(x, counts, NVFP4_ROWS).num_bytes == 48 * 32 + 48 * 4 + 3 * 4
    assert quantise_grouped_columns(x, counts, NVFP4_ROWS).num_bytes == 48 * 32 + 3 * 64 + 3 * 4


def test_counts_that_do_not_cover_the_rows_are_refused() -> None:
    x = torch.ones(10, 32)
    for counts in ([3, 6], [3, 8], []):
        for make in (quantise_grouped, quantise_grouped_columns):
            with pytest.raises(ValueError, match="there are 10 rows"):
                make(x, torch.tensor(counts, dtype=torch.int64), FP8_TENSOR)


@pytest.mark.parametrize("name", ["rows_128", "mxfp8", "nvfp4"])
def test_counts_that_break_blocks_along_the_rows_are_refused(name: str) -> None:
    format, multiple = FORMATS[name]
    with pytest.raises(ValueError, match=f"has {multiple - 1} rows.* multiple of {multiple}"):
        quantise_grouped_columns(torch.ones(2 * multiple, 32), torch.tensor([multiple - 1, multiple + 1]), format)


def test_formats_of_weights_and_a_needless_amax_are_refused() -> None:
    x, counts = torch.ones(32, 32), torch.tensor([16, 16])
    for format in (FP8_WEIGHT, NVFP4_WEIGHT):
        with pytest.raises(ValueError, match="are for weights"):
            quantise_grouped(x, counts, format)
    with pytest.raises(ValueError, match="amax of shape"):
        quantise_grouped(x, counts, FP8_TENSOR, amax_E=torch.ones(3))
    with pytest.raises(ValueError, match="cannot be given one"):
        quantise_grouped(x, counts, MXFP8, amax_E=torch.ones(2))
