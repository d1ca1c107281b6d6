"""Stand-ins for what prices memory and time: rough closed forms in which every option costs something and gives something."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.counts import count_parameters
from core.config.run import RunConfig
from core.parallel.mesh import fold
from core.pipeline.layout import layout_of
from launch.plan.result import AxisTraffic, MemoryParts, RankMemory, StepTime
from launch.profiles import Profile

BYTES = {"float32": 4, "bfloat16": 2}
# Of a layer's activations: the share that an option frees, and what it costs of the products' time.
FREED = {
    **{"layernorm": (0.05, 0.004), "moe_act": (0.08, 0.01), "mla_up_proj": (0.25, 0.03), "mlp": (0.05, 0.02)},
    **{"shared_experts": (0.03, 0.02), "core_attn": (0.1, 0.06), "moe": (0.5, 0.2), "full": (0.97, 0.34)},
}


class RoughMemory:
    """Weights, gradients, states and activations, spread evenly over everything that cuts them. asked: how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def of(self, run: RunConfig) -> tuple[RankMemory, ...]:
        """One place for all of the pipeline."""
        self.asked += 1
        p, precision, memory = run.parallel, run.precision, run.memory
        counts = count_parameters(run.model)
        experts = sum(
            layer.mlp.experts * layer.mlp.expert_parameters(run.model.hidden)
            for _, layer in run.model.all_layers()
            if hasattr(layer.mlp, "experts")
        )
        mine = (counts.total - experts) / (p.tp * p.pp) + experts / (p.ep * p.etp * p.pp)
        edp = fold(p, run.ranks).expert.size("edp")
        weight = 1 if precision.primary else BYTES[precision.compute]
        states = (4 + 2 * BYTES[precision.moments]) / max(edp, 1) * (1 - memory.optimizer_offload)
        tokens = run.train.microbatch * run.train.sequence_tokens / (p.tp * p.cp)
        layers = len(run.model.layers) * (1 + (p.pp - 1) / (p.pp * layout_of(run.model, p).virtual))
        kept = 1 - min(0.97, sum(FREED[name][0] for name in memory.recompute) + 0.04 * len(memory.offload))
        kept *= 0.7 if precision.recipe else 1.0
        parts = MemoryParts(
            parameters=int(mine * weight),
            gradients=int(mine * BYTES[precision.main_gradients]),
            optimizer=int(mine * states),
            activations=int(tokens * layers * run.model.hidden * 80 * kept),
            logits=0,
            working=0,
        )
        return (RankMemory(pp_rank=0, rank=0, balanced=parts, worst=parts, in_flight=(p.pp,)),)


@dataclass(frozen=True, kw_only=True)
class RoughPlan:
    """What a search reads of a TimePlan."""

    step: StepTime
    communication: tuple[AxisTraffic, ...]


def rough_time(run: RunConfig, profile: Profile) -> RoughPlan:
    """Products, communication of two axes, launches and a bubble."""
    assert profile.chip and profile.fabric and profile.speeds
    p = run.parallel
    tokens = run.train.global_batch * run.train.sequence_tokens / run.ranks
    dp = fold(p, run.ranks).dense.size("dp")
    microbatches = run.train.global_batch / dp / run.train.microbatch
    active = count_parameters(run.model).active
    rate = (profile.chip.fp8 or 0) * 0.35 if run.precision.recipe else profile.chip.bfloat16 * 0.5
    again = sum(FREED[name][1] for name in run.memory.recompute) + 0.03 * len(run.memory.offload)
    products = tokens * 6 * active / rate * (1 + again + 0.1 * run.memory.optimizer_offload)
    inside = p.ep * p.etp <= profile.fabric.domain
    once = p.dispatcher in ("deepep", "hybridep", "flex")
    fast = profile.fabric.all_to_all_nvlink if inside else profile.fabric.all_to_all_network * (2 if once else 1)
    ep = tokens * len(run.model.layers) * 8 * 8 * run.model.hidden * (p.ep - 1) / p.ep / fast
    ep *= 0.2 if p.schedule == "combined" else 1.0
    tp = tokens * len(run.model.layers) * 16 * run.model.hidden * (p.tp - 1) / profile.fabric.nvlink
    launches = 0.0 if run.execution.graphs else microbatches * len(run.model.layers) / p.pp * 1e-3
    bubble = (p.pp - 1) / (layout_of(run.model, p).virtual * microbatches)
    walls = {"products": products, "ep": ep, "tp": tp, "launches": launches}
    walls["bubble"] = bubble * sum(walls.values())
    seconds = sum(walls.values())
    step = StepTime(seconds=seconds, bubble=bubble, walls=walls, tokens_per_second=tokens / seconds, tflops=0.0)
    traffic = AxisTraffic(axis="ep", sent_bytes=1, inside=inside, seconds=ep, exposed_seconds=ep)
    return RoughPlan(step=step, communication=(traffic,))
