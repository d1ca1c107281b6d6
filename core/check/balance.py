"""Which balances and selections of experts a router can have together."""

from __future__ import annotations

from collections.abc import Iterator

from core.check.words import above, at_least
from core.config.architecture import (
    AuxLoss,
    Balance,
    ExpertBias,
    ExpertChoice,
    MoE,
    QuantileBias,
    Router,
    Sinkhorn,
    TopK,
    ZLoss,
)
from core.config.router_text import balance_text, selection_text
from core.errors import Fault

KEY = "model.moe.router"


def check_balance(moe: MoE) -> Iterator[Fault]:
    """Every fault of how the experts of `moe` are balanced and chosen."""
    router = moe.router
    yield from _numbers(router)
    yield from _twice(router)
    biased = any(isinstance(part, ExpertBias) for part in router.balance)
    if biased and router.score not in ("sigmoid", "sqrt_softplus"):
        rule = "cannot carry an ExpertBias, which is added to scores that each expert has for itself"
        yield Fault(
            code="balance.bias-score",
            setting=f"{KEY}.score",
            value=router.score,
            rule=rule,
            works="sigmoid, sqrt_softplus",
        )
    if any(isinstance(part, QuantileBias) for part in router.balance):
        yield from _quantile(moe)
    if isinstance(router.selection, Sinkhorn):
        yield from above(f"{KEY}.selection.tolerance", router.selection.tolerance, 0)
        yield from at_least(f"{KEY}.selection.rounds", router.selection.rounds, 1)
    if not isinstance(router.selection, TopK):
        yield from _selection(moe)


def _numbers(router: Router) -> Iterator[Fault]:
    for part in router.balance:
        name = f"{KEY}.balance.{type(part).__name__}"
        if isinstance(part, (AuxLoss, ZLoss)):
            yield from at_least(f"{name}.coefficient", part.coefficient, 0)
        elif isinstance(part, ExpertBias):
            yield from at_least(f"{name}.rate", part.rate, 0)
        elif not 0 <= part.ema < 1:
            rule = "must be at least 0 and less than 1: it is the share of the old thresholds that is kept"
            yield Fault(code="balance.ema", setting=f"{name}.ema", value=part.ema, rule=rule, works="0, 0.9")


def _twice(router: Router) -> Iterator[Fault]:
    scopes = [part.scope for part in router.balance if isinstance(part, AuxLoss)]
    kinds = [type(part).__name__ for part in router.balance if not isinstance(part, AuxLoss)]
    for name in sorted({name for name in [*scopes, *kinds] if [*scopes, *kinds].count(name) > 1}):
        rule = "stands twice among the balances of one router"
        yield Fault(
            code="balance.twice", setting=f"{KEY}.balance", value=name, rule=rule, works="one of each kind and scope"
        )


def _quantile(moe: MoE) -> Iterator[Fault]:
    """Thresholds make every choice, so nothing else can."""
    router = moe.router
    others = _of(router, AuxLoss, ExpertBias)
    if others:
        rule = "does not go with quantile balancing, whose thresholds alone balance the experts"
        works = "quantile with at most a z loss"
        yield Fault(
            code="balance.quantile-alone", setting=f"{KEY}.balance", value=balance_text(others), rule=rule, works=works
        )
    if router.groups:
        rule = "does not go with quantile balancing, whose thresholds assume that any expert can be chosen"
        yield Fault(
            code="balance.quantile-groups",
            setting=f"{KEY}.groups",
            value=router.groups,
            rule=rule,
            works="none, or another balance",
        )
    if moe.top_k >= moe.experts > 0:
        rule = f"must be less than model.moe.experts={moe.experts} for quantile balancing, which needs an expert not chosen"
        works = f"1 to {moe.experts - 1}" if moe.experts > 2 else "1, and 2 or more experts"
        yield Fault(
            code="balance.quantile-spare-expert", setting="model.moe.top_k", value=moe.top_k, rule=rule, works=works
        )


def _selection(moe: MoE) -> Iterator[Fault]:
    """Optimal transport and expert choice balance the experts themselves."""
    router = moe.router
    key, value = f"{KEY}.selection", selection_text(router.selection)
    others = _of(router, AuxLoss, ExpertBias, QuantileBias)
    if others:
        rule = f"balances the experts itself and does not go with {KEY}.balance={balance_text(others)}"
        yield Fault(
            code="selection.alone", setting=key, value=value, rule=rule, works="at most a z loss beside it, or top_k"
        )
    if router.groups:
        rule = f"does not go with {KEY}.groups={router.groups}"
        yield Fault(code="selection.groups", setting=key, value=value, rule=rule, works=f"top_k, or {KEY}.groups=none")
    if isinstance(router.selection, ExpertChoice) and moe.capacity:
        rule = f"gives every expert equally many tokens and does not go with model.moe.capacity={moe.capacity}"
        yield Fault(
            code="selection.capacity", setting=key, value=value, rule=rule, works="top_k, or model.moe.capacity=none"
        )
    score = "sigmoid" if isinstance(router.selection, Sinkhorn) and moe.top_k == 1 else "softmax"
    if router.score != score:
        why = "" if isinstance(router.selection, ExpertChoice) else f" where model.moe.top_k={moe.top_k}"
        rule = f"must be {score} with {KEY}.selection={value}{why}"
        yield Fault(code="selection.score", setting=f"{KEY}.score", value=router.score, rule=rule, works=score)
    if router.normalise:
        rule = f"must be false with {KEY}.selection={value}, whose weights are the scores as they are"
        yield Fault(code="selection.normalise", setting=f"{KEY}.normalise", value=True, rule=rule, works="false")


def _of(router: Router, *kinds: type[Balance]) -> tuple[Balance, ...]:
    return tuple(part for part in router.balance if isinstance(part, kinds))
