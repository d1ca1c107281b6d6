"""A microbatch on the device, made from what the loader read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.attention.packing import Packing, packing_of
from core.data.packing import Microbatch


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """tokens and labels [T] int64, label -100 where nothing is predicted, and how sequences lie in them."""

    tokens: Tensor
    labels: Tensor
    packing: Packing


def to_device(microbatch: Microbatch, device: torch.device) -> TokenBatch:
    """The microbatch as tensors on `device`."""
    tokens = torch.from_numpy(microbatch.tokens).to(device)
    labels = torch.from_numpy(microbatch.labels).to(device)
    packing = packing_of(torch.from_numpy(microbatch.cu_seqlens), tokens.shape[0], device)
    return TokenBatch(tokens=tokens, labels=labels, packing=packing)
