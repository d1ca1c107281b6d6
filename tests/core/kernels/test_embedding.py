"""Rows of a table: a frequent token's gradient is not rounded away."""

from __future__ import annotations

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
