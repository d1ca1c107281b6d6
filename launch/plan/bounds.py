"""What no set-up of a mapping can do without, from closed forms that cost microseconds: which mappings are worth asking the model about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from core.config.architecture import GQA, Layer, ModelConfig, MoE
from core.config.counts import count_parameters
from core.config.flops import flops_per_token
from core.config.mapping import PACKAGES
from core.config.precision import BYTES, state_bytes
from core.config.run import RunConfig
from core.pipeline.layout import Part, layout_of
from launch.plan.candidates import Setup
from launch.plan.weights import held_bytes
from launch.profiles import Profile

# A forward costs half a backward, so a step that computes everything again takes a third longer.
AGAIN = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Bound:
    """bytes: below which no option brings the fullest rank. seconds: about what a step takes, by what they go to."""

    bytes: float
    walls: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """All of them together."""
        return sum(self.walls.values())


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of one layer: parameters that tp cuts, those of its routed experts, rough bytes that a token leaves for the backward, its FLOP.

    top_k: 0 where it has no experts.
    """

    dense: int
    experts: int
    kept_bytes: float
    flops: float
    top_k: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """The sums over what one pipeline rank holds. routed: its layers with experts."""

    dense: int
    experts: int
    kept_bytes: float
    flops: float
    layers: int
    routed: int


@dataclass(frozen=True, kw_only=True)
class Leanest:
    """The fewest bytes that a parameter can cost: its weight, its gradient, its masters and moments."""

    weight: float
    gradient: float
    states: float

    def of(self, parameters: float, replicas: int, sharding: str) -> float:
        """Bytes of so many parameters of a rank."""
        held = self.weight + self.gradient
        return parameters * ((held / replicas if sharding == "fsdp" else held) + self.states / replicas)


class Bounds:
    """The bounds of one search: what does not depend on the mapping is counted once.

    profile: of hardware whose chip, fabric and speeds are known. fixed: keys whose values no option may change.
    """

    def __init__(self, run: RunConfig, gpus: int, profile: Profile, fixed: frozenset[str]) -> None:
        assert profile.chip and profile.fabric and profile.speeds, "hardware of which nothing is known has no bounds"
        self._run, self._gpus = run, gpus
        self._chip, self._fabric, self._speeds = profile.chip, profile.fabric, profile.speeds
        self._leanest = leanest(run, fixed, profile)
        kinds = {layer: _weights(layer, run) for layer in set(run.model.layers)}
        self._weights = [kinds[layer] for layer in (*run.model.layers, *run.model.mtp_layers())]
        self._top_k = max(weights.top_k for weights in self._weights)
        self._held: dict[tuple[int, int, str | None], tuple[int, tuple[Held, ...]]] = {}

    def of(self, setup: Setup) -> Bound:
        """The bound of one mapping."""
        p = setup.parallel
        virtual, ranks = self._ranks(p.pp, p.vpp, p.layout, setup)
        dp, edp = self._gpus // (p.tp * p.cp * p.pp), self._gpus // (p.etp * p.ep * p.pp)
        tokens = setup.microbatch * self._run.train.sequence_tokens / (p.tp * p.cp)
        microbatches = self._run.train.global_batch // (dp * setup.microbatch)
        states = inputs = kept = 0.0
        for rank, held in enumerate(ranks):
            mine = self._leanest.of(held.dense / p.tp, dp * p.cp, p.sharding)
            mine += self._leanest.of(held.experts / (p.ep * p.etp), edp, p.sharding)
            waiting = tokens * _live(rank, p.pp, virtual, microbatches) / virtual
            least = waiting * held.layers * self._run.model.hidden * 2
            if mine + least > states + inputs:
                states, inputs, kept = mine, least, waiting * held.kept_bytes
        walls = self._walls(setup, ranks, tokens, microbatches)
        walls["bubble"] = (p.pp - 1) / (virtual * microbatches) * sum(walls.values())
        # What is too much for the memory is computed again: as much of a third of the products as of the activations.
        share = min(max((states + kept - self._chip.memory) / max(kept - inputs, 1.0), 0.0), 1.0)
        return Bound(bytes=states + inputs, walls=walls | {"recomputation": AGAIN * share * walls["products"]})

    def _ranks(self, pp: int, vpp: int, layout: str | None, setup: Setup) -> tuple[int, tuple[Held, ...]]:
        """Virtual stages, and what each pipeline rank holds."""
        key = (pp, vpp, layout)
        if key not in self._held:
            spread = layout_of(self._run.model, setup.parallel)
            self._held[key] = spread.virtual, tuple(self._hold(spread.parts_of(rank)) for rank in range(pp))
        return self._held[key]

    def _hold(self, parts: tuple[Part, ...]) -> Held:
        model, ahead = self._run.model, len(self._run.model.layers)
        numbers = [i for part in parts for i in (*part.layers, *(ahead + d for d in part.ahead))]
        mine = [self._weights[i] for i in numbers]
        heads = sum(part.loss + len(part.ahead) for part in parts)
        return Held(
            dense=sum(w.dense for w in mine) + _ends(parts, model),
            experts=sum(w.experts for w in mine),
            kept_bytes=sum(w.kept_bytes for w in mine),
            flops=sum(w.flops for w in mine) + heads * 6.0 * model.vocab * model.hidden,
            layers=len(mine),
            routed=sum(w.top_k > 0 for w in mine),
        )

    def _walls(self, setup: Setup, ranks: tuple[Held, ...], tokens: float, microbatches: int) -> dict[str, float]:
        """About how long a step of the dearest rank takes. Nothing is hidden: mappings are compared, not promised."""
        p, hidden, speeds = setup.parallel, self._run.model.hidden, self._speeds
        low = setup.precision.recipe is not None and self._chip.fp8 is not None
        rate = (self._chip.fp8 or 0) * speeds.low_products if low else self._chip.bfloat16 * speeds.products
        layers, routed = max(held.layers for held in ranks), max(held.routed for held in ranks)
        # Four gathers and four scatters of a rank's tokens: forward and backward, attention and MLP.
        inside = 8 * (p.tp - 1) * tokens * hidden * 2 / self._fabric.nvlink
        rows = 4 * tokens * self._top_k * hidden * 2
        return {
            "products": microbatches * tokens * max(held.flops for held in ranks) / rate,
            "launches": 0.0 if setup.execution.graphs else microbatches * layers * speeds.launch_seconds,
            "tp": microbatches * layers * inside,
            "ep": microbatches * routed * rows * self._seconds_per_byte(setup),
        }

    def _seconds_per_byte(self, setup: Setup) -> float:
        """Of rows that go to experts anywhere in ep: those inside an NVLink domain, and those that leave it."""
        p, fabric = setup.parallel, self._fabric
        domain = min(p.ep, max(fabric.domain // p.etp, 1))
        once = p.dispatcher in (*PACKAGES, "flex")
        # A token sent once goes to no more domains than there are, however many of its experts lie there.
        share = min(1.0, p.ep / domain / max(self._top_k, 1)) if once else 1.0
        rate = fabric.token_once_nvlink if once else fabric.all_to_all_nvlink
        network = fabric.token_once_network if once else fabric.all_to_all_network
        return (domain - 1) / p.ep / rate + (1 - domain / p.ep) * share / network


def leanest(run: RunConfig, fixed: frozenset[str], profile: Profile) -> Leanest:
    """The fewest bytes of a parameter that the settings outside `fixed` allow."""
    precision, low = run.precision, run.precision.compute == "bfloat16"
    free = {name for name in ("recipe", "primary", "main_gradients", "moments") if f"precision.{name}" not in fixed}
    recipe = precision.recipe is not None or ("recipe" in free and bool(profile.chip and profile.chip.recipes))
    primary = low and recipe and (precision.primary or "primary" in free)
    gradients = "bfloat16" if low and "main_gradients" in free else precision.main_gradients
    states = state_bytes(precision)
    if low and "moments" in free:
        states = min(states, state_bytes(replace(precision, moments="bfloat16")))
    on_host = run.memory.optimizer_offload if "memory.optimizer_offload" in fixed else 1.0
    least = 1.0 if precision.recipe is None else held_bytes(replace(precision, primary=True))
    return Leanest(
        weight=min(least, BYTES[precision.compute]) if primary else held_bytes(precision),
        gradient=BYTES[gradients],
        states=(1 - on_host) * states,
    )


def _weights(layer: Layer, run: RunConfig) -> Weights:
    model, hidden = run.model, run.model.hidden
    alone = replace(model, layers=(layer,), predict_ahead=None)
    ends = model.vocab * hidden * (1 if model.tied_embeddings else 2) + hidden
    a, moe = layer.attention, layer.mlp if isinstance(layer.mlp, MoE) else None
    experts = moe.experts * moe.expert_parameters(hidden) if moe else 0
    queries = a.heads * 2 * a.head_dim if isinstance(a, GQA) else a.heads * 2 * (a.nope_dim + a.rope_dim)
    widths = moe.top_k * (2 * hidden + 3 * moe.expert_ffn) if moe else 3 * hidden
    return Weights(
        dense=count_parameters(alone).main - ends - experts,
        experts=experts,
        kept_bytes=2.0 * (5 * hidden + 2 * queries + widths),
        flops=flops_per_token(alone, run.train.sequence_tokens) - 6.0 * model.vocab * hidden,
        top_k=moe.top_k if moe else 0,
    )


def _ends(parts: tuple[Part, ...], model: ModelConfig) -> int:
    """Parameters of the embedding and the head on these stages, and of the projections of prediction modules."""
    matrix = model.vocab * model.hidden
    embedding = any(part.embedding or part.ahead for part in parts)
    head = any(part.loss for part in parts)
    both = 1 if embedding and head and model.tied_embeddings else embedding + head
    return matrix * both + 2 * model.hidden**2 * sum(len(part.ahead) for part in parts)


def _live(rank: int, pp: int, virtual: int, microbatches: int) -> int:
    """Forwards of chunks that wait for their backward at most, under 1F1B."""
    ahead = pp - rank if virtual == 1 else 2 * (pp - 1 - rank) + (virtual - 1) * pp + 1
    return min(ahead, virtual * microbatches)
