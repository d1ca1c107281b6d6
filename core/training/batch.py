"""A microbatch on the device, made from what the loader read."""

from __future__ import annotations

import torch

from core.data.packing import Microbatch
from core.transformer.context import TokenBatch
from core.transformer.stage import Stage


def to_device(microbatch: Microbatch, model: Stage) -> TokenBatch:
    """The microbatch as tensors on the model's device, with this rank's share of it."""
    device = model.place.device
    tokens, labels = torch.from_numpy(microbatch.tokens).to(device), torch.from_numpy(microbatch.labels).to(device)
    return model.batch(tokens, labels, torch.from_numpy(microbatch.cu_seqlens))
