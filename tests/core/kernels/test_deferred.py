"""Weight gradients that are put off come out bit for bit as those that are not, and only while somebody collects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from core.kernels.deferred import Deferred
from core.kernels.grouped_matmul import expert_mlp
from core.precision.matmul import deferring_linear, linear
from tests.core.numbers import BACKENDS, draw, near, use_backend

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# No token, one, primes; and a weight of two matrices, as gate and up are.
SHAPES = [(0, (3, 5)), (1, (1, 1)), (7, (11, 13)), (7, (2, 3, 5)), (0, (2, 3, 5))]
COUNTS = [(0, 0), (1,), (3, 0, 7, 2), (0, 4, 0)]
HIDDEN, FFN = 5, 7

Product = Callable[[Tensor, list[nn.Parameter], Deferred], Tensor]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(draw(10 + i, *shape, dtype=dtype)) for i, shape in enumerate(shapes)]


def multiply(x: Tensor, weights: list[nn.Parameter], later: Deferred) -> Tensor:
    return deferring_linear(x, weights[0], later)


def experts(counts: tuple[int, ...]) -> Product:
    def product(x: Tensor, weights: list[nn.Parameter], later: Deferred) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        router = draw(5, sum(counts)).sigmoid().to(wide)
        return expert_mlp(x, router, weights[0], weights[1], counts, later)

    return product


def expert_shapes(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (len(counts), 2, FFN, HIDDEN), (len(counts), HIDDEN, FFN)


def run(
    product: Product, x: Tensor, weights: list[nn.Parameter], later: Deferred, *, collecting: bool, passes: int = 1
) -> list[Tensor]:
    """`passes` backward passes; what has then come of gradients of x and the weights, zeros of no elements for none."""
    leaf = x.detach().clone().requires_grad_()
    for i in range(passes):
        out = product(leaf, weights, later)
        later.collecting = collecting
        out.backward(draw(30 + i, *out.shape, dtype=out.dtype))
        later.collecting = False
    return [torch.zeros(0) if t.grad is None else t.grad.clone() for t in (leaf, *weights)]


def check(product: Product, x: Tensor, shapes: tuple[tuple[int, ...], ...], passes: int) -> None:
    """Immediate and put-off gradients of the same passes."""
    at_once, later = parameters(*shapes, dtype=x.dtype), Deferred()
    expected = run(product, x, at_once, later, collecting=False, passes=passes)
    assert later.work == []
    put_off = parameters(*shapes, dtype=x.dtype)
    found = run(product, x, put_off, later, collecting=True, passes=passes)
    assert torch.equal(found[0], expected[0]), "the input's gradient"
    assert all(weight.grad is None for weight in put_off)
    assert len(later.work) == len(shapes) * passes
    for work in later.take():
        work()
    assert later.work == [] == later.take()
    for weight, truth in zip(put_off, expected[1:], strict=True):
        assert weight.grad is not None and weight.grad.dtype == x.dtype and not weight.grad.requires_grad
        assert torch.equal(weight.grad, truth)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "shape"), SHAPES)
def test_a_products_put_off_gradient_is_bitwise_the_immediate_one(
    monkeypatch: pytest.MonkeyPatch, tokens: int, shape: tuple[int, ...], dtype: torch.dtype, passes: int, backend: str
) -> None:
    use_backend(monkeypatch, backend)
    check(multiply, draw(0, tokens, shape[-1], dtype=dtype), (shape,), passes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_the_experts_put_off_gradients_are_bitwise_the_immediate_ones(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], dtype: torch.dtype, passes: int, backend: str
) -> None:
    use_backend(monkeypatch, backend)
    check(experts(counts), draw(0, sum(counts), HIDDEN, dtype=dtype), expert_shapes(counts), passes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "shape"), SHAPES)
def test_a_product_that_may_put_off_is_the_plain_product(
    monkeypatch: pytest.MonkeyPatch, tokens: int, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    use_backend(monkeypatch, backend)
    (weight,), (twin,) = parameters(shape, dtype=dtype), parameters(shape, dtype=dtype)
    x, y = (draw(0, tokens, shape[-1], dtype=dtype).requires_grad_() for _ in range(2))
    out, plain = deferring_linear(x, weight, Deferred()), linear(y, twin.flatten(0, -2))
    assert torch.equal(out, plain)
    arrives = draw(30, *out.shape, dtype=dtype)
    out.backward(arrives)
    plain.backward(arrives)
    for mine, theirs in ((x.grad, y.grad), (weight.grad, twin.grad)):
        near(mine, theirs, units=2)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_experts_that_may_put_off_are_bitwise_those_that_may_not(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    x, shapes = draw(0, sum(counts), HIDDEN, dtype=dtype), expert_shapes(counts)
    router = draw(5, sum(counts)).sigmoid().to(dtype)
    found, plain = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    mine = run(experts(counts), x, found, Deferred(), collecting=False)
    theirs = run(lambda v, w, _: expert_mlp(v, router, w[0], w[1], counts), x, plain, Deferred(), collecting=False)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_put_off_gradients_add_to_what_is_there_in_the_order_in_which_they_were_put() -> None:
    weight, later = nn.Parameter(torch.zeros(2)), Deferred()
    weight.grad = torch.tensor([1.0, 2.0])
    order: list[int] = []

    def gradient(number: int) -> Callable[[], Tensor]:
        def made() -> Tensor:
            order.append(number)
            return torch.tensor([10.0, 20.0]) * number

        return made

    for number in (1, 2, 3):
        later.put(weight, gradient(number))
    assert order == [] and weight.grad.tolist() == [1.0, 2.0]
    for work in later.take():
        work()
    assert order == [1, 2, 3] and weight.grad.tolist() == [61.0, 122.0]


def test_a_frozen_input_and_a_collecting_pass_leave_no_gradient_at_once() -> None:
    (weight,), later = parameters((3, 5), dtype=torch.float64), Deferred()
    later.collecting = True
    deferring_linear(draw(0, 7, 5), weight, later).sum().backward()
    assert weight.grad is None
    for work in later.take():
        work()
    assert weight.grad is not None
    near(weight.grad, draw(0, 7, 5).sum(0).expand(3, -1), units=32)
