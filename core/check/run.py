"""Every rule over a run: the model's, the mapping's, and those of the other sections."""

from __future__ import annotations

from collections.abc import Iterator

from core.check.execution import check_execution
from core.check.limits import check_package
from core.check.mapping import check_mapping
from core.check.memory import check_memory
from core.check.model import check_model
from core.check.precision import check_precision
from core.check.words import above, at_least, nearest_multiples, positive
from core.config.architecture import MoE
from core.config.run import RunConfig
from core.errors import Fault


def check(run: RunConfig) -> tuple[Fault, ...]:
    """Every fault of `run`, in the order of its sections; empty where it can run."""
    found = [
        *check_model(run.model),
        *check_mapping(run.model, run.parallel, run.ranks),
        *check_package(run),
        *_train(run),
        *_optimizer(run),
        *_data(run),
        *check_precision(run),
        *check_execution(run),
        *check_memory(run),
        *_checkpoint(run),
    ]
    return tuple(dict.fromkeys(found))


def _train(run: RunConfig) -> Iterator[Fault]:
    train, parallel = run.train, run.parallel
    sizes = ("steps", "sequence_tokens", "global_batch", "microbatch", "eval_interval", "eval_sequences")
    faults = tuple(positive("train", train, *sizes))
    yield from faults
    if train.schedule_steps is not None:
        yield from positive("train", train, "schedule_steps")
    yield from at_least("train.seed", train.seed, 0)
    yield from at_least("train.sample_tokens", train.sample_tokens, 0)
    yield from at_least("precision.insight_interval", run.precision.insight_interval, 0)
    if train.sequence_tokens > run.model.max_tokens > 0:
        rule = f"must be at most model.max_tokens={run.model.max_tokens}"
        works = f"{run.model.max_tokens} or less"
        yield Fault(
            code="train.sequence-fits-model",
            setting="train.sequence_tokens",
            value=train.sequence_tokens,
            rule=rule,
            works=works,
        )
    if train.forced_routing is not None:
        yield from _forced(run)
    model_parallel = parallel.tp * parallel.cp * parallel.pp
    if faults or model_parallel < 1 or run.ranks < 1 or run.ranks % model_parallel:
        return
    replicas = run.ranks // model_parallel
    together = train.microbatch * replicas
    if train.global_batch % together:
        rule = f"must be a multiple of train.microbatch={train.microbatch} times {replicas} data-parallel ranks"
        works = nearest_multiples(train.global_batch, together)
        yield Fault(
            code="train.batch-divides", setting="train.global_batch", value=train.global_batch, rule=rule, works=works
        )


def _forced(run: RunConfig) -> Iterator[Fault]:
    name = run.train.forced_routing
    if not any(isinstance(layer.mlp, MoE) for layer in run.model.layers):
        rule = "needs layers with experts to force tokens to"
        yield Fault(code="train.forced-experts", setting="train.forced_routing", value=name, rule=rule, works="none")
    elif name == "hot_rank" and run.parallel.ep == 1:
        rule = "needs several ranks that share the experts, and parallel.ep=1"
        yield Fault(
            code="train.forced-ranks",
            setting="train.forced_routing",
            value=name,
            rule=rule,
            works="hot_expert, or a higher parallel.ep",
        )


def _optimizer(run: RunConfig) -> Iterator[Fault]:
    optimizer = run.optimizer
    yield from above("optimizer.learning_rate", optimizer.learning_rate, 0)
    if not 0 <= optimizer.min_learning_rate <= optimizer.learning_rate:
        rule = f"must lie between 0 and optimizer.learning_rate={optimizer.learning_rate}"
        works = f"0 to {optimizer.learning_rate}"
        yield Fault(
            code="optimizer.min-learning-rate",
            setting="optimizer.min_learning_rate",
            value=optimizer.min_learning_rate,
            rule=rule,
            works=works,
        )
    for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        if not 0 <= beta < 1:
            yield Fault(
                code="optimizer.beta",
                setting=f"optimizer.{name}",
                value=beta,
                rule="must lie in [0, 1)",
                works="0.9 or 0.95",
            )
    yield from above("optimizer.eps", optimizer.eps, 0)
    yield from at_least("optimizer.weight_decay", optimizer.weight_decay, 0)
    if optimizer.clip_norm is not None:
        yield from above("optimizer.clip_norm", optimizer.clip_norm, 0, works="1.0, or none")
    yield from at_least("optimizer.warmup_steps", optimizer.warmup_steps, 0)
    yield from at_least("optimizer.decay_steps", optimizer.decay_steps, 0)
    length = run.train.schedule_steps or run.train.steps
    decay = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    if min(optimizer.warmup_steps, decay) >= 0 and optimizer.warmup_steps + decay > length > 0:
        plus = f" plus optimizer.decay_steps={decay}" if decay else ""
        name = "train.steps" if run.train.schedule_steps is None else "train.schedule_steps"
        rule = f"{plus.lstrip() + ' ' if plus else ''}must fit into the schedule of {name}={length} steps"
        works = f"{max(length - decay, 0)} or less" if decay <= length else "a smaller optimizer.decay_steps"
        yield Fault(
            code="optimizer.warmup-fits",
            setting="optimizer.warmup_steps",
            value=optimizer.warmup_steps,
            rule=rule,
            works=works,
        )


def _data(run: RunConfig) -> Iterator[Fault]:
    fraction = run.data.validation_fraction
    if not 0 < fraction < 1:
        rule = "must lie between 0 and 1, both excluded"
        yield Fault(
            code="data.validation-fraction", setting="data.validation_fraction", value=fraction, rule=rule, works="0.05"
        )


def _checkpoint(run: RunConfig) -> Iterator[Fault]:
    yield from positive("checkpoint", run.checkpoint, "interval", "keep")
