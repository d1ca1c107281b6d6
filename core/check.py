"""Every rule over a run, before any process starts (contract 9): all faults at once, each with the nearest values that work.

Settings are named as `--set` takes them; a part that many layers share is reported once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from core.config.architecture import GQA, AuxLoss, Dense, ExpertBias, ModelConfig, MoE, Router, Yarn, ZLoss
from core.config.mapping import ParallelConfig
from core.config.run import RunConfig
from core.errors import Fault

# A byte-level vocabulary holds every byte and one mark between documents.
SMALLEST_VOCAB = 257
# Axes whose arithmetic is there and whose layers are not yet.
UNBUILT_AXES = ("tp", "cp", "pp", "etp")


def check(run: RunConfig) -> tuple[Fault, ...]:
    """Every fault of `run`, in the order of its sections; empty where it can run."""
    found = [*check_model(run.model), *_mapping(run), *_train(run), *_optimizer(run), *_data(run), *_checkpoint(run)]
    return tuple(dict.fromkeys(found))


def check_model(model: ModelConfig) -> tuple[Fault, ...]:
    """Every fault of a model alone, whatever it runs on."""
    found = [*_sizes(model)]
    for _, layer in model.all_layers():
        found += _gqa(layer.attention) if isinstance(layer.attention, GQA) else _mla(layer.attention)
        found += _positive("model.dense", layer.mlp, "ffn") if isinstance(layer.mlp, Dense) else _moe(layer.mlp)
    return tuple(dict.fromkeys(found))


def _sizes(model: ModelConfig) -> Iterator[Fault]:
    yield from _positive("model", model, "hidden", "max_tokens")
    if model.vocab < SMALLEST_VOCAB:
        rule = "must hold the 256 bytes and the mark between documents"
        yield Fault(setting="model.vocab", value=model.vocab, rule=rule, works=f"{SMALLEST_VOCAB} or more")
    if not model.layers:
        yield Fault(setting="model.num_layers", value=0, rule="must be positive", works="1 or more")
    yield from _above("model.norm.eps", model.norm.eps, 0)
    yield from _above("model.rope.theta", model.rope.theta, 1)
    yield from _above("model.init_std", model.init_std, 0)
    if isinstance(model.rope, Yarn):
        yield from _at_least("model.rope.factor", model.rope.factor, 1)
        yield from _positive("model.rope", model.rope, "trained_tokens")
    if model.predict_ahead:
        yield from _positive("model.predict_ahead", model.predict_ahead, "depth")
        yield from _at_least("model.predict_ahead.loss_weight", model.predict_ahead.loss_weight, 0)


def _gqa(attention: GQA) -> Iterator[Fault]:
    faults = tuple(_positive("model.attention", attention, "heads", "kv_heads", "head_dim"))
    yield from faults
    if faults:
        return
    if attention.heads % attention.kv_heads:
        works = _nearest(attention.kv_heads, lambda n: attention.heads % n == 0)
        rule = f"must divide model.attention.heads={attention.heads}"
        yield Fault(setting="model.attention.kv_heads", value=attention.kv_heads, rule=rule, works=works)
    yield from _even("model.attention.head_dim", attention.head_dim)


def _mla(attention: Any) -> Iterator[Fault]:
    yield from _positive("model.attention", attention, "heads", "latent_rank", "nope_dim", "rope_dim", "value_dim")
    if attention.query_rank is not None:
        yield from _positive("model.attention", attention, "query_rank")
    yield from _even("model.attention.rope_dim", attention.rope_dim)


def _moe(moe: MoE) -> Iterator[Fault]:
    yield from _positive("model.moe", moe, "experts", "top_k", "expert_ffn")
    if moe.top_k > moe.experts > 0:
        rule = f"must be at most model.moe.experts={moe.experts}"
        yield Fault(setting="model.moe.top_k", value=moe.top_k, rule=rule, works=f"1 to {moe.experts}")
    if moe.shared:
        yield from _positive("model.moe.shared", moe.shared, "count")
    yield from _router(moe.router)
    if moe.router.groups and moe.experts > 0 and moe.top_k > 0:
        yield from _groups(moe)


def _router(router: Router) -> Iterator[Fault]:
    yield from _above("model.moe.router.scale", router.scale, 0)
    if router.score == "softmax_after_top_k" and router.normalise:
        rule = "has no meaning with model.moe.router.score=softmax_after_top_k, whose weights sum to one already"
        yield Fault(setting="model.moe.router.normalise", value=True, rule=rule, works="false, or score=softmax")
    scopes = [part.scope for part in router.balance if isinstance(part, AuxLoss)]
    kinds = [type(part).__name__ for part in router.balance if not isinstance(part, AuxLoss)]
    for name in sorted({name for name in [*scopes, *kinds] if [*scopes, *kinds].count(name) > 1}):
        rule = "stands twice among the balances of one router"
        yield Fault(setting="model.moe.router.balance", value=name, rule=rule, works="one of each kind and scope")
    for part in router.balance:
        if isinstance(part, (AuxLoss, ZLoss)):
            yield from _at_least(f"model.moe.router.balance.{type(part).__name__}.coefficient", part.coefficient, 0)
        else:
            yield from _at_least("model.moe.router.balance.ExpertBias.rate", part.rate, 0)
    if router.score != "sigmoid" and any(isinstance(part, ExpertBias) for part in router.balance):
        rule = "cannot carry an ExpertBias, which is added to sigmoid scores"
        yield Fault(setting="model.moe.router.score", value=router.score, rule=rule, works="sigmoid")


def _groups(moe: MoE) -> Iterator[Fault]:
    groups = moe.router.groups
    assert groups is not None, "asked about the groups of a router without any"
    faults = tuple(_positive("model.moe.router.groups", groups, "total", "kept", "best"))
    yield from faults
    if faults:
        return
    key = "model.moe.router.groups"
    if moe.experts % groups.total:
        works = _nearest(groups.total, lambda n: moe.experts % n == 0)
        rule = f"must divide model.moe.experts={moe.experts}"
        yield Fault(setting=f"{key}.total", value=groups.total, rule=rule, works=works)
        return
    per_group = moe.experts // groups.total
    least, most = math.ceil(moe.top_k / per_group), groups.total
    if not least <= groups.kept <= most:
        rule = (
            f"must be at most {key}.total={groups.total}, and hold the model.moe.top_k={moe.top_k} experts of a token "
            f"in groups of {per_group}"
        )
        works = f"{least} to {most}" if least < most else f"{least}" if least == most else "a smaller model.moe.top_k"
        yield Fault(setting=f"{key}.kept", value=groups.kept, rule=rule, works=works)


def _mapping(run: RunConfig) -> Iterator[Fault]:
    parallel = run.parallel
    faults = [*_positive("parallel", parallel, "tp", "cp", "pp", "ep", "etp")]
    faults += _at_least("--ranks", run.ranks, 1)
    for axis in UNBUILT_AXES:
        degree = _degrees(parallel)[axis]
        if degree > 1:
            rule = "is built in a later version"
            faults.append(Fault(setting=f"parallel.{axis}", value=degree, rule=rule, works="1"))
    yield from faults
    if faults:
        return
    experts = _experts(run)
    if not experts and parallel.ep > 1:
        rule = "spreads experts, and this model has none"
        yield Fault(setting="parallel.ep", value=parallel.ep, rule=rule, works="1")
    for number in experts:
        if number % parallel.ep:
            works = _nearest(parallel.ep, lambda n, number=number: number % n == 0)  # type: ignore[misc]
            rule = f"must divide model.moe.experts={number}"
            yield Fault(setting="parallel.ep", value=parallel.ep, rule=rule, works=works)
    yield from _folds(run)


def _folds(run: RunConfig) -> Iterator[Fault]:
    """Both foldings must divide the world."""
    parallel = run.parallel
    dense, expert = parallel.tp * parallel.cp * parallel.pp, parallel.etp * parallel.ep * parallel.pp
    both = math.lcm(dense, expert)
    if run.ranks % both:
        names = "parallel.tp*cp*pp" if run.ranks % dense else "parallel.etp*ep*pp"
        size = dense if run.ranks % dense else expert
        works = _nearest(run.ranks, lambda n: n % both == 0)
        other = _nearest(parallel.ep, lambda n: run.ranks % n == 0 and all(number % n == 0 for number in _experts(run)))
        hint = f", or parallel.ep={other}" if not run.ranks % dense else ""
        yield Fault(
            setting="--ranks", value=run.ranks, rule=f"must be a multiple of {names}={size}", works=works + hint
        )


def _experts(run: RunConfig) -> list[int]:
    """The numbers of experts that layers of the model have."""
    return sorted({layer.mlp.experts for _, layer in run.model.all_layers() if isinstance(layer.mlp, MoE)})


def _degrees(parallel: ParallelConfig) -> dict[str, int]:
    """The degree of every axis by name."""
    return {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "ep": parallel.ep, "etp": parallel.etp}


def _train(run: RunConfig) -> Iterator[Fault]:
    train, parallel = run.train, run.parallel
    sizes = ("steps", "sequence_tokens", "global_batch", "microbatch", "eval_interval", "eval_sequences")
    faults = tuple(_positive("train", train, *sizes))
    yield from faults
    if train.schedule_steps is not None:
        yield from _positive("train", train, "schedule_steps")
    yield from _at_least("train.seed", train.seed, 0)
    yield from _at_least("train.sample_tokens", train.sample_tokens, 0)
    if train.sequence_tokens > run.model.max_tokens > 0:
        rule = f"must be at most model.max_tokens={run.model.max_tokens}"
        works = f"{run.model.max_tokens} or less"
        yield Fault(setting="train.sequence_tokens", value=train.sequence_tokens, rule=rule, works=works)
    model_parallel = parallel.tp * parallel.cp * parallel.pp
    if faults or model_parallel < 1 or run.ranks < 1 or run.ranks % model_parallel:
        return
    replicas = run.ranks // model_parallel
    together = train.microbatch * replicas
    if train.global_batch % together:
        rule = f"must be a multiple of train.microbatch={train.microbatch} times {replicas} data-parallel ranks"
        works = _nearest(train.global_batch, lambda n: n % together == 0)
        yield Fault(setting="train.global_batch", value=train.global_batch, rule=rule, works=works)


def _optimizer(run: RunConfig) -> Iterator[Fault]:
    optimizer = run.optimizer
    yield from _above("optimizer.learning_rate", optimizer.learning_rate, 0)
    if not 0 <= optimizer.min_learning_rate <= optimizer.learning_rate:
        rule = f"must lie between 0 and optimizer.learning_rate={optimizer.learning_rate}"
        works = f"0 to {optimizer.learning_rate}"
        yield Fault(setting="optimizer.min_learning_rate", value=optimizer.min_learning_rate, rule=rule, works=works)
    for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        if not 0 <= beta < 1:
            yield Fault(setting=f"optimizer.{name}", value=beta, rule="must lie in [0, 1)", works="0.9 or 0.95")
    yield from _above("optimizer.eps", optimizer.eps, 0)
    yield from _at_least("optimizer.weight_decay", optimizer.weight_decay, 0)
    if optimizer.clip_norm is not None:
        yield from _above("optimizer.clip_norm", optimizer.clip_norm, 0, works="1.0, or none")
    yield from _at_least("optimizer.warmup_steps", optimizer.warmup_steps, 0)
    yield from _at_least("optimizer.decay_steps", optimizer.decay_steps, 0)
    length = run.train.schedule_steps or run.train.steps
    decay = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    if min(optimizer.warmup_steps, decay) >= 0 and optimizer.warmup_steps + decay > length > 0:
        plus = f" plus optimizer.decay_steps={decay}" if decay else ""
        name = "train.steps" if run.train.schedule_steps is None else "train.schedule_steps"
        rule = f"{plus.lstrip() + ' ' if plus else ''}must fit into the schedule of {name}={length} steps"
        works = f"{max(length - decay, 0)} or less" if decay <= length else "a smaller optimizer.decay_steps"
        yield Fault(setting="optimizer.warmup_steps", value=optimizer.warmup_steps, rule=rule, works=works)


def _data(run: RunConfig) -> Iterator[Fault]:
    fraction = run.data.validation_fraction
    if not 0 < fraction < 1:
        rule = "must lie between 0 and 1, both excluded"
        yield Fault(setting="data.validation_fraction", value=fraction, rule=rule, works="0.05")


def _checkpoint(run: RunConfig) -> Iterator[Fault]:
    yield from _positive("checkpoint", run.checkpoint, "interval", "keep")


def _positive(prefix: str, value: Any, *names: str) -> Iterator[Fault]:
    """A fault for each named field of a declaration that is below one."""
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    for name in names:
        yield from _at_least(f"{prefix}.{name}", held[name], 1)


def _at_least(setting: str, value: float, least: float) -> Iterator[Fault]:
    # written so that a NaN is a fault too
    if not value >= least:
        rule = "must be positive" if least == 1 else f"must be at least {least}"
        yield Fault(setting=setting, value=value, rule=rule, works=f"{least} or more")


def _above(setting: str, value: float, floor: float, works: str = "") -> Iterator[Fault]:
    if not value > floor:
        rule = "must be positive" if floor == 0 else f"must be greater than {floor}"
        yield Fault(setting=setting, value=value, rule=rule, works=works or f"any number greater than {floor}")


def _even(setting: str, value: int) -> Iterator[Fault]:
    if value > 0 and value % 2:
        rule = "must be even, because the rotation turns pairs"
        yield Fault(setting=setting, value=value, rule=rule, works=_nearest(value, lambda n: n % 2 == 0))


def _nearest(value: int, works: Callable[[int], bool]) -> str:
    """The nearest positive values that work, below and above: `32 or 64`; whatever exists within a hundredfold."""
    below = next((n for n in range(value - 1, 0, -1) if works(n)), None)
    above = next((n for n in range(value + 1, max(value, 1) * 100 + 1) if works(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)
