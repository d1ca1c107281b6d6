"""What attention needs to know of a packed batch: where each sequence starts and ends (contract 3)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Sequences behind one another in [tokens, …]: their lengths in order, and every token's position in its sequence."""

    lengths: tuple[int, ...]
    positions_T: Tensor

    @property
    def uniform(self) -> bool:
        """Whether all sequences are of one length, so that they can be viewed as a batch."""
        return len(set(self.lengths)) == 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; 0 without any."""
        return max(self.lengths, default=0)


def packing_of(cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> Packing:
    """The packing that cumulative lengths describe: int64 [n + 1] from 0 to `tokens`, increasing; None is one sequence.

    The host reads cu_seqlens once. Raises ValueError where they do not cover the tokens.
    """
    ends = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    lengths = tuple(b - a for a, b in pairwise(ends))
    # A batch of no tokens is one empty sequence, or none.
    fewest = 1 if tokens else 0
    if not ends or ends[0] != 0 or ends[-1] != tokens or any(n < fewest for n in lengths):
        raise ValueError(f"cu_seqlens must rise from 0 to the {tokens} tokens, got {ends}")
    lengths = tuple(n for n in lengths if n)
    parts = [torch.arange(n, device=device) for n in lengths]
    positions = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)
    return Packing(lengths=lengths, positions_T=positions)
