"""Large matrices, which are rounded a few rows at a time: bit for bit what comes of them at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from core.precision import formats
from core.precision.bands import bands_of, each_band
from core.precision.formats import quantise
from core.precision.grouped import quantise_grouped, quantise_grouped_columns
from tests.core.precision.test_formats import FORMATS, draw, same

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(301, 1031), (3, 131, 1024)])
@pytest.mark.parametrize("name", FORMATS)
def test_bands_have_the_bits_of_the_whole(
    name: str, shape: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(*shape).requires_grad_()
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    bands = bands_of(shape, formats.block_of(FORMATS[name], shape), CPU)
    assert len(bands) > 2 and sum(band.rows.stop - band.rows.start for band in bands) == x.numel() // shape[-1]
    x = x.detach()
    x[..., 7, 40] = torch.nan
    got = [quantise(x, FORMATS[name], noise=drawn) for drawn in (None, noise)]
    back = [some.dequantise(torch.bfloat16) for some in got]
    monkeypatch.setattr(formats, "bands_of", lambda *_: [])
    for some, values, drawn in zip(got, back, (None, noise), strict=True):
        whole = quantise(x, FORMATS[name], noise=drawn)
        assert torch.equal(some.data.view(torch.uint8), whole.data.view(torch.uint8))
        assert torch.equal(some.scales.float().nan_to_num(-1.0), whole.scales.float().nan_to_num(-1.0))
        assert torch.equal(values.nan_to_num(-1.0), whole.dequantise(torch.bfloat16).nan_to_num(-1.0))


@pytest.mark.parametrize("name", ["tensor_e4m3", "rows_128", "mxfp8", "nvfp4"])
def test_bands_of_rows_of_experts_have_the_bits_of_each_expert(name: str) -> None:
    counts = [128, 0, 384]
    x = draw(512, 528)
    rows = quantise_grouped(x, torch.tensor(counts), FORMATS[name])
    columns = quantise_grouped_columns(x, torch.tensor(counts), FORMATS[name])
    for index, part in enumerate(x.split(counts)):
        same(rows.expert(index), quantise(part, FORMATS[name]))
        same(columns.expert(index), quantise(part.T.contiguous(), FORMATS[name]))
        assert torch.equal(rows.dequantise().split(counts)[index], quantise(part, FORMATS[name]).dequantise())


def test_what_fails_in_a_band_fails_outside() -> None:
    def broken(_: object) -> torch.Tensor:
        raise ValueError("of one band")

    with pytest.raises(ValueError, match="of one band"):
        each_band(bands_of((512, 1024), (1, 32), CPU), broken)


def test_small_tensors_and_those_of_other_devices_are_not_cut() -> None:
    assert bands_of((8, 32), (1, 32), CPU) == []
    assert bands_of((8192, 7168), (1, 32), torch.device("meta")) == []
    assert bands_of((0, 7168), (1, 32), CPU) == []
