"""Cross-entropy over rows of logits in Triton against numpy in float64, whole and in stretches of the vocabulary."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from core.config.mapping import ParallelConfig
from core.config.run import IGNORE
from core.kernels.cross_entropy import VocabularyCut, head_cross_entropy, head_cross_entropy_reference
from core.parallel.groups import groups_for
from core.state.box import stretch
from tests.core.kernels.triton_case import kernels
from tests.core.numbers import draw, gradients, leaf, near
from tests.ranks import Ranks

pytest.importorskip("triton", minversion="3.7")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = 6


@pytest.fixture(autouse=True)
def blocks_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies take several."""
    from core.kernels.triton import cross_entropy

    monkeypatch.setattr(cross_entropy, "_BLOCK", 8)


def case(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [6, vocab] of very different size, labels, and which rows count."""
    logits = draw(0, ROWS, vocab) * torch.tensor([[1.0], [20.0], [0.0], [3.0], [5.0], [1.0]]) + 7
    return logits.to(dtype), (torch.arange(ROWS) * 5) % vocab, torch.tensor([True, True, False, True, True, False])


def truth_of(logits: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every row and its gradient, by numpy in float64."""
    z, keep = logits.double().numpy(), valid.numpy()
    powers = np.exp(z - z.max(1, keepdims=True))
    at, rows = labels.numpy(), np.arange(len(z))
    loss = (np.log(powers.sum(1)) + z.max(1) - z[rows, at]) * keep
    gradient = powers / powers.sum(1, keepdims=True)
    gradient[rows, at] -= 1
    return torch.from_numpy(loss), torch.from_numpy(gradient * keep[:, None])


# One column, a block, one more than a block, primes.
@pytest.mark.parametrize("vocab", [1, 2, 8, 9, 37])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient_of_every_row_are_those_of_numpy(
    device: torch.device, vocab: int, dtype: torch.dtype
) -> None:
    from core.kernels.triton.cross_entropy import loss_and_gradient_

    logits, labels, valid = case(vocab, dtype)
    here, at, keep = logits.to(device), torch.where(valid, labels, -1).to(device), valid.to(device)
    loss, gradient = truth_of(logits, labels, valid)
    found = loss_and_gradient_(here, at, keep, gradient=False)
    assert torch.equal(here.cpu(), logits)
    near(found.cpu(), loss, least=10.0)
    assert torch.equal(loss_and_gradient_(here, at, keep, gradient=True), found) and found.dtype == torch.float32
    near(here.cpu(), gradient, units=4, least=0.1)


@pytest.mark.parametrize("ends", [(0, 37), (0, 9, 37), (0, 1, 1, 20, 37), (0, 0, 37, 37)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stretches_of_the_vocabulary_add_up_to_the_whole(
    device: torch.device, ends: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of every stretch the largest, the sum and the label's logit; then, given those of the whole, its part of the gradient."""
    from core.kernels.triton.cross_entropy import gradient_, row_sums

    logits, labels, valid = case(37, dtype)
    pieces = [logits[:, a:b].contiguous().to(device) for a, b in pairwise(ends)]
    at = [torch.where(valid & (labels >= a) & (labels < b), labels - a, -1).to(device) for a, b in pairwise(ends)]
    sums = [row_sums(piece, label) for piece, label in zip(pieces, at, strict=True)]
    for (largest, total, _), piece in zip(sums, pieces, strict=True):
        if not piece.shape[1]:
            assert bool((largest == -torch.inf).all()) and not total.any()
    top = torch.stack([largest for largest, _, _ in sums]).amax(0)
    total = sum((total * (largest - top).exp() for largest, total, _ in sums), start=torch.zeros_like(top))
    of_label = sum((found for _, _, found in sums), start=torch.zeros_like(top))
    loss, gradient = truth_of(logits, labels, valid)
    near(((total.log() + top - of_label).cpu() * valid), loss, least=10.0)
    for piece, label in zip(pieces, at, strict=True):
        gradient_(piece, label, valid.to(device), top, total)
    near(torch.cat(pieces, dim=1).cpu(), gradient, units=4, least=0.1)


def test_logits_far_apart_stay_finite(device: torch.device) -> None:
    from core.kernels.triton.cross_entropy import loss_and_gradient_

    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e38, 1e38, -1e38]], device=device)
    loss = loss_and_gradient_(
        logits, torch.tensor([1, 0, 1], device=device), torch.ones(3, dtype=torch.bool, device=device), gradient=True
    )
    near(loss.cpu(), torch.tensor([2e4, np.log(3), np.log(2)]))
    near(logits.cpu(), torch.tensor([[1.0, -1, 0], [-2 / 3, 1 / 3, 1 / 3], [0.5, -0.5, 0]]))


@pytest.mark.parametrize("tokens", [0, 1, 23])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_and_loss_are_those_of_the_definition(device: torch.device, tokens: int, dtype: torch.dtype) -> None:
    tensors = [draw(0, tokens, 5, dtype=dtype), draw(1, 11, 5, dtype=dtype)]
    labels = (torch.arange(tokens) * 7) % 11
    labels[::3] = IGNORE
    with kernels("triton"):
        on = labels.to(device)
        got = gradients(lambda h, w: head_cross_entropy(h, w, on), [x.to(device) for x in tensors])
    with kernels("reference"):
        truth = gradients(lambda h, w: head_cross_entropy_reference(h, w, labels), [x.double() for x in tensors])
    assert [x.dtype for x in got] == [torch.float32, dtype, dtype]
    near(got[0].cpu().to(dtype), truth[0], units=4)
    for a, b in zip(got[1:], truth[1:], strict=True):
        near(a.cpu(), b, units=64 if dtype == torch.float32 else 6, least=1e-3)


def _shares(
    rank: int, world: int, cases: list[tuple[list[Tensor], Tensor]], rows: tuple[int, ...]
) -> list[list[list[Tensor]]]:
    """By case this rank's share of the loss and its gradients, by the reference and by Triton."""
    tp = groups_for(ParallelConfig(tp=world)).tp
    found = []
    for (everyone, whole), labels in cases:
        cut = VocabularyCut(tp=tp, vocab=whole.shape[0], rows=rows)
        found.append([])
        for name in ("reference", "triton"):
            hidden, weight = leaf(everyone), leaf(whole[stretch(tuple(whole.shape), 0, rank, world).slices])
            with kernels(name):
                share = head_cross_entropy(hidden, weight, labels, cut=cut)
                share.backward()
            assert hidden.grad is not None and weight.grad is not None
            found[-1].append([share.detach(), hidden.grad, weight.grad])
    return found


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks of tests are CPUs, on which Triton runs where there is no GPU"
)
def test_ranks_of_a_cut_vocabulary_get_what_the_reference_gives_them(ranks: Ranks) -> None:
    cases = []
    for vocab in (1, 19):
        labels = torch.arange(9) % vocab
        labels[4] = IGNORE
        cases.append(([draw(2, 9, 3, dtype=torch.float32), draw(3, vocab, 3, dtype=torch.float32)], labels))
    for rank in ranks.run(_shares, 2, cases, (5, 4)):
        for reference, by_kernel in rank:
            for truth, got in zip(reference, by_kernel, strict=True):
                near(got, truth, units=16, least=1.0)
