"""Regions that run again and outputs that are made again: values, what is kept, how often what runs, and when."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from core.config.mapping import ParallelConfig
from core.memory.recompute import discard, recompute, recompute_with
from core.parallel.collectives import all_gather
from core.parallel.groups import groups_for
from tests.core.memory.alive import Made
from tests.core.numbers import draw
from tests.ranks import Ranks

ROWS, WIDTH = 7, 5
BYTES = ROWS * WIDTH * 8


def leaf(seed: int, *shape: int) -> Tensor:
    return draw(seed, *shape).requires_grad_()


class Counted:
    """A chain of operations that each keep something, and how often it has run."""

    def __init__(self) -> None:
        self.runs = 0
        self.weight = leaf(9, WIDTH, WIDTH)

    def __call__(self, x: Tensor) -> Tensor:
        self.runs += 1
        return ((x @ self.weight).tanh() * x.sin()).exp()


def gradients(function: Callable[[Tensor], Tensor], chain: Counted) -> list[Tensor]:
    """Of an input and of the chain's weight; the input is no leaf."""
    chain.weight.grad = None
    x = leaf(1, ROWS, WIDTH)
    function(x * 2).sum().backward()
    assert x.grad is not None and chain.weight.grad is not None
    return [x.grad, chain.weight.grad]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------------------------------- regions


def test_a_region_runs_twice_and_gives_the_same_gradients_to_the_last_bit() -> None:
    chain = Counted()
    plain = gradients(chain, chain)
    chain.runs = 0
    assert equal(gradients(lambda x: recompute(chain, x), chain), plain)
    assert chain.runs == 2


def test_without_gradients_a_region_runs_once() -> None:
    chain = Counted()
    with torch.no_grad():
        recompute(chain, leaf(1, ROWS, WIDTH)).sum()
    assert chain.runs == 1


def test_of_a_region_its_inputs_are_kept_and_nothing_else_and_after_the_backward_nothing() -> None:
    chain, x = Counted(), leaf(1, ROWS, WIDTH)
    kept = []
    for function in (chain, lambda x: recompute(chain, x)):
        with Made([x, chain.weight]) as made:
            out = function(x * 2)
            kept.append(made.alive(out))
            out.sum().backward()
        assert chain.weight.grad is not None and x.grad is not None
        assert made.alive(out, chain.weight.grad, x.grad) == 0
    # The input, its sine and cosine's operand (the input again), the tanh, and the result, which is the output.
    assert kept == [3 * BYTES, BYTES]


def test_a_region_that_nobody_differentiates_leaves_nothing() -> None:
    chain, x = Counted(), leaf(1, ROWS, WIDTH)
    gc.disable()
    try:
        with Made([x, chain.weight]) as made:
            out = recompute(chain, x * 2)
            out = discard(lambda x: (x.exp(),), (out,), lambda y: y.sin())
            del out
        assert made.alive() == 0
    finally:
        gc.enable()


def test_several_results_and_what_else_the_first_run_told() -> None:
    runs = []

    def both(x: Tensor, factor: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], str]:
        runs.append(x.requires_grad)
        return (x.sin() * factor, x.detach().argmax(), x.cos()), f"run {len(runs)}"

    x, factor = leaf(1, ROWS), leaf(2, ROWS)
    (sine, place, cosine), told = recompute_with(both, x, factor)
    assert told == "run 1" and place.dtype == torch.int64 and not place.requires_grad
    # One of two results is not used.
    sine.sum().backward()
    assert runs == [True, True]
    assert torch.equal(x.grad, x.detach().cos() * factor.detach()) and torch.equal(factor.grad, x.detach().sin())
    assert cosine.requires_grad


def test_a_region_whose_inputs_need_no_gradient_still_gives_those_of_its_weights() -> None:
    chain, x = Counted(), draw(1, ROWS, WIDTH)
    chain(x).sum().backward()
    expected, chain.weight.grad = chain.weight.grad, None
    recompute(chain, x).sum().backward()
    assert chain.runs == 3 and torch.equal(chain.weight.grad, expected)


def test_a_region_in_a_region_and_outputs_discarded_around_and_inside() -> None:
    chain = Counted()
    plain = gradients(lambda x: chain(chain(x.exp()).sin().exp()), chain)
    first = [2 * [lambda x: recompute(chain, x)], [chain, lambda x: recompute(chain, x)]]
    for inner, second in first:
        for around in (True, False):

            def whole(x: Tensor, inner=inner, second=second) -> Tensor:
                made = discard(lambda x: (x.exp(),), (x,), inner)
                return discard(lambda x: (x.sin().exp(),), (made,), second)

            found = gradients((lambda x, whole=whole: recompute(whole, x)) if around else whole, chain)
            assert equal(found, plain)


def test_a_second_run_that_does_something_else_is_noticed() -> None:
    runs = []

    def fickle(x: Tensor) -> Tensor:
        runs.append(1)
        return x.sin() if len(runs) == 1 else x[:-1].sin()

    out = recompute(fickle, leaf(1, ROWS))
    with pytest.raises(AssertionError, match="something else"):
        out.sum().backward()


def test_two_backwards_of_one_region_are_refused() -> None:
    out = recompute(torch.sin, leaf(1, ROWS))
    out.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="twice"):
        out.sum().backward()


def lopsided(rank: int, world: int) -> list[Tensor]:
    """A region with a collective, in which only one rank keeps anything, between other collectives."""
    group = groups_for(ParallelConfig(tp=world)).tp
    x = leaf(rank, 3)

    def region(x: Tensor) -> Tensor:
        y = all_gather(x, group)
        return y.exp() if rank == 0 else y * 2.0

    out = all_gather(recompute(region, x), group)
    (out * torch.arange(out.numel())).sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


def test_a_rank_that_keeps_nothing_in_a_region_takes_part_in_its_collectives_again(ranks: Ranks) -> None:
    found = ranks.run(lopsided, 2, timeout_seconds=20.0)
    both = torch.cat([leaf(0, 3), leaf(1, 3)]).detach().requires_grad_()
    rows = torch.cat([both.exp(), both * 2.0])
    # Each rank differentiates its own sum over all rows.
    (2 * rows * torch.arange(rows.numel())).sum().backward()
    for rank, (out, grad) in enumerate(found):
        torch.testing.assert_close(out, rows.detach())
        torch.testing.assert_close(grad, both.grad[3 * rank : 3 * rank + 3])


# ------------------------------------------------------------------------------------------------ discarded outputs


def test_an_output_is_made_again_once_for_all_its_consumers_and_is_not_kept() -> None:
    chain, x, others = Counted(), leaf(1, ROWS, WIDTH), [leaf(i, ROWS, WIDTH) for i in (2, 3, 4)]

    def consumer(y: Tensor) -> Tensor:
        return sum((y * other).sum() for other in others) + (y[2:, 1:].T * 3.0).square().sum()

    consumer(chain(x)).backward()
    expected = [t.grad for t in (x, chain.weight, *others)]
    for t in (x, chain.weight, *others):
        t.grad = None
    chain.runs = 0
    with Made([x, chain.weight, *others]) as made:
        out = discard(lambda x: (chain(x),), (x,), consumer)
        assert chain.runs == 1
        # The part's own result of exp is its output; sin keeps x; kept are tanh, sin, and of the consumer y.T * 3.
        kept = made.alive(out)
        out.backward()
    assert chain.runs == 2
    assert equal([t.grad for t in (x, chain.weight, *others)], expected)
    # exp keeps its own result, outside of what the consumer keeps: so the output stays for its sake.
    assert kept == 3 * BYTES + (ROWS - 2) * (WIDTH - 1) * 8


def sine(x: Tensor) -> tuple[Tensor]:
    """Keeps its input alone."""
    return (x.sin(),)


def test_what_consumers_keep_besides_the_output_stays_and_hooks_around_see_it() -> None:
    x, other = leaf(1, ROWS, WIDTH), leaf(2, ROWS, WIDTH)
    seen: list[tuple[int, ...]] = []

    def note(kept: Tensor) -> Tensor:
        seen.append(tuple(kept.shape))
        return kept.detach()

    def consumer(y: Tensor) -> Tensor:
        return (y.unflatten(1, (1, WIDTH))[3:] * other[3:, None]).exp()

    with Made([x, other]) as made, torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        out = discard(sine, (x,), consumer)
    # Held by the part and as the other factor, both of which were there before; and the consumer's own result.
    assert made.alive(out) == 0
    rest = (ROWS - 3, 1, WIDTH)
    assert sorted(seen) == sorted([(ROWS, WIDTH), (ROWS, WIDTH), rest, rest])
    (grad,) = torch.autograd.grad(out.sum(), x)
    y = x.detach().sin().requires_grad_()
    consumer(y).sum().backward()
    assert torch.equal(grad, y.grad * x.detach().cos())


def test_behind_the_backward_nothing_that_was_made_again_is_left() -> None:
    x, runs = leaf(1, ROWS, WIDTH), []

    def part(x: Tensor) -> tuple[Tensor]:
        runs.append(1)
        return sine(x)

    a, b = leaf(2, ROWS, WIDTH), leaf(3, ROWS, WIDTH)
    with Made([x, a, b]) as made:
        out = discard(part, (x,), lambda y: ((y * a).sin() + y * b).sum())
        out.backward()
    assert len(runs) == 2
    assert made.alive(out, x.grad, a.grad, b.grad) == 0


def test_a_chain_of_discarded_outputs_keeps_the_first_input_alone() -> None:
    x, other = leaf(1, ROWS, WIDTH), leaf(2, ROWS, WIDTH)

    def last(z: Tensor) -> Tensor:
        return (z * other).sum()

    def chain(x: Tensor) -> Tensor:
        return discard(sine, (x,), lambda y: discard(sine, (y,), lambda z: discard(sine, (z,), last)))

    (last(x.sin().sin().sin())).backward()
    expected = [x.grad, other.grad]
    x.grad = other.grad = None
    with Made([x, other]) as made:
        out = chain(x)
        assert made.alive(out) == 0
    out.backward()
    assert equal([x.grad, other.grad], expected)


def test_an_output_that_is_a_piece_of_an_input_is_kept_with_it_and_not_made_again() -> None:
    runs: list[int] = []
    x, other = leaf(1, ROWS, WIDTH), leaf(2, ROWS, 2)

    def part(x: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(1)
        return x[:, :2], x[:, 2:].sin()

    out = discard(part, (x,), lambda piece, rest: (piece * other).sum() + rest.sum())
    out.backward()
    assert len(runs) == 1
    assert torch.equal(other.grad, x.detach()[:, :2])


def test_without_gradients_nothing_is_noted() -> None:
    with torch.no_grad():
        out = discard(sine, (leaf(1, ROWS),), lambda y: y * y)
    assert not out.requires_grad


def test_a_part_that_lays_its_output_out_otherwise_the_second_time_is_noticed() -> None:
    runs: list[int] = []

    def fickle(x: Tensor) -> tuple[Tensor]:
        runs.append(1)
        return (x.sin() if len(runs) == 1 else x.sin().T.contiguous().T,)

    out = discard(fickle, (leaf(1, ROWS, WIDTH),), lambda y: y.square().sum())
    with pytest.raises(AssertionError, match="something else"):
        out.backward()
