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

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.dense.source import canonical_shapes, open_dense
from ckpt.source import MODEL_PREFIX, Described, Form, Source
from ckpt.upcycle_options import UpcycleOptions, chosen_layers, router_std_of, upcycled_model, weight_sum
from core.config.architecture import ModelConfig, MoE
from core.config.counts import count_parameters
from core.config.family import Family, find_family
from core.errors import CheckpointError, RequestError
from core.state.box import Box
from core.state.rules import numbers_in
from core.state.seed import normal

_LAYER = "layers.{layer}.mlp"
# What of a dense config.json also holds for the upcycled model: which tokens open, close and fill a text.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
# Files that describe the dense model, and would tell lies about the upcycled one.
_LEFT = ("README.md", ".gitattributes")


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
        std = router_std_of(self._options, self._model)
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


def summary(dense: ModelConfig, options: UpcycleOptions) -> tuple[str, ...]:
    """What will be made, in lines for people: experts, parameters, and how near the first outputs are to the dense model's."""
    model = upcycled_model(dense, options)
    chosen = chosen_layers(dense, options)
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


def _config_of(family: Family, model: ModelConfig) -> dict[str, Any] | None:
    """The config.json of `model` as one of `family`; None where that cannot express it."""
    try:
        config = family.huggingface.write_config(model)
        return config if family.huggingface.read_config(config) == model else None
    except RequestError:
        return None


def _dense_name(layer: int, which: str) -> str:
    return f"{MODEL_PREFIX}{_LAYER.format(layer=layer)}.{which}"


def _wide(tensor: Tensor) -> Tensor:
    """At least float32, in which factors and noise are applied."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def _times(tensor: Tensor, factor: float) -> Tensor:
    """The product, not yet rounded to the stored type."""
    return tensor if factor == 1.0 else _wide(tensor) * factor
