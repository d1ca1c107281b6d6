"""What the parts of a model ask of one device for one microbatch, in closed form from the declarations.

Forward alone; a backward does the products twice and passes memory twice (launch/plan/time.py). FLOP are those of
core/config/flops.py and the router's. Bytes count every tensor of activations once where an operation reads it and once where one
writes it, as kernels do that fuse nothing but what the zoo's own do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from core.config.architecture import GQA, MLA, Dense, Layer, MoE, num_halves
from core.config.memory import OffloadName, RecomputeName
from core.config.precision import BYTES
from core.config.run import RunConfig

_WIDE = 4  # bytes of a float32: logits, scores, router weights


@dataclass(frozen=True, kw_only=True)
class Work:
    """One part of a layer, forward.

    products: FLOP of products with weights, which a recipe quantises; plain: of those that stay in the run's dtype; attention: between
    queries and keys, and of values. streamed: bytes of activations. weights: numbers of weights that are read (and, backward, whose
    gradients are added up); held: whose they are; low: the share of them that a recipe quantises. recomputed: the names of core/config/memory.py under which the part is computed again.
    """

    name: str
    products: float = 0.0
    plain: float = 0.0
    attention: float = 0.0
    streamed: float = 0.0
    weights: float = 0.0
    low: float = 0.0
    held: Literal["layer", "experts", "head"] = "layer"
    recomputed: tuple[RecomputeName, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank has of a microbatch.

    tokens: on it between attention and MLPs (sequences * length / (tp * cp)). sequence: tokens of a sequence. element: bytes of an
    activation. quantised: bytes written of a number when it is made an operand of a recipe, in both directions of the product; 0 without.
    """

    tokens: float
    sequence: int
    hidden: int
    element: int
    quantised: float
    tp: int
    etp: int
    ep: int
    sorted_once: bool

    @staticmethod
    def of(run: RunConfig) -> Share:
        """The even share of a rank."""
        parallel, train = run.parallel, run.train
        recipe = run.precision.recipe
        width = 0.0 if recipe is None else recipe.bits / 8
        return Share(
            tokens=train.microbatch * train.sequence_tokens / (parallel.tp * parallel.cp),
            sequence=train.sequence_tokens,
            hidden=run.model.hidden,
            element=BYTES[run.precision.compute],
            quantised=2 * width,
            tp=parallel.tp,
            etp=parallel.etp,
            ep=parallel.ep,
            sorted_once=parallel.dispatcher != "alltoall",
        )

    def moved(self, numbers: float) -> float:
        """Bytes of so many numbers of every token."""
        return self.tokens * numbers * self.element

    def product(
        self,
        name: str,
        inner: float,
        outer: float,
        *,
        rows: float = 1.0,
        held: float,
        low: float = 1.0,
        by: tuple[RecomputeName, ...] = (),
    ) -> Work:
        """A product of `rows` vectors of every token: `inner` numbers in, `outer` out. held: numbers of weights on this rank; low: the
        share of them that a recipe takes.

        Its operand is read once more where it must be quantised first.
        """
        quantising = (self.element + self.quantised) * inner if self.quantised and low else 0.0
        flops = 2 * self.tokens * rows * inner * outer
        return Work(
            name=name,
            products=low * flops,
            plain=(1 - low) * flops,
            streamed=self.moved(rows * (inner + outer)) + self.tokens * rows * quantising,
            weights=held,
            low=low,
            recomputed=("full", *by),
        )

    def passing(self, name: str, numbers: float, *by: RecomputeName) -> Work:
        """An operation that only reads and writes: so many numbers of every token in all."""
        return Work(name=name, streamed=self.moved(numbers), recomputed=("full", *by))


def layer_work(layer: Layer, share: Share, high: Sequence[str] = ()) -> Iterator[Work]:
    """The parts of one layer in the order in which they run. high: the names inside it of weights that a recipe leaves alone."""
    hidden = share.hidden
    yield share.passing("attention norm", 2 * hidden, "layernorm")
    if isinstance(layer.attention, GQA):
        yield from _grouped(layer.attention, share, high)
    else:
        yield from _latent(layer.attention, share, high)
    yield share.passing("residual", 3 * hidden)
    yield share.passing("mlp norm", 2 * hidden, "layernorm")
    if isinstance(layer.mlp, Dense):
        yield from _dense(layer.mlp, share, high)
    else:
        yield from _experts(layer.mlp, share, high)
    yield share.passing("residual", 3 * hidden)


def _low(high: Sequence[str], sizes: Mapping[str, float]) -> float:
    """The share of some weights, by name and size, that a recipe takes."""
    return 1 - sum(size for name, size in sizes.items() if name in high) / sum(sizes.values())


def _grouped(a: GQA, share: Share, high: Sequence[str]) -> Iterator[Work]:
    query, keys = a.heads * a.head_dim, 2 * a.kv_heads * a.head_dim
    held = share.hidden * (query + max(keys, 2 * a.head_dim * share.tp)) / share.tp
    sizes = {"attention.query.weight": query, "attention.key.weight": keys / 2, "attention.value.weight": keys / 2}
    yield share.product("queries, keys, values", share.hidden, query + keys, held=held, low=_low(high, sizes))
    rotated = query + keys / 2
    yield share.passing("rotation", (4 if a.head_norm else 2) * rotated)
    yield _attention(a.heads, 2 * a.head_dim, 2 * query + keys, share)
    low = _low(high, {"attention.output.weight": 1})
    yield share.product("attention output", query, share.hidden, held=query * share.hidden / share.tp, low=low)


def _latent(a: MLA, share: Share, high: Sequence[str]) -> Iterator[Work]:
    hidden = share.hidden
    query, wide = a.heads * (a.nope_dim + a.rope_dim), a.heads * (a.nope_dim + a.value_dim)
    value = a.heads * a.value_dim
    latents = a.latent_rank + (a.query_rank or 0)
    down = latents + a.rope_dim
    sizes = {
        "attention.query_down.weight": a.query_rank or 0,
        "attention.latent_down.weight": a.latent_rank + a.rope_dim,
    }
    yield share.product("latents", hidden, down, held=hidden * down, low=_low(high, sizes))
    yield share.passing("latent norms", 2 * latents, "layernorm")
    source = hidden if a.query_rank is None else a.query_rank
    up: tuple[RecomputeName, ...] = ("mla_up_proj",)
    low = _low(high, {f"attention.{'query' if a.query_rank is None else 'query_up'}.weight": 1})
    yield share.product("queries", source, query, held=source * query / share.tp, low=low, by=up)
    low = _low(high, {"attention.latent_up.weight": 1})
    yield share.product("keys, values", a.latent_rank, wide, held=a.latent_rank * wide / share.tp, low=low, by=up)
    # Queries are rotated in place; a key is written whole, with the rotated part that all heads share.
    yield share.passing("rotation", 2 * query + 2 * wide, "mla_up_proj")
    yield _attention(a.heads, a.nope_dim + a.rope_dim + a.value_dim, 2 * query + 2 * value, share)
    low = _low(high, {"attention.output.weight": 1})
    yield share.product("attention output", value, hidden, held=value * hidden / share.tp, low=low)


def _attention(heads: int, sizes: int, passing: float, share: Share) -> Work:
    """Causal: every query sees half of the sequence."""
    flops = 2 * share.tokens * heads * sizes * share.sequence / 2
    return Work(name="attention", attention=flops, streamed=share.moved(passing), recomputed=("full", "core_attn"))


def _dense(mlp: Dense, share: Share, high: Sequence[str]) -> Iterator[Work]:
    halves, ffn, hidden = num_halves(mlp.activation), mlp.ffn, share.hidden
    into, out = (_low(high, {f"mlp.{name}": 1}) for name in ("gate_up", "down"))
    held = hidden * ffn / share.tp
    yield share.product("mlp in", hidden, halves * ffn, held=halves * held, low=into, by=("mlp",))
    yield share.passing("mlp activation", (halves + 1) * ffn, "mlp")
    yield share.product("mlp out", ffn, hidden, held=held, low=out, by=("mlp",))


def _experts(moe: MoE, share: Share, high: Sequence[str]) -> Iterator[Work]:
    """Router, rows sorted and brought back, routed experts, shared ones. All experts get equally many rows."""
    hidden, width, ffn, k = share.hidden, moe.routed_width(share.hidden), moe.expert_ffn, moe.top_k
    halves = num_halves(moe.activation)
    scores = share.moved(hidden) + 6 * _WIDE * share.tokens * moe.experts
    router = 2 * share.tokens * hidden * moe.experts
    by: tuple[RecomputeName, ...] = ("full", "moe")
    yield Work(name="router", plain=router, streamed=scores, weights=hidden * moe.experts, recomputed=by)
    if moe.latent is not None:
        low = _low(high, {"mlp.latent_down.weight": 1, "mlp.latent_up.weight": 1})
        yield share.product("latent", hidden, 2 * width, held=2 * hidden * width, low=low, by=("moe",))
    # Into sending order, and by expert where they arrive; a dispatcher that sends a token once copies rows only there.
    sorting = (1 if share.sorted_once else 3) * k * width + width
    yield share.passing("rows to experts", sorting, "moe")
    held = moe.experts / share.ep * width * ffn / share.etp
    low, down = (_low(high, {f"mlp.experts.{name}": 1}) for name in ("gate_up", "down"))
    into = share.product("experts in", width, halves * ffn, rows=k, held=halves * held, low=low, by=("moe",))
    yield replace(into, held="experts")
    yield share.passing("experts' activation", k * (halves + 1) * ffn, "moe", "moe_act")
    out = share.product("experts out", ffn, width, rows=k, held=held, low=down, by=("moe",))
    yield replace(out, held="experts")
    yield share.passing("rows from experts", sorting, "moe")
    if moe.shared is not None:
        both: tuple[RecomputeName, ...] = ("moe", "shared_experts")
        always = moe.shared.count * ffn
        low, down = (_low(high, {f"mlp.shared.{name}": 1}) for name in ("gate_up", "down"))
        held = hidden * always / share.tp
        yield share.product("shared in", hidden, halves * always, held=halves * held, low=low, by=both)
        yield share.passing("shared activation", (halves + 1) * always + 3 * hidden, *both)
        yield share.product("shared out", always, hidden, held=held, low=down, by=both)


def embedding_work(share: Share) -> Work:
    """Rows of the embedding, read and written."""
    return Work(name="embedding", streamed=share.moved(2 * share.hidden))


def loss_work(vocab: int, share: Share) -> Work:
    """The last norm, logits in the run's dtype, and their cross-entropy in float32: written, read for the loss, and again for its
    gradient, which overwrites them."""
    logits = share.tokens * vocab
    return Work(
        name="loss",
        plain=2 * logits * share.hidden,
        streamed=share.moved(3 * share.hidden) + logits * (share.element + _WIDE),
        weights=share.hidden * vocab / share.tp,
        held="head",
    )


def ahead_work(share: Share, *, low: bool = True) -> Iterator[Work]:
    """What a prediction module has around its layer: three norms and the projection of both halves. Its logits belong to the loss.
    low: whether a recipe takes the projection."""
    yield share.passing("halves' norms", 6 * share.hidden)
    held = 2.0 * share.hidden * share.hidden
    work = share.product("projection", 2 * share.hidden, share.hidden, held=held, low=float(low))
    yield replace(work, recomputed=())


def offloaded(layer: Layer, names: tuple[OffloadName, ...], share: Share) -> float:
    """Bytes of one layer's activations that wait in host memory: the inputs of what is named."""
    a, mlp, hidden = layer.attention, layer.mlp, share.hidden
    if isinstance(a, GQA):
        value, read = a.heads * a.head_dim, (a.heads + 2 * a.kv_heads) * a.head_dim
    else:
        value, read = a.heads * a.value_dim, a.heads * (2 * (a.nope_dim + a.rope_dim) + a.value_dim)
    numbers: dict[OffloadName, float] = {"attn_norm": hidden, "mlp_norm": hidden, "core_attn": read, "attn_proj": value}
    if isinstance(mlp, MoE):
        numbers["expert_fc1"] = mlp.top_k * mlp.routed_width(hidden)
        numbers["moe_act"] = mlp.top_k * num_halves(mlp.activation) * mlp.expert_ffn
    return share.moved(sum(numbers.get(name, 0.0) for name in names))
