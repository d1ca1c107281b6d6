"""Seconds of the parts of a model for one microbatch: what they ask for (launch/plan/work.py, communication.py) at the rates of the
hardware. Products, attention and streaming follow one another on a device; exchanges are added where nothing hides them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from core.config.architecture import Layer, MoE
from core.config.execution import GraphName
from core.config.recipe import BITS, Operand
from core.config.run import RunConfig
from core.pipeline.layout import Part
from launch.plan.communication import Exchange, Links, layer_exchanges, over_tp
from launch.plan.kinds import Kind, Kinds, kinds_of
from launch.plan.work import Share, Work, ahead_work, embedding_work, layer_work, loss_work, offloaded
from launch.profiles import Chip, Profile, Speeds

# Backward of attention: five products where forward has two.
_ATTENTION_BACKWARD = 2.5
# Of a layer's kernels, the share that each kind of graph starts at once; and the share of all that forward has.
_GRAPHED: dict[GraphName, float] = {"attn": 0.4, "moe_router": 0.1, "moe_preprocess": 0.1, "mlp": 0.6, "moe": 0.6}
_FORWARD_LAUNCHES = 1 / 3


class Cost(NamedTuple):
    """Seconds by what they go to."""

    products: float = 0.0
    attention: float = 0.0
    streaming: float = 0.0
    launches: float = 0.0
    offload: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    etp: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)

    @property
    def exchanged(self) -> float:
        """Of rows with experts elsewhere: what a combined action hides."""
        return self.ep + self.etp


def added(costs: Iterable[Cost]) -> Cost:
    """Wall by wall."""
    return Cost(*map(sum, zip(Cost(), *costs, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of one microbatch, forward and backward. sent: by axis the bytes that it sends, and their seconds if nothing hid them.

    dense, experts: numbers of weights that are passed, without those of embedding and head, which several parts may share; low: how many
    of either a recipe takes.
    """

    forward: Cost
    backward: Cost
    sent: tuple[tuple[str, float, float], ...] = ()
    dense: float = 0.0
    experts: float = 0.0
    low: tuple[float, float] = (0.0, 0.0)


def added_passes(passes: Iterable[Passes]) -> Passes:
    """One after the other."""
    each = tuple(passes)
    return Passes(
        forward=added(p.forward for p in each),
        backward=added(p.backward for p in each),
        sent=tuple(sent for p in each for sent in p.sent),
        dense=sum(p.dense for p in each),
        experts=sum(p.experts for p in each),
        low=(sum(p.low[0] for p in each), sum(p.low[1] for p in each)),
    )


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """What turns work into seconds for one run on one kind of hardware."""

    run: RunConfig
    chip: Chip
    speeds: Speeds
    share: Share
    links: Links
    kinds: Kinds

    @staticmethod
    def of(run: RunConfig, profile: Profile) -> Pricing:
        """Raises ValueError where nothing is known of the hardware's speed, or where it has not the run's recipe."""
        if profile.chip is None or profile.fabric is None or profile.speeds is None:
            raise ValueError(f"nothing is known of the speed of --hw {profile.name}")
        recipe = run.precision.recipe
        if recipe is not None and not profile.chip.has(recipe):
            raise ValueError(f"{profile.name} has no {recipe.name}")
        links = Links.of(run, profile.fabric)
        return Pricing(
            run=run,
            chip=profile.chip,
            speeds=profile.speeds,
            share=Share.of(run),
            links=links,
            kinds=kinds_of(run.model, recipe),
        )

    @property
    def _plain(self) -> float:
        """FLOP a second of products in the run's dtype."""
        chip, narrow = self.chip, self.run.precision.compute != "float32"
        return (chip.bfloat16 if narrow else chip.float32) * self.speeds.products

    def _rate(self, sides: Iterable[Operand | None]) -> float:
        """FLOP a second of products of two such operands: as fast as the wider one allows."""
        bits = max(16 if side is None else BITS[side.element] for side in sides)
        if bits == 16:
            return self._plain
        peak = self.chip.fp4 if bits == 4 else self.chip.fp8
        assert peak is not None, "a chip has the peak of its recipes"
        return peak * self.speeds.low_products

    def _products(self, work: Work) -> tuple[float, float]:
        """Seconds of the products of a part, forward and backward: those that the recipe takes, each at its own rate, and the others."""
        recipe = self.run.precision.recipe
        plain = (work.plain + (work.products if recipe is None else 0.0)) / self._plain
        if recipe is None or not work.products:
            return plain, 2 * plain
        forward, of_input, of_weight = (
            work.products / self._rate(vars(each).values())
            for each in (recipe.forward, recipe.input_gradient, recipe.weight_gradient)
        )
        return plain + forward, 2 * plain + of_input + of_weight

    def _attention_rate(self, which: int) -> float:
        """FLOP a second, between what was measured at 4,096 and at 16,384 tokens and level beyond."""
        near, far = self.speeds.attention[which], self.speeds.long_attention[which]
        place = min(1.0, max(0.0, log2(self.share.sequence / 4096) / 2))
        return near + place * (far - near)

    def forward(self, work: Work) -> Cost:
        """One forward of a part."""
        low = work.low if self.share.quantised else 0.0
        operand = low * self.share.quantised / 2 + (1 - low) * self.share.element
        return Cost(
            products=self._products(work)[0],
            attention=work.attention / self._attention_rate(0),
            streaming=(self.speeds.streamed * work.streamed + operand * work.weights) / self.chip.memory_bandwidth,
        )

    def backward(self, work: Work) -> Cost:
        """Its backward: products twice; weights are read once more, and their gradients read and written."""
        ahead = self.forward(work)
        gradients = 2 * (2 if self.run.precision.main_gradients == "bfloat16" else 4) * work.weights
        again = ahead if set(work.recomputed) & set(self.run.memory.recompute) else Cost()
        passing = self.speeds.streamed * work.streamed / self.chip.memory_bandwidth
        own = Cost(
            products=self._products(work)[1],
            attention=_ATTENTION_BACKWARD * work.attention / self._attention_rate(1),
            streaming=ahead.streaming + passing + gradients / self.chip.memory_bandwidth,
        )
        return added((own, again))

    def passes(
        self, works: Iterable[Work], exchanges: Iterable[Exchange], launches: float, host_bytes: float
    ) -> Passes:
        """Forward and backward of parts that follow one another. launches: of a layer's launch seconds; host_bytes: offloaded."""
        works = tuple(works)
        forward, backward = added(map(self.forward, works)), added(map(self.backward, works))
        shared = tuple(work for work in works if "shared_experts" in work.recomputed)
        beside = {
            "attention": (forward.attention, backward.attention),
            "shared": (sum(self.forward(w).total for w in shared), sum(self.backward(w).total for w in shared)),
        }
        there, back, sent = Cost(), Cost(), []
        for exchange in exchanges:
            again = bool(set(exchange.recomputed) & set(self.run.memory.recompute))
            hides = beside.get(exchange.hidden_by or "", (0.0, 0.0))
            ahead = max(0.0, exchange.forward[1] - hides[0])
            there = added((there, Cost(**{exchange.axis: ahead})))
            behind = max(0.0, exchange.backward[1] - hides[1]) + (ahead if again else 0.0)
            back = added((back, Cost(**{exchange.axis: behind})))
            number, seconds = (f * (1 + again) + b for f, b in zip(exchange.forward, exchange.backward, strict=True))
            sent.append((exchange.axis, number, seconds))
        return Passes(
            forward=self._waiting(added((forward, there)), launches * _FORWARD_LAUNCHES, host_bytes),
            backward=self._waiting(added((backward, back)), launches * (1 - _FORWARD_LAUNCHES), host_bytes),
            sent=tuple(sent),
            dense=sum(w.weights for w in works if w.held == "layer"),
            experts=sum(w.weights for w in works if w.held == "experts"),
            low=(_low(works, "layer"), _low(works, "experts")),
        )

    def _waiting(self, cost: Cost, launches: float, host_bytes: float) -> Cost:
        """With what a device waits for its host: for kernels to be started, and for bytes that computation does not hide."""
        link = max(0.0, host_bytes / self.chip.host_link - cost.total)
        together = self.run.parallel.schedule == "combined"
        host = launches * self.speeds.launch_seconds * (self.speeds.combined_launches if together else 1.0)
        return added((cost, Cost(launches=max(0.0, host - cost.total), offload=link)))

    def layer(self, kind: Kind) -> Passes:
        """One layer."""
        layer = kind.layer
        return self.passes(
            layer_work(layer, self.share, kind.high),
            layer_exchanges(layer, self.run, self.share, self.links, kind.high),
            launched(layer, self.run.execution.graphs),
            offloaded(layer, self.run.memory.offload, self.share),
        )

    def part(self, part: Part, priced: Sequence[Passes]) -> tuple[Passes, ...]:
        """What a stage has: its passes, one after the other. priced: layers, by kind."""
        model, share, kinds = self.run.model, self.share, self.kinds
        found = [priced[kinds.of[i]] for i in part.layers]
        if part.embedding:
            crossing = over_tp("embedding", share.hidden, share, self.links)
            found.append(self.passes((embedding_work(share),), crossing, 0, 0))
        for _ in part.ahead:
            assert kinds.ahead is not None, "a model with prediction modules"
            found.append(priced[kinds.ahead])
            found.append(self.passes(ahead_work(share, low=kinds.projection), (), 0, 0))
        if part.loss:  # of the model and of every module
            for _ in range(1 + len(model.mtp_layers())):
                crossing = over_tp("head", share.hidden, share, self.links)
                found.append(self.passes((loss_work(model.vocab, share),), crossing, 0, 0))
        return tuple(found)


def _low(works: Iterable[Work], held: str) -> float:
    return sum(work.low * work.weights for work in works if work.held == held)


def launched(layer: Layer, graphs: tuple[GraphName, ...]) -> float:
    """The share of a layer's kernels that the host starts one by one."""
    if "full_iteration" in graphs:
        return 0.0
    parts: tuple[GraphName, ...] = (
        ("attn", "moe_router", "moe_preprocess") if isinstance(layer.mlp, MoE) else ("attn", "mlp")
    )
    taken = sum(_GRAPHED[name] for name in parts if name in graphs)
    if isinstance(layer.mlp, MoE) and "moe" in graphs:
        taken = _GRAPHED["moe"] + (_GRAPHED["attn"] if "attn" in graphs else 0.0)
    return max(0.0, 1.0 - taken)
