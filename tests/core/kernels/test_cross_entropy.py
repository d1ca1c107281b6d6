"""Head and cross-entropy in one, whole and cut over tp, against numpy's logsumexp and torch's own loss in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.mapping import ParallelConfig
from core.config.run import IGNORE
from core.kernels import cross_entropy
from core.kernels.cross_entropy import VocabularyCut, head_cross_entropy, head_cross_entropy_reference
from core.parallel.groups import Group, groups_for
from core.parallel.meter import Meter
from core.state.box import stretch
from tests.core.numbers import BACKENDS, draw, gradients, leaf, near, use_backend
from tests.ranks import Ranks

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


# Tokens that each rank counts: uneven, with a rank that counts none, and none at all.
ROWS: dict[int, list[tuple[int, ...]]] = {
    1: [(7,), (0,)],
    2: [(3, 0), (64, 67), (0, 0)],
    3: [(1, 0, 130), (5, 6, 2)],
    4: [(7, 1, 0, 2), (33, 33, 32, 33), (0, 0, 1, 0)],
}


def _shares(
    rank: int, world: int, operands: list[tuple[list[Tensor], Tensor]], cases: list[tuple[int, ...]], chunk_bytes: int
) -> list[dict[str, Tensor | int]]:
    """By case this rank's share of the loss and the gradients of 0.37 times it, in chunks of so many bytes of logits."""
    meter = Meter()
    tp = groups_for(ParallelConfig(tp=world), meter=meter).tp
    results: list[dict[str, Tensor | int]] = []
    for ((everyone, whole), labels), rows in zip(operands, cases, strict=True):
        meter.sent_bytes.clear()
        hidden, weight = leaf(everyone), leaf(whole[stretch(tuple(whole.shape), 0, rank, world).slices])
        cut = VocabularyCut(tp=tp, vocab=whole.shape[0], rows=rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_entropy, "_CHUNK_BYTES", chunk_bytes)
            share = head_cross_entropy(hidden, weight, labels, cut=cut)
            (share * 0.37).backward()
            sent = meter.sent_bytes["tp", "all_reduce"]
            with torch.no_grad():
                evaluated = head_cross_entropy(hidden, weight, labels, cut=cut)
        assert hidden.grad is not None and weight.grad is not None and not evaluated.requires_grad
        assert meter.sent_bytes["tp", "all_reduce"] == 2 * sent
        of = {"hidden": hidden.grad, "weight": weight.grad}
        results.append({"share": share, "evaluated": evaluated, **of, "sent": sent})
    return results


def _torch_losses(tensors: list[Tensor], labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of every token, and the gradients of 0.37 times their sum: torch's, in float64, on one rank."""
    hidden, weight = (leaf(x.double()) for x in tensors)
    losses = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="none")
    (losses.sum() * 0.37).backward()
    assert hidden.grad is not None and weight.grad is not None
    return losses.detach(), hidden.grad, weight.grad


def _compare(
    found: Sequence[dict[str, Tensor]], tensors: list[Tensor], labels: Tensor, rows: tuple[int, ...], close: float
) -> None:
    """Shares are the losses of a rank's own tokens; weight gradients are pieces of the whole, those of hidden add up to it."""
    losses, of_hidden, of_weight = _torch_losses(tensors, labels)
    for one, own in zip(found, losses.split(list(rows)), strict=True):
        assert one["share"].shape == () and torch.equal(one["share"], one["evaluated"])
        np.testing.assert_allclose(float(one["share"]), float(own.sum()), rtol=close, atol=close)
    hidden = sum((one["hidden"].double() for one in found[1:]), start=found[0]["hidden"].double())
    weight = torch.cat([one["weight"].double() for one in found])
    for got, truth in ((hidden, of_hidden), (weight, of_weight)):
        assert got.shape == truth.shape
        largest = float(truth.abs().max()) if truth.numel() else 0.0
        np.testing.assert_allclose(got.numpy(), truth.numpy(), rtol=0, atol=close * max(1.0, largest))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_cut_over_tp_the_shares_are_the_loss_and_the_gradients_those_of_the_whole(
    ranks: Ranks, world: int, dtype: torch.dtype, close: float
) -> None:
    operands = [case(sum(rows), dtype, vocab=261) for rows in ROWS[world]]
    results = zip(*ranks.run(_shares, world, operands, ROWS[world], 1), strict=True)
    for (tensors, labels), rows, found in zip(operands, ROWS[world], results, strict=True):
        _compare(found, tensors, labels, rows, close)
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        assert [one["share"].dtype for one in found] == [wide] * world
        # Of every chunk of 64 tokens the maximum, and then sum and label logit.
        chunks = [min(64, sum(rows) - start) for start in range(0, sum(rows), 64)]
        sizes = [tokens * numbers * wide.itemsize for tokens in chunks for numbers in (1, 2)]
        assert [one["sent"] for one in found] == [sum(2 * (world - 1) * size // world for size in sizes)] * world


# 1600 bytes are 200 float64 logits of one row of the vocabulary and 100 of two: where ranks hold one and two, all take 100.
@pytest.mark.parametrize(("vocab", "world"), [(3, 2), (5, 3), (1, 2), (3, 4), (2, 4)])
def test_ranks_of_uneven_or_no_vocabulary_take_as_many_chunks(ranks: Ranks, vocab: int, world: int) -> None:
    rows = (131, *(0,) * (world - 2), 2)
    tensors, labels = case(133, torch.float64, vocab=vocab)
    found = [one for (one,) in ranks.run(_shares, world, [(tensors, labels)], [rows], 1600)]
    _compare(found, tensors, labels, rows, 1e-12)


def test_cut_over_tp_ignored_labels_and_large_logits_are_no_different(ranks: Ranks) -> None:
    tensors, labels = case(5, torch.float32)
    labels[:] = IGNORE
    for (one,) in ranks.run(_shares, 3, [(tensors, labels)], [(2, 0, 3)], 1):
        assert one["share"].item() == 0.0 and not one["hidden"].any() and not one["weight"].any()
    # Two ranks, of whom one holds only logits that are 2e4 below the other's largest.
    tensors = [torch.tensor([[1e4], [-1e4], [1e4]]), torch.tensor([[1.0], [0.0], [-1.0]])]
    found = [one for (one,) in ranks.run(_shares, 2, [(tensors, torch.tensor([1, 2, 2]))], [(2, 1)], 1)]
    assert [one["share"].item() for one in found] == [1e4, 2e4]
    for one in found:
        assert bool(torch.isfinite(one["hidden"]).all()) and bool(torch.isfinite(one["weight"]).all())


def _known_fault(rank: int, world: int, gathered: bool) -> float | str:
    """Logits [0, 1, 2, 3] and label 3; gathered: with the whole matrix where this rank's rows belong."""
    cut = VocabularyCut(tp=groups_for(ParallelConfig(tp=world)).tp, vocab=4, rows=(1, 0))
    weight = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    mine = weight if gathered else weight[2 * rank : 2 * rank + 2]
    try:
        return head_cross_entropy(torch.ones(1, 1), mine, torch.tensor([3]), cut=cut).item()
    except ValueError as fault:
        return str(fault)


def test_gathered_rows_of_the_vocabulary_are_refused_and_not_counted_twice(ranks: Ranks) -> None:
    # Fault E5: -log(e^3 / (1 + e + e^2 + e^3)) is 0.4402; a vocabulary that is summed on both ranks gives log 2 more, 1.133.
    assert ranks.run(_known_fault, 2, False) == [pytest.approx(0.440190, abs=1e-6), 0.0]
    for rank, fault in enumerate(ranks.run(_known_fault, 2, True)):
        stretch_of = ["[0, 2)", "[2, 4)"][rank]
        assert f"a head of 4 rows is not the stretch {stretch_of} of a vocabulary of 4 that rank {rank} of 2" in fault


def _with_label(rank: int, world: int, label: int) -> str:
    cut = VocabularyCut(tp=groups_for(ParallelConfig(tp=world)).tp, vocab=5, rows=(1, 1))
    try:
        head_cross_entropy(torch.ones(2, 1), torch.ones(2 + rank, 1), torch.tensor([0, label]), cut=cut)
    except RuntimeError as fault:
        return str(fault)
    return "accepted"


@pytest.mark.parametrize("label", [5, -1])
def test_a_label_that_no_rank_holds_is_an_error_on_all_of_them(ranks: Ranks, label: int) -> None:
    for fault in ranks.run(_with_label, 2, label, timeout_seconds=10):
        assert f"index {label} is out of bounds" in fault


def test_operands_that_disagree_with_the_cut_are_refused_before_anything_is_sent() -> None:
    pair = Group(ranks=(0, 1), position=0, handle=None)
    hidden, weight, labels = torch.ones(3, 2), torch.ones(2, 2), torch.zeros(3, dtype=torch.int64)
    cut = VocabularyCut(tp=pair, vocab=5, rows=(1, 2))
    for operands, said in (
        ((hidden, torch.ones(3, 2), labels), r"3 rows is not the stretch \[0, 2\) of a vocabulary of 5"),
        ((hidden[:1], weight, labels), r"rows=\(1, 2\) are 3 tokens, but hidden has 1 and labels 3"),
        ((hidden, weight, labels[:2]), r"rows=\(1, 2\) are 3 tokens, but hidden has 3 and labels 2"),
    ):
        with pytest.raises(ValueError, match=said):
            head_cross_entropy(*operands, cut=cut)
    with pytest.raises(ValueError, match=r"rows=\(3,\) must be 2 counts"):
        head_cross_entropy(hidden, weight, labels, cut=VocabularyCut(tp=pair, vocab=5, rows=(3,)))
