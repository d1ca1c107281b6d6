"""What is computed again or kept elsewhere instead of staying in a GPU's memory between forward and backward (report section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Parts of a layer that are computed again in the backward, by Megatron's names. full: whole layers. core_attn: the attention itself.
# layernorm: both norms of a layer, and those of latents. mla_up_proj: queries, keys and values from their latents. mlp: of dense layers.
# moe: router, dispatch, experts; their rows come home once. moe_act: the experts' activation, which ours never keep. shared_experts: the
# experts that see every token.
RecomputeName = Literal["full", "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
# Activations that wait for their backward in host memory: the inputs of what is named.
OffloadName = Literal["attn_norm", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """recompute: parts of every layer that are computed again in the backward. offload: activations that wait in host memory.

    optimizer_offload: the share of the optimizer's states that stays in host memory between steps, 0 to 1.
    """

    recompute: tuple[RecomputeName, ...] = ()
    offload: tuple[OffloadName, ...] = ()
    optimizer_offload: float = 0.0
