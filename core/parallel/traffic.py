"""What the ranks of a mapping send each other for one training step, in closed form from the declarations alone.

Written from what every exchange is for, not from the code that does it: `benchmarks/scaling.py` holds the two against each other.
An exchange over n ranks is counted as a good implementation sends it: a gather or a reduce-scatter (n - 1) / n of the whole from
every rank, an all-reduce twice that, an all-to-all what is for others. Nothing is recomputed, and the optimizer is ZeRO-1.

Tokens lie on many ranks, unevenly, but each of the G tokens of the global batch on exactly one of tp * cp, so that sums over the
world are exact in G whatever the cut: every function here gives such a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from core.config.architecture import (
    GQA,
    Attention,
    AuxLoss,
    Dense,
    ExpertChoice,
    Layer,
    ModelConfig,
    MoE,
    QuantileBias,
    TopK,
    ZLoss,
    num_halves,
)
from core.config.mapping import ParallelConfig

_WEIGHT_BYTES = 4  # router weights, their gradients, and loads are float32
_COUNT_BYTES = 8  # int64, and sums for reports in float64
_CHOICE_BYTES = 4  # int32, the expert of a choice


class HeldPart(Protocol):
    """What a stage of a pipeline holds, as `core.pipeline.layout.Part` says it."""

    @property
    def embedding(self) -> bool:
        """Whether it begins with the embedding."""
        ...

    @property
    def ahead(self) -> tuple[int, ...]:
        """Its multi-token prediction modules."""
        ...

    @property
    def loss(self) -> bool:
        """Whether it ends with the loss."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step whose traffic is asked for.

    world: ranks. parts: the stages of the pipeline in order, stage s on pipeline rank s % pp. lengths: tokens of every sequence of
    the global batch, over all replicas; microbatches: of it. element_bytes: of parameters and activations (2, 4 or 8).
    remote_share: of the routed rows, the share whose expert another rank of ep holds; None: (ep - 1) / ep, as when every rank uses
    all experts alike.
    """

    model: ModelConfig
    parallel: ParallelConfig
    world: int
    parts: tuple[HeldPart, ...]
    lengths: tuple[int, ...]
    microbatches: int
    element_bytes: int
    remote_share: float | None = None

    @property
    def tokens(self) -> int:
        """Of the global batch."""
        return sum(self.lengths)

    @property
    def wide_bytes(self) -> int:
        """Of sums, main gradients and statistics."""
        return max(4, self.element_bytes)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.parallel.pp

    @property
    def dp(self) -> int:
        """Replicas of the dense folding."""
        return self.stage_ranks // (self.parallel.tp * self.parallel.cp)

    @property
    def edp(self) -> int:
        """Replicas of the expert folding."""
        return self.stage_ranks // (self.parallel.etp * self.parallel.ep)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What all ranks together send over `axis` for one purpose in a step."""

    axis: str
    purpose: str
    sent_bytes: float


def expected_bytes(step: TrainingStep) -> dict[str, float]:
    """Bytes that a rank sends in a step by axis (names as in `core.parallel.groups.Groups`), the mean over the world.

    The copies of a parameter lie on `replicas`, `edp` or `embedding`. Axes over which nothing is sent are left out.
    Raises ValueError for a sharding other than ZeRO-1, and where the routing alone decides what is sent: with a dispatcher that
    sends a token once to each rank, with a budget of the ranks, and with rows of zeros.
    """
    found: dict[str, float] = {}
    for exchange in exchanges(step):
        found[exchange.axis] = found.get(exchange.axis, 0.0) + exchange.sent_bytes
    return {axis: sent / step.world for axis, sent in found.items() if sent}


def exchanges(step: TrainingStep) -> Iterator[Exchange]:
    """Everything that is sent in a step, layer by layer, then around the layers. Raises ValueError as `expected_bytes` does."""
    if step.parallel.sharding != "zero1":
        raise ValueError(f"there is no closed form for parallel.sharding={step.parallel.sharding}, only for zero1")
    _check_routed(step)
    for _, layer in step.model.all_layers():
        yield from _attention(step, layer.attention)
        if isinstance(layer.mlp, Dense):
            yield _over_tp(step, "mlp", 4 * step.model.hidden)
            continue
        if layer.mlp.shared is not None:
            yield _over_tp(step, "shared experts", 4 * step.model.hidden)
        yield from _experts(step, layer.mlp)
        yield from _balance(step, layer.mlp)
        yield from _capacity(step, layer.mlp)
    yield from _vocabulary(step)
    yield _pipeline(step)
    yield from _copies(step)
    yield from _reports(step)


def _check_routed(step: TrainingStep) -> None:
    """Whether the rows that travel are those of all choices, one each. Raises ValueError otherwise."""
    parallel = step.parallel
    if parallel.dispatcher not in ("allgather", "alltoall"):
        raise ValueError(f"what parallel.dispatcher={parallel.dispatcher} sends is decided by the routing")
    if parallel.expert_budget is not None:
        raise ValueError(
            f"what parallel.expert_budget={parallel.expert_budget} leaves to be sent is decided by the routing"
        )
    moes = (layer.mlp for _, layer in step.model.all_layers() if isinstance(layer.mlp, MoE))
    if any(moe.capacity is not None and moe.capacity.pad for moe in moes):
        raise ValueError("there is no closed form for model.moe.capacity with pad, which sends rows of zeros too")


def _over_tp(step: TrainingStep, purpose: str, width: int, element_bytes: int | None = None) -> Exchange:
    """Gathers and reduce-scatters over tp of `width` numbers a token in all, forward and backward."""
    size = step.element_bytes if element_bytes is None else element_bytes
    return Exchange(axis="tp", purpose=purpose, sent_bytes=step.tokens * (step.parallel.tp - 1) * width * size)


def _attention(step: TrainingStep, attention: Attention) -> Iterator[Exchange]:
    """tp: the input (latent attention: only the latents) is gathered and the output reduce-scattered, and the reverse backward.

    cp, of the heads that a rank of tp holds: ranks of `heads` trade q, k and v for tokens and the output back, each way; in the
    ring keys and values come to every place with a later token, forward and again backward, with their gradients, which are summed
    wide. The rotated key of latent attention, which all heads share, is sent once for all heads that a rank holds.
    """
    hidden, tp = step.model.hidden, step.parallel.tp
    heads, kv_heads = attention.heads // tp, max(1, _kv_heads(attention) // tp)
    if isinstance(attention, GQA):
        entered, key, value, shared = hidden, attention.head_dim, attention.head_dim, 0
    else:
        queries = hidden if attention.query_rank is None else attention.query_rank
        entered = queries + attention.latent_rank + attention.rope_dim
        key, value, shared = attention.nope_dim, attention.value_dim, attention.rope_dim
    yield _over_tp(step, "attention", 2 * entered + 2 * hidden)

    traders = step.parallel.cp_alltoall
    places = step.parallel.cp // traders
    mine, mine_kv = heads // traders, max(1, kv_heads // traders)
    keys = mine_kv * (key + value) + shared  # numbers of a token that a rank of `heads` needs to read it
    traded = 2 * step.element_bytes * (mine * (key + shared + value) + keys)
    yield Exchange(axis="heads", purpose="attention", sent_bytes=step.tokens * tp * (traders - 1) * traded)
    passed = (2 * step.element_bytes + step.wide_bytes) * keys * traders
    readings = sum(_readings_elsewhere(length, places) for length in step.lengths)
    yield Exchange(axis="ring", purpose="attention", sent_bytes=readings * tp * passed)


def _readings_elsewhere(length: int, places: int) -> int:
    """Over the tokens of a sequence, to how many other places of the ring each goes: those that hold a later chunk, if only an empty one.

    Of 2 * places chunks place s holds the s-th and the s-th from the end: one of the first half is read everywhere, one of the
    second half by the places before its own. Equal chunks: 3/4 * length * (places - 1).
    """
    chunks = 2 * places
    tokens = (length * (c + 1) // chunks - length * c // chunks for c in range(chunks))
    return sum(count * min(places - 1, chunks - 1 - c) for c, count in enumerate(tokens))


def _kv_heads(attention: Attention) -> int:
    return attention.kv_heads if isinstance(attention, GQA) else attention.heads


def _experts(step: TrainingStep, moe: MoE) -> Iterator[Exchange]:
    """Dispatch and combine, forward and backward; each way the router weights go along once, and before it sizes and choices.

    A row is a token for one of its experts: G * K of them (experts that choose take up to one more each). All-to-all: a row crosses
    ep where its expert is remote, and then is gathered by the ranks of etp, which each hold a part of the expert. All-gather, and
    where there is no ep: every token goes to all etp * ep ranks.
    """
    p, hidden = step.parallel, moe.routed_width(step.model.hidden)
    weight = max(_WEIGHT_BYTES, step.wide_bytes)
    passes = step.stage_ranks * (step.microbatches // step.dp)  # of this layer, over its ranks
    if p.dispatcher == "allgather" or p.ep == 1:
        others = p.etp * p.ep - 1
        columns = moe.experts if isinstance(moe.router.selection, ExpertChoice) else moe.top_k
        per_token = 4 * hidden * step.element_bytes + columns * (2 * weight + _CHOICE_BYTES)
        everything = others * (step.tokens * per_token + passes * _COUNT_BYTES)
        yield Exchange(axis="experts", purpose="dispatch and combine", sent_bytes=everything)
        return
    per_row = 4 * hidden * step.element_bytes + 2 * weight
    rows = step.tokens * moe.top_k
    share = (p.ep - 1) / p.ep if step.remote_share is None else step.remote_share
    counts = passes * _COUNT_BYTES * moe.experts
    sent = rows * share * per_row + counts * (p.ep - 1) / p.ep
    yield Exchange(axis="ep", purpose="dispatch and combine", sent_bytes=sent)
    yield Exchange(axis="etp", purpose="dispatch and combine", sent_bytes=(p.etp - 1) * (rows * per_row + counts))


def _balance(step: TrainingStep, moe: MoE) -> Iterator[Exchange]:
    """Loads: of each microbatch or sequence over the ranks that share it, of the global batch over the stage. Where a choice or its
    thresholds look at a whole microbatch, all its logits with every token's place in it."""
    size, shared = _logit_bytes(step, moe), step.parallel.tp * step.parallel.cp
    logits = (shared - 1) * step.tokens * (moe.experts * size + _COUNT_BYTES)
    if not isinstance(moe.router.selection, TopK):
        yield Exchange(axis="sequence", purpose="selection", sent_bytes=logits)
    for balance in moe.router.balance:
        if isinstance(balance, QuantileBias):
            yield Exchange(axis="sequence", purpose="balance", sent_bytes=logits)
        if not isinstance(balance, AuxLoss):
            continue
        if balance.scope == "global_batch":
            each = 2 * (step.stage_ranks - 1) * (moe.experts + 1) * size
            sent = each * (step.microbatches // step.dp)
            yield Exchange(axis="tokens", purpose="balance", sent_bytes=sent)
        else:
            rows = len(step.lengths) if balance.scope == "sequence" else step.microbatches
            yield Exchange(axis="sequence", purpose="balance", sent_bytes=2 * (shared - 1) * rows * moe.experts * size)


def _logit_bytes(step: TrainingStep, moe: MoE) -> int:
    return 8 if moe.router.dtype == "float64" else step.wide_bytes


def _capacity(step: TrainingStep, moe: MoE) -> Iterator[Exchange]:
    """Where experts drop, the ranks of a microbatch see all its choices with their weights, and every token's place in it."""
    if moe.capacity is not None:
        per_token = moe.top_k * (_COUNT_BYTES + max(_WEIGHT_BYTES, step.wide_bytes)) + _COUNT_BYTES
        others = step.parallel.tp * step.parallel.cp - 1
        yield Exchange(axis="sequence", purpose="capacity", sent_bytes=others * step.tokens * per_token)


def _vocabulary(step: TrainingStep) -> Iterator[Exchange]:
    """Embeddings are reduce-scattered and their gradients gathered; for the head it is the reverse, and of every token's logits
    the largest, the sum of exponentials and the label's are made one. Both once for the model and once for each module ahead."""
    uses = 1 + len(step.model.mtp_layers())
    yield _over_tp(step, "embedding", 2 * step.model.hidden * uses)
    yield _over_tp(step, "head", 2 * step.model.hidden * uses)
    yield _over_tp(step, "head", 2 * 3 * uses, step.wide_bytes)


def _pipeline(step: TrainingStep) -> Exchange:
    """Between neighbouring parts: every stream of hidden states forward, its gradient backward."""
    streams = crossed = 0
    for part in step.parts[:-1]:
        streams += part.embedding + len(part.ahead)
        crossed += streams
    width = 2 * step.model.hidden * step.element_bytes if step.parallel.pp > 1 else 0
    return Exchange(axis="pp", purpose="activations and gradients", sent_bytes=step.tokens * width * crossed)


def _copies(step: TrainingStep) -> Iterator[Exchange]:
    """ZeRO-1: gradients are reduce-scattered over the copies of their parameters, and updated parameters gathered.

    P numbers in n copies each, however they are cut between: each of the n holders sends P (n - 1) / n, so P (n - 1) together.
    """
    per_number = step.wide_bytes + step.element_bytes
    spread = step.parallel.cp * step.dp
    numbers = _dense_numbers(step)
    dense = sum(count * (adjacent * spread - 1) for adjacent, count in numbers.items())
    yield Exchange(axis="replicas", purpose="gradients and parameters", sent_bytes=dense * per_number)
    experts = [layer.mlp for _, layer in step.model.all_layers() if isinstance(layer.mlp, MoE)]
    held = sum(moe.experts * moe.expert_parameters(step.model.hidden) for moe in experts)
    yield Exchange(axis="edp", purpose="gradients and parameters", sent_bytes=held * (step.edp - 1) * per_number)
    tied = step.model.tied_embeddings
    users = (s for s, part in enumerate(step.parts) if part.embedding or part.ahead or (tied and part.loss))
    copies = len({s % step.parallel.pp for s in users}) * spread
    embedding = step.model.vocab * step.model.hidden * (copies - 1)
    yield Exchange(axis="embedding", purpose="gradients and parameters", sent_bytes=embedding * per_number)


def _dense_numbers(step: TrainingStep) -> Counter[int]:
    """Trained numbers outside experts and embedding, by how many neighbours along tp hold the same ones."""
    model, tp = step.model, step.parallel.tp
    found: Counter[int] = Counter()
    for _, layer in model.all_layers():
        found += _layer_numbers(layer, model.hidden, tp)
    # A prediction module has three norms of its own and the projection of both halves.
    found[tp] += model.hidden + len(model.mtp_layers()) * (3 * model.hidden + 2 * model.hidden**2)
    found[1] += 0 if model.tied_embeddings else model.vocab * model.hidden
    return found


def _layer_numbers(layer: Layer, hidden: int, tp: int) -> Counter[int]:
    """The same of one layer."""
    found = Counter({tp: 2 * hidden})
    a = layer.attention
    if isinstance(a, GQA):
        found[1] += 2 * a.heads * a.head_dim * hidden
        found[max(1, tp // a.kv_heads)] += 2 * a.kv_heads * a.head_dim * hidden
        found[tp] += 2 * a.head_dim if a.head_norm else 0
    else:
        queries = hidden if a.query_rank is None else a.query_rank
        found[1] += a.heads * (a.nope_dim + a.rope_dim) * queries
        found[1] += a.heads * ((a.nope_dim + a.value_dim) * a.latent_rank + a.value_dim * hidden)
        found[tp] += (a.latent_rank + a.rope_dim) * hidden + a.latent_rank
        found[tp] += 0 if a.query_rank is None else a.query_rank * (hidden + 1)
    if isinstance(layer.mlp, Dense):
        found[1] += (1 + num_halves(layer.mlp.activation)) * layer.mlp.ffn * hidden
        return found
    found[tp] += layer.mlp.experts * hidden
    if layer.mlp.shared is not None:
        shared = layer.mlp.shared.count * layer.mlp.expert_ffn * hidden
        found[1] += (1 + num_halves(layer.mlp.activation)) * shared
        found[tp] += hidden if layer.mlp.shared.gated else 0
    found[tp] += 0 if layer.mlp.latent is None else 2 * hidden * layer.mlp.latent
    return found


def _reports(step: TrainingStep) -> Iterator[Exchange]:
    """Small all-reduces: labels of the global batch over dp; over the world losses, balance losses, choices and what else is told of
    MoE layers, their largest logits, and the norm."""
    ahead = len(step.model.mtp_layers())
    dp = step.dp
    labels = step.world // dp * 2 * (dp - 1) * (2 + ahead) * _COUNT_BYTES
    yield Exchange(axis="dp", purpose="labels", sent_bytes=labels)
    moes = [layer.mlp for _, layer in step.model.all_layers() if isinstance(layer.mlp, MoE)]
    kinds = [(balance, moe.experts) for moe in moes for balance in moe.router.balance]
    balances = sum(isinstance(balance, (AuxLoss, ZLoss)) for balance, _ in kinds)
    quantiles = sum(experts + 1 for balance, experts in kinds if isinstance(balance, QuantileBias))
    numbers = 1 + ahead + balances + quantiles + sum(moe.experts + 3 for moe in moes)
    everywhere = 2 * (step.world - 1) * _COUNT_BYTES
    yield Exchange(axis="world", purpose="losses and choices", sent_bytes=everywhere * numbers)
    yield Exchange(axis="world", purpose="largest logits", sent_bytes=everywhere * len(moes))
    yield Exchange(axis="world", purpose="gradient norm", sent_bytes=everywhere)
