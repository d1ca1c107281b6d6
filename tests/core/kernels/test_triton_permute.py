"""The row map, permutation and sums of rows in Triton, against torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.kernels.grouped_matmul import expert_mlp
from core.kernels.permute import RowMap, map_rows, permute, permute_weights, permute_with_weights, sum_rows, unpermute
from tests.core.kernels.triton_case import DTYPES, agree, kernels, moved
from tests.core.numbers import draw

pytest.importorskip("triton", minversion="3.7")

# Tokens, experts, choices per token, width: nothing, ones, primes, more than nine experts, more columns than a tile has.
SIZES = [(0, 3, 2, 5), (1, 1, 1, 1), (7, 3, 2, 5), (13, 11, 8, 17), (3, 2, 1, 1031), (2, 5, 3, 0)]
PADDING = [{}, {"multiple": 4}, {"rows_per_expert": 3}, {"rows_per_expert": 0}]


def routing(tokens: int, experts: int, choices: int, seed: int = 0) -> Tensor:
    """Any experts, and some choices that are not routed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts, (tokens, choices), generator=generator)


def map_of_torch(chosen: Tensor, experts: int, **padding: int | None) -> RowMap:
    with kernels("reference"):
        return map_rows(chosen, experts, **padding)


def same_map(got: RowMap, truth: RowMap) -> None:
    for name, value in vars(truth).items():
        other = vars(got)[name]
        if isinstance(value, Tensor):
            assert other.dtype == value.dtype and torch.equal(other.cpu(), value), name
        else:
            assert other is value, name


def check_map(chosen: Tensor, experts: int, device: torch.device, **padding: int | None) -> None:
    with kernels("triton"):
        got = map_rows(chosen.to(device), experts, **padding)
    same_map(got, map_of_torch(chosen, experts, **padding))


@settings(max_examples=25)
@given(st.data())
def test_the_map_is_that_of_a_stable_sort_bit_by_bit(device: torch.device, data: st.DataObject) -> None:
    experts, choices, tokens = (data.draw(st.integers(*ends)) for ends in ((1, 17), (1, 9), (0, 40)))
    chosen = routing(tokens, data.draw(st.integers(1, experts)), choices, data.draw(st.integers(0, 99)))
    check_map(
        chosen,
        experts,
        device,
        multiple=data.draw(st.integers(1, 9)),
        rows_per_expert=data.draw(st.one_of(st.none(), st.integers(0, 12))),
    )


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("expert", [-1, 0, 4])
def test_one_expert_takes_all_or_none_does(device: torch.device, expert: int, padding: dict[str, int]) -> None:
    check_map(torch.full((97, 2), expert), 5, device, **padding)


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("padding", [*PADDING, {"rows_per_expert": 41}])
def test_the_map_is_the_same_over_many_blocks(device: torch.device, padding: dict[str, int], block: int) -> None:
    """183 choices are 46 blocks of 4, which are counted together 32 at a time."""
    from core.kernels.triton.permute import place_rows

    chosen = routing(61, 7, 3)
    multiple, just = padding.get("multiple", 1), padding.get("rows_per_expert")
    order, row, counts = place_rows(
        chosen.flatten().to(device), 7, multiple=multiple, rows_per_expert=just, block=block
    )
    truth = map_of_torch(chosen, 7, **padding)
    same_map(replace(truth, order_R=order, row_TK=row.view(61, 3), counts_E=counts), truth)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize(
    ("sizes", "dtype"), [*((sizes, torch.float32) for sizes in SIZES), *((SIZES[3], dtype) for dtype in DTYPES)]
)
def test_rows_go_out_and_come_back_as_torch_moves_them(
    device: torch.device, sizes: tuple[int, ...], padding: dict[str, int], dtype: torch.dtype
) -> None:
    tokens, experts, choices, width = sizes
    rows = map_of_torch(routing(tokens, experts, choices), experts, **padding)
    hidden = draw(0, tokens, width, dtype=dtype)
    weights = draw(1, tokens, choices, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    back = draw(2, rows.rows, width, dtype=dtype)
    agree(lambda rows, x, w: permute_with_weights(x, w, rows), [hidden, weights], device, rows)
    agree(lambda rows, x: unpermute(x, rows), [back], device, rows)
    agree(lambda rows, x, w: unpermute(x, rows, w), [back, weights], device, rows)


@settings(max_examples=15)
@given(st.data())
def test_drawn_cases_agree(device: torch.device, data: st.DataObject) -> None:
    tokens, experts, choices, width = (data.draw(st.integers(*e)) for e in ((0, 30), (1, 17), (1, 6), (1, 40)))
    just = data.draw(st.one_of(st.none(), st.integers(0, 9)))
    chosen = routing(tokens, data.draw(st.integers(1, experts)), choices, data.draw(st.integers(0, 99)))
    rows = map_of_torch(chosen, experts, multiple=data.draw(st.integers(1, 5)), rows_per_expert=just)
    hidden, weights, back = draw(0, tokens, width), draw(1, tokens, choices), draw(2, rows.rows, width)
    agree(lambda rows, x: permute(x, rows), [hidden], device, rows)
    agree(lambda rows, w: permute_weights(w, rows), [weights], device, rows)
    agree(lambda rows, x, w: unpermute(x, rows, w), [back, weights], device, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", PADDING)
def test_rows_are_copies_bit_by_bit(device: torch.device, padding: dict[str, int], dtype: torch.dtype) -> None:
    rows, hidden = map_of_torch(routing(13, 5, 3), 5, **padding), draw(0, 13, 7, dtype=dtype)
    with kernels("reference"):
        truth = permute(hidden, rows)
    with kernels("triton"):
        assert torch.equal(permute(hidden.to(device), moved(rows, device)).cpu(), truth)


def test_triton_sums_16_bit_rows_in_float32(device: torch.device) -> None:
    # 256 + 1 + 1 is 258, but 256 where each sum is rounded to bfloat16.
    rows = moved(map_of_torch(torch.tensor([[0, 1, 2, -1]]), 3), device)
    values = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16, device=device)
    ones = torch.ones(1, 4, device=device)
    with kernels("triton"):
        assert unpermute(values, rows).item() == unpermute(values, rows, ones).item() == 258.0
        hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True, device=device)
        permute(hidden, rows).backward(values)
        assert hidden.grad is not None and hidden.grad.item() == 258.0
        # The weight's gradient is 1 * 256 + 1 * 1 + 1 * 1 over the width.
        weight = torch.ones(1, 1, requires_grad=True, device=device)
        one = moved(map_of_torch(torch.tensor([[0]]), 1), device)
        unpermute(values.view(1, 3), one, weight).backward(torch.ones(1, 3, dtype=torch.bfloat16, device=device))
        assert weight.grad is not None and weight.grad.item() == 258.0


def test_triton_reads_tensors_in_any_memory_order(device: torch.device) -> None:
    chosen = routing(6, 4, 2)
    rows = map_of_torch(chosen, 4)
    turned, back = draw(0, 3, 6).T, draw(1, 3, 2 * rows.rows)[:, ::2].T
    weights = draw(2, 2, 6).T
    agree(lambda rows, x, w: permute_with_weights(x, w, rows), [turned, weights], device, rows)
    agree(lambda rows, x, w: unpermute(x, rows, w), [back, weights], device, rows)
    with kernels("triton"):
        hidden = turned.to(device).requires_grad_()
        permute(hidden, moved(rows, device)).sum().backward()  # the gradient of a sum is one number expanded
    routed = (chosen >= 0).sum(1, keepdim=True).double().expand(6, 3)
    assert hidden.grad is not None and torch.equal(hidden.grad.cpu(), routed)


def test_triton_sums_over_an_index_that_is_no_permutation(device: torch.device) -> None:
    index = torch.tensor([[3, 3], [0, 3], [2, 2], [2, 0]], device=device)
    rows = draw(0, 3, 2, dtype=torch.float32).to(device)
    with kernels("triton"):
        got = sum_rows(rows, index)
    assert torch.equal(got, torch.stack([0 * rows[0], rows[0], 2 * rows[2], rows[2] + rows[0]]))


def test_gradients_by_triton_equal_those_by_differences(device: torch.device) -> None:
    rows = moved(map_of_torch(torch.tensor([[2, 0], [-1, 2]]), 3, multiple=2), device)
    hidden, weights, back = (x.to(device) for x in (draw(0, 2, 2), draw(1, 2, 2), draw(2, rows.rows, 2)))
    with kernels("triton"):
        for function, tensors in (
            (lambda x, w: permute_with_weights(x, w, rows), (hidden, weights)),
            (lambda x, w: unpermute(x, rows, w), (back, weights)),
        ):
            assert torch.autograd.gradcheck(function, tuple(x.detach().requires_grad_() for x in tensors))


def saved(function: Callable[[], Tensor]) -> tuple[int, list[tuple[int, ...]]]:
    """Bytes of all different tensors that a forward keeps for its backward, and their shapes."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(x.numel() * x.element_size() for x in kept.values()), [tuple(x.shape) for x in kept.values()]


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_before_the_second_product_keep_no_expert_output(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    """Against weights applied to the experts' outputs: R * H numbers less, and the router weights, which no sum needs."""
    tokens, experts, choices, hidden, ffn = 11, 3, 2, 8, 16
    chosen = torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) + 1) % experts], 1)
    rows = moved(map_of_torch(chosen, experts), device)
    counts = rows.counts_E.tolist()
    weights = draw(1, tokens, choices, dtype=torch.float32).to(device).requires_grad_()
    x, gate_up, down = (
        draw(i, *shape, dtype=dtype).to(device).requires_grad_()
        for i, shape in enumerate([(tokens, hidden), (experts, 2, ffn, hidden), (experts, hidden, ffn)])
    )
    ones = torch.ones(rows.rows, device=device)

    def early() -> Tensor:
        rows_RH, weight_R = permute_with_weights(x, weights, rows)
        return unpermute(expert_mlp(rows_RH, weight_R, gate_up, down, counts), rows)

    def late() -> Tensor:
        return unpermute(expert_mlp(permute(x, rows), ones, gate_up, down, counts), rows, weights)

    with kernels(name):
        (few, shapes), (many, _) = saved(early), saved(late)
    assert many - few - weights.numel() * 4 == rows.rows * hidden * x.element_size()
    assert shapes.count((rows.rows, hidden)) == 1, "more is kept of [R, H] than what goes into the experts"
