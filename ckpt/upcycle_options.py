"""How a dense model becomes a mixture of experts: the options, all that is wrong with them, and the model that they give.

The reasons stand in ckpt/upcycle.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from core.check.words import above, at_least, nearest, nearest_multiples
from core.config.architecture import Dense, ModelConfig, MoE, Router, SharedExperts
from core.config.family import find_family
from core.errors import ConfigError, Fault

Scaling = Literal["exact", "cube_root"]


@dataclass(frozen=True, kw_only=True)
class SharedFromDense:
    """A shared expert from the dense FFN's first `count` pieces, which gives the part `share` of their output."""

    count: int
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class UpcycleOptions:
    """How a dense model becomes a mixture of experts.

    style: the family whose router and balancing it gets. experts: E, all routed experts of a layer: copies * granularity. top_k: K.
    granularity: g, pieces of the dense FFN. scaling: where the factor on the experts goes. normalise: whether the router divides by
    the sum of the chosen weights, None: as the family does. layers: those that get experts, None for all. noise_std: of the noise on
    copies, in units of the dense weights. router_std: of the router's random rows, None: as new matrices of the model.
    seed: of router and noise, which depend on it, on the tensor's name and on the element's place alone.
    """

    style: str
    experts: int
    top_k: int
    granularity: int = 1
    scaling: Scaling = "exact"
    normalise: bool | None = None
    shared: SharedFromDense | None = None
    layers: tuple[int, ...] | None = None
    noise_std: float | None = None
    router_std: float | None = None
    seed: int = 0

    @property
    def copies(self) -> int:
        """r, how many experts start from the same weights."""
        return self.experts // self.granularity


def upcycled_model(dense: ModelConfig, options: UpcycleOptions) -> ModelConfig:
    """The mixture of experts that `dense` becomes. Raises ConfigError with all that `upcycle_options_faults` finds."""
    faults = upcycle_options_faults(dense, options)
    if faults:
        raise ConfigError(faults)
    chosen = chosen_layers(dense, options)
    layers = tuple(
        replace(layer, mlp=_moe(layer.mlp, options)) if i in chosen and isinstance(layer.mlp, Dense) else layer
        for i, layer in enumerate(dense.layers)
    )
    return replace(dense, layers=layers)


def upcycle_options_faults(dense: ModelConfig, options: UpcycleOptions) -> tuple[Fault, ...]:
    """Every reason why `dense` cannot be upcycled like that, settings named as the command has them."""
    found = [*_number_faults(options), *_layer_faults(dense, options)]
    try:
        find_family(options.style)
    except ConfigError as error:
        found += [replace(fault, setting="--model") for fault in error.faults]
    if not found:
        found += [*_split_faults(dense, options), *_router_faults(dense, options)]
    return tuple(found)


def layers_named(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers that `text` names: `all`; `every 2` for the second, fourth, …; or numbers from 0 such as `0,3,5-7`.

    Raises ConfigError for any other text, and for layers that the model does not have.
    """
    words = text.replace(":", " ").split()
    if words == ["all"]:
        return tuple(range(num_layers))
    if len(words) == 2 and words[0] == "every" and words[1].isdecimal() and 0 < int(words[1]) <= num_layers:
        return tuple(range(int(words[1]) - 1, num_layers, int(words[1])))
    found: set[int] = set()
    for item in text.replace(" ", "").split(","):
        first, dash, last = item.partition("-")
        numbers = (
            range(int(first), int(last or first) + 1) if first.isdecimal() and (last.isdecimal() or not dash) else ()
        )
        if not numbers or numbers[-1] >= num_layers:
            rule = f"names no layers of a model that has {num_layers}"
            works = f"all, every 2, or numbers from 0 to {num_layers - 1} such as 0,{num_layers - 1}"
            raise ConfigError([Fault(setting="--layers", value=text, rule=rule, works=works)])
        found.update(numbers)
    return tuple(sorted(found))


def weight_sum(moe: MoE) -> float:
    """W, what a token's router weights add up to: of every token where `sums_alike`, else of one whose scores are all equal."""
    router = moe.router
    if router.score == "softmax_after_top_k" or router.normalise:
        return router.scale
    return router.scale * moe.top_k * (1 / moe.experts if router.score == "softmax" else 1 / 2)


def sums_alike(moe: MoE, *, router_std: float) -> bool:
    """Whether the router weights of every token add up to the same, so that a factor on the experts can be exact."""
    router = moe.router
    certain = router.score == "softmax_after_top_k" or router.normalise
    return certain or router_std == 0 or (router.score == "softmax" and moe.top_k == moe.experts)


def chosen_layers(dense: ModelConfig, options: UpcycleOptions) -> tuple[int, ...]:
    """The layers of the model that are to get experts."""
    every = range(len(dense.layers))
    return tuple(every) if options.layers is None else tuple(i for i in sorted(set(options.layers)) if i in every)


def router_std_of(options: UpcycleOptions, model: ModelConfig) -> float:
    """The standard deviation of the router's random rows."""
    return model.init_std if options.router_std is None else options.router_std


def _moe(dense: Dense, options: UpcycleOptions) -> MoE:
    """The experts that take the place of a dense FFN."""
    return MoE(
        experts=options.experts,
        top_k=options.top_k,
        expert_ffn=dense.ffn // options.granularity,
        activation=dense.activation,
        router=_router_of(options),
        shared=SharedExperts(count=options.shared.count) if options.shared else None,
    )


def _router_of(options: UpcycleOptions) -> Router:
    """The style's router: that of the family's first published size.

    Without groups, for which virtual groups leave no choice; with the factor g where it has one.
    """
    sizes = find_family(options.style).sizes
    size = next((size for size in sizes if size.published), sizes[0])
    router = next(layer.mlp.router for layer in size.model.layers if isinstance(layer.mlp, MoE))
    scale = 1.0 if router.scale == 1.0 else float(options.granularity)
    normalise = router.normalise if options.normalise is None else options.normalise
    return replace(router, groups=None, scale=scale, normalise=normalise)


def _number_faults(options: UpcycleOptions) -> Iterator[Fault]:
    """Faults of single numbers."""
    for name, value in (("experts", options.experts), ("top-k", options.top_k), ("granularity", options.granularity)):
        yield from at_least(f"--{name}", value, 1)
    if options.noise_std is not None:
        yield from above("--noise", options.noise_std, 0, "a number above 0, or no --noise")
    if options.router_std is not None:
        yield from at_least("--router-std", options.router_std, 0)
    if options.scaling not in ("exact", "cube_root"):
        yield Fault(setting="--scaling", value=options.scaling, rule="is not a scaling", works="exact or cube_root")
    if options.shared is not None:
        yield from at_least("--shared", options.shared.count, 1)
        if not 0 < options.shared.share < 1:
            rule = "must be a part of the output, between 0 and 1: at 0 or 1 one of both would start dead"
            yield Fault(setting="--shared-share", value=options.shared.share, rule=rule, works="0.5")


def _layer_faults(dense: ModelConfig, options: UpcycleOptions) -> Iterator[Fault]:
    """Faults of the choice of layers."""
    last = len(dense.layers) - 1
    if dense.predict_ahead is not None:
        rule = "predicts several tokens ahead, of which no dense model is upcycled"
        yield Fault(setting="DENSE", value="multi-token prediction", rule=rule, works="a dense model without it")
    if options.layers == ():
        yield Fault(setting="--layers", value="none", rule="must name a layer", works=f"all, or 0 to {last}")
    for i in options.layers or ():
        if not 0 <= i <= last:
            yield Fault(setting="--layers", value=i, rule="is not a layer of the model", works=f"0 to {last}")
    named = [i for i in chosen_layers(dense, options) if not isinstance(dense.layers[i].mlp, Dense)]
    if named:
        works = ", ".join(str(i) for i, layer in enumerate(dense.layers) if isinstance(layer.mlp, Dense)) or "none"
        rule = "has experts already"
        yield Fault(setting="--layers", value=named[0], rule=rule, works=works)


def _split_faults(dense: ModelConfig, options: UpcycleOptions) -> Iterator[Fault]:
    """Faults of numbers that must divide each other."""
    g = options.granularity
    widths = {layer.mlp.ffn for i in chosen_layers(dense, options) if isinstance((layer := dense.layers[i]).mlp, Dense)}
    for ffn in sorted(widths):
        yield from _width_faults(ffn, g)
    whole = "so that every copy of the FFN is whole"
    if options.experts % g:
        rule, works = f"must be a multiple of --granularity={g}, {whole}", nearest_multiples(options.experts, g)
        yield Fault(setting="--experts", value=options.experts, rule=rule, works=works)
    if options.top_k % g:
        rule = f"must be a multiple of --granularity={g}, so that a token uses each piece of the FFN equally often"
        yield Fault(setting="--top-k", value=options.top_k, rule=rule, works=nearest_multiples(options.top_k, g))
    if options.top_k > options.experts:
        rule = f"must be at most --experts={options.experts}"
        yield Fault(setting="--top-k", value=options.top_k, rule=rule, works=f"{g} to {options.experts}")
    if options.shared is not None and options.shared.count > g:
        rule = f"must be at most --granularity={g}: the dense FFN has no more pieces"
        yield Fault(setting="--shared", value=options.shared.count, rule=rule, works="1" if g == 1 else f"1 to {g}")


def _width_faults(ffn: int, granularity: int) -> Iterator[Fault]:
    if ffn % granularity:
        works = nearest(granularity, lambda n: ffn % n == 0, most=ffn)
        rule = f"must divide the dense FFN's width {ffn}"
        yield Fault(setting="--granularity", value=granularity, rule=rule, works=works)


def _router_faults(dense: ModelConfig, options: UpcycleOptions) -> Iterator[Fault]:
    """Faults of the router with the scaling."""
    moe = _moe(Dense(ffn=options.granularity), options)
    if moe.router.score == "softmax_after_top_k" and moe.router.normalise:
        rule = f"has no meaning with --model={options.style}, whose weights add up to one already"
        yield Fault(setting="--normalise", value=True, rule=rule, works="no --normalise")
    elif options.scaling == "exact" and not sums_alike(moe, router_std=router_std_of(options, dense)):
        rule = (
            "cannot be: without normalising, the weights of the chosen experts add up to something else for every token, "
            "and no factor on the experts makes up for that"
        )
        works = "--normalise, --scaling=cube_root (near, not equal), or --router-std=0"
        yield Fault(setting="--scaling", value="exact", rule=rule, works=works)
