"""Head and cross-entropy in one, against numpy's logsumexp and autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from core.config.run import IGNORE
from core.kernels.cross_entropy import head_cross_entropy, head_cross_entropy_reference
from tests.core.numbers import BACKENDS, draw, gradients, near, use_backend

HIDDEN, VOCAB = 5, 11


def case(tokens: int, dtype: torch.dtype, vocab: int = VOCAB, hidden: int = HIDDEN) -> tuple[list[Tensor], Tensor]:
    """[hidden, weight] and labels, every third of which is ignored."""
    generator = torch.Generator().manual_seed(tokens)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::3] = IGNORE
    return [draw(0, tokens, hidden, dtype=dtype), draw(1, vocab, hidden, dtype=dtype)], labels


def numpy_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    logits = hidden.double().numpy() @ weight.double().numpy().T
    total = 0.0
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label != -100:
            total += row.max() + np.log(np.exp(row - row.max()).sum()) - row[label]
    return total


# Around the number of tokens that are taken at a time, and primes.
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 511, 512, 513, 1031])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradients_are_those_of_the_definition(tokens: int, dtype: torch.dtype) -> None:
    tensors, labels = case(tokens, dtype)
    got = gradients(lambda h, w: head_cross_entropy(h, w, labels), tensors)
    truth = gradients(lambda h, w: head_cross_entropy_reference(h, w, labels), [x.double() for x in tensors])
    assert got[0].shape == () and got[0].dtype == dtype
    near(got[0], torch.tensor(numpy_loss(*tensors, labels), dtype=torch.float64), units=64)
    for a, b in zip(got, truth, strict=True):
        near(a, b, units=64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 53, 517])
def test_bfloat16_stays_within_its_own_rounding(monkeypatch: pytest.MonkeyPatch, backend: str, tokens: int) -> None:
    use_backend(monkeypatch, backend)
    tensors, labels = case(tokens, torch.bfloat16)
    got = gradients(lambda h, w: head_cross_entropy(h, w, labels), tensors)
    truth = gradients(lambda h, w: head_cross_entropy_reference(h, w, labels), [x.double() for x in tensors])
    assert [x.dtype for x in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    near(got[0].to(torch.bfloat16), truth[0], units=2)
    for a, b in zip(got[1:], truth[1:], strict=True):
        near(a, b, units=4)


def test_gradients_equal_those_by_differences() -> None:
    tensors, labels = case(5, torch.float64, vocab=4, hidden=3)
    assert torch.autograd.gradcheck(
        lambda h, w: head_cross_entropy(h, w, labels), [x.requires_grad_() for x in tensors]
    )


def test_an_outer_factor_reaches_a_bfloat16_gradient_unrounded() -> None:
    # 1 / 1.0038 rounds to 1 in bfloat16: all gradients below the head would be 0.4 % too long, always to the same side.
    tensors, labels = case(401, torch.bfloat16)
    once, twice = (
        gradients(lambda h, w, f=factor: head_cross_entropy(h, w, labels) * f, tensors)[1].double().norm()
        for factor in (1.0, 1.00195)
    )
    assert float(twice / once) == pytest.approx(1.00195, abs=2e-4)


@pytest.mark.parametrize("tokens", [0, 3])
def test_where_every_label_is_ignored_loss_and_gradients_are_zero(tokens: int) -> None:
    tensors, _ = case(tokens, torch.float32)
    labels = torch.full((tokens,), IGNORE)
    loss, of_hidden, of_weight = gradients(lambda h, w: head_cross_entropy(h, w, labels), tensors)
    assert loss.item() == 0.0
    assert not of_hidden.any() and of_weight.shape == (VOCAB, HIDDEN) and not of_weight.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_large_logits_neither_overflow_nor_lose_the_loss(dtype: torch.dtype) -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4]], dtype=dtype), torch.tensor([[1.0], [0.0], [-1.0]], dtype=dtype)
    size = float(hidden[0, 0])
    loss, of_hidden, of_weight = gradients(
        lambda h, w: head_cross_entropy(h, w, torch.tensor([1, 2])), [hidden, weight]
    )
    assert loss.item() == pytest.approx(
        size, rel=1e-6
    )  # first row: size above its label; second row: certain and right
    assert bool(torch.isfinite(of_hidden).all()) and bool(torch.isfinite(of_weight).all())


def test_without_gradients_the_value_is_the_same() -> None:
    tensors, labels = case(700, torch.float32)
    with torch.no_grad():
        plain = head_cross_entropy(*tensors, labels)
    assert not plain.requires_grad
    assert torch.equal(plain, head_cross_entropy(*(x.requires_grad_() for x in tensors), labels).detach())


def test_a_second_backward_over_a_kept_graph_gives_the_same_gradient() -> None:
    tensors, labels = case(9, torch.float32)
    hidden, weight = (x.requires_grad_() for x in tensors)
    loss = head_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss * 0.5, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 0.5, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_operands_in_any_memory_order_give_the_same() -> None:
    (hidden, weight), labels = case(7, torch.float64)
    strided = [hidden.T.contiguous().T, weight.repeat_interleave(2, 0)[::2]]
    for a, b in zip(
        gradients(lambda h, w: head_cross_entropy(h, w, labels), strided),
        gradients(lambda h, w: head_cross_entropy(h, w, labels), [hidden, weight]),
        strict=True,
    ):
        near(a, b, units=16)


def test_a_label_outside_the_vocabulary_is_an_error() -> None:
    tensors, labels = case(4, torch.float32)
    labels[1] = VOCAB
    with pytest.raises(RuntimeError, match="out of bounds"):
        head_cross_entropy(*tensors, labels)
