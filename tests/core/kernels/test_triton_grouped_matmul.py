"""Triton's grouped products, and the experts made of them, against plain loops in float64. tests/gpu runs the same on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from core.config.architecture import SWIGLU, Activation, ClampedSwiGLU, GeGLU, SquaredReLU, num_halves
from core.kernels.deferred import Deferred
from core.kernels.grouped_matmul import expert_mlp, expert_mlp_loop
from core.kernels.grouped_products import Biases
from tests.core.numbers import draw, gradients, leaf, near

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows of each piece: none at all, no piece, one, primes, pieces without rows at both ends and between, more than nine pieces, and
# pieces of several tiles.
COUNTS = [(), (0,), (1,), (0, 1, 0), (3, 0, 7, 2), (0, 0, 1, 0, 2, 0, 3, 1, 0, 4, 5, 0), (37, 0, 7)]
# Dtype, rows behind the last piece, depth and width of the matrices: one, tiles that are met exactly, primes. Not all with all of
# the others: the interpreter takes milliseconds for a tile.
CASES = [
    (torch.float32, 5, 19, 37),
    (torch.bfloat16, 5, 37, 19),
    (torch.float16, 0, 32, 64),
    (torch.bfloat16, 0, 1, 1),
]


def ends_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.int64).cumsum(0).to(device, torch.int32)


def by_piece(counts: tuple[int, ...], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each piece of every tensor, in float64 on the CPU."""
    live = [x[: sum(counts)].double().cpu().split(list(counts)) if counts else () for x in tensors]
    return list(zip(*live, strict=True))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("dtype", "over", "depth", "width"), CASES)
def test_rows_are_multiplied_by_the_matrix_of_their_piece_and_rows_of_none_give_zeros(
    device: torch.device, dtype: torch.dtype, counts: tuple[int, ...], over: int, depth: int, width: int
) -> None:
    from core.kernels.triton.grouped_matmul import product

    rows, live = sum(counts) + over, sum(counts)
    x, weight = draw(0, rows, depth, dtype=dtype).to(device), draw(1, len(counts), width, depth, dtype=dtype).to(device)
    grad = draw(2, rows, width, dtype=dtype).to(device)
    x[live:], grad[live:] = torch.nan, torch.inf
    ends = ends_of(counts, device)
    forward, of_rows = product(x, weight.transpose(1, 2), ends), product(grad, weight, ends)
    assert forward.dtype == of_rows.dtype == dtype
    assert not forward[live:].any() and not of_rows[live:].any()
    for e, (xs, ys) in enumerate(by_piece(counts, x, forward)):
        near(ys.to(dtype), xs @ weight[e].double().cpu().T, units=4)
    for e, (gs, of_xs) in enumerate(by_piece(counts, grad, of_rows)):
        near(of_xs.to(dtype), gs @ weight[e].double().cpu(), units=4)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("dtype", "over", "depth", "width"), CASES)
def test_the_gradient_of_a_matrix_sums_over_its_own_rows_and_is_zero_without_any(
    device: torch.device, dtype: torch.dtype, counts: tuple[int, ...], over: int, depth: int, width: int
) -> None:
    from core.kernels.triton.grouped_matmul import weight_gradient

    rows = sum(counts) + over
    x, grad = draw(0, rows, depth, dtype=dtype).to(device), draw(2, rows, width, dtype=dtype).to(device)
    x[sum(counts) :], grad[sum(counts) :] = torch.nan, torch.inf
    found = weight_gradient(grad, x, ends_of(counts, device))
    assert found.shape == (len(counts), width, depth) and found.dtype == dtype
    for e, (gs, xs) in enumerate(by_piece(counts, grad, x)):
        near(found[e].cpu(), gs.T @ xs, units=4)
        assert len(gs) or not found[e].any()


def test_operands_in_any_memory_order_give_the_same(device: torch.device) -> None:
    from core.kernels.triton.grouped_matmul import product, weight_gradient

    ends = ends_of((3, 0, 7), device)
    x, grad = (draw(i, 10, n, dtype=torch.float32).to(device) for i, n in ((0, 19), (1, 21)))
    weight = draw(2, 3, 21, 19, dtype=torch.float32).to(device)
    turned = (
        x.T.contiguous().T,
        grad.repeat_interleave(2, 1)[:, ::2],
        weight.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    )
    assert all(not a.is_contiguous() and torch.equal(a, b) for a, b in zip(turned, (x, grad, weight), strict=True))
    assert torch.equal(product(turned[0], turned[2].transpose(1, 2), ends), product(x, weight.transpose(1, 2), ends))
    assert torch.equal(product(turned[1], turned[2], ends), product(grad, weight, ends))
    assert torch.equal(weight_gradient(turned[1], turned[0], ends), weight_gradient(grad, x, ends))


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    from core.kernels.triton.grouped_matmul import product, weight_gradient

    x, weight = draw(0, 4, 3, dtype=torch.float32).to(device), draw(1, 2, 3, 5, dtype=torch.float32).to(device)
    ends = ends_of((1, 3), device)
    with pytest.raises(ValueError, match="rows of 3 and 1 pieces do not fit matrices of"):
        product(x, weight, ends[:1])
    with pytest.raises(ValueError, match="both must be bfloat16, float16 or float32"):
        product(x.double(), weight.double(), ends)
    with pytest.raises(ValueError, match="both must be bfloat16"):
        product(x.half(), weight, ends)
    with pytest.raises(ValueError, match=r"ends of pieces in torch\.int64: they must be int32"):
        product(x, weight, ends.long())
    with pytest.raises(ValueError, match="3 rows of the gradient belong to 4 rows"):
        weight_gradient(x[:3], x, ends)


def operands(
    activation: Activation, counts: tuple[int, ...], dtype: torch.dtype, over: int = 0, hidden: int = 18, ffn: int = 21
) -> list[Tensor]:
    """rows, weights, gate_up, down and the biases, of which the second is a stretch of 5."""
    experts, halves, rows = len(counts), num_halves(activation), sum(counts) + over
    shapes = (experts, halves, ffn, hidden), (experts, hidden, ffn), (experts, halves, ffn), (experts, 5)
    weight = draw(1, rows).sigmoid().float()
    return [draw(0, rows, hidden, dtype=dtype), weight, *(draw(2 + i, *s, dtype=dtype) for i, s in enumerate(shapes))]


def mlp(form: Callable[..., Tensor], activation: Activation, counts: object) -> Callable[..., Tensor]:
    def function(*x: Tensor) -> Tensor:
        biases = Biases(gate_up=x[4], down=x[5], first=2) if len(x) > 4 else None
        return form(*x[:4], counts, activation=activation, biases=biases)

    return function


# A limit that no number meets: rounded to another side of it, one would have another gradient.
ACTIVATIONS = (SWIGLU, GeGLU(tanh=True), ClampedSwiGLU(limit=64.0, alpha=1.702, shift=1.0), SquaredReLU())
EXPERTS = [
    *((activation, dtype, (3, 0, 4), True) for activation in ACTIVATIONS for dtype in DTYPES),
    *((SWIGLU, torch.float32, counts, False) for counts in ((0, 0), (0, 19), (3, 0, 4))),
]


@pytest.mark.parametrize(("activation", "dtype", "counts", "biased"), EXPERTS, ids=str)
def test_experts_by_triton_are_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    activation: Activation,
    dtype: torch.dtype,
    counts: tuple[int, ...],
    biased: bool,
) -> None:
    monkeypatch.setenv("ZOO_EXPERTS", "triton")
    tensors = operands(activation, counts, dtype)[: 6 if biased else 4]
    truth = gradients(mlp(expert_mlp_loop, activation, counts), [x.double() for x in tensors])

    def there(*x: Tensor) -> Tensor:
        return mlp(expert_mlp, activation, counts)(*(y.to(device) for y in x)).cpu()

    got = gradients(there, tensors)
    for a, b in zip(got, truth, strict=True):
        near(
            a if dtype in (torch.float32, a.dtype) else a.to(dtype),
            b,
            units=64 if dtype == torch.float32 else 8,
        )


def test_the_device_alone_knows_the_counts_and_rows_over_are_zero(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv("ZOO_EXPERTS", "triton")
    counts, over = (3, 0, 7), 4
    tensors = operands(SquaredReLU(), counts, torch.float32, over)
    tensors[0][10:] = torch.nan
    leaves = [leaf(x.to(device)) for x in tensors]
    out = mlp(expert_mlp, SquaredReLU(), torch.tensor(counts, device=device))(*leaves)
    arrives = draw(9, *out.shape).float()
    out.backward(arrives.to(device))
    twins = [leaf((x[:10] if i < 2 else x).double()) for i, x in enumerate(tensors)]
    truth = mlp(expert_mlp_loop, SquaredReLU(), counts)(*twins)
    truth.backward(arrives[:10].double())
    near(out[:10].cpu(), truth, units=64)
    assert not out[10:].any()
    for i, (a, b) in enumerate(zip(leaves, twins, strict=True)):
        assert a.grad is not None
        near(a.grad[:10].cpu() if i < 2 else a.grad.cpu(), b.grad, units=64)
        assert i >= 2 or not a.grad[10:].any()


def test_gradients_of_matrices_that_are_put_off_come_out_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv("ZOO_EXPERTS", "triton")
    found = []
    for collecting in (False, True):
        later = Deferred(collecting=collecting)
        x, weight, gate_up, down = (leaf(y.to(device)) for y in operands(SWIGLU, (3, 0, 2), torch.float32)[:4])
        gate_up, down = torch.nn.Parameter(gate_up.detach()), torch.nn.Parameter(down.detach())
        expert_mlp(x, weight, gate_up, down, (3, 0, 2), later).sum().backward()
        assert (gate_up.grad is None) == (down.grad is None) == collecting
        for work in later.take():
            work()
        found.append([y.grad for y in (x, weight, gate_up, down)])
    for now, then in zip(*found, strict=True):
        assert now is not None and then is not None and torch.equal(now, then)
