"""A dense model as a mixture of experts that gives the same outputs at first: read by box, so under any mapping and in little memory.

A dense FFN of width F is cut into g pieces of width F / g ("granularity": piece j has rows j of gate and of up, and columns j of
down; the sum over pieces is the FFN, because the activation works on each neuron alone). r copies of all pieces make
E = r * g experts: expert e = i * g + j is copy i of piece j. The router has r random rows, each repeated g times in a row, so that
the g experts of one copy, a virtual group, have equal scores. A token uses K experts, K a multiple of g. Equal scores are taken
in order of the expert, and a group's experts are neighbours, so the K best are always K / g whole groups, ties between groups
included: each piece of the FFN is used equally often, K / g times. (Report section 7.6; arXiv 2410.07524.)

What the factor on the experts must be. Let y be the FFN's output, f_j that of piece j, w_e a token's weight of expert e, the same
for all experts of a group. With every expert's output multiplied by s, the layer gives

    sum over chosen groups i, pieces j of  w_(ig) * s * f_j  =  s * y * (sum over chosen groups of w_(ig))  =  s * y * W / g

where W is the sum of the token's K weights. So s = g / W, and it is right for every token exactly where W is the same for all:

    softmax over the chosen                          W = scale           s = g / scale               exact
    softmax or sigmoid, divided by their sum         W = scale           s = g / scale               exact
    softmax over all experts, K = E                  W = scale           s = g / scale               exact
    softmax over all experts, K < E                  W = scale * K / E   s = g * E / (K * scale)     where all scores are equal
                                                       (= r * g^2 / K for scale 1)
    sigmoid, not divided                             W = scale * K / 2   s = 2 * g / (K * scale)     where all scores are zero

In the last two rows W differs from token to token as soon as the router tells tokens apart: exact only while it is zero
(router_std=0, with which all tokens start at the same K experts); otherwise `exact` is refused and the cube root an approximation.

Where s goes. `exact`: on down alone, in which the output is linear, whatever the activation. `cube_root`: s^(1/3) on gate, up
and down, as is usual; exact for an activation with a(c x) = c a(x) only, which SiLU is not. Where the family's router has a factor
of its own, that becomes g: then s = 1 and experts are copied to the last bit. In bfloat16 a factor that is no power of two rounds
each weight; what is exact here is exact up to that.

A shared expert takes the first `count` pieces and multiplies its output by `share`; the routed experts of these pieces give the
rest, s * (1 - share), the others s. Sum: share * f_j + (1 - share) * f_j = f_j for pieces held by both. With count = g it is the
dense FFN itself.

Noise, where asked for, is added to gate, up and down of every copy but the first, before the factor; outputs then differ by it.

What is not carried over: optimizer moments, which belong to other parameters, and random and data state. Training starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ckpt.dense.source import canonical_shapes, open_dense
from ckpt.source import MODEL_PREFIX, Described, Form, Source
from core.check.words import above, at_least, nearest, nearest_multiples
from core.config.architecture import Dense, ModelConfig, MoE, Router, SharedExperts
from core.config.counts import count_parameters
from core.config.family import Family, find_family
from core.errors import CheckpointError, ConfigError, Fault, RequestError
from core.state.box import Box
from core.state.rules import numbers_in
from core.state.seed import normal

Scaling = Literal["exact", "cube_root"]
_LAYER = "layers.{layer}.mlp"
# What of a dense config.json also holds for the upcycled model: which tokens open, close and fill a text.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
# Files that describe the dense model, and would tell lies about the upcycled one.
_LEFT = ("README.md", ".gitattributes")


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


class Upcycled:
    """A mixture of experts made from a dense source while it is read: a Source (ckpt/source.py) itself.

    The dense source must stay open meanwhile. Tensors keep the element type of what they are made from; a router has that of its layer's FFN.
    """

    def __init__(self, dense: Source, options: UpcycleOptions) -> None:
        """Raises ConfigError with all that `upcycle_options_faults` finds, CheckpointError where nothing describes the dense model."""
        described = dense.describe()
        if described is None:
            raise CheckpointError("the dense model has no description, so it is not known how to upcycle it")
        self._dense, self._options, self._described = dense, options, described
        self._model = upcycled_model(described.model, options)
        self._layers = {i: layer.mlp for i, layer in enumerate(self._model.layers) if isinstance(layer.mlp, MoE)}
        shapes = canonical_shapes(self._model)
        self._forms = {
            MODEL_PREFIX + name: Form(shape=shape, dtype=self._dtype(name)) for name, shape in shapes.items()
        }

    @property
    def forms(self) -> Mapping[str, Form]:
        """Every tensor."""
        return self._forms

    def read(self, name: str, box: Box) -> Tensor:
        """The piece `box`; of the dense model only the pieces in it are read, each once."""
        made, form = self._made(name.removeprefix(MODEL_PREFIX)), self._forms[name]
        if made is None:
            return self._dense.read(name, box)
        layer, tensor = made
        out = torch.zeros(box.shape, dtype=getattr(torch, form.dtype))
        if not box.elements or tensor == "router.bias":
            return out
        if tensor == "router.weight":
            return self._router(name, box).to(out.dtype)
        fill = self._shared if tensor.startswith("shared.") else self._experts
        fill(layer, tensor.split(".")[1], box, out)
        return out

    def describe(self) -> Described:
        """The mixture of experts; its family where the config.json of the style can express it, else None."""
        family = find_family(self._options.style)
        config = _config_of(family, self._model)
        kept = {k: v for k, v in (self._described.published or {}).items() if k in _KEPT}
        return Described(
            family=None if config is None else family.name,
            model=self._model,
            published=None if config is None else config | kept,
            assets={name: data for name, data in self._described.assets.items() if name not in _LEFT},
        )

    def _made(self, canonical: str) -> tuple[int, str] | None:
        """Layer and tensor of what is made here; None for what the dense model has as it is."""
        layer, _, tensor = canonical.partition(".mlp.")
        numbers = numbers_in("layers.{layer}", layer) if tensor else None
        return (numbers["layer"], tensor) if numbers and numbers["layer"] in self._layers else None

    def _dtype(self, canonical: str) -> str:
        made = self._made(canonical)
        if made is None:
            return self._dense.forms[MODEL_PREFIX + canonical].dtype
        layer, tensor = made
        source = "down" if tensor.endswith(".down") else "gate_up"
        return "float32" if tensor == "router.bias" else self._dense.forms[_dense_name(layer, source)].dtype

    def _router(self, name: str, box: Box) -> Tensor:
        """Rows of the router: the random row of an expert's copy. Drawn as `initialise` draws a router of `copies` rows."""
        first, count, g = box.offset[0], box.shape[0], self._options.granularity
        copies = range(first // g, (first + count - 1) // g + 1)
        std = _router_std(self._options, self._model)
        drawn = Box(offset=(copies.start, box.offset[1]), shape=(len(copies), box.shape[1]))
        rows = normal(self._options.seed, name.removeprefix(MODEL_PREFIX), drawn, std=std)
        return rows[torch.arange(first, first + count) // g - copies.start]

    def _experts(self, layer: int, which: str, box: Box, out: Tensor) -> None:
        """Routed experts: dimension 0 counts them, and the one before the last, or for down the last, is their part of the FFN."""
        g, first = self._options.granularity, box.offset[0]
        inner = Box(offset=box.offset[1:], shape=box.shape[1:])
        experts = range(first, first + box.shape[0])
        for piece in sorted({e % g for e in experts}):
            # In gate_up [2, ffn, hidden] and in down [hidden, ffn] alike, dimension 1 is the FFN.
            start = (inner.offset[0], inner.offset[1] + piece * self._layers[layer].expert_ffn, *inner.offset[2:])
            dense = self._dense.read(_dense_name(layer, which), Box(offset=start, shape=inner.shape))
            factor = self._factor(layer, which, self._factor_of_piece(layer, piece))
            for expert in experts:
                if expert % g == piece:
                    noisy = self._with_noise(dense, f"{_LAYER.format(layer=layer)}.experts.{which}", expert, inner)
                    out[expert - first] = _times(noisy, factor)

    def _shared(self, layer: int, which: str, box: Box, out: Tensor) -> None:
        """The shared expert: the first pieces of the FFN, which stand together in it."""
        assert self._options.shared is not None, "only a model with shared experts has their tensors"
        factor = self._factor(layer, which, self._options.shared.share)
        out.copy_(_times(self._dense.read(_dense_name(layer, which), box), factor))

    def _factor_of_piece(self, layer: int, piece: int) -> float:
        """What the output of the routed experts of a piece is multiplied by."""
        shared, moe = self._options.shared, self._layers[layer]
        rest = 1.0 - shared.share if shared is not None and piece < shared.count else 1.0
        return rest * self._options.granularity / weight_sum(moe)

    def _factor(self, layer: int, which: str, of_output: float) -> float:
        """What a matrix is multiplied by, so that (nearly, for the cube root) the output is by `of_output`."""
        if self._options.scaling == "cube_root":
            return of_output ** (1 / 3)
        return of_output if which == "down" else 1.0

    def _with_noise(self, dense: Tensor, canonical: str, expert: int, inner: Box) -> Tensor:
        """A piece as copy of it; the first copy is the original."""
        std, seed = self._options.noise_std, self._options.seed
        if std is None or expert < self._options.granularity:
            return dense
        box = Box(offset=(expert, *inner.offset), shape=(1, *inner.shape))
        # A stream of its own: the tensor's name alone gives the numbers of its initialisation.
        return _wide(dense) + normal(seed, f"{canonical}/noise", box, std=std)[0]


def upcycled_source(path: str | Path, options: UpcycleOptions) -> Upcycled:
    """The dense model at `path`, upcycled; for a process of its own, which needs nothing but these two values."""
    return Upcycled(open_dense(path), options)


def upcycled_model(dense: ModelConfig, options: UpcycleOptions) -> ModelConfig:
    """The mixture of experts that `dense` becomes. Raises ConfigError with all that `upcycle_options_faults` finds."""
    faults = upcycle_options_faults(dense, options)
    if faults:
        raise ConfigError(faults)
    chosen = _chosen(dense, options)
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


def summary(dense: ModelConfig, options: UpcycleOptions) -> tuple[str, ...]:
    """What will be made, in lines for people: experts, parameters, and how near the first outputs are to the dense model's."""
    model = upcycled_model(dense, options)
    chosen = _chosen(dense, options)
    before, after = count_parameters(dense), count_parameters(model)
    moe = model.layers[chosen[0]].mlp
    assert isinstance(moe, MoE), "a chosen layer has experts"
    pieces = f"{options.copies} copies of {options.granularity} pieces" if options.granularity > 1 else "copies"
    shared = f", and a shared expert of width {moe.shared.count * moe.expert_ffn}" if moe.shared else ""
    same = "equal the dense model's"
    if options.noise_std is not None:
        same = f"differ from the dense model's by noise of {options.noise_std} on the copies"
    elif options.scaling == "cube_root":
        same = "are near the dense model's (cube-root scaling)"
    return (
        f"{len(chosen)} of {len(dense.layers)} layers get experts: {moe.experts} of width {moe.expert_ffn} ({pieces}), "
        f"of which a token uses {moe.top_k}{shared}",
        f"parameters: {before.main:,} dense; {after.main:,} upcycled, of which a token passes {after.active:,}",
        f"the first outputs {same}",
    )


def _moe(dense: Dense, options: UpcycleOptions) -> MoE:
    """The experts that take the place of a dense FFN."""
    return MoE(
        experts=options.experts,
        top_k=options.top_k,
        expert_ffn=dense.ffn // options.granularity,
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


def _config_of(family: Family, model: ModelConfig) -> dict[str, Any] | None:
    """The config.json of `model` as one of `family`; None where that cannot express it."""
    try:
        config = family.huggingface.write_config(model)
        return config if family.huggingface.read_config(config) == model else None
    except RequestError:
        return None


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
    named = [i for i in _chosen(dense, options) if not isinstance(dense.layers[i].mlp, Dense)]
    if named:
        works = ", ".join(str(i) for i, layer in enumerate(dense.layers) if isinstance(layer.mlp, Dense)) or "none"
        rule = "has experts already"
        yield Fault(setting="--layers", value=named[0], rule=rule, works=works)


def _split_faults(dense: ModelConfig, options: UpcycleOptions) -> Iterator[Fault]:
    """Faults of numbers that must divide each other."""
    g = options.granularity
    widths = {layer.mlp.ffn for i in _chosen(dense, options) if isinstance((layer := dense.layers[i]).mlp, Dense)}
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
    elif options.scaling == "exact" and not sums_alike(moe, router_std=_router_std(options, dense)):
        rule = (
            "cannot be: without normalising, the weights of the chosen experts add up to something else for every token, "
            "and no factor on the experts makes up for that"
        )
        works = "--normalise, --scaling=cube_root (near, not equal), or --router-std=0"
        yield Fault(setting="--scaling", value="exact", rule=rule, works=works)


def _chosen(dense: ModelConfig, options: UpcycleOptions) -> tuple[int, ...]:
    """The layers of the model that are to get experts."""
    every = range(len(dense.layers))
    return tuple(every) if options.layers is None else tuple(i for i in sorted(set(options.layers)) if i in every)


def _router_std(options: UpcycleOptions, model: ModelConfig) -> float:
    return model.init_std if options.router_std is None else options.router_std


def _dense_name(layer: int, which: str) -> str:
    return f"{MODEL_PREFIX}{_LAYER.format(layer=layer)}.{which}"


def _wide(tensor: Tensor) -> Tensor:
    """At least float32, in which factors and noise are applied."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def _times(tensor: Tensor, factor: float) -> Tensor:
    """The product, not yet rounded to the stored type."""
    return tensor if factor == 1.0 else _wide(tensor) * factor
