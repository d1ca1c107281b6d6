"""Weights that are held in low precision alone: nothing is kept of them in the run's dtype (report section 5.3.5)."""

from __future__ import annotations

from dataclasses import dataclass

from core.precision.formats import Quantised


@dataclass(kw_only=True, eq=False)
class PrimaryWeight:
    """A weight [..., N, K] as its products read it: rows along K, and columns, the transpose, along N."""

    rows: Quantised
    columns: Quantised

    def get(self, *, transposed: bool) -> Quantised:
        """What the forward reads, or what the input gradient does."""
        return self.columns if transposed else self.rows
