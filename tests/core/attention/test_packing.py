"""What cumulative lengths say, and which are refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from core.attention.packing import held_pieces, held_tokens, packing_of

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
