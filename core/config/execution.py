"""How the work of a step is handed to the device: what does not change what is computed, nor where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What is captured as a CUDA graph, by Megatron's names; full_iteration: everything but the optimizer (report section 4.3.5).
GraphName = Literal["full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess"]


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """graphs: what is captured as CUDA graphs. dispatcher_sms: processors of a GPU that a dispatcher's kernels take (None: the
    package's own choice)."""

    graphs: tuple[GraphName, ...] = ()
    dispatcher_sms: int | None = None
