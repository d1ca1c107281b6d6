"""What cumulative lengths say, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from core.attention.packing import Packing, held_pieces, held_tokens, packing_of
from core.parallel.groups import Group, one_rank

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ends", "lengths", "positions"),
    [
        ([0, 3], (3,), [0, 1, 2]),
        ([0, 1, 3, 4], (1, 2, 1), [0, 0, 1, 0]),
        ([0, 2, 4], (2, 2), [0, 1, 0, 1]),
        ([0], (), []),
        ([0, 0], (), []),
        ([0, 0, 0], (), []),
    ],
)
def test_positions_start_again_in_every_sequence(
    ends: list[int], lengths: tuple[int, ...], positions: list[int]
) -> None:
    for dtype in (torch.int64, torch.int32):
        packing = packing_of(torch.tensor(ends, dtype=dtype), ends[-1], CPU)
        assert packing.lengths == lengths and packing.positions_T.tolist() == positions
        assert packing.positions_T.dtype == torch.int64
        assert packing.uniform == (len(set(lengths)) == 1)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_without_lengths_all_tokens_are_one_sequence(tokens: int) -> None:
    packing = packing_of(None, tokens, CPU)
    assert packing.lengths == ((tokens,) if tokens else ()) and packing.positions_T.tolist() == list(range(tokens))


@pytest.mark.parametrize(
    ("ends", "tokens"),
    [
        ([0, 3], 4),
        ([1, 4], 4),
        ([0, 3, 2, 4], 4),
        ([0, 2, 2, 4], 4),
        ([], 0),
        ([], 3),
        ([0], 3),
        ([0, 5, 0], 0),
        ([0, 5], 4),
    ],
)
def test_lengths_that_do_not_cover_the_tokens_are_refused(ends: list[int], tokens: int) -> None:
    with pytest.raises(ValueError, match=f"rise from 0 to the {tokens} tokens, got"):
        packing_of(torch.tensor(ends, dtype=torch.int64), tokens, CPU)


@pytest.mark.parametrize(("ring", "heads"), list(product((1, 2, 3, 4), (1, 2, 3))))
@pytest.mark.parametrize("length", [0, 1, 2, 5, 13, 64])
def test_the_ranks_of_a_context_group_hold_every_token_once(length: int, ring: int, heads: int) -> None:
    held = [
        position
        for r, h in product(range(ring), range(heads))
        for start, stop in held_pieces(length, (r, ring), (h, heads))
        for position in range(start, stop)
    ]
    assert sorted(held) == list(range(length))
    sizes = [held_tokens(length, (r, ring), (h, heads)) for r, h in product(range(ring), range(heads))]
    assert sum(sizes) == length and max(sizes) - min(sizes) <= 2


def test_the_ring_is_cut_like_a_zigzag_and_the_ranks_that_exchange_heads_hold_neighbouring_stretches() -> None:
    assert held_pieces(16, (0, 2), (0, 1)) == ((0, 4), (12, 16))
    assert held_pieces(16, (1, 2), (0, 1)) == ((4, 8), (8, 12))
    assert held_pieces(16, (0, 1), (1, 2)) == ((8, 16),)
    assert [held_pieces(16, (0, 2), (h, 2)) for h in (0, 1)] == [((0, 4),), ((12, 16),)]


def test_a_causal_mask_leaves_every_rank_of_the_ring_as_much_work() -> None:
    work = [
        sum(position + 1 for start, stop in held_pieces(64, (r, 4), (0, 1)) for position in range(start, stop))
        for r in range(4)
    ]
    assert len(set(work)) == 1


def packings(lengths: tuple[int, ...], ring: int, heads: int, tp: int) -> dict[tuple[int, int, int], Packing]:
    """What every rank of a microbatch holds, by its place in ring, heads and tp."""
    bounds = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)])
    found = {}
    for place in product(range(ring), range(heads), range(tp)):
        sizes = zip(place, (ring, heads, tp), strict=True)
        r, h, t = (Group(ranks=tuple(range(n)), position=p, handle=None) for p, n in sizes)
        groups = replace(one_rank(), ring=r, heads=h, tp=t)
        found[place] = packing_of(bounds, sum(lengths), CPU, groups)
    return found


@pytest.mark.parametrize(("ring", "heads", "tp"), [(1, 1, 1), (1, 1, 2), (2, 1, 3), (1, 3, 2), (2, 2, 2), (3, 2, 5)])
@pytest.mark.parametrize("lengths", [(), (1,), (7,), (5, 1, 12), (2, 2, 2, 2)])
def test_every_token_lies_between_layers_on_one_rank_and_knows_its_sequence_and_position(
    lengths: tuple[int, ...], ring: int, heads: int, tp: int
) -> None:
    known = [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
    held = []
    for (r, h, t), packing in packings(lengths, ring, heads, tp).items():
        assert packing.lengths == lengths and packing.tokens == sum(lengths)
        index = packing.index_T.tolist()
        # Of every sequence what its place in cp holds, in order; the same on all ranks of tp.
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        pieces = [(b, held_pieces(n, (r, ring), (h, heads))) for b, n in zip(starts, lengths, strict=True)]
        assert index == [b + i for b, of_sequence in pieces for start, stop in of_sequence for i in range(start, stop)]
        told = list(zip(packing.sequence_T.tolist(), packing.positions_T.tolist(), strict=True))
        assert told == [known[i] for i in index]
        # tp holds stretches of that, as equal as can be.
        assert len(packing.rows) == tp and sum(packing.rows) == len(index)
        assert max(packing.rows) - min(packing.rows) <= 1
        assert packing.mine == slice(sum(packing.rows[:t]), sum(packing.rows[: t + 1]))
        assert packing.mine_T.tolist() == index[packing.mine]
        held += packing.mine_T.tolist()
    assert sorted(held) == list(range(sum(lengths)))


def test_one_rank_holds_all_tokens_in_order() -> None:
    packing = packing_of(torch.tensor([0, 2, 3, 7]), 7, CPU)
    assert packing.index_T.tolist() == packing.mine_T.tolist() == list(range(7))
    assert packing.sequence_T.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert packing.rows == (7,) and packing.mine == slice(0, 7)
    for tensor in (packing.index_T, packing.positions_T, packing.sequence_T):
        assert tensor.dtype == torch.int64
