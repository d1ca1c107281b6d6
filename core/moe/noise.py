"""Noise on the input of routers, which keeps them trying other experts (Switch: arXiv 2101.03961, appendix)."""

from __future__ import annotations

from torch import Tensor

from core.state.seed import uniform_rows


def jitter(reach: float, name: str, tokens_T: Tensor, hidden: int, *, seed: int, step: int) -> Tensor:
    """Factors uniform in (1 - reach, 1 + reach): [T, hidden] float64 on the device of tokens_T.

    tokens_T: int64, places in the global batch. A factor depends on (seed, name, token, feature, step) alone, so that every mapping
    draws the same, and so does a layer that is computed again.
    """
    return uniform_rows(seed, name, tokens_T, hidden, step=step).mul_(2.0 * reach).add_(1.0 - reach)
