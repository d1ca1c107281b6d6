"""Random numbers by name and place: published vectors, plain-Python arithmetic, moments, and any piece equal to the whole."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.state.box import Box, whole
from core.state.seed import normal, philox, stream_key, uniform, uniform_rows

# Known-answer vectors of Random123 (kat_vectors, philox4x32-10): counter, key, words.
VECTORS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def python_number(seed: int, name: str, row: int, column: int, step: int = 0) -> float:
    """One normal number by the module's documented rule, with Python's integers."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    key = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
    counter = [column // 4, row % 2**32, row // 2**32, step]
    for _ in range(10):
        p, q = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(q >> 32) ^ counter[1] ^ key[0], q % 2**32, (p >> 32) ^ counter[3] ^ key[1], p % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    pair = column % 4 // 2 * 2
    u, v = ((counter[pair + i] + 0.5) / 2**32 for i in (0, 1))
    turn = math.cos if column % 2 == 0 else math.sin
    return math.sqrt(-2 * math.log(u)) * turn(2 * math.pi * v)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_the_generator_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    first, second = words(key)
    rows = torch.tensor([words(counter)] * 3)
    assert philox(rows, (first, second)).tolist() == [words(expected)] * 3


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 1), (0, 6), (13, 7), (2**32 - 1, 2), (2**33 + 5, 11)])
def test_each_number_is_that_of_the_written_rule(row: int, column: int) -> None:
    value = normal(7, "layers.10.x", Box(offset=(row, column), shape=(1, 1)), step=3)
    assert value.item() == pytest.approx(python_number(7, "layers.10.x", row, column, 3), rel=1e-6)


def test_leading_indices_are_mixed_by_a_fixed_stride() -> None:
    value = normal(1, "a", Box(offset=(3, 1, 5, 2), shape=(1, 1, 1, 1)))
    assert value.item() == pytest.approx(python_number(1, "a", (3 << 40) + (1 << 20) + 5, 2), rel=1e-6)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return shape, Box(offset=tuple(low for low, _ in ends), shape=tuple(high - low for low, high in ends))


@given(pieces(), st.integers(0, 2**63), st.integers(0, 1000))
def test_a_piece_is_the_same_whoever_draws_it(case: tuple[tuple[int, ...], Box], seed: int, step: int) -> None:
    shape, box = case
    for draw in (normal, uniform):
        piece, all_of_it = draw(seed, "x", box, step=step), draw(seed, "x", whole(shape), step=step)
        assert piece.shape == box.shape
        assert torch.equal(piece, all_of_it[box.slices])


def test_a_piece_is_the_same_across_the_seams_of_what_is_drawn_at_a_time() -> None:
    shape = (40009, 5)
    everything = normal(0, "tall", whole(shape), std=0.02)
    box = Box(offset=(16381, 1), shape=(16397, 3))
    assert torch.equal(normal(0, "tall", box, std=0.02), everything[box.slices])
    long = uniform(0, "long", whole((200_003,)))
    assert torch.equal(uniform(0, "long", Box(offset=(131_071,), shape=(7,))), long[131_071:131_078])


def test_the_size_of_the_whole_tensor_does_not_matter() -> None:
    small, large = normal(0, "x", whole((3, 5))), normal(0, "x", whole((11, 13)))
    assert torch.equal(small, large[:3, :5])


def test_normal_numbers_have_the_moments_and_the_tails_of_a_normal_distribution() -> None:
    x = normal(5, "layers.0.mlp.down", whole((512, 509))).double().numpy().ravel()
    n = x.size
    moments = [np.mean(x**k) for k in (1, 2, 3, 4)]
    # Five standard errors: the k-th power of a normal number has variance E x^2k - (E x^k)^2.
    for got, expected, variance in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(got - expected) < 5 * math.sqrt(variance / n)
    cumulative = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in np.sort(x)])
    assert np.abs(cumulative - (np.arange(n) + 0.5) / n).max() < 1.95 / math.sqrt(n)  # Kolmogorov, 0.1 %
    assert 4.0 < np.abs(x).max() < 6.7  # 32 bits reach 6.76


def test_uniform_numbers_fill_the_open_interval_evenly() -> None:
    x = np.sort(uniform(5, "u", whole((256, 257))).numpy().ravel())
    assert x.dtype == np.float64 and x[0] > 0.0 and x[-1] < 1.0
    assert np.abs(x - (np.arange(x.size) + 0.5) / x.size).max() < 1.95 / math.sqrt(x.size)


def test_neighbours_and_other_streams_are_independent() -> None:
    box = whole((400, 404))
    x = normal(1, "layers.1.w", box)
    others = {
        "name": normal(1, "layers.11.w", box),
        "seed": normal(2, "layers.1.w", box),
        "step": normal(1, "layers.1.w", box, step=1),
        "column": x.roll(1, 1),
        "row": x.roll(1, 0),
        "sine and cosine": x.view(400, 202, 2).flip(2).reshape(400, 404),
        "transposed": normal(1, "layers.1.w", whole((404, 400))).T,
    }
    for what, other in others.items():
        correlation = float((x * other).mean())
        # The cosine and the sine of one pair count twice, which doubles the variance.
        assert abs(correlation) < 5 * math.sqrt(2 / x.numel()), what
        assert float((x == other).float().mean()) < 0.01, what


def test_std_scales_and_the_result_is_float32() -> None:
    box = whole((7, 11))
    one, small = normal(1, "w", box), normal(1, "w", box, std=0.006)
    assert small.dtype == torch.float32
    assert torch.allclose(small, one * 0.006, rtol=1e-6)


def test_seed_and_name_cannot_be_confused() -> None:
    assert stream_key(1, "2:x") != stream_key(12, ":x")
    assert len({stream_key(seed, f"layers.{i}") for seed in range(50) for i in range(50)}) == 2500


def test_a_tensor_whose_row_numbers_would_collide_is_refused() -> None:
    for box in (whole((1, 1, 1, 1, 4)), Box(offset=(0, 2**20, 0), shape=(1, 1, 4))):
        with pytest.raises(AssertionError, match="no room"):
            normal(0, "x", box)


@settings(max_examples=20)
@given(st.integers(0, 3), st.integers(0, 9))
def test_empty_pieces_are_empty(dimension: int, offset: int) -> None:
    shape = tuple(0 if d == dimension else 2 for d in range(4))
    assert normal(0, "x", Box(offset=(offset,) * 4, shape=shape)).shape == shape


def test_rows_in_any_order_are_those_of_the_whole_matrix() -> None:
    matrix = uniform(5, "x", whole((23, 7)), step=2)
    rows = torch.tensor([22, 0, 3, 3])
    assert torch.equal(uniform_rows(5, "x", rows, 7, step=2), matrix[rows])
    far = torch.tensor([2**33 + 5])
    assert torch.equal(uniform_rows(5, "x", far, 3), uniform(5, "x", Box(offset=(2**33 + 5, 0), shape=(1, 3))))
    assert uniform_rows(5, "x", rows[:0], 7).shape == (0, 7)
