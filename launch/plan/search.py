"""The best set-ups of a model on so many GPUs, in the three phases of the report's section 9.1, and why all others lost.

First the mappings that fit in memory by a bound that no option goes below. Then those whose step is shortest by closed forms, where
communication that leaves its NVLink domain, bubbles and small batches show. Then, mapping by mapping, the options that attack its
largest wall: what shortens the step as long as something does, and what leaves memory free until it fits. A mapping whose step is
longer than a found one's even with memory for nothing is not followed further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from core.check import check
from core.check.built import not_built, startable
from core.config.override import settings
from core.config.run import RunConfig
from core.errors import RequestError
from launch.plan.bounds import AGAIN, Bound, Bounds
from launch.plan.candidates import Setup, mappings, setup_of
from launch.plan.found import Found, Loser, SearchResult, gib
from launch.plan.options import Move, memory_moves, time_moves, undo_moves
from launch.plan.result import AxisTraffic, RankMemory, StepTime
from launch.profiles import Profile, find_profile

PRICED = 40
IMPROVED = 12
# Ways to spread the layers of one mapping that are followed.
LAYOUTS = 3
SHOWN = 6
# Set-ups whose layers are traced as they are; that is most of a search's time.
MOST_PROVEN = 8
# An option has to save so much of a step to be worth naming.
WORTH = 1e-3


class PriceMemory(Protocol):
    """What prices memory: launch/plan/memory.py's MemoryPlanner."""

    def of(self, run: RunConfig) -> tuple[RankMemory, ...]:
        """The fullest rank at each place of the pipeline."""
        ...


class Priced(Protocol):
    """What a search reads of a TimePlan."""

    @property
    def step(self) -> StepTime:
        """A step of the whole job."""
        ...

    @property
    def communication(self) -> tuple[AxisTraffic, ...]:
        """By axis."""
        ...


PriceTime = Callable[[RunConfig, Profile], Priced]


def search(
    run: RunConfig,
    gpus: int,
    *,
    planner: PriceMemory | None = None,
    price_time: PriceTime | None = None,
    fixed: frozenset[str] = frozenset(),
    buildable_only: bool = False,
) -> SearchResult:
    """The best set-ups of `run` on `gpus` GPUs of its hardware; global batch and sequence length stay as they are.

    planner, price_time: what says bytes and seconds; the plan's own without. fixed: keys of --set that keep the run's values.
    buildable_only: nothing that cannot be started yet. Raises RequestError for hardware of which nothing is known beforehand.
    """
    profile = find_profile(run.hardware)
    if profile.chip is None or profile.fabric is None or profile.speeds is None:
        raise RequestError(
            f"--hw {run.hardware}: nothing is known of it beforehand, so set-ups cannot be compared. "
            "Works: a kind of hardware with a profile, as gb200 or h100."
        )
    asked, run = run, startable(run, fixed) if buildable_only else run
    quick, exact = _planners(run, planner)
    prices = Prices(run, gpus, profile, quick, price_time or _price_time())
    return _Search(asked, prices, exact, fixed, buildable_only).result()


class Prices:
    """Bytes and seconds of set-ups, each asked for once: what the search goes by."""

    def __init__(self, run: RunConfig, gpus: int, profile: Profile, memory: PriceMemory, time: PriceTime) -> None:
        assert profile.chip is not None, "capacity is known of hardware with a profile"
        self.run, self.gpus, self.profile = run, gpus, profile
        self.capacity = int(profile.chip.memory)
        self._memory, self._time = memory, time
        self._bytes: dict[Setup, int] = {}
        self._priced: dict[Setup, Priced] = {}

    def bytes(self, setup: Setup) -> int:
        """Of the fullest rank, by balanced routing."""
        if setup not in self._bytes:
            ranks = self._memory.of(setup.on(self.run, self.gpus))
            self._bytes[setup] = max(rank.balanced.total for rank in ranks)
        return self._bytes[setup]

    def priced(self, setup: Setup) -> Priced:
        """Its step."""
        if setup not in self._priced:
            self._priced[setup] = self._time(setup.on(self.run, self.gpus), self.profile)
        return self._priced[setup]

    def seconds(self, setup: Setup) -> float:
        """Of a step."""
        return self.priced(setup).step.seconds

    def fits(self, setup: Setup) -> bool:
        """Whether the fullest rank has room."""
        return self.bytes(setup) <= self.capacity


@dataclass(frozen=True, kw_only=True)
class _Lead:
    """A mapping in the third phase: where its options have led, and what was done on the way."""

    begun: Setup
    setup: Setup
    steps: tuple[str, ...]


class _Search:
    """One search: what it may vary, what it knows, and what it has ruled out."""

    def __init__(
        self, asked: RunConfig, prices: Prices, exact: PriceMemory, fixed: frozenset[str], buildable_only: bool
    ) -> None:
        self._asked = asked
        self._prices, self._exact, self._fixed, self._buildable_only = prices, exact, fixed, buildable_only
        self._run, self._gpus, self._profile = prices.run, prices.gpus, prices.profile
        self._legal: dict[Setup, bool] = {}
        self._losers: list[Loser] = []

    def result(self) -> SearchResult:
        """All three phases."""
        own = setup_of(self._run)
        ranked = self._shortest(self._that_fit())
        leads = [_Lead(begun=each, setup=each, steps=()) for each in ranked]
        if self._allowed(own):
            leads.insert(0, _Lead(begun=own, setup=own, steps=()))
        fitted = self._fitted(leads)
        begun = self._found(_Lead(begun=own, setup=own, steps=())) if self._allowed(own) else None
        if begun is not None and begun.headroom >= 0 and all(each.setup != own for each in fitted):
            fitted.append(_Lead(begun=own, setup=own, steps=()))
        return SearchResult(
            gpus=self._gpus,
            hardware=self._profile.name,
            capacity=self._prices.capacity,
            begun=begun,
            found=self._proven(fitted),
            losers=tuple(self._losers),
        )

    def _proven(self, fitted: list[_Lead]) -> tuple[Found, ...]:
        """The fastest that differ in more than vpp and layout, each held against what the plan itself says of its memory."""
        leads = {lead.setup: lead for lead in sorted(fitted, key=self._order)}
        found: list[Found] = []
        asked = 0
        for setup, lead in leads.items():
            like = next((each for each in found if _alike(each.setup) == _alike(setup)), None)
            if found and (like is not None or len(found) == SHOWN or asked == MOST_PROVEN):
                self._losers.append(self._slower(setup, (like or found[0]).setup))
                continue
            proven, asked = self._found(lead), asked + 1
            if proven.headroom >= 0:
                found.append(proven)
            else:
                reason = f"does not fit: {gib(proven.memory)} of {gib(self._prices.capacity)} when traced itself"
                self._lose(setup, 3, reason)
        return tuple(found)

    # ------------------------------------------------------------------------------------------ phases one and two

    def _that_fit(self) -> list[tuple[Bound, Setup]]:
        """Phase one: the mappings whose weights, states and layer inputs leave room, by a bound that no option goes below."""
        bounds = Bounds(self._run, self._gpus, self._profile, self._fixed)
        kept = []
        for setup in mappings(self._plain(), self._gpus, self._profile, self._fixed):
            bound = bounds.of(setup)
            if bound.bytes <= self._prices.capacity:
                kept.append((bound, setup))
            else:
                reason = f"does not fit: at least {gib(bound.bytes)} of {gib(self._prices.capacity)} with every option"
                self._lose(setup, 1, reason)
        return sorted(kept, key=lambda each: (each[0].seconds, each[1].mapping, each[1].parallel.layout or ""))

    def _shortest(self, kept: list[tuple[Bound, Setup]]) -> list[Setup]:
        """Phase two: those whose step is shortest, by closed forms first and by the plan's own model then, with what they have to
        compute again to fit."""
        longer: dict[Setup, float] = {}
        asked = list(kept)
        while asked and len(longer) < PRICED:
            bound, setup = asked.pop(0)
            if not self._allowed(setup):
                self._lose(setup, 2, self._illegal(setup))
                continue
            again = self._again(setup)
            if again > 1:
                reason = f"does not fit: {gib(self._prices.bytes(self._leanest(setup)))} of {gib(self._prices.capacity)} with every option"
                self._lose(setup, 1, reason)
            else:
                longer[setup] = self._prices.seconds(setup) + AGAIN * again * bound.walls["products"]
        for bound, setup in asked:
            self._lose(setup, 2, self._bound_reason(setup, bound, kept[0][0]))
        chosen = sorted(longer, key=lambda each: (longer[each], each.mapping))
        shortest, others = _diverse(chosen, LAYOUTS)
        self._losers += [self._slower(setup, chosen[0], phase=2) for setup in others]
        return shortest

    def _again(self, setup: Setup) -> float:
        """Which share of the activations has to be computed again to fit with the smallest states; above 1 where nothing helps."""
        prices, lean = self._prices, self._leanest(setup)
        usual = replace(lean, memory=replace(lean.memory, recompute=setup.memory.recompute))
        over, freed = prices.bytes(usual) - prices.capacity, prices.bytes(usual) - prices.bytes(lean)
        return 0.0 if over <= 0 else over / freed if freed > 0 else inf

    def _leanest(self, setup: Setup) -> Setup:
        """The set-up with every option that leaves memory free for little, and all layers computed again."""
        fixed = self._fixed
        for move in memory_moves(setup, self._run):
            last = move.key in ("memory.recompute", "memory.offload") or (
                self._buildable_only and move.key != "memory.recompute"
            )
            if move.key not in fixed and not last:
                setup = move.apply(setup)
        if "memory.recompute" in fixed:
            return setup
        return replace(setup, memory=replace(setup.memory, recompute=("full",), offload=()))

    def _plain(self) -> RunConfig:
        """The run without the options that cost time or were chosen for its own mapping, save those that are fixed."""
        run, fixed = self._run, self._fixed
        memory, execution, parallel = run.memory, run.execution, run.parallel
        if "memory.recompute" not in fixed:
            memory = replace(memory, recompute=())
        if "memory.offload" not in fixed:
            memory = replace(memory, offload=())
        if "memory.optimizer_offload" not in fixed:
            memory = replace(memory, optimizer_offload=0.0)
        if "parallel.schedule" not in fixed:
            parallel = replace(parallel, schedule="1f1b")
        if "execution.graphs" not in fixed and self._buildable_only:
            execution = replace(execution, graphs=())
        return replace(run, memory=memory, execution=execution, parallel=parallel)

    # ------------------------------------------------------------------------------------------------- phase three

    def _faster(self, lead: _Lead) -> _Lead:
        """The mapping with every option that shortens its step, the one that saves most first: as if memory were for nothing."""
        while True:
            best, now = None, self._prices.seconds(lead.setup)
            for move in time_moves(lead.setup, self._run, self._profile):
                moved = self._moved(lead.setup, move)
                if moved is not None and self._prices.seconds(moved) < now * (1 - WORTH):
                    best, now = (move, moved), self._prices.seconds(moved)
            if best is None:
                return lead
            lead = self._stepped(lead, *best)

    def _fitted(self, leads: Iterable[_Lead]) -> list[_Lead]:
        """Those that fit with what leaves memory free, the most promising first, until none can be better than what is found."""
        found: list[_Lead] = []
        for plain in leads:
            if len(found) >= IMPROVED:
                self._losers.append(self._slower(plain.setup, min(found, key=self._order).setup, phase=2))
                continue
            lead = self._faster(plain)
            if self._prices.seconds(lead.setup) >= self._limit(found):
                best = min(found, key=self._order)
                self._losers.append(self._slower(lead.setup, best.setup, even=True))
                continue
            # What hides exchanges wants memory and most of each layer kept: it may be what is in the way.
            fitted = self._smaller(lead, last=lead.setup == plain.setup)
            if fitted is None and lead.setup != plain.setup:
                fitted = self._smaller(plain, last=True)
            if fitted is not None and all(each.setup != fitted.setup for each in found):
                found.append(fitted)
        return found

    def _limit(self, found: Iterable[_Lead]) -> float:
        """Seconds of the last of those that would be shown: what takes as long is not followed."""
        best: dict[tuple[int, ...], float] = {}
        for each in found:
            seconds, kind = self._prices.seconds(each.setup), _alike(each.setup)
            best[kind] = min(seconds, best.get(kind, seconds))
        return sorted(best.values())[SHOWN - 1] if len(best) >= SHOWN else float("inf")

    def _smaller(self, lead: _Lead, *, last: bool) -> _Lead | None:
        """The mapping with as many options as make it fit, those that free most for their time first; None where none does.

        last: whether it has then lost.
        """
        prices = self._prices
        if not prices.fits(lead.setup):
            for move in self._by_worth(lead.setup):
                moved = self._moved(lead.setup, move)
                if moved is None or prices.bytes(moved) >= prices.bytes(lead.setup):
                    continue
                lead = self._stepped(lead, move, moved)
                if prices.fits(lead.setup):
                    break
        if not prices.fits(lead.setup) and not last:
            return None
        if not prices.fits(lead.setup):
            tried = ", ".join(_options(lead.setup)) or "no option"
            reason = f"does not fit: {gib(prices.bytes(lead.setup))} of {gib(prices.capacity)}, with {tried}"
            self._lose(lead.begun, 3, reason)
            return None
        return self._without_needless(lead)

    def _by_worth(self, setup: Setup) -> list[Move]:
        """What leaves memory free, the most bytes for a second of the step first, measured one by one on the mapping."""
        prices, worth = self._prices, []
        for place, move in enumerate(memory_moves(setup, self._run)):
            moved = self._moved(setup, move)
            if moved is None:
                continue
            freed = prices.bytes(setup) - prices.bytes(moved)
            lost = max(prices.seconds(moved) / prices.seconds(setup) - 1, 1e-6)
            if freed > 0:
                worth.append((-freed / lost, place, move))
        return [move for _, _, move in sorted(worth, key=lambda each: each[:2])]

    def _without_needless(self, lead: _Lead) -> _Lead:
        """The set-up without what later options made needless."""
        for move in undo_moves(lead.setup):
            moved = self._moved(lead.setup, move)
            shorter = moved is not None and self._prices.seconds(moved) <= self._prices.seconds(lead.setup) * (1 + 1e-9)
            if moved is not None and shorter and self._prices.fits(moved):
                lead = _Lead(begun=lead.begun, setup=moved, steps=(*lead.steps, f"{move.text}: more is not needed"))
        return lead

    def _stepped(self, lead: _Lead, move: Move, moved: Setup) -> _Lead:
        """The lead with one option more, and what it did."""
        before, after = self._prices.priced(lead.setup).step, self._prices.priced(moved).step
        change = after.seconds / before.seconds - 1
        if change < 0:
            wall = max(before.walls, key=lambda name: before.walls[name] - after.walls.get(name, 0.0))
            share = before.walls[wall] / before.seconds
            why = f"{wall} took {share:.0%} of the step, which is {-change:.1%} shorter"
        else:
            over = self._prices.bytes(lead.setup) - self._prices.capacity
            freed = self._prices.bytes(lead.setup) - self._prices.bytes(moved)
            why = f"{gib(over)} too many, frees {gib(freed)}, the step is {change:.1%} longer"
        return _Lead(begun=lead.begun, setup=moved, steps=(*lead.steps, f"{move.text}: {why}"))

    def _moved(self, setup: Setup, move: Move) -> Setup | None:
        """The set-up after an option; None where that is fixed, changes nothing, or is not allowed."""
        if move.key in self._fixed:
            return None
        moved = move.apply(setup)
        return moved if moved != setup and self._allowed(moved) else None

    # --------------------------------------------------------------------------------------------- rules and reasons

    def _allowed(self, setup: Setup) -> bool:
        if setup not in self._legal:
            self._legal[setup] = self._illegal(setup) == ""
        return self._legal[setup]

    def _illegal(self, setup: Setup) -> str:
        """The first rule that a set-up breaks, in words; empty where it keeps all of them."""
        run = setup.on(self._run, self._gpus)
        faults = check(run)
        if not faults and self._buildable_only:
            faults = not_built(run)
        return "" if not faults else f"breaks a rule: {faults[0].setting}={faults[0].value} {faults[0].rule}"

    def _lose(self, setup: Setup, phase: int, reason: str) -> None:
        self._losers.append(Loser(mapping=_named(setup), phase=phase, reason=reason))

    def _slower(self, setup: Setup, best: Setup, *, phase: int = 3, even: bool = False) -> Loser:
        """Why the step of `setup` is longer than that of `best`: the wall that grew most."""
        mine, other = self._prices.priced(setup), self._prices.priced(best)
        longer = mine.step.seconds / other.step.seconds - 1
        walls = {name: spent - other.step.walls.get(name, 0.0) for name, spent in mine.step.walls.items()}
        wall = max(walls, key=lambda name: walls[name])
        leaves = any(axis.axis == wall and not axis.inside for axis in mine.communication)
        share = mine.step.walls[wall] / mine.step.seconds
        free = " even with memory for nothing" if even else ""
        return Loser(
            mapping=_named(setup), phase=phase, reason=f"slower by {longer:.0%}{free}: {_share(wall, share, leaves)}"
        )

    def _bound_reason(self, setup: Setup, bound: Bound, best: Bound) -> str:
        """Why a mapping is slow by the closed forms: the wall that grew most against the shortest step."""
        wall = max(bound.walls, key=lambda name: bound.walls[name] - best.walls.get(name, 0.0))
        longer, share = bound.seconds / best.seconds - 1, bound.walls[wall] / bound.seconds
        p, fabric = setup.parallel, self._profile.fabric
        leaves = fabric is not None and wall == "ep" and p.ep * p.etp > fabric.domain
        return f"slower by about {longer:.0%}: {_share(wall, share, leaves)}"

    def _order(self, lead: _Lead) -> tuple[float, str]:
        return self._prices.seconds(lead.setup), _named(lead.setup)

    def _found(self, lead: _Lead) -> Found:
        setup, step = lead.setup, self._prices.priced(lead.setup).step
        run = setup.on(self._run, self._gpus)
        used = max(rank.balanced.total for rank in self._exact.of(run))
        return Found(
            setup=setup,
            tokens_per_second=step.tokens_per_second,
            tflops=step.tflops,
            seconds=step.seconds,
            memory=used,
            headroom=self._prices.capacity - used,
            settings=_changed(replace(self._asked, ranks=self._gpus), run),
            steps=lead.steps,
            cannot_start=tuple(f"{fault.setting}={fault.value}" for fault in not_built(run)),
        )


def _diverse(setups: Iterable[Setup], most: int) -> tuple[list[Setup], list[Setup]]:
    """The set-ups in their order, at most so many of those that differ in vpp, layout and options alone; and the others."""
    kept: list[Setup] = []
    others: list[Setup] = []
    seen: Counter[tuple[int, ...]] = Counter()
    for setup in setups:
        seen[_alike(setup)] += 1
        (kept if seen[_alike(setup)] <= most else others).append(setup)
    return kept, others


def _share(wall: str, share: float, leaves: bool) -> str:
    if leaves:
        return f"{wall} leaves the NVLink domain, {share:.0%} of its step is spent on it"
    return f"{share:.0%} of its step goes to {wall}"


def _changed(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """What `--set` takes to make one run the other."""
    old, new = settings(before), settings(after)
    return tuple(f"{key}={_text(value)}" for key, value in new.items() if old.get(key, value) != value)


def _text(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _named(setup: Setup) -> str:
    layout = f" layout {setup.parallel.layout}" if setup.parallel.layout else ""
    return f"{setup.mapping}{layout}"


def _options(setup: Setup) -> Iterator[str]:
    """What leaves memory free in a set-up, in words."""
    memory, precision = setup.memory, setup.precision
    if memory.recompute:
        yield f"recompute {','.join(memory.recompute)}"
    if memory.offload:
        yield f"offload {','.join(memory.offload)}"
    if memory.optimizer_offload:
        yield f"{memory.optimizer_offload:.0%} of the optimizer on the host"
    if precision.primary:
        yield "primary weights"
    for name, dtype in (("moments", precision.moments), ("gradients", precision.main_gradients)):
        if dtype == "bfloat16":
            yield f"bfloat16 {name}"


def _alike(setup: Setup) -> tuple[int, ...]:
    """What set-ups have in common that differ in vpp, layout and options alone."""
    p = setup.parallel
    return p.tp, p.cp, p.pp, p.ep, p.etp, setup.microbatch


def _planners(run: RunConfig, planner: PriceMemory | None) -> tuple[PriceMemory, PriceMemory]:
    """What prices many set-ups, and what proves a few: the plan's own, or both times the one that is given."""
    from launch.plan.memory import MemoryPlanner
    from launch.plan.quick import QuickMemory

    exact = planner or MemoryPlanner()
    return (QuickMemory(run, exact.traces) if isinstance(exact, MemoryPlanner) else exact), exact


def _price_time() -> PriceTime:
    from launch.plan.time import plan_time

    def price(run: RunConfig, profile: Profile) -> Priced:
        return plan_time(run, profile, exact=False)

    return price
