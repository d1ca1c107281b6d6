"""What attention needs to know of a packed microbatch: where sequences start and end, and which tokens this rank holds (contract 3).

A microbatch belongs to tp * cp ranks. cp cuts every sequence: its ring holds two chunks of it each, one from the front and its
mirror from the back, so that a causal mask leaves every rank as much work (zigzag); the ranks that exchange heads cut what their
place in the ring holds into stretches. Between attention and MLPs the ranks of tp hold stretches of what their rank of cp holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from core.parallel.groups import Group, Groups
from core.state.box import ends


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Sequences behind one another in a microbatch, and this rank's share of them.

    lengths: tokens of every whole sequence, in order. index_T: int64, the tokens of the microbatch that this rank of cp holds,
    sequence by sequence. positions_T, sequence_T: int64, of each of those its position in its sequence, and which sequence.
    rows: how many of them each rank of tp holds between attention layers, one stretch after the other; mine: this rank's.
    shares: how many tokens each of the tp * cp ranks of the microbatch holds.
    """

    lengths: tuple[int, ...]
    index_T: Tensor
    positions_T: Tensor
    sequence_T: Tensor
    rows: tuple[int, ...]
    mine: slice
    shares: tuple[int, ...]

    @property
    def uniform(self) -> bool:
        """Whether all sequences are of one length, so that they can be viewed as a batch."""
        return len(set(self.lengths)) == 1

    @property
    def tokens(self) -> int:
        """Tokens of the whole microbatch."""
        return sum(self.lengths)

    @property
    def mine_T(self) -> Tensor:
        """int64, the tokens of the microbatch that this rank holds between attention layers."""
        return self.index_T[self.mine]


def packing_of(cu_seqlens: Tensor | None, tokens: int, device: torch.device, groups: Groups | None = None) -> Packing:
    """The packing that cumulative lengths describe: int64 [n + 1] from 0 to `tokens`, increasing; None is one sequence.

    groups: over whose tp and cp the microbatch is spread; None for one rank. The host reads cu_seqlens once; nothing is
    communicated. Raises ValueError where they do not cover the tokens.
    """
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    lengths = tuple(b - a for a, b in pairwise(bounds))
    # A batch of no tokens is one empty sequence, or none.
    fewest = 1 if tokens else 0
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(n < fewest for n in lengths):
        raise ValueError(f"cu_seqlens must rise from 0 to the {tokens} tokens, got {bounds}")
    lengths = tuple(n for n in lengths if n)
    ring, heads, tp = (0, 1), (0, 1), (0, 1)
    if groups is not None:
        ring, heads, tp = (_place(group) for group in (groups.ring, groups.heads, groups.tp))
    return _share(lengths, ring, heads, tp, device)


def held_pieces(length: int, ring: tuple[int, int], heads: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The stretches [start, stop) of a sequence that one rank of cp holds, rising, empty ones left out.

    ring, heads: (position, size) in the two foldings of cp.
    """
    (r, ring_size), (h, heads_size) = ring, heads
    cuts = ends(length, 2 * ring_size)
    chunks = ((cuts[r], cuts[r + 1]), (cuts[2 * ring_size - 1 - r], cuts[2 * ring_size - r]))
    bounds = ends(sum(stop - start for start, stop in chunks), heads_size)
    return tuple(_between(chunks, bounds[h], bounds[h + 1]))


def held_tokens(length: int, ring: tuple[int, int], heads: tuple[int, int]) -> int:
    """How many tokens of a sequence one rank of cp holds."""
    return sum(stop - start for start, stop in held_pieces(length, ring, heads))


def _place(group: Group) -> tuple[int, int]:
    return group.position, group.size


def _between(chunks: tuple[tuple[int, int], ...], low: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of `chunks`, laid behind one another, from place `low` to place `high`."""
    laid = 0
    for start, stop in chunks:
        first, last = max(low, laid), min(high, laid + stop - start)
        if first < last:
            yield start + first - laid, start + last - laid
        laid += stop - start


def _share(
    lengths: tuple[int, ...],
    ring: tuple[int, int],
    heads: tuple[int, int],
    tp: tuple[int, int],
    device: torch.device,
) -> Packing:
    """The packing of one rank; places are (position, size)."""
    none = torch.zeros(0, dtype=torch.int64)
    index, positions, sequence = [none], [none], [none]
    begin = 0
    for number, length in enumerate(lengths):
        for start, stop in held_pieces(length, ring, heads):
            positions.append(torch.arange(start, stop))
            index.append(positions[-1] + begin)
            sequence.append(torch.full((stop - start,), number))
        begin += length
    index_T = torch.cat(index).to(device)
    bounds = ends(index_T.numel(), tp[1])
    places = [((r, ring[1]), (h, heads[1])) for r in range(ring[1]) for h in range(heads[1])]
    held = [sum(held_tokens(length, *place) for length in lengths) for place in places]
    return Packing(
        lengths=lengths,
        index_T=index_T,
        positions_T=torch.cat(positions).to(device),
        sequence_T=torch.cat(sequence).to(device),
        rows=tuple(b - a for a, b in pairwise(bounds)),
        mine=slice(bounds[tp[0]], bounds[tp[0] + 1]),
        shares=tuple(b - a for tokens in held for a, b in pairwise(ends(tokens, tp[1]))),
    )
