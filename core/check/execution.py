"""Rules over how work is handed to the device: CUDA graphs, a dispatcher's processors, and what a combined schedule leaves alone."""

from __future__ import annotations

from collections.abc import Iterator

from core.config.architecture import Dense, MoE
from core.config.execution import GraphName
from core.config.mapping import LIMITS, PACKAGES
from core.config.memory import RecomputeName
from core.config.run import RunConfig
from core.errors import Fault

GRAPHS, SMS = "execution.graphs", "execution.dispatcher_sms"
OF_MOE: tuple[GraphName, ...] = ("moe", "moe_router", "moe_preprocess")
# What a combined schedule takes apart, to hide the communication of one pass behind the other one: none of it can be one piece.
WHOLE_GRAPHS: tuple[GraphName, ...] = ("mlp", "moe")
WHOLE_RECOMPUTE: tuple[RecomputeName, ...] = ("full", "moe")


def check_execution(run: RunConfig) -> Iterator[Fault]:
    """Every fault of what is captured, and of the processors that a dispatcher takes."""
    if run.execution.graphs:
        yield from _together(run.execution.graphs)
        yield from _captured(run)
    if run.parallel.schedule == "combined":
        yield from _combined(run)
    if run.execution.dispatcher_sms is not None:
        yield from _processors(run, run.execution.dispatcher_sms)


def _together(graphs: tuple[GraphName, ...]) -> Iterator[Fault]:
    """What is captured once is not captured again as a part of something else."""
    value = ",".join(graphs)
    if "full_iteration" in graphs and len(graphs) > 1:
        rule = "captures all and parts of it: full_iteration stands alone"
        works = f"full_iteration, or {_without(graphs, 'full_iteration')}"
        yield Fault(code="graphs.whole-alone", setting=GRAPHS, value=value, rule=rule, works=works)
    elif "moe" in graphs and {"moe_router", "moe_preprocess"} & set(graphs):
        rule = "captures moe and parts of it"
        works = f"{_without(graphs, 'moe_router', 'moe_preprocess')}, or {_without(graphs, 'moe')}"
        yield Fault(code="graphs.moe-alone", setting=GRAPHS, value=value, rule=rule, works=works)
    elif "moe_preprocess" in graphs and "moe_router" not in graphs:
        rule = "captures moe_preprocess, which goes on from the graph of moe_router, without it"
        works = f"{_with(graphs, 'moe_router')}, or {_without(graphs, 'moe_preprocess')}"
        yield Fault(code="graphs.preprocess-needs-router", setting=GRAPHS, value=value, rule=rule, works=works)


def _captured(run: RunConfig) -> Iterator[Fault]:
    """There is what is captured, and its shapes are known beforehand."""
    graphs, layers = run.execution.graphs, [layer for _, layer in run.model.all_layers()]
    value = ",".join(graphs)
    moes = [layer.mlp for layer in layers if isinstance(layer.mlp, MoE)]
    dense = any(isinstance(layer.mlp, Dense) for layer in layers)
    absent = [name for name in graphs if (name in OF_MOE and not moes) or (name == "mlp" and not dense)]
    if absent:
        rule = f"captures {','.join(absent)}, and this model has no layers of that kind"
        yield Fault(
            code="graphs.nothing-there", setting=GRAPHS, value=value, rule=rule, works=_without(graphs, *absent)
        )
    whole = [name for name in graphs if name in ("full_iteration", "moe")]
    if whole and run.parallel.expert_budget is None and not all(moe.capacity and moe.capacity.pad for moe in moes):
        rule = (
            f"captures {whole[0]}, whose shapes must be known beforehand, and experts here take as many rows as are routed: "
            "model.moe.capacity pads nothing, and parallel.expert_budget=none"
        )
        ways = [_without(graphs, *whole)]
        if "pad" in LIMITS[run.parallel.dispatcher]:
            ways.append("model.moe.capacity=1.25:weight:pad")
        if not any(moe.capacity for moe in moes):
            ways.append("parallel.expert_budget=1.25")
        yield Fault(code="graphs.static-shapes", setting=GRAPHS, value=value, rule=rule, works=", or ".join(ways))


def _combined(run: RunConfig) -> Iterator[Fault]:
    """The layers of a combined schedule are done in parts."""
    for code, key, held, whole in (
        ("graphs.combined", GRAPHS, run.execution.graphs, WHOLE_GRAPHS),
        ("recompute.combined", "memory.recompute", run.memory.recompute, WHOLE_RECOMPUTE),
    ):
        pieces = [name for name in held if name in whole]
        if pieces:
            rule = f"makes one piece of {','.join(pieces)}, which parallel.schedule=combined takes apart to hide communication"
            works = f"{_without(held, *pieces)}, or parallel.schedule=1f1b"
            yield Fault(code=code, setting=key, value=",".join(held), rule=rule, works=works)


def _processors(run: RunConfig, processors: int) -> Iterator[Fault]:
    """Only packages of kernels take processors for themselves, and DeepEP an even number."""
    dispatcher = run.parallel.dispatcher
    if dispatcher not in PACKAGES:
        rule = f"is for the kernels of {' and '.join(PACKAGES)}, and here parallel.dispatcher={dispatcher}"
        works = f"none, or parallel.dispatcher={PACKAGES[0]}"
        yield Fault(code="dispatcher.sms-package", setting=SMS, value=processors, rule=rule, works=works)
    elif processors < 1 or (dispatcher == "deepep" and processors % 2):
        even = " and even, as deepep takes one half to send and one to receive" if dispatcher == "deepep" else ""
        works = "none, or 20" if processors < 1 else f"none, or {processors + 1}"
        yield Fault(
            code="dispatcher.sms-number", setting=SMS, value=processors, rule=f"must be positive{even}", works=works
        )


def _without(names: tuple[str, ...], *dropped: str) -> str:
    return ",".join(name for name in names if name not in dropped) or "none"


def _with(names: tuple[GraphName, ...], added: GraphName) -> str:
    return ",".join((added, *names))
