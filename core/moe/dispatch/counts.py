"""What a dispatcher made of a routing, counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Of this rank's choices in one layer: int64 scalars on the device, so that counting lets nobody wait.

    routed: rows that reach an expert; without drops all choices but those of padding. dropped: choices that found no room, in an expert
    of limited capacity or a rank of limited budget. saved: of the routed rows, those that did not travel because their token had
    been sent to that rank for another expert already; a rank's own rows count too, though they never travel far.
    """

    routed: Tensor
    dropped: Tensor
    saved: Tensor


def count_moved(experts_TK: Tensor, chosen_TK: Tensor | None, *, experts_per_rank: int, token_once: bool) -> Moved:
    """chosen_TK: the experts before any was dropped; None: as experts_TK. token_once: whether copies of a token are saved."""
    routed = (experts_TK >= 0).sum()
    dropped = torch.zeros_like(routed) if chosen_TK is None else (chosen_TK >= 0).sum() - routed
    saved = torch.zeros_like(routed)
    if token_once:
        ranks = torch.div(experts_TK, experts_per_rank, rounding_mode="floor").sort(1).values
        saved = ((ranks[:, 1:] == ranks[:, :-1]) & (ranks[:, 1:] >= 0)).sum()
    return Moved(routed=routed, dropped=dropped, saved=saved)
