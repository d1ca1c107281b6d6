"""What cumulative lengths say, and which are refused."""

from __future__ import annotations

import pytest
import torch

from core.attention.packing import packing_of

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
        assert packing.longest == max(lengths, default=0)
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
