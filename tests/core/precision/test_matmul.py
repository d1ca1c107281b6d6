"""The matrix products of the layers against numpy, natively and widened."""

from __future__ import annotations

import pytest
import torch

from core.precision.matmul import linear, wide_linear
from tests.core.numbers import BACKENDS, draw, gradients, near, use_backend

# No tokens, one, primes, sizes that are no multiple of eight, one output.
SIZES = [(0, 5, 3), (1, 1, 1), (7, 13, 11), (16, 8, 24), (3, 30, 47)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inside", "outside"), SIZES)
def test_values_and_gradients_equal_the_exact_products(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype, tokens: int, inside: int, outside: int
) -> None:
    use_backend(monkeypatch, backend)
    x, weight = draw(0, tokens, inside, dtype=dtype), draw(1, outside, inside, dtype=dtype)
    got = gradients(linear, [x, weight])
    grad = draw(99, tokens, outside).to(dtype).double().numpy()
    wide_x, wide_weight = x.double().numpy(), weight.double().numpy()
    for ours, truth in zip(got, (wide_x @ wide_weight.T, grad @ wide_weight, grad.T @ wide_x), strict=True):
        near(ours, torch.from_numpy(truth), units=2 if dtype == torch.bfloat16 else 16)


def test_a_widened_product_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "float32")
    # In bfloat16 steps the ones would vanish beside 256.
    x, weight = torch.ones(1, 33, dtype=torch.bfloat16), torch.ones(1, 33, dtype=torch.bfloat16)
    x[0, 0] = 256
    assert linear(x, weight).item() == 288.0
    y, other = draw(0, 17, 23, dtype=torch.bfloat16), draw(1, 5, 23, dtype=torch.bfloat16)
    assert torch.equal(linear(y, other), (y.double() @ other.double().T).to(torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_nobody_asked_for_is_not_made(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    use_backend(monkeypatch, backend)
    x, weight = (draw(i, 3, 3, dtype=torch.bfloat16) for i in range(2))
    for asked, other in ((x, weight), (weight, x)):
        asked.requires_grad_()
        linear(x, weight).sum().backward()
        assert asked.grad is not None and other.grad is None
        asked.requires_grad_(False).grad = None


@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_in_any_memory_order_give_the_same(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    use_backend(monkeypatch, backend)
    x, weight = draw(0, 7, 5, dtype=torch.bfloat16), draw(1, 3, 5, dtype=torch.bfloat16)
    strided = gradients(linear, [x.T.contiguous().T, weight.repeat_interleave(2, 1)[:, ::2]])
    for a, b in zip(strided, gradients(linear, [x, weight]), strict=True):
        near(a, b, units=2)


@pytest.mark.parametrize("tokens", [0, 1, 29])
@pytest.mark.parametrize(
    ("narrow", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.float64,) * 2]
)
def test_a_wide_product_is_that_of_wider_copies_to_the_last_bit_and_keeps_none_of_them(
    tokens: int, narrow: torch.dtype, wide: torch.dtype
) -> None:
    x, weight = draw(0, tokens, 23, dtype=narrow), draw(1, 7, 23, dtype=narrow)
    kept: list[torch.dtype] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor.detach()

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return wide_linear(x, weight, wide)

    got = gradients(noted, [x, weight])
    copies = gradients(lambda x, weight: linear(x.to(wide), weight.to(wide)), [x, weight])
    for ours, theirs in zip(got, copies, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert set(kept) == {narrow}
