"""One matrix as embedding, as head, and as both at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core.layers.embedding import Vocabulary
from tests.core.layers.places import place
from tests.core.numbers import draw, near

VOCAB, HIDDEN = 13, 5
TOKENS, LABELS = torch.tensor([12, 0, 3, 3, 7]), torch.tensor([0, 3, -100, 7, 12])


def build(dtype: torch.dtype) -> Vocabulary:
    vocabulary = Vocabulary(VOCAB, HIDDEN, init_std=0.1, place=place(dtype))
    vocabulary.weight.data.copy_(draw(0, VOCAB, HIDDEN))
    return vocabulary


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_embeds_and_scores(dtype: torch.dtype) -> None:
    vocabulary = build(dtype)
    assert torch.equal(vocabulary.embed(TOKENS), vocabulary.weight[TOKENS])
    hidden = draw(1, 5, HIDDEN, dtype=dtype)
    logits = vocabulary.logits(hidden)
    assert logits.dtype == torch.float32
    truth = hidden.double() @ vocabulary.weight.detach().double().T
    loss = vocabulary.loss(hidden, LABELS)
    expected = F.cross_entropy(truth, LABELS, reduction="sum")
    if dtype == torch.bfloat16:  # both are wide, but made of rounded products
        logits, loss = logits.to(dtype), loss.to(dtype)
    near(logits, truth)
    near(loss, expected)


def test_no_tokens_give_no_rows_no_loss_and_a_zero_gradient() -> None:
    vocabulary, none = build(torch.float32), torch.zeros(0, dtype=torch.int64)
    assert vocabulary.logits(vocabulary.embed(none)).shape == (0, VOCAB)
    loss = vocabulary.loss(vocabulary.embed(none), none)
    loss.backward()
    assert loss.item() == 0.0
    assert vocabulary.weight.grad is not None and not vocabulary.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_tied_matrix_gets_both_gradients(dtype: torch.dtype) -> None:
    vocabulary = build(dtype)
    vocabulary.loss(vocabulary.embed(TOKENS), LABELS).backward()
    wide = vocabulary.weight.detach().double().requires_grad_()
    F.cross_entropy(wide[TOKENS] @ wide.T, LABELS, reduction="sum").backward()
    near(vocabulary.weight.grad, wide.grad, units=4 if dtype == torch.bfloat16 else 16)


def test_a_token_in_a_thousand_places_keeps_its_gradient_in_bfloat16() -> None:
    vocabulary = build(torch.bfloat16)
    out = vocabulary.embed(torch.full((1000,), 4))
    out.backward(torch.ones_like(out))
    assert vocabulary.weight.grad is not None and vocabulary.weight.grad[4].tolist() == [1000.0] * HIDDEN
