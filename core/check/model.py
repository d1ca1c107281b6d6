"""Every rule over a model alone, whatever it runs on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from core.check.balance import check_balance
from core.check.limits import check_capacity
from core.check.words import above, at_least, even, nearest, positive
from core.config.architecture import GQA, Activation, ClampedSwiGLU, Dense, ModelConfig, MoE, Router, Yarn
from core.errors import Fault

# A byte-level vocabulary holds every byte and one mark between documents.
SMALLEST_VOCAB = 257


def check_model(model: ModelConfig) -> tuple[Fault, ...]:
    """Every fault of a model alone, whatever it runs on."""
    found = [*_sizes(model)]
    # Equal layers have equal faults, and a search checks thousands of runs of one model.
    for layer in dict.fromkeys(layer for _, layer in model.all_layers()):
        found += _gqa(layer.attention) if isinstance(layer.attention, GQA) else _mla(layer.attention)
        found += _dense(layer.mlp) if isinstance(layer.mlp, Dense) else _moe(layer.mlp)
    return tuple(dict.fromkeys(found))


def _sizes(model: ModelConfig) -> Iterator[Fault]:
    yield from positive("model", model, "hidden", "max_tokens")
    if model.vocab < SMALLEST_VOCAB:
        rule = "must hold the 256 bytes and the mark between documents"
        yield Fault(
            code="model.vocab-of-bytes",
            setting="model.vocab",
            value=model.vocab,
            rule=rule,
            works=f"{SMALLEST_VOCAB} or more",
        )
    if not model.layers:
        yield Fault(
            code="model.some-layers", setting="model.num_layers", value=0, rule="must be positive", works="1 or more"
        )
    yield from above("model.norm.eps", model.norm.eps, 0)
    yield from above("model.rope.theta", model.rope.theta, 1)
    yield from above("model.init_std", model.init_std, 0)
    if isinstance(model.rope, Yarn):
        yield from at_least("model.rope.factor", model.rope.factor, 1)
        yield from positive("model.rope", model.rope, "trained_tokens")
    if model.predict_ahead:
        yield from positive("model.predict_ahead", model.predict_ahead, "depth")
        yield from at_least("model.predict_ahead.loss_weight", model.predict_ahead.loss_weight, 0)


def _gqa(attention: GQA) -> Iterator[Fault]:
    faults = tuple(positive("model.attention", attention, "heads", "kv_heads", "head_dim"))
    yield from faults
    if faults:
        return
    if attention.heads % attention.kv_heads:
        works = nearest(attention.kv_heads, lambda n: attention.heads % n == 0)
        rule = f"must divide model.attention.heads={attention.heads}"
        yield Fault(
            code="model.kv-heads-divide-heads",
            setting="model.attention.kv_heads",
            value=attention.kv_heads,
            rule=rule,
            works=works,
        )
    yield from even("model.attention.head_dim", attention.head_dim)


def _mla(attention: Any) -> Iterator[Fault]:
    yield from positive("model.attention", attention, "heads", "latent_rank", "nope_dim", "rope_dim", "value_dim")
    if attention.query_rank is not None:
        yield from positive("model.attention", attention, "query_rank")
    yield from even("model.attention.rope_dim", attention.rope_dim)


def _dense(dense: Dense) -> Iterator[Fault]:
    yield from positive("model.dense", dense, "ffn")
    yield from _activation("model.dense.activation", dense.activation)


def _activation(key: str, activation: Activation) -> Iterator[Fault]:
    if not isinstance(activation, ClampedSwiGLU):
        return
    numbers = {"limit": activation.limit, "alpha": activation.alpha, "shift": activation.shift}
    for name, value in numbers.items():
        if not math.isfinite(value):
            yield Fault(
                code="model.activation-finite",
                setting=f"{key}.{name}",
                value=value,
                rule="must be finite",
                works="7, 1.702 and 1 in gpt-oss",
            )
        elif name != "shift":
            yield from above(f"{key}.{name}", value, 0)


def _moe(moe: MoE) -> Iterator[Fault]:
    yield from _activation("model.moe.activation", moe.activation)
    yield from positive("model.moe", moe, "experts", "top_k", "expert_ffn")
    if moe.top_k > moe.experts > 0:
        rule = f"must be at most model.moe.experts={moe.experts}"
        yield Fault(
            code="model.top-k-experts",
            setting="model.moe.top_k",
            value=moe.top_k,
            rule=rule,
            works=f"1 to {moe.experts}",
        )
    if moe.shared:
        yield from positive("model.moe.shared", moe.shared, "count")
    yield from check_capacity(moe.capacity)
    if moe.latent is not None:
        yield from positive("model.moe", moe, "latent")
    yield from _router(moe.router)
    yield from check_balance(moe)
    if moe.router.groups and moe.experts > 0 and moe.top_k > 0:
        yield from _groups(moe)


def _router(router: Router) -> Iterator[Fault]:
    yield from above("model.moe.router.scale", router.scale, 0)
    if router.jitter is not None and not 0 < router.jitter < 1:
        rule = "must lie between 0 and 1, both excluded"
        yield Fault(
            code="model.jitter-range",
            setting="model.moe.router.jitter",
            value=router.jitter,
            rule=rule,
            works="0.01, or none",
        )
    if router.score == "softmax_after_top_k" and router.normalise:
        rule = "has no meaning with model.moe.router.score=softmax_after_top_k, whose weights sum to one already"
        yield Fault(
            code="model.normalise-after-top-k",
            setting="model.moe.router.normalise",
            value=True,
            rule=rule,
            works="false, or score=softmax",
        )


def _groups(moe: MoE) -> Iterator[Fault]:
    groups = moe.router.groups
    assert groups is not None, "asked about the groups of a router without any"
    faults = tuple(positive("model.moe.router.groups", groups, "total", "kept", "best"))
    yield from faults
    if faults:
        return
    key = "model.moe.router.groups"
    if moe.experts % groups.total:
        works = nearest(groups.total, lambda n: moe.experts % n == 0)
        rule = f"must divide model.moe.experts={moe.experts}"
        yield Fault(
            code="model.groups-divide-experts", setting=f"{key}.total", value=groups.total, rule=rule, works=works
        )
        return
    per_group = moe.experts // groups.total
    least, most = math.ceil(moe.top_k / per_group), groups.total
    if not least <= groups.kept <= most:
        rule = (
            f"must be at most {key}.total={groups.total}, and hold the model.moe.top_k={moe.top_k} experts of a token "
            f"in groups of {per_group}"
        )
        works = f"{least} to {most}" if least < most else f"{least}" if least == most else "a smaller model.moe.top_k"
        yield Fault(code="model.groups-hold-top-k", setting=f"{key}.kept", value=groups.kept, rule=rule, works=works)
