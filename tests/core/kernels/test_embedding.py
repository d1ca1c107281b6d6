"""Rows of a table, whole and cut: a frequent token's gradient is not rounded away, and none reaches another row."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from core.kernels.embedding import embedding
from tests.core.numbers import draw, gradients, near


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [[], [4], [0, 6, 6, 3, 0, 6, 1]])
def test_rows_are_looked_up_and_gradients_added(dtype: torch.dtype, tokens: list[int]) -> None:
    table, index = draw(0, 7, 3, dtype=dtype), torch.tensor(tokens, dtype=torch.int64)
    one_hot = torch.eye(7, dtype=torch.float64)[index]
    got = gradients(lambda w: embedding(index, w), [table])
    truth = gradients(lambda w: one_hot @ w, [table.double()])
    assert torch.equal(got[0].double(), truth[0])
    near(got[1], truth[1], units=2)


def test_two_thousand_equal_tokens_keep_their_whole_gradient_in_bfloat16() -> None:
    # One after another in bfloat16 they would stop at 256.
    table = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    out = embedding(torch.full((2000,), 1), table)
    out.backward(torch.ones_like(out))
    assert table.grad is not None and table.grad.tolist() == [[0, 0], [2000, 2000], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [(0, 3, 7), (0, 0, 1, 7, 7), (0, 7)])
def test_pieces_of_a_table_give_their_own_rows_and_zeros_and_get_their_own_gradients(
    dtype: torch.dtype, bounds: tuple[int, ...]
) -> None:
    table, tokens = draw(0, 7, 3, dtype=dtype), torch.tensor([0, 6, 6, 3, 0, 6, 1, 2])
    truth = gradients(lambda w: torch.eye(7, dtype=torch.float64)[tokens] @ w, [table.double()])
    for low, high in pairwise(bounds):
        out, gradient = gradients(lambda w, low=low: embedding(tokens, w, first=low, vocab=7), [table[low:high]])
        here = ((tokens >= low) & (tokens < high))[:, None]
        assert out.dtype == dtype and torch.equal(out.double(), torch.where(here, truth[0], 0.0))
        near(gradient, truth[1][low:high], units=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_a_token_elsewhere_is_written_to_no_row(dtype: torch.dtype) -> None:
    piece = torch.ones(2, 1, dtype=dtype, requires_grad=True)
    out = embedding(torch.tensor([0, 5, 6, 9, 5]), piece, first=5, vocab=10)
    out.backward(torch.tensor([[torch.inf], [2.0], [3.0], [torch.nan], [0.5]], dtype=dtype))
    assert piece.grad is not None and piece.grad.tolist() == [[2.5], [3.0]]


@pytest.mark.parametrize("token", [7, -1])
@pytest.mark.parametrize("bounds", [(0, 7), (0, 3), (3, 7), (3, 3)])
def test_a_token_outside_the_whole_table_is_an_error_in_each_piece(token: int, bounds: tuple[int, int]) -> None:
    piece = torch.ones(7, 2)[slice(*bounds)]
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        embedding(torch.tensor([4, token]), piece, first=bounds[0], vocab=7)
