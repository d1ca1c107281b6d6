"""One matrix as embedding, as head, and as both at once, whole and cut over tp."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.mapping import ParallelConfig
from core.config.run import IGNORE
from core.layers.embedding import Vocabulary
from core.layers.place import Place
from core.parallel.groups import groups_for
from core.parallel.meter import Meter
from core.state.box import tiling_fault, whole
from core.state.inventory import declared, initialise, replicas
from core.state.spec import TensorSpec
from tests.core.layers.places import place
from tests.core.numbers import draw, leaf, near
from tests.ranks import Ranks

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


# By tp: how many of the tokens each rank holds.
ROWS: dict[int, list[tuple[int, ...]]] = {
    1: [(11,), (0,)],
    2: [(3, 0), (12, 11), (0, 0)],
    3: [(1, 0, 10), (4, 4, 4)],
    4: [(7, 1, 0, 2), (5, 6, 5, 7), (0, 0, 1, 0)],
}
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])
DTYPES = pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])


def _case(tokens: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    inputs, labels = torch.randint(0, vocab, (2, tokens), generator=generator)
    labels[1::3] = IGNORE
    return inputs, labels


def _cut(world: int, vocab: int, dtype: torch.dtype, meter: Meter | None = None) -> Vocabulary:
    """This rank's stretch of a matrix that every rank draws alike."""
    parallel = ParallelConfig(tp=world)
    here = Place(groups=groups_for(parallel, meter=meter), parallel=parallel, dtype=dtype, device=torch.device("cpu"))
    vocabulary = Vocabulary(vocab, HIDDEN, init_std=0.1, place=here, replicas="embedding")
    vocabulary.weight.data.copy_(draw(0, vocab, HIDDEN)[vocabulary.specs()["weight"].box.slices])
    return vocabulary


def _mine(rank: int, rows: tuple[int, ...]) -> slice:
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def _equal(found: Tensor, truth: Tensor, close: float) -> None:
    assert found.shape == truth.shape
    found, truth = found.detach().double(), truth.detach()
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    difference = (found - truth).abs()
    assert not found.numel() or float(difference.max()) <= close * max(1.0, largest)


def _embed_on(rank: int, world: int, vocab: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """By case this rank's rows, and the matrix's gradient under an output gradient that every rank takes its rows of."""
    vocabulary, results = _cut(world, vocab, dtype), []
    for rows in ROWS[world]:
        out = vocabulary.embed(_case(sum(rows), vocab)[0], rows)
        of_out = draw(2, sum(rows), HIDDEN, dtype=dtype)[_mine(rank, rows)]
        results.append((out, *torch.autograd.grad(out, vocabulary.weight, of_out)))
    return results


@DTYPES
@WORLDS
@pytest.mark.parametrize("vocab", [261, 3])
def test_each_rank_embeds_its_own_tokens_and_the_pieces_of_the_gradient_are_the_whole(
    ranks: Ranks, vocab: int, world: int, dtype: torch.dtype, close: float
) -> None:
    for rows, found in zip(ROWS[world], zip(*ranks.run(_embed_on, world, vocab, dtype), strict=True), strict=True):
        matrix = leaf(draw(0, vocab, HIDDEN).to(dtype).double())
        truth = F.embedding(_case(sum(rows), vocab)[0], matrix)
        truth.backward(draw(2, sum(rows), HIDDEN, dtype=dtype).double())
        assert [out.shape[0] for out, _ in found] == list(rows)
        assert torch.equal(torch.cat([out for out, _ in found]).double(), truth)
        assert matrix.grad is not None
        _equal(torch.cat([gradient for _, gradient in found]), matrix.grad, close)


def _frequent(rank: int, world: int) -> list[list[float]]:
    vocabulary = _cut(world, 3, torch.bfloat16)
    out = vocabulary.embed(torch.full((1000,), 1), (600, 400))
    out.backward(torch.ones_like(out))
    assert vocabulary.weight.grad is not None
    return vocabulary.weight.grad.tolist()


def test_a_token_in_a_thousand_places_of_all_ranks_keeps_its_gradient_in_bfloat16(ranks: Ranks) -> None:
    assert ranks.run(_frequent, 2) == [[[0.0] * HIDDEN], [[1000.0] * HIDDEN, [0.0] * HIDDEN]]


def _loss_on(rank: int, world: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """By case this rank's share, and the gradients of its hidden rows and of its stretch of the matrix."""
    vocabulary, results = _cut(world, 261, dtype), []
    for rows in ROWS[world]:
        hidden = leaf(draw(1, sum(rows), HIDDEN, dtype=dtype)[_mine(rank, rows)])
        share = vocabulary.loss(hidden, _case(sum(rows), 261)[1], rows)
        results.append((share, *torch.autograd.grad(share * 0.37, (hidden, vocabulary.weight))))
    return results


@DTYPES
@WORLDS
def test_shares_of_the_loss_add_up_and_every_gradient_is_the_one_of_their_sum(
    ranks: Ranks, world: int, dtype: torch.dtype, close: float
) -> None:
    for rows, found in zip(ROWS[world], zip(*ranks.run(_loss_on, world, dtype), strict=True), strict=True):
        hidden = leaf(draw(1, sum(rows), HIDDEN, dtype=dtype).double())
        matrix = leaf(draw(0, 261, HIDDEN).to(dtype).double())
        truth = F.cross_entropy(hidden @ matrix.T, _case(sum(rows), 261)[1], reduction="sum")
        (truth * 0.37).backward()
        assert hidden.grad is not None and matrix.grad is not None
        _equal(torch.stack([share.double() for share, _, _ in found]).sum(), truth, close)
        _equal(torch.cat([of_hidden for _, of_hidden, _ in found]), hidden.grad, close)
        _equal(torch.cat([of_weight for _, _, of_weight in found]), matrix.grad, close)


def _tied_on(rank: int, world: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    vocabulary, results = _cut(world, 261, dtype), []
    for rows in ROWS[world]:
        tokens, labels = _case(sum(rows), 261)
        share = vocabulary.loss(vocabulary.embed(tokens, rows).sin(), labels, rows)
        results.append((share, *torch.autograd.grad(share, vocabulary.weight)))
    return results


@DTYPES
@WORLDS
def test_a_tied_matrix_gets_both_gradients_on_every_rank(
    ranks: Ranks, world: int, dtype: torch.dtype, close: float
) -> None:
    for rows, found in zip(ROWS[world], zip(*ranks.run(_tied_on, world, dtype), strict=True), strict=True):
        matrix, (tokens, labels) = leaf(draw(0, 261, HIDDEN).to(dtype).double()), _case(sum(rows), 261)
        truth = F.cross_entropy(F.embedding(tokens, matrix).sin() @ matrix.T, labels, reduction="sum")
        truth.backward()
        assert matrix.grad is not None
        _equal(torch.stack([share.double() for share, _ in found]).sum(), truth, close)
        _equal(torch.cat([gradient for _, gradient in found]), matrix.grad, close)


def _logits_on(rank: int, world: int) -> list[Tensor]:
    vocabulary = _cut(world, 261, torch.float64)
    with torch.no_grad():
        return [vocabulary.logits(draw(1, sum(rows), HIDDEN)[_mine(rank, rows)], rows) for rows in ROWS[world]]


@WORLDS
def test_every_rank_gets_the_logits_of_all_tokens_and_the_whole_vocabulary(ranks: Ranks, world: int) -> None:
    for rows, found in zip(ROWS[world], zip(*ranks.run(_logits_on, world), strict=True), strict=True):
        truth = draw(1, sum(rows), HIDDEN) @ draw(0, 261, HIDDEN).T
        for logits in found:
            assert logits.dtype == torch.float32 and torch.equal(logits, found[0])
            near(logits, truth)


def _bytes_on(rank: int, world: int, rows: tuple[int, ...], dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """By what is done, bytes over tp by collective."""
    meter, told = Meter(), {}
    vocabulary, (tokens, labels) = _cut(world, 261, dtype, meter), _case(sum(rows), 261)
    hidden = leaf(draw(1, sum(rows), HIDDEN, dtype=dtype)[_mine(rank, rows)])

    def told_since() -> dict[str, int]:
        assert all(axis == "tp" for axis, _ in meter.sent_bytes)
        sent = {name: count for (_, name), count in meter.sent_bytes.items()}
        meter.sent_bytes.clear()
        return sent

    out = vocabulary.embed(tokens, rows)
    told["embed"] = told_since()
    out.backward(torch.ones_like(out))
    told["embed backward"] = told_since()
    share = vocabulary.loss(hidden, labels, rows)
    told["loss"] = told_since()
    share.backward()
    told["loss backward"] = told_since()
    vocabulary.logits(hidden, rows)
    told["logits"] = told_since()
    return told


@pytest.mark.parametrize(("rows", "dtype"), [((6, 6), torch.float32), ((1, 0, 10), torch.bfloat16)])
def test_what_is_sent_is_a_gather_or_scatter_of_hidden_and_three_numbers_per_token(
    ranks: Ranks, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    n, tokens, row = len(rows), sum(rows), HIDDEN * dtype.itemsize
    for rank, told in enumerate(ranks.run(_bytes_on, n, rows, dtype)):
        gather, scatter = (n - 1) * rows[rank] * row, (tokens - rows[rank]) * row
        if len(set(rows)) == 1:  # the closed form T * H * (n - 1) / n
            assert gather == scatter == tokens * row * (n - 1) // n
        held = 261 * (rank + 1) // n - 261 * rank // n
        assert told == {
            "embed": {"reduce_scatter": scatter},
            "embed backward": {"all_gather": gather},
            # Maximum, sum and label logit, in float32.
            "loss": {"all_gather": gather, "all_reduce": sum(2 * (n - 1) * tokens * k * 4 // n for k in (1, 2))},
            "loss backward": {"reduce_scatter": scatter},
            "logits": {"all_gather": gather + (n - 1) * held * tokens * dtype.itemsize},
        }


def _declared_on(rank: int, world: int, vocab: int) -> tuple[TensorSpec, tuple[int, ...], Tensor]:
    vocabulary = _cut(world, vocab, torch.float32)
    initialise(vocabulary, seed=3)
    spec = declared(vocabulary)["weight"].spec
    copies = replicas(spec, groups_for(ParallelConfig(tp=world)))
    return spec, copies.ranks, vocabulary.weight.detach()


@WORLDS
@pytest.mark.parametrize("vocab", [261, 3])
def test_the_stretches_tile_the_matrix_and_are_drawn_as_pieces_of_the_same(
    ranks: Ranks, vocab: int, world: int
) -> None:
    found = ranks.run(_declared_on, world, vocab)
    assert tiling_fault(whole((vocab, HIDDEN)), [spec.box for spec, _, _ in found]) is None
    alone = Vocabulary(vocab, HIDDEN, init_std=0.1, place=place())
    initialise(alone, seed=3)
    np.testing.assert_array_equal(torch.cat([piece for _, _, piece in found]).numpy(), alone.weight.detach().numpy())
    for rank, (spec, copies, _) in enumerate(found):
        assert (spec.shape, spec.replicas, spec.adjacent) == ((vocab, HIDDEN), "embedding", 1)
        assert copies == (rank,)


def _without_rows(rank: int, world: int) -> list[str]:
    vocabulary = _cut(world, 5, torch.float32)
    hidden, none, said = torch.ones(2, HIDDEN), torch.zeros(2, dtype=torch.int64), []
    for use in (
        lambda: vocabulary.embed(none),
        lambda: vocabulary.loss(hidden, none),
        lambda: vocabulary.logits(hidden),
        lambda: vocabulary.loss(hidden, none, (2, 2)),
    ):
        try:
            use()
        except ValueError as fault:
            said.append(str(fault))
    return said


def test_ranks_that_share_tokens_must_say_how_many_each_holds_and_give_the_labels_of_all(ranks: Ranks) -> None:
    for said in ranks.run(_without_rows, 2, timeout_seconds=10):
        assert len(said) == 4 and all("counts=(2,) must be 2 counts" in fault for fault in said[:3])
        assert "rows=(2, 2) are 4 tokens, but hidden has 4 and labels 2" in said[3]
