"""What of a router is worth telling beside its load."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def logit_size(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Sum of the squares and largest absolute value of the logits of tokens that are not padding: [2] of their dtype, zeros without any."""
    seen = logits_TE.detach()
    if valid_T is not None:
        seen = seen.masked_fill(~valid_T[:, None], 0.0)
    if seen.numel() == 0:
        return seen.new_zeros(2)
    return torch.stack([seen.square().sum(), seen.abs().amax()])
