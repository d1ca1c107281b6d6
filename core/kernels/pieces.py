"""Where the rows of each expert lie among all rows, for products of all experts at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """How R rows lie in E contiguous pieces: ends_E [E] int32 on their device, and counts where the host knows them.

    Rows behind the last end belong to no piece: whatever stands in them, the products of them are zero.
    """

    ends_E: Tensor
    counts: tuple[int, ...] | None = None

    def owner(self, rows: int) -> Tensor:
        """The piece of each of so many rows [R] int64, E for those behind the last end. The host does not wait."""
        return torch.searchsorted(
            self.ends_E, torch.arange(rows, dtype=torch.int32, device=self.ends_E.device), right=True
        )
