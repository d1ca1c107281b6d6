"""Differences against numbers computed by hand and by numpy in wide types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt.diff import Difference, compare, differences, is_same
from ckpt.source import Described, Form
from core.errors import CheckpointError
from core.state.box import Box


class Memory:
    """Tensors in memory; the largest box that was read is kept."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.forms = {n: Form(shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for n, t in tensors.items()}
        self.largest = 0

    def read(self, name: str, box: Box) -> Tensor:
        self.largest = max(self.largest, box.elements)
        return self.tensors[name][box.slices].clone()

    def describe(self) -> Described | None:
        return None


def between(a: Mapping[str, Tensor], b: Mapping[str, Tensor], **asked: float | bool | int) -> dict[str, Difference]:
    found = compare(lambda: Memory(a), lambda: Memory(b), **asked)  # type: ignore[arg-type]
    assert [one.name for one in found] == sorted(one.name for one in found)
    return {one.name: one for one in found}


def test_the_largest_absolute_and_relative_differences_are_those_of_numpy() -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(53, 17, generator=generator)
    b = a + 0.01 * torch.randn(53, 17, generator=generator)
    x, y = a.double().numpy(), b.double().numpy()
    found = between({"model.w": a}, {"model.w": b}, chunk_bytes=600)["model.w"]
    assert found.absolute == np.abs(x - y).max()
    assert found.relative == (np.abs(x - y) / np.maximum(np.abs(x), np.abs(y))).max()
    assert found.verdict == "differs" and not is_same(found)


@pytest.mark.parametrize(
    ("a", "b", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
        ([0.0, 3.0], [-0.0, 3.0], 0.0, 0.0),
        ([0.0], [1e-30], 1e-30, 1.0),
        ([2.0, -1.0], [2.0, 3.0], 4.0, 4 / 3),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0, 0.0),
        ([math.nan, 1.0], [5.0, 1.0], math.inf, math.inf),
        ([math.inf], [math.inf], 0.0, 0.0),
        ([math.inf], [-math.inf], math.inf, math.inf),
        ([math.inf], [1.0], math.inf, math.inf),
    ],
)
def test_zeros_infinities_and_what_is_no_number_are_told_apart(
    a: list[float], b: list[float], absolute: float, relative: float
) -> None:
    found = differences(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    assert found == pytest.approx((absolute, relative))


def test_not_numbers_of_other_bits_are_still_no_numbers() -> None:
    a = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert differences(a, b) == (0.0, 0.0)


def test_neighbouring_large_integers_differ_though_no_float_tells_them_apart() -> None:
    a = torch.tensor([2**60, -5], dtype=torch.int64)
    assert differences(a, a.clone()) == (0.0, 0.0)
    assert differences(a, a + torch.tensor([1, 0]))[0] >= 1.0
    assert differences(a, a + torch.tensor([0, 3]))[0] == 3.0
    assert differences(torch.tensor([True, False]), torch.tensor([True, True])) == (1.0, 1.0)


def test_narrow_types_are_compared_by_their_exact_values() -> None:
    wide = torch.tensor([1.0, 1.0 + 2**-9, -3.0])
    narrow = wide.to(torch.bfloat16)
    found = between({"w": wide}, {"w": narrow})["w"]
    assert (found.verdict, found.absolute) == ("other type", 2**-9)
    assert between({"w": wide}, {"w": narrow}, tolerance=2**-9)["w"].verdict == "near"
    assert between({"w": wide}, {"w": narrow}, tolerance=2**-10)["w"].verdict == "differs"
    exact = torch.tensor([1.0, -0.5, 448.0])
    assert between({"w": exact}, {"w": exact.to(torch.float8_e4m3fn)}, tolerance=0.0)["w"].verdict == "equal"


def test_what_is_only_in_one_and_what_has_another_shape_is_told_without_a_number() -> None:
    a = {"model.a": torch.ones(3), "model.b": torch.ones(2, 3), "model.c": torch.zeros(0)}
    b = {"model.b": torch.ones(3, 2), "model.c": torch.zeros(0), "optimizer.m.d": torch.ones(1)}
    found = between(a, b)
    assert {name: one.verdict for name, one in found.items()} == {
        "model.a": "only in A",
        "model.b": "other shape",
        "model.c": "equal",
        "optimizer.m.d": "only in B",
    }
    assert found["model.b"].absolute is None
    assert found["model.a"].a == Form(shape=(3,), dtype="float32") and found["model.a"].b is None
    assert between(a, b, model_only=True).keys() == {"model.a", "model.b", "model.c"}


def test_a_large_tensor_is_read_in_chunks_and_every_byte_is_told_once() -> None:
    a, b = (Memory({"model.w": torch.arange(30_000.0).reshape(100, 300) + add}) for add in (0, 0))
    b.tensors["model.w"][99, 299] = -1.0  # type: ignore[index]
    told: list[tuple[int, int]] = []
    found = compare(lambda: a, lambda: b, chunk_bytes=4_800, progress=lambda *said: told.append(said))
    assert found[0].absolute == 30_000.0
    assert max(a.largest, b.largest) <= 1_200
    assert told[-1] == (120_000, 120_000) and len(told) >= 25


def made_in_a_process(add: float) -> Memory:
    """Can be sent to another process by name."""
    return Memory({f"model.{n}": torch.full((5, 7), float(n)) + (add if n == 3 else 0) for n in range(5)})


def with_zero() -> Memory:
    return made_in_a_process(0.0)


def with_half() -> Memory:
    return made_in_a_process(0.5)


def test_several_processes_find_the_same_differences_in_the_same_order() -> None:
    one = compare(with_zero, with_half)
    assert one == compare(with_zero, with_half, workers=2)
    assert [one.absolute for one in one] == [0, 0, 0, 0.5, 0]


def test_a_damaged_tensor_ends_the_comparison(tmp_path: Path) -> None:
    class Damaged(Memory):
        def read(self, name: str, box: Box) -> Tensor:
            raise CheckpointError(f"{name} is damaged")

    tensors = {"model.w": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"model\.w is damaged"):
        compare(lambda: Memory(tensors), lambda: Damaged(tensors))
