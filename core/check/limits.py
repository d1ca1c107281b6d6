"""Rules over what experts and ranks may drop, and which dispatchers can do it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from core.check.words import nearest
from core.config.architecture import Capacity, ModelConfig, MoE
from core.config.capacity_text import capacity_text
from core.config.mapping import LIMITS, PACKAGES, Limit, ParallelConfig
from core.config.run import RunConfig
from core.errors import Fault


def check_capacity(capacity: Capacity | None) -> Iterator[Fault]:
    """Faults of what experts drop, whatever they run on."""
    if capacity is not None and not 0 < capacity.factor < math.inf:
        rule = "must begin with a positive number; none drops nothing"
        yield Fault(
            code="capacity.positive",
            setting="model.moe.capacity",
            value=capacity_text(capacity),
            rule=rule,
            works="1.25, or none",
        )


def check_limits(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Fault]:
    """Faults of a dispatcher and what is asked of it: nodes, a budget, rows of a fixed number."""
    yield from _nodes(parallel)
    yield from _budget(model, parallel)
    asked: dict[Limit, bool] = {
        "capacity": bool(_capacities(model)),
        "pad": any(capacity.pad for capacity in _capacities(model)),
        "budget": parallel.expert_budget is not None,
    }
    told = {
        "capacity": "drops nothing, and model.moe.capacity does",
        "pad": "moves as many rows as are routed, and the pad of model.moe.capacity wants a fixed number",
        "budget": f"knows no budget, and parallel.expert_budget={parallel.expert_budget} is one",
    }
    for limit, wanted in asked.items():
        if wanted and limit not in LIMITS[parallel.dispatcher]:
            works = " or ".join(name for name, limits in LIMITS.items() if all(x in limits for x in asked if asked[x]))
            yield Fault(
                code="dispatcher.limit",
                setting="parallel.dispatcher",
                value=parallel.dispatcher,
                rule=told[limit],
                works=works,
            )


def check_package(run: RunConfig) -> Iterator[Fault]:
    """Faults of a dispatcher that is a package of kernels, in what the run computes with."""
    dispatcher, compute = run.parallel.dispatcher, run.precision.compute
    if dispatcher in PACKAGES and compute != "bfloat16":
        rule = f"is not what parallel.dispatcher={dispatcher} moves, which is bfloat16 alone"
        works = "bfloat16, or parallel.dispatcher=flex"
        yield Fault(
            code="dispatcher.package-bfloat16", setting="precision.compute", value=compute, rule=rule, works=works
        )


def _nodes(parallel: ParallelConfig) -> Iterator[Fault]:
    """Nodes fold ep, and only a dispatcher that sends tokens by way of them can use them."""
    size = parallel.ep_per_node
    if size < 1 or parallel.ep < 1:
        return
    divides = parallel.ep % size == 0
    if size > 1 and parallel.dispatcher != "flex":
        rule = f"is for parallel.dispatcher=flex, and here parallel.dispatcher={parallel.dispatcher}"
        works = "1, or parallel.dispatcher=flex" if divides else "1"
        yield Fault(
            code="dispatcher.nodes-need-flex", setting="parallel.ep_per_node", value=size, rule=rule, works=works
        )
    elif not divides:
        works = nearest(size, lambda n: parallel.ep % n == 0, most=parallel.ep)
        rule = f"must divide parallel.ep={parallel.ep}"
        yield Fault(
            code="dispatcher.nodes-divide-ep", setting="parallel.ep_per_node", value=size, rule=rule, works=works
        )


def _budget(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Fault]:
    """A budget is a positive number, and the one thing that drops."""
    budget, key = parallel.expert_budget, "parallel.expert_budget"
    if budget is None:
        return
    if not 0 < budget < math.inf:
        rule = "must be a positive number; none drops nothing"
        yield Fault(code="budget.positive", setting=key, value=budget, rule=rule, works="none")
        return
    if _capacities(model):
        rule = "drops rows of a rank, and model.moe.capacity drops rows of an expert already"
        yield Fault(
            code="budget.or-capacity", setting=key, value=budget, rule=rule, works="none, or model.moe.capacity=none"
        )
    if not any(isinstance(layer.mlp, MoE) for _, layer in model.all_layers()):
        rule = "is for ranks of experts, and this model has none"
        yield Fault(code="budget.experts", setting=key, value=budget, rule=rule, works="none")


def _capacities(model: ModelConfig) -> list[Capacity]:
    moes = (layer.mlp for _, layer in model.all_layers() if isinstance(layer.mlp, MoE))
    return [moe.capacity for moe in moes if moe.capacity is not None]
