"""Every rule over a mapping: what it asks of the model, of the world, and of its own settings among each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from core.check.limits import check_limits
from core.check.words import at_least, nearest, nearest_multiples, positive
from core.config.architecture import GQA, Dense, ModelConfig, MoE
from core.config.mapping import PACKAGES, ParallelConfig
from core.errors import ConfigError, Fault
from core.pipeline.layout import layout_of

DEGREES = ("tp", "cp", "pp", "ep", "etp", "vpp", "cp_alltoall", "ep_per_node", "fsdp_replicas")
# Why FSDP, which gathers and frees the parameters of one module after the other and takes gradients by hooks, refuses a schedule.
AGAINST_FSDP = {
    "zero_bubble": "puts weight gradients off, past the hooks by which parallel.sharding=fsdp takes them",
    "combined": "runs a forward beside a backward, and parallel.sharding=fsdp holds the parameters of one of them at a time",
}
FOLDING_CODES = {("tp", "cp", "pp"): "mapping.world-attention", ("etp", "ep", "pp"): "mapping.world-experts"}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one degree has to keep, in words and as a function of the degree. most: no larger degree keeps it."""

    code: str
    words: str
    holds: Callable[[int], bool]
    most: int | None = None


def check_mapping(model: ModelConfig, parallel: ParallelConfig, ranks: int) -> tuple[Fault, ...]:
    """Every fault of `parallel` for `model` in a world of `ranks`. Faults of the model alone are check_model's."""
    found = [*positive("parallel", parallel, *DEGREES), *at_least("--ranks", ranks, 1)]
    if not found:
        for degree in ("tp", "cp_alltoall", "ep", "etp"):
            found += _broken(model, parallel, degree)
        found += _folds(model, parallel, ranks)
        found += _sharding(parallel, ranks)
        found += check_limits(model, parallel)
    if min(parallel.pp, parallel.vpp) >= 1:
        found += _layout(model, parallel)
    return tuple(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------- one degree and the model


def _broken(model: ModelConfig, parallel: ParallelConfig, degree: str) -> Iterator[Fault]:
    """A fault for every rule that a degree breaks; the values that work keep all of its rules."""
    rules, value = _rules(model, parallel, degree), _degrees(parallel)[degree]
    most = min((rule.most for rule in rules if rule.most is not None), default=None)
    for rule in rules:
        if not rule.holds(value):
            works = nearest(value, lambda n: all(rule.holds(n) for rule in rules), most=most)
            yield Fault(code=rule.code, setting=f"parallel.{degree}", value=value, rule=rule.words, works=works)


def _rules(model: ModelConfig, parallel: ParallelConfig, degree: str) -> tuple[Rule, ...]:
    """What a degree has to keep whatever the world is."""
    match degree:
        case "tp":
            return (*_heads_over_tp(model), *_widths_over_tp(model))
        case "cp":
            return (_multiple_of("mapping.cp-alltoall-divides-cp", "parallel.cp_alltoall", parallel.cp_alltoall),)
        case "cp_alltoall":
            return (
                _divides("mapping.cp-alltoall-divides-cp", "parallel.cp", parallel.cp),
                *_heads_to_trade(model, parallel.tp),
            )
        case "pp":
            return (
                Rule(
                    code="layout.pp",
                    words="must share the layout",
                    holds=lambda n: not _layout(model, replace(parallel, pp=n)),
                ),
            )
        case "ep":
            experts = sorted({moe.experts for moe in _moes(model) if moe.experts > 0})
            return tuple(_divides("mapping.ep-divides-experts", "model.moe.experts", number) for number in experts) or (
                _one("mapping.ep-needs-experts", "spreads experts"),
            )
        case _:
            widths = sorted({moe.expert_ffn for moe in _moes(model) if moe.expert_ffn > 0})
            narrow = tuple(_at_most("mapping.etp-width", "model.moe.expert_ffn", width) for width in widths) or (
                _one("mapping.etp-needs-experts", "cuts experts"),
            )
            return (*narrow, *_whole_experts(parallel))


def _whole_experts(parallel: ParallelConfig) -> Iterator[Rule]:
    """Packages of kernels know no parts of an expert."""
    if parallel.dispatcher in PACKAGES:
        words = f"cuts experts, which parallel.dispatcher={parallel.dispatcher} takes whole"
        yield Rule(code="dispatcher.package-whole-experts", words=words, holds=lambda n: n == 1, most=1)


def _heads_over_tp(model: ModelConfig) -> Iterator[Rule]:
    """tp cuts between heads, and a key/value head lies on one rank or whole on each of several neighbours."""
    for heads, kv_heads in _attentions(model):
        yield _divides("mapping.tp-divides-heads", "model.attention.heads", heads)
        if kv_heads != heads:
            yield _shares("mapping.tp-kv-heads", "model.attention.kv_heads", kv_heads)


def _widths_over_tp(model: ModelConfig) -> Iterator[Rule]:
    """Pieces may be uneven, but every rank has one. What is wrong in itself is no matter of tp."""
    yield _at_most("mapping.tp-width", "model.vocab", max(model.vocab, 1))
    for mlp in dict.fromkeys(layer.mlp for _, layer in model.all_layers()):
        if isinstance(mlp, Dense):
            yield _at_most("mapping.tp-width", "model.dense.ffn", max(mlp.ffn, 1))
        elif mlp.shared:
            name = f"model.moe.shared.count={mlp.shared.count} times model.moe.expert_ffn"
            yield _at_most("mapping.tp-width", name, mlp.expert_ffn, of=max(mlp.shared.count * mlp.expert_ffn, 1))


def _heads_to_trade(model: ModelConfig, tp: int) -> Iterator[Rule]:
    """Ranks that trade heads for sequence end with equally many of the heads that their rank of tp holds."""
    held = f", of which a rank of parallel.tp={tp} holds " if tp > 1 else ""
    for heads, kv_heads in _attentions(model):
        if heads % tp or not _one_divides(tp, kv_heads):
            continue
        mine, mine_kv = heads // tp, max(1, kv_heads // tp)
        yield _divides(
            "mapping.cp-alltoall-heads", "model.attention.heads", heads, of=mine, also=held and f"{held}{mine}"
        )
        if mine_kv != mine:
            yield _shares(
                "mapping.cp-alltoall-kv-heads",
                "model.attention.kv_heads",
                kv_heads,
                of=mine_kv,
                also=held and f"{held}{mine_kv}",
            )


def _attentions(model: ModelConfig) -> list[tuple[int, int]]:
    """Query heads and key/value heads of the layers of a model, each pair once; what is wrong in itself left out."""
    found = []
    for attention in dict.fromkeys(layer.attention for _, layer in model.all_layers()):
        kv_heads = attention.kv_heads if isinstance(attention, GQA) else attention.heads
        if min(attention.heads, kv_heads) >= 1 and attention.heads % kv_heads == 0:
            found.append((attention.heads, kv_heads))
    return sorted(set(found))


def _moes(model: ModelConfig) -> list[MoE]:
    return [layer.mlp for _, layer in model.all_layers() if isinstance(layer.mlp, MoE)]


def _divides(code: str, name: str, number: int, *, of: int | None = None, also: str = "") -> Rule:
    """of, also: the number that counts, where it is not `number` itself, and why."""
    counts = number if of is None else of
    return Rule(code=code, words=f"must divide {name}={number}{also}", holds=lambda n: counts % n == 0, most=counts)


def _shares(code: str, name: str, number: int, *, of: int | None = None, also: str = "") -> Rule:
    counts = number if of is None else of
    words = f"must divide {name}={number}{also}{',' if also else ''} or be a multiple of it"
    return Rule(code=code, words=words, holds=lambda n: _one_divides(n, counts))


def _multiple_of(code: str, name: str, number: int) -> Rule:
    return Rule(code=code, words=f"must be a multiple of {name}={number}", holds=lambda n: n % number == 0)


def _at_most(code: str, name: str, number: int, *, of: int | None = None) -> Rule:
    counts = number if of is None else of
    return Rule(code=code, words=f"must be at most {name}={number}", holds=lambda n: n <= counts, most=counts)


def _one(code: str, does: str) -> Rule:
    return Rule(code=code, words=f"{does}, and this model has none", holds=lambda n: n == 1, most=1)


def _one_divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


# ------------------------------------------------------------------------------------------------------- the world


def _folds(model: ModelConfig, parallel: ParallelConfig, ranks: int) -> Iterator[Fault]:
    """Both foldings must divide the world."""
    both = _both_foldings(parallel)
    for (axes, code), size in zip(FOLDING_CODES.items(), (_dense(parallel), _expert(parallel)), strict=True):
        if ranks % size:
            works = ", or ".join([nearest_multiples(ranks, both), *_degrees_that_fit(model, parallel, ranks, axes)])
            rule = f"must be a multiple of parallel.{'*'.join(axes)}={size}"
            yield Fault(code=code, setting="--ranks", value=ranks, rule=rule, works=works)


def _degrees_that_fit(model: ModelConfig, parallel: ParallelConfig, ranks: int, axes: Sequence[str]) -> Iterator[str]:
    """For each degree that could be blamed, the nearest ones with which both foldings divide this world."""
    for axis in axes:
        value, rules = _degrees(parallel)[axis], _rules(model, parallel, axis)

        def fits(n: int, axis: str = axis, rules: tuple[Rule, ...] = rules) -> bool:
            folds = ranks % n == 0 and ranks % _both_foldings(replace(parallel, **{axis: n})) == 0  # type: ignore[arg-type]
            return folds and all(rule.holds(n) for rule in rules)

        works = nearest(value, fits, most=ranks) if value > 1 else ""
        if works:
            yield f"parallel.{axis}={works}"


def _sharding(parallel: ParallelConfig, ranks: int) -> Iterator[Fault]:
    """FSDP stands in the way of some schedules, and only its shards can have copies, which split dp."""
    schedule, replicas, fsdp = parallel.schedule, parallel.fsdp_replicas, parallel.sharding == "fsdp"
    if fsdp and schedule in AGAINST_FSDP:
        works = "1f1b or gpipe, or parallel.sharding=zero1"
        yield Fault(
            code="mapping.fsdp-schedule",
            setting="parallel.schedule",
            value=schedule,
            rule=AGAINST_FSDP[schedule],
            works=works,
        )
    dp, left_over = divmod(ranks, _dense(parallel))
    divides = not left_over and dp % replicas == 0
    if fsdp and not left_over and not divides:
        works = nearest(replicas, lambda n: dp % n == 0, most=dp)
        rule = f"must divide the {dp} data-parallel ranks"
        yield Fault(
            code="mapping.fsdp-replicas-divide-dp",
            setting="parallel.fsdp_replicas",
            value=replicas,
            rule=rule,
            works=works,
        )
    if not fsdp and replicas > 1:
        rule = f"copies what parallel.sharding=fsdp shards, and here parallel.sharding={parallel.sharding}"
        works = "1, or parallel.sharding=fsdp" if divides else "1"
        yield Fault(
            code="mapping.fsdp-replicas-need-fsdp",
            setting="parallel.fsdp_replicas",
            value=replicas,
            rule=rule,
            works=works,
        )


def _layout(model: ModelConfig, parallel: ParallelConfig) -> tuple[Fault, ...]:
    try:
        layout_of(model, parallel)
    except ConfigError as error:
        return error.faults
    return ()


def _both_foldings(parallel: ParallelConfig) -> int:
    """The smallest world that both foldings divide."""
    return math.lcm(_dense(parallel), _expert(parallel))


def _dense(parallel: ParallelConfig) -> int:
    return parallel.tp * parallel.cp * parallel.pp


def _expert(parallel: ParallelConfig) -> int:
    return parallel.etp * parallel.ep * parallel.pp


def _degrees(parallel: ParallelConfig) -> dict[str, int]:
    """The degrees that have rules of their own, by name."""
    return {
        "tp": parallel.tp,
        "cp": parallel.cp,
        "cp_alltoall": parallel.cp_alltoall,
        "pp": parallel.pp,
        "ep": parallel.ep,
        "etp": parallel.etp,
    }
