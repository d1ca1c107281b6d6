"""The dispatcher of an MoE layer."""

from __future__ import annotations

from core.config.architecture import MoE
from core.config.mapping import DispatcherName
from core.layers.place import Place
from core.moe.dispatch.allgather import AllGatherDispatcher
from core.moe.dispatch.alltoall import AllToAllDispatcher
from core.moe.dispatch.deepep import DeepEPDispatcher
from core.moe.dispatch.flex import FlexDispatcher
from core.moe.dispatch.hybridep import HybridEPDispatcher
from core.moe.dispatch.protocol import Dispatcher
from core.parallel.collectives import Packing

# Dispatchers that send a token to a rank once, however many of its experts are there.
TOKEN_ONCE: tuple[DispatcherName, ...] = ("flex", "deepep", "hybridep")


def make_dispatcher(config: MoE, place: Place, *, multiple: int = 1, packing: Packing | None = None) -> Dispatcher:
    """The dispatcher that the mapping names.

    multiple: every expert's rows are filled up with rows of zeros to a multiple of it, for products that want one. packing: how they
    travel there in fewer bytes, which packages' kernels are not asked to (core/check says so).
    """
    groups, experts = place.groups, config.experts
    name = dispatcher_name(config, place)
    assert packing is None or name not in ("deepep", "hybridep"), "packages send rows as they are"
    match name:
        case "allgather":
            return AllGatherDispatcher(experts, groups, multiple, packing)
        case "alltoall":
            return AllToAllDispatcher(experts, groups, multiple, packing)
        case "flex":
            return FlexDispatcher(experts, groups, multiple, packing)
        case "deepep":
            return DeepEPDispatcher(experts, place, multiple)
        case "hybridep":
            return HybridEPDispatcher(experts, place, multiple)


def dispatcher_name(config: MoE, place: Place) -> DispatcherName:
    """The dispatcher that runs.

    Without ep no row has a rank to go to, and under etp every rank needs every token, which it gathers once rather than once for
    each of its experts; unless the experts' rows are to be of a fixed number.
    """
    named, groups = place.parallel.dispatcher, place.groups
    if groups.ep.size > 1 or named == "allgather":
        return named
    padded = config.capacity is not None and config.capacity.pad
    return "allgather" if groups.etp.size > 1 and not padded else "alltoall"
