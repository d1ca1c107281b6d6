"""The options on top of a mapping: what can make its step shorter, and what leaves memory free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, get_args

from core.config.architecture import MLA, Dense, ModelConfig, MoE
from core.config.execution import GraphName
from core.config.mapping import PACKAGES, DispatcherName
from core.config.memory import OffloadName, RecomputeName
from core.config.recipe import RECIPES, Recipe
from core.config.run import RunConfig
from launch.plan.candidates import Setup
from launch.profiles import Profile

Name = TypeVar("Name", bound=str)
# What is captured where expert products are not, since their shapes follow from the routing (report section 4.3.5).
PARTIAL_GRAPHS: tuple[GraphName, ...] = ("attn", "moe_router", "moe_preprocess")
PACKAGES_NEED = (9, 0)
RECOMPUTE: tuple[RecomputeName, ...] = get_args(RecomputeName)
OFFLOAD: tuple[OffloadName, ...] = get_args(OffloadName)
# Activations that are not there to wait on the host where a part is computed again.
COMPUTED_AGAIN: dict[str, tuple[OffloadName, ...]] = {
    "layernorm": ("attn_norm", "mlp_norm"),
    "core_attn": ("core_attn",),
    "moe_act": ("moe_act",),
    "moe": ("mlp_norm", "expert_fc1", "moe_act"),
    "full": ("attn_norm", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
}


@dataclass(frozen=True, kw_only=True)
class Move:
    """One option more: what it sets as `--set` takes it, its setting, and the set-up with it."""

    text: str
    key: str
    apply: Callable[[Setup], Setup]


def time_moves(setup: Setup, run: RunConfig, profile: Profile) -> Iterator[Move]:
    """Options that can make a step shorter: how tokens travel, what hides it, fewer launches, faster products."""
    own = setup.parallel
    for dispatcher in dispatchers(profile):
        if dispatcher != own.dispatcher:
            yield _parallel("dispatcher", dispatcher, ep_per_node=_nodes(dispatcher, setup, profile))
    for schedule in ("1f1b", "combined", "zero_bubble"):
        if schedule != own.schedule and (schedule == "1f1b" or own.pp > 1 or schedule == "combined"):
            yield _parallel("schedule", schedule)
    with_moe = any(isinstance(layer.mlp, MoE) for layer in run.model.layers)
    partial: tuple[GraphName, ...] = PARTIAL_GRAPHS if with_moe else ("attn", "mlp")
    for graphs in dict.fromkeys((run.execution.graphs, partial)):
        if profile.device == "cuda" and graphs and graphs != setup.execution.graphs:
            yield _graphs(graphs)
    if run.precision.compute == "bfloat16" and profile.chip is not None:
        # The finest scales that the hardware has, which keep most of what is learned. Four bits are for those who name them.
        finest = [name for name in profile.chip.recipes if RECIPES[name].bits == 8][-1:]
        for name in finest if setup.precision.recipe is None else ():
            yield _precision("recipe", RECIPES[name])


def memory_moves(setup: Setup, run: RunConfig) -> Iterator[Move]:
    """Options that leave more memory free: smaller optimizer states, recomputation, host memory (report Table 13)."""
    memory = setup.memory
    if run.precision.compute == "bfloat16":
        yield from _smaller_states(setup)
    for name in recomputable(run.model):
        if name not in memory.recompute and "full" not in memory.recompute:
            yield _recompute(name)
    for offload in OFFLOAD:
        if offload not in memory.offload:
            yield _offload(offload)
    for share in (0.5, 1.0):
        if memory.optimizer_offload < share and not setup.precision.primary:
            yield _memory("optimizer_offload", share)


def _smaller_states(setup: Setup) -> Iterator[Move]:
    """Fewer bytes for moments, gradients and weights."""
    precision = setup.precision
    if precision.moments == "float32":
        yield _precision("moments", "bfloat16")
    if precision.main_gradients != "bfloat16":
        yield _precision("main_gradients", "bfloat16")
    if precision.recipe is not None and not precision.primary and not setup.memory.optimizer_offload:
        yield _precision("primary", True)


def undo_moves(setup: Setup) -> Iterator[Move]:
    """Every option that keeps memory free, taken back: the dearest for time first."""
    memory, precision = setup.memory, setup.precision
    for name in memory.recompute:
        yield _memory("recompute", tuple(each for each in memory.recompute if each != name))
    if memory.optimizer_offload:
        yield _memory("optimizer_offload", 0.0)
    for offload in memory.offload:
        yield _memory("offload", tuple(each for each in memory.offload if each != offload))
    if precision.moments != "float32":
        yield _precision("moments", "float32")
    if precision.main_gradients != "float32":
        yield _precision("main_gradients", "float32")


def dispatchers(profile: Profile) -> tuple[DispatcherName, ...]:
    """Those that run on the hardware: packages of kernels need Hopper or later. `allgather` sends every row everywhere."""
    plain: tuple[DispatcherName, ...] = ("alltoall", "flex")
    return (*PACKAGES, *plain) if (profile.capability or (0, 0)) >= PACKAGES_NEED else plain


def recomputable(model: ModelConfig) -> tuple[RecomputeName, ...]:
    """The parts of this model's layers that can be computed again, the cheapest first and whole layers last."""
    latent = any(isinstance(layer.attention, MLA) for layer in model.layers)
    dense = any(isinstance(layer.mlp, Dense) for layer in model.layers)
    experts = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    names: list[RecomputeName] = ["layernorm"]
    names += ["moe_act"] if experts else []
    names += ["mla_up_proj"] if latent else []
    names += ["shared_experts"] if any(moe.shared for moe in experts) else []
    names += ["mlp"] if dense else []
    names += ["core_attn", "moe", "full"] if experts else ["core_attn", "full"]
    return tuple(names)


def _recompute(name: RecomputeName) -> Move:
    """A part more that is computed again; what is computed again does not wait on the host too."""

    def apply(setup: Setup) -> Setup:
        held = setup.memory
        names = (name,) if name == "full" else _ordered(RECOMPUTE, (*held.recompute, name))
        waiting = tuple(each for each in held.offload if each not in COMPUTED_AGAIN.get(name, ()))
        return replace(setup, memory=replace(held, recompute=names, offload=waiting))

    return Move(text=f"recompute {name}", key="memory.recompute", apply=apply)


def _offload(name: OffloadName) -> Move:
    """Activations more that wait on the host, unless they are computed again."""

    def apply(setup: Setup) -> Setup:
        held = setup.memory
        if any(name in COMPUTED_AGAIN.get(part, ()) for part in held.recompute):
            return setup
        return replace(setup, memory=replace(held, offload=_ordered(OFFLOAD, (*held.offload, name))))

    return Move(text=f"offload {name}", key="memory.offload", apply=apply)


def _graphs(names: tuple[GraphName, ...]) -> Move:
    def apply(setup: Setup) -> Setup:
        return replace(setup, execution=replace(setup.execution, graphs=names))

    return Move(text=f"execution.graphs={','.join(names)}", key="execution.graphs", apply=apply)


def _nodes(dispatcher: str, setup: Setup, profile: Profile) -> int:
    """How many neighbours of ep share a node: what `flex` has to be told."""
    node = profile.fabric.gpus_per_node if profile.fabric else 1
    return min(setup.parallel.ep, node) if dispatcher == "flex" else 1


def _ordered(known: Iterable[Name], names: Iterable[str]) -> tuple[Name, ...]:
    """The names in the order in which they are declared."""
    return tuple(name for name in known if name in names)


def _parallel(name: str, value: object, **also: object) -> Move:
    def apply(setup: Setup) -> Setup:
        return replace(setup, parallel=replace(setup.parallel, **{name: value, **also}))  # type: ignore[arg-type]

    return Move(text=f"parallel.{name}={value}", key=f"parallel.{name}", apply=apply)


def _precision(name: str, value: object) -> Move:
    def apply(setup: Setup) -> Setup:
        return replace(setup, precision=replace(setup.precision, **{name: value}))  # type: ignore[arg-type]

    shown = value.name if isinstance(value, Recipe) else str(value).lower()
    return Move(text=f"precision.{name}={shown}", key=f"precision.{name}", apply=apply)


def _memory(name: str, value: object) -> Move:
    def apply(setup: Setup) -> Setup:
        return replace(setup, memory=replace(setup.memory, **{name: value}))  # type: ignore[arg-type]

    shown = ",".join(value) or "none" if isinstance(value, tuple) else value
    return Move(text=f"memory.{name}={shown}", key=f"memory.{name}", apply=apply)
