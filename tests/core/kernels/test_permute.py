"""Rows grouped by expert and back, against loops over tokens and choices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.kernels.permute import map_rows, permute, permute_weights, permute_with_weights, sum_rows, unpermute
from tests.core.numbers import draw, gradients, near

HIDDEN = 3


@st.composite
def routings(draw_case: st.DrawFn) -> tuple[Tensor, int]:
    """experts [T, K] with -1 for choices that are not routed, and the number of experts."""
    tokens, choices, experts = (
        draw_case(st.integers(0, 13)),
        draw_case(st.integers(1, 5)),
        draw_case(st.integers(1, 17)),
    )
    one = st.integers(-1, experts - 1)
    rows = draw_case(st.lists(st.lists(one, min_size=choices, max_size=choices), min_size=tokens, max_size=tokens))
    return torch.tensor(rows, dtype=torch.int64).view(tokens, choices), experts


def in_order(experts_TK: Tensor, experts: int) -> list[tuple[int, int]]:
    """(token, choice) of every row: expert by expert, then as they come."""
    tokens, choices = experts_TK.shape
    places = [(t, k) for t in range(tokens) for k in range(choices)]
    return [(t, k) for e in range(experts) for t, k in places if int(experts_TK[t, k]) == e]


@settings(max_examples=40)
@given(routings())
def test_the_map_lists_each_routed_choice_once_expert_by_expert(case: tuple[Tensor, int]) -> None:
    chosen, experts = case
    expected, rows = in_order(chosen, experts), map_rows(chosen, experts)
    choices = chosen.shape[1]
    assert rows.rows == len(expected)
    assert rows.order_R.tolist() == [t * choices + k for t, k in expected]
    assert rows.token_R.tolist() == [t for t, _ in expected]
    assert rows.counts_E.tolist() == [int((chosen == e).sum()) for e in range(experts)]
    numbers = {place: row for row, place in enumerate(expected)}
    for t in range(chosen.shape[0]):
        assert rows.row_TK[t].tolist() == [numbers.get((t, k), len(expected)) for k in range(choices)]


@settings(max_examples=40)
@given(routings())
def test_rows_go_out_and_come_back_with_their_gradients(case: tuple[Tensor, int]) -> None:
    chosen, experts = case
    expected, rows = in_order(chosen, experts), map_rows(chosen, experts)
    hidden, weights = draw(0, chosen.shape[0], HIDDEN), draw(1, *chosen.shape)
    for order in ("out", "weights", "back"):
        if order == "out":
            got = gradients(lambda x: permute(x, rows), [hidden])
            naive = gradients(lambda x: torch.stack([x[t] for t, _ in expected]) if expected else x[:0] * 1.0, [hidden])
        elif order == "weights":
            got = gradients(lambda x: permute_weights(x, rows), [weights])
            naive = gradients(
                lambda x: torch.stack([x[t, k] for t, k in expected]) if expected else x.flatten()[:0] * 1.0, [weights]
            )
        else:
            back = draw(2, rows.rows, HIDDEN)
            got = gradients(lambda x: unpermute(x, rows), [back])
            naive = gradients(lambda x: _sum_by_token(x, expected, hidden), [back])
        for a, b in zip(got, naive, strict=True):
            near(a, b, units=16)


def _sum_by_token(rows_RH: Tensor, expected: list[tuple[int, int]], like: Tensor) -> Tensor:
    out = [torch.zeros(HIDDEN, dtype=rows_RH.dtype) for _ in range(like.shape[0])]
    for row, (token, _) in enumerate(expected):
        out[token] = out[token] + rows_RH[row]
    return torch.stack(out) + 0.0 * rows_RH.sum() if out else rows_RH[:0] * 1.0


def test_gradients_equal_those_by_differences() -> None:
    rows = map_rows(torch.tensor([[2, 0], [-1, 2], [10, 2]]), 11)
    hidden, weights, back = (draw(0, 3, 2), draw(1, 3, 2), draw(2, 5, 2))
    for function, x in ((permute, hidden), (permute_weights, weights), (unpermute, back)):
        assert torch.autograd.gradcheck(lambda v, f=function: f(v, rows), x.requires_grad_())


def test_tokens_without_a_route_get_zeros_and_no_gradient() -> None:
    rows = map_rows(torch.full((4, 2), -1), 3)
    assert rows.rows == 0 and rows.counts_E.tolist() == [0, 0, 0]
    hidden = draw(0, 4, HIDDEN).requires_grad_()
    out = unpermute(permute(hidden, rows), rows)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_no_tokens_give_no_rows() -> None:
    rows = map_rows(torch.zeros(0, 4, dtype=torch.int64), 5)
    assert rows.counts_E.tolist() == [0] * 5 and rows.token_R.numel() == 0
    assert unpermute(permute(torch.zeros(0, HIDDEN), rows), rows).shape == (0, HIDDEN)


@pytest.mark.parametrize("routed", [True, False])
def test_bfloat16_rows_are_summed_in_float32_in_both_directions(routed: bool) -> None:
    # 256 + 1 + 1 is 258, but 256 where each sum is rounded to bfloat16. A choice that is not routed takes the other path.
    chosen = torch.tensor([[0, 1, 2, 3 if routed else -1]])
    rows = map_rows(chosen, 4)
    values = torch.tensor([256.0, 1.0, 1.0, 0.0])[: rows.rows, None].to(torch.bfloat16)
    assert unpermute(values, rows).item() == 258.0
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    permute(hidden, rows).backward(values)
    assert hidden.grad is not None and hidden.grad.item() == 258.0
    assert hidden.grad.dtype == torch.bfloat16


def test_rows_that_are_not_contiguous_are_read_right() -> None:
    rows = map_rows(torch.tensor([[1, 0], [0, 2], [2, -1]]), 3)
    hidden, back = draw(0, HIDDEN, 3).T, draw(1, HIDDEN, 10)[:, ::2].T
    near(permute(hidden, rows), permute(hidden.contiguous(), rows))
    near(unpermute(back, rows), unpermute(back.contiguous(), rows))
    leaf = hidden.detach().requires_grad_()
    permute(leaf, rows).sum().backward()  # the gradient of a sum is one number expanded
    assert leaf.grad.tolist() == [[2.0] * 3, [2.0] * 3, [1.0] * 3]


def test_a_sum_of_rows_skips_the_row_that_does_not_exist() -> None:
    rows = draw(0, 3, 2)
    got = sum_rows(rows, torch.tensor([[3, 3], [0, 3], [2, 2]]))
    near(got, torch.stack([torch.zeros(2, dtype=torch.float64), rows[0], 2 * rows[2]]))


@settings(max_examples=40)
@given(routings(), st.integers(2, 9), st.one_of(st.none(), st.integers(0, 12)))
def test_d1_d3_rows_of_zeros_fill_every_expert_up_and_change_nothing(
    case: tuple[Tensor, int], multiple: int, just: int | None
) -> None:
    """D1: counts are aligned even where the multiple exceeds the tokens; D3: as many rows as are counted."""
    chosen, experts = case
    rows = map_rows(chosen, experts, multiple=multiple, rows_per_expert=just)
    routed = [int((chosen == e).sum()) for e in range(experts)]
    counts = [-(-n // multiple) * multiple if just is None else just for n in routed]
    assert rows.counts_E.tolist() == counts
    assert rows.rows == sum(counts)
    expected: list[tuple[int, int] | None] = []
    for e, count in enumerate(counts):
        real = [place for place in in_order(chosen, experts) if int(chosen[place]) == e][:count]
        expected += [*real, *[None] * (count - len(real))]
    assert rows.order_R.tolist() == [-1 if p is None else p[0] * chosen.shape[1] + p[1] for p in expected]
    # Where rows are so many at most, what finds none counts as not routed.
    numbers = {place: row for row, place in enumerate(expected)}
    places = [(t, k) for t in range(chosen.shape[0]) for k in range(chosen.shape[1])]
    assert rows.row_TK.flatten().tolist() == [numbers.get(place, sum(counts)) for place in places]
    here = torch.tensor([place in numbers for place in places], dtype=torch.bool).view(chosen.shape)
    plain = map_rows(torch.where(here, chosen, -1), experts)
    hidden, weights = draw(0, chosen.shape[0], HIDDEN), draw(1, *chosen.shape)
    real_R = rows.order_R >= 0
    for x, function in ((hidden, permute), (weights, permute_weights)):
        got = gradients(lambda x, f=function: f(x, rows)[real_R], [x])
        for a, b in zip(got, gradients(lambda x, f=function: f(x, plain), [x]), strict=True):
            near(a, b, units=16)
        assert not function(x, rows)[~real_R].any()
    arrived = draw(2, rows.rows, HIDDEN)
    out, gradient = gradients(lambda x: unpermute(x, rows), [arrived])
    expected_out, expected_gradient = gradients(lambda x: unpermute(x, plain), [arrived[real_R]])
    near(out, expected_out)
    near(gradient[real_R], expected_gradient)
    assert not gradient[~real_R].any()


@settings(max_examples=20)
@given(routings(), st.integers(1, 4), st.one_of(st.none(), st.integers(0, 5)))
def test_a_weighted_sum_is_that_of_weighted_rows(case: tuple[Tensor, int], multiple: int, just: int | None) -> None:
    chosen, experts = case
    rows = map_rows(chosen, experts, multiple=multiple, rows_per_expert=just)
    back, weights = draw(0, rows.rows, HIDDEN), draw(1, *chosen.shape)

    def naive(x: Tensor, w: Tensor) -> Tensor:
        out = [0.0 * x.sum() + 0.0 * w.sum() + torch.zeros(HIDDEN, dtype=x.dtype) for _ in range(chosen.shape[0])]
        for t, places in enumerate(rows.row_TK.tolist()):
            for k, row in enumerate(places):
                if row < rows.rows:
                    out[t] = out[t] + w[t, k] * x[row]
        return torch.stack(out) if out else x[:0] + 0.0 * w.sum()

    for got, truth in zip(
        gradients(lambda x, w: unpermute(x, rows, w), [back, weights]), gradients(naive, [back, weights]), strict=True
    ):
        near(got, truth, units=16)


def test_a_weighted_sum_of_bfloat16_rows_is_rounded_once_and_passes_finite_differences() -> None:
    rows = map_rows(torch.tensor([[0, 1, 2, -1]]), 3)
    values = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    weights = torch.ones(1, 4, requires_grad=True)
    out = unpermute(values, rows, weights)
    assert out.dtype == torch.bfloat16 and out.item() == 258.0
    out.backward()
    assert weights.grad is not None and weights.grad.tolist() == [[256.0, 1.0, 1.0, 0.0]]
    rows = map_rows(torch.tensor([[2, 0], [-1, 2], [10, 2]]), 11, multiple=2)
    back, weights = draw(0, rows.rows, 2).requires_grad_(), draw(1, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: unpermute(x, rows, w), (back, weights))


def test_rows_and_weights_together_are_rows_and_weights() -> None:
    rows = map_rows(torch.tensor([[1, 0], [0, -1], [2, 0]]), 3, multiple=2)
    hidden, weights = draw(0, 3, HIDDEN), draw(1, 3, 2)
    got = permute_with_weights(hidden, weights, rows)
    assert torch.equal(got[0], permute(hidden, rows)) and torch.equal(got[1], permute_weights(weights, rows))
