"""Every product of a weight in the layers of a model, from its declaration alone, and which of them a recipe takes.

tests/models/test_products.py holds the list against the real modules' parameters. Embedding, head and router are none of them: they
stay in the run's dtype, or in the router's own, under every recipe (report section 5.1); so does the gate of shared experts, one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from core.config.architecture import GQA, MLA, Attention, Dense, Layer, ModelConfig, MoE, num_halves
from core.config.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Product:
    """x · weight.T of one weight, by its canonical name: `outputs` by `inputs`, of `experts` such matrices.

    cut: which of the two the ranks of tp, of experts those of etp, share out.
    """

    name: str
    outputs: int
    inputs: int
    cut: Literal["none", "outputs", "inputs"] = "none"
    experts: int = 1
    routed: bool = False


def products(model: ModelConfig) -> Iterator[Product]:
    """All of a model's layers and multi-token prediction modules, in the order of the modules."""
    for path, layer in model.all_layers():
        if path.startswith("mtp."):
            module = path.removesuffix(".layer")
            yield Product(name=f"{module}.projection.weight", outputs=model.hidden, inputs=2 * model.hidden)
        yield from _layer(path, layer, model.hidden)


def quantised_products(recipe: Recipe, model: ModelConfig) -> tuple[Product, ...]:
    """Those that a recipe takes: all but what its patterns name and the layers at either end that it leaves out."""
    last = len(model.layers) - recipe.high_last
    plain = {f"layers.{i}" for i in range(len(model.layers)) if i < recipe.high_first or i >= last}

    def high(name: str) -> bool:
        layer = ".".join(name.split(".")[:2])
        return layer in plain or any(fnmatchcase(name, pattern) for pattern in recipe.high)

    return tuple(product for product in products(model) if not high(product.name))


def unmatched(recipe: Recipe, model: ModelConfig) -> tuple[str, ...]:
    """The recipe's patterns that no product of this model matches: a slip of the pen, as a rule."""
    names = [product.name for product in products(model)]
    return tuple(pattern for pattern in recipe.high if not any(fnmatchcase(name, pattern) for name in names))


def _layer(path: str, layer: Layer, hidden: int) -> Iterator[Product]:
    yield from _attention(f"{path}.attention", layer.attention, hidden)
    if isinstance(layer.mlp, Dense):
        yield from _mlp(f"{path}.mlp", hidden, layer.mlp.ffn, num_halves(layer.mlp.activation))
    else:
        yield from _moe(f"{path}.mlp", layer.mlp, hidden)


def _attention(path: str, attention: Attention, hidden: int) -> Iterator[Product]:
    if isinstance(attention, MLA):
        yield from _latent(path, attention, hidden)
        return
    a: GQA = attention
    for name, heads in (("query", a.heads), ("key", a.kv_heads), ("value", a.kv_heads)):
        yield Product(name=f"{path}.{name}.weight", outputs=heads * a.head_dim, inputs=hidden, cut="outputs")
    yield Product(name=f"{path}.output.weight", outputs=hidden, inputs=a.heads * a.head_dim, cut="inputs")


def _latent(path: str, a: MLA, hidden: int) -> Iterator[Product]:
    query, wide = a.heads * (a.nope_dim + a.rope_dim), a.heads * (a.nope_dim + a.value_dim)
    if a.query_rank is None:
        yield Product(name=f"{path}.query.weight", outputs=query, inputs=hidden, cut="outputs")
    else:
        yield Product(name=f"{path}.query_down.weight", outputs=a.query_rank, inputs=hidden)
        yield Product(name=f"{path}.query_up.weight", outputs=query, inputs=a.query_rank, cut="outputs")
    yield Product(name=f"{path}.latent_down.weight", outputs=a.latent_rank + a.rope_dim, inputs=hidden)
    yield Product(name=f"{path}.latent_up.weight", outputs=wide, inputs=a.latent_rank, cut="outputs")
    yield Product(name=f"{path}.output.weight", outputs=hidden, inputs=a.heads * a.value_dim, cut="inputs")


def _mlp(path: str, hidden: int, ffn: int, halves: int) -> Iterator[Product]:
    yield Product(name=f"{path}.gate_up", outputs=halves * ffn, inputs=hidden, cut="outputs")
    yield Product(name=f"{path}.down", outputs=hidden, inputs=ffn, cut="inputs")


def _moe(path: str, moe: MoE, hidden: int) -> Iterator[Product]:
    width, halves = moe.routed_width(hidden), num_halves(moe.activation)
    for product in _mlp(f"{path}.experts", width, moe.expert_ffn, halves):
        yield Product(
            name=product.name,
            outputs=product.outputs,
            inputs=product.inputs,
            cut=product.cut,
            experts=moe.experts,
            routed=True,
        )
    if moe.latent is not None:
        yield Product(name=f"{path}.latent_down.weight", outputs=width, inputs=hidden)
        yield Product(name=f"{path}.latent_up.weight", outputs=hidden, inputs=width)
    if moe.shared is not None:
        yield from _mlp(f"{path}.shared", hidden, moe.shared.count * moe.expert_ffn, halves)
