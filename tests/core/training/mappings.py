"""Mappings of small worlds, and what runs on them: every folding of 1, 2 and 4 ranks, drawn ones of 8 (known faults, pattern 3)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from core.config.architecture import (
    GQA,
    MLA,
    Balance,
    Capacity,
    Dense,
    ExpertBias,
    Groups,
    Layer,
    ModelConfig,
    MoE,
    MultiToken,
    Router,
    SharedExperts,
)
from core.config.mapping import ParallelConfig
from tests.core.tiny import GLOBAL_LOSS, MICROBATCH_LOSS, NORM, SEQUENCE_LOSS, Z_LOSS, deepseek, mixtral

SIZES = (1, 2, 4, 8)
BIAS = ExpertBias(rate=0.05)


def wide_mixtral(balance: tuple[Balance, ...] = (MICROBATCH_LOSS, Z_LOSS)) -> ModelConfig:
    """Three MoE layers of 8 experts, whose width and vocabulary divide by nothing; four heads share two."""
    moe = MoE(
        experts=8, top_k=2, expert_ffn=7, router=Router(score="softmax_after_top_k", normalise=False, balance=balance)
    )
    attention = GQA(heads=4, kv_heads=2, head_dim=4)
    return replace(mixtral(), layers=(Layer(attention=attention, mlp=moe),) * 3)


def wide_qwen3(balance: tuple[Balance, ...] = (SEQUENCE_LOSS, GLOBAL_LOSS)) -> ModelConfig:
    """Four MoE layers of 8 experts, top-3, with query and key norms and tied embeddings; one key head for all."""
    moe = MoE(experts=8, top_k=3, expert_ffn=9, router=Router(score="softmax", normalise=True, balance=balance))
    attention = GQA(heads=4, kv_heads=1, head_dim=6, head_norm=NORM)
    return replace(mixtral(), layers=(Layer(attention=attention, mlp=moe),) * 4, tied_embeddings=True)


def wide_deepseek(
    balance: tuple[Balance, ...] = (BIAS, SEQUENCE_LOSS, MICROBATCH_LOSS, Z_LOSS),
) -> ModelConfig:
    """A dense and two MoE layers with MLA: 8 experts in 4 groups, a shared expert, two modules that predict ahead."""
    attention = MLA(heads=4, query_rank=6, latent_rank=8, nope_dim=4, rope_dim=4, value_dim=5, latent_norm=NORM)
    router = Router(score="sigmoid", normalise=True, groups=Groups(total=4, kept=2, best=2), scale=2.5, balance=balance)
    moe = MoE(experts=8, top_k=3, expert_ffn=7, router=router, shared=SharedExperts(count=1))
    dense, sparse = Layer(attention=attention, mlp=Dense(ffn=13)), Layer(attention=attention, mlp=moe)
    base = replace(deepseek(), layers=(dense, sparse, sparse))
    return replace(base, predict_ahead=MultiToken(depth=2, loss_weight=0.3))


def dropping(model: ModelConfig, capacity: Capacity) -> ModelConfig:
    """The same with experts that take only so many rows."""
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, capacity=capacity)) if isinstance(layer.mlp, MoE) else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


MODELS = {
    "mixtral": wide_mixtral(),
    "qwen3": wide_qwen3(),
    "deepseek": wide_deepseek(),
    "mixtral, dropping": dropping(wide_mixtral(), Capacity(factor=0.8)),
    "deepseek, dropping": dropping(wide_deepseek(), Capacity(factor=1.0, drop="position", pad=True)),
}
# Layouts that the even one is not: uneven parts, empty ones, prediction modules on stages of their own. By parts.
LAYOUTS = {
    "mixtral": {2: ("Et|ttL", "Ettt|L", "E|tttL"), 4: ("E|tt|t|L", "Et||tt|L", "Ett|t||L")},
    "qwen3": {2: ("Ettt|tL", "E|ttttL"), 4: ("Ett|t|t|L", "E|tt|tt|L"), 6: ("Et|t||t|t|L",)},
    "deepseek": {2: ("Ettt|mmL", "Et|ttmmL"), 4: ("Et|tt|mm|L", "Ett|t|m|mL"), 6: ("E|t|t|t|mm|L", "Et|t|t|m|m|L")},
}


def foldings(world: int) -> Iterator[ParallelConfig]:
    """Every way to fold `world` ranks into both meshes."""
    for pp in (size for size in SIZES if world % size == 0 and size <= 4):
        pairs = [(a, b) for a, b in product(SIZES, SIZES) if (world // pp) % (a * b) == 0]
        for (tp, cp), (etp, ep) in product(pairs, pairs):
            if tp <= 4:
                yield ParallelConfig(tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


def dressed(parallel: ParallelConfig, model: str, replicas: int, draw: random.Random) -> ParallelConfig:
    """The same folding with drawn schedule, virtual stages or layout, dispatcher, kind of context parallelism, and sharding."""
    heads = 4 // parallel.tp
    inner = draw.choice([n for n in SIZES if parallel.cp % n == 0 and heads % n == 0])
    schedule = draw.choice(("gpipe", "1f1b", "zero_bubble", "combined")) if draw.random() < 0.8 else "1f1b"
    found = replace(
        parallel,
        schedule=schedule,
        dispatcher=draw.choice(("alltoall", "flex", "allgather")),
        cp_alltoall=inner,
    )
    if draw.random() < 0.25:
        found = replace(found, sharding="fsdp", schedule=draw.choice(("gpipe", "1f1b")))
        found = replace(found, fsdp_replicas=draw.choice([n for n in (1, 2) if replicas % n == 0]))
    if parallel.pp == 1 and draw.random() < 0.7:
        return found
    vpp = draw.choice((1, 2, 3)) if parallel.pp > 1 else 2
    texts = LAYOUTS[model.split(",", maxsplit=1)[0]].get(parallel.pp * vpp, ())
    if texts and draw.random() < 0.6:
        return replace(found, layout=draw.choice(texts))
    return replace(found, vpp=vpp)


def drawn(world: int, count: int | None = None, seed: int = 0) -> list[tuple[str, ParallelConfig]]:
    """(model, mapping): every folding of the world, or `count` drawn ones, each on a drawn model; the models come in turn."""
    draw = random.Random(100 * world + seed)
    all_of_them = list(foldings(world))
    chosen = all_of_them if count is None else draw.sample(all_of_them, count)
    names = list(MODELS)
    first = draw.randrange(len(names))
    found = []
    for i, parallel in enumerate(chosen):
        name = names[(first + i) % len(names)]
        replicas = world // (parallel.tp * parallel.cp * parallel.pp)
        found.append((name, dressed(parallel, name, replicas, draw)))
    return found


def label(parallel: ParallelConfig) -> str:
    """What differs from the plain mapping, short."""
    plain = ParallelConfig()
    shown = {k: v for k, v in vars(parallel).items() if v != getattr(plain, k)}
    return " ".join(f"{k}={v}" for k, v in shown.items()) or "one rank"
