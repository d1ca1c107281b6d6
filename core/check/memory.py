"""Rules over what is made again in the backward, and over what waits in host memory.

Recomputed shared experts and the communication that they hide go together: their second run hides the gradients' way back. So there
is no rule between the two. That experts keep no activation (`moe_act`) holds of every product they can run with, and needs no setting.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.config.architecture import MLA, Dense, MoE
from core.config.memory import RecomputeName
from core.config.run import RunConfig
from core.errors import Fault

RECOMPUTE, OFFLOAD = "memory.recompute", "memory.optimizer_offload"


def check_memory(run: RunConfig) -> Iterator[Fault]:
    """Every fault of the section `memory`."""
    names = run.memory.recompute
    if "full" in names and len(names) > 1:
        rule = "makes whole layers again and parts of them: full stands alone"
        yield Fault(
            code="recompute.full-alone",
            setting=RECOMPUTE,
            value=",".join(names),
            rule=rule,
            works=f"full, or {_without(names, 'full')}",
        )
    yield from _there(run)
    share = run.memory.optimizer_offload
    # Written so that a NaN is a fault too.
    if not 0 <= share <= 1:
        yield Fault(
            code="memory.optimizer-share",
            setting=OFFLOAD,
            value=share,
            rule="is a share of the optimizer's states, and must lie in [0, 1]",
            works="0 for none, or 1 for all",
        )


def _there(run: RunConfig) -> Iterator[Fault]:
    """What is to be made again is there."""
    names, layers = run.memory.recompute, [layer for _, layer in run.model.all_layers()]
    moes = [layer.mlp for layer in layers if isinstance(layer.mlp, MoE)]
    if "mla_up_proj" in names and not any(isinstance(layer.attention, MLA) for layer in layers):
        rule = "makes mla_up_proj again, and the attention of this model has no latents for it to rise from"
        works = _without(names, "mla_up_proj")
        yield Fault(code="recompute.needs-mla", setting=RECOMPUTE, value=",".join(names), rule=rule, works=works)
    there: dict[RecomputeName, bool] = {
        "mlp": any(isinstance(layer.mlp, Dense) for layer in layers),
        "moe": bool(moes),
        "moe_act": bool(moes),
        "shared_experts": any(moe.shared is not None for moe in moes),
    }
    absent = [name for name in names if not there.get(name, True)]
    if absent:
        rule = f"makes {','.join(absent)} again, and this model has no layers of that kind"
        works = _without(names, *absent)
        yield Fault(code="recompute.nothing-there", setting=RECOMPUTE, value=",".join(names), rule=rule, works=works)


def _without(names: tuple[RecomputeName, ...], *dropped: RecomputeName) -> str:
    return ",".join(name for name in names if name not in dropped) or "none"
