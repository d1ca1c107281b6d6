"""Attention over packed sequences: each sequence as if alone, and numpy's plain softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from core.attention.packing import Packing, packing_of
from core.attention.softmax import causal_attention, causal_attention_reference
from tests.core.numbers import BACKENDS, draw, gradients, near, use_backend

SCALE = 0.37
# Sequences: one token, one sequence, primes, equal ones, equal but for one, ones of a single token.
PACKINGS = [(1,), (7,), (3, 1, 5, 2), (4, 4, 4), (4, 4, 5), (1, 1, 1), (13, 1)]
# Heads, key/value heads, head size, value size.
SHAPES = [(1, 1, 4, 4), (6, 2, 5, 5), (4, 1, 6, 3), (3, 3, 8, 5), (2, 2, 3, 7)]


def packed(lengths: tuple[int, ...]) -> Packing:
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    return packing_of(ends, sum(lengths), torch.device("cpu"))


def operands(tokens: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    heads, shared, size, value = shape
    sizes = ((tokens, heads, size), (tokens, shared, size), (tokens, shared, value))
    return [draw(i, *s, dtype=dtype) for i, s in enumerate(sizes)]


def naive(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Token by token, head by head."""
    out, share = np.zeros((q.shape[0], q.shape[1], v.shape[2])), q.shape[1] // k.shape[1]
    starts = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    for t, start in enumerate(starts):
        for a in range(q.shape[1]):
            logits = k[start : t + 1, a // share] @ q[t, a] * SCALE
            weights = np.exp(logits - logits.max())
            out[t, a] = weights / weights.sum() @ v[start : t + 1, a // share]
    return out


@pytest.mark.parametrize("form", [causal_attention, causal_attention_reference])
@pytest.mark.parametrize("lengths", PACKINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_token_sees_its_own_sequence_up_to_itself(
    form: object, lengths: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    assert callable(form)
    tensors = operands(sum(lengths), shape)
    truth = naive(*(x.numpy() for x in tensors), lengths)
    near(form(*tensors, packed(lengths), SCALE), torch.from_numpy(truth), units=32)


@pytest.mark.parametrize("lengths", PACKINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_equal_the_definition(
    lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors, packing = operands(sum(lengths), shape, dtype), packed(lengths)
    got = gradients(lambda *x: causal_attention(*x, packing, SCALE), tensors)
    truth = gradients(lambda *x: causal_attention_reference(*x, packing, SCALE), [x.double() for x in tensors])
    for ours, exact in zip(got, truth, strict=True):
        near(ours, exact, units=32, least=1.0)  # a sequence of one token has no gradient by its query and key


@pytest.mark.parametrize("lengths", [(3, 1, 5, 2), (4, 4, 4)])
def test_a_sequence_is_the_same_alone_as_packed(lengths: tuple[int, ...]) -> None:
    tensors, packing = operands(sum(lengths), (6, 2, 5, 3)), packed(lengths)
    together = gradients(lambda *x: causal_attention(*x, packing, SCALE), tensors)
    start = 0
    for length in lengths:
        piece = slice(start, start + length)
        grad = draw(99, *together[0].shape)[piece]
        alone = [x[piece].clone().requires_grad_() for x in tensors]
        out = causal_attention(*alone, packed((length,)), SCALE)
        out.backward(grad)
        near(together[0][piece], out, units=16)
        for x, all_of_it in zip(alone, together[1:], strict=True):
            near(x.grad, all_of_it[piece], units=32)
        start += length


def test_gradients_equal_those_by_differences() -> None:
    packing = packed((2, 1))
    tensors = [x.requires_grad_() for x in operands(3, (2, 1, 3, 2))]
    assert torch.autograd.gradcheck(lambda *x: causal_attention(*x, packing, SCALE), tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(7,), (3, 1, 5, 2), (4, 4)])
def test_bfloat16_stays_within_its_own_rounding(
    monkeypatch: pytest.MonkeyPatch, backend: str, lengths: tuple[int, ...]
) -> None:
    use_backend(monkeypatch, backend)
    tensors, packing = operands(sum(lengths), (6, 2, 5, 3), torch.bfloat16), packed(lengths)
    got = gradients(lambda *x: causal_attention(*x, packing, SCALE), tensors)
    truth = gradients(lambda *x: causal_attention_reference(*x, packing, SCALE), [x.double() for x in tensors])
    for ours, exact in zip(got, truth, strict=True):
        assert ours.dtype == torch.bfloat16
        near(ours, exact, units=4)


@pytest.mark.parametrize("ends", [[0], [0, 0]])
def test_no_tokens_give_no_rows_and_a_gradient_that_exists(ends: list[int]) -> None:
    packing = packing_of(torch.tensor(ends), 0, torch.device("cpu"))
    out, *grads = gradients(lambda *x: causal_attention(*x, packing, SCALE), operands(0, (6, 2, 5, 3)))
    assert out.shape == (0, 6, 3) and [g.shape[0] for g in grads] == [0, 0, 0]


def test_large_logits_pick_one_token_without_overflow() -> None:
    q, k, v = (x * 1e3 for x in operands(5, (2, 2, 4, 4), torch.float32))
    near(
        causal_attention(q, k, v, packed((5,)), SCALE),
        torch.from_numpy(naive(*(x.double().numpy() for x in (q, k, v)), (5,))),
    )


def test_operands_cut_out_of_larger_tensors_are_read_right() -> None:
    tensors, packing = operands(6, (4, 2, 5, 3)), packed((3, 3))
    wide = [torch.cat([x, x * 7], -1)[..., : x.shape[-1]] for x in tensors]
    got = gradients(lambda *x: causal_attention(*x, packing, SCALE), wide)
    for a, b in zip(got, gradients(lambda *x: causal_attention(*x, packing, SCALE), tensors), strict=True):
        near(a, b, units=16)
