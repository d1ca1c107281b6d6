"""The mappings that a search looks at: all that a model, a batch and a machine allow, with their layers balanced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

from core.config.architecture import GQA, ModelConfig, MoE
from core.config.execution import ExecutionConfig
from core.config.flops import flops_per_token
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import PrecisionConfig
from core.config.run import RunConfig
from core.pipeline.layout import LONGEST, Layout, even_layout, layout_of, layout_text, parse_layout
from launch.profiles import Profile

Value = TypeVar("Value")
# Report section 9.1.2: below so many tokens a sequence is not worth cutting; mappings beyond these sizes are in no published set-up.
WORTH_CUTTING = 8192
MOST = {"tp": 16, "cp": 64, "pp": 64, "vpp": 16, "microbatch": 16}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a search varies of a run; everything else stays as it is, so that every set-up computes the same step."""

    parallel: ParallelConfig
    microbatch: int
    precision: PrecisionConfig
    memory: MemoryConfig
    execution: ExecutionConfig

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Counted once: a search looks a set-up up a hundred times."""
        return hash((self.parallel, self.microbatch, self.precision, self.memory, self.execution))

    def on(self, run: RunConfig, gpus: int) -> RunConfig:
        """The run with this set-up on so many GPUs."""
        return replace(
            run,
            ranks=gpus,
            parallel=self.parallel,
            train=replace(run.train, microbatch=self.microbatch),
            precision=self.precision,
            memory=self.memory,
            execution=self.execution,
        )

    @property
    def mapping(self) -> str:
        """Its degrees in words, those of 1 left out."""
        p = self.parallel
        names = ("tp", "cp", "pp", "vpp", "ep", "etp")
        sizes = (p.tp, p.cp, p.pp, p.vpp, p.ep, p.etp)
        degrees = [f"{name} {size}" for name, size in zip(names, sizes, strict=True) if size > 1]
        return " ".join([*degrees, f"microbatch {self.microbatch}"])


def setup_of(run: RunConfig) -> Setup:
    """What a search could vary of `run`, as it is. A layout text says its vpp."""
    return Setup(
        parallel=run.parallel,
        microbatch=run.train.microbatch,
        precision=run.precision,
        memory=run.memory,
        execution=run.execution,
    )


# ------------------------------------------------------------------------------------------------------------ mappings


def mappings(run: RunConfig, gpus: int, profile: Profile, fixed: frozenset[str]) -> Iterator[Setup]:
    """Every mapping worth a look with the options of `run`: both foldings divide, the batch divides, TP stays inside a node's NVLink.

    fixed: keys that stay as they are in `run`. Experts are spread (EP) before they are cut (ETP, only where `run` has it already).
    """
    base, train = setup_of(run), run.train
    plain = Choices(run=run, fixed=fixed)
    for pp in plain.of("pp", divisors(gpus, min(MOST["pp"], len(run.model.layers)))):
        for tp in plain.of("tp", tensor_degrees(run.model, gpus // pp, profile)):
            longest = MOST["cp"] if train.sequence_tokens >= WORTH_CUTTING else 1
            for cp in plain.of("cp", divisors(gpus // pp // tp or 1, longest)):
                replicas, left_over = divmod(gpus, pp * tp * cp)
                # A degree that the user fixed may not divide what the others leave.
                if left_over or not replicas or train.global_batch % replicas:
                    continue
                for microbatch in plain.microbatches(divisors(train.global_batch // replicas, MOST["microbatch"])):
                    for ep in plain.of("ep", expert_degrees(run.model, gpus // pp)):
                        if gpus % (run.parallel.etp * ep * pp):
                            continue
                        degrees = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
                        yield from _with_layouts(plain, base, degrees, microbatch, profile)


def _with_layouts(
    plain: Choices, base: Setup, degrees: dict[str, int], microbatch: int, profile: Profile
) -> Iterator[Setup]:
    """The mapping with each way to spread its layers, and each way to pass the keys of a sequence round."""
    run, pp = plain.run, degrees["pp"]
    node = profile.fabric.gpus_per_node if profile.fabric else 1
    share = min(degrees["ep"], node) if base.parallel.dispatcher == "flex" else base.parallel.ep_per_node
    for traded in plain.of("cp_alltoall", sorted({1, degrees["cp"]})):
        for vpp, layout in plain.layouts(pp):
            parallel = replace(
                base.parallel,
                **degrees,  # type: ignore[arg-type]
                cp_alltoall=traded,
                vpp=vpp,
                layout=layout,
                ep_per_node=run.parallel.ep_per_node if plain.keeps("ep_per_node") else share,
            )
            yield replace(base, parallel=parallel, microbatch=microbatch)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The values to try for a setting of a run: the run's own alone where the user fixed it."""

    run: RunConfig
    fixed: frozenset[str]

    def keeps(self, name: str) -> bool:
        """Whether a setting of the mapping is fixed."""
        return f"parallel.{name}" in self.fixed

    def of(self, name: str, values: Sequence[int]) -> Sequence[int]:
        """The degrees to try for one axis of the mapping."""
        own = {name_: size for name_, size in vars(self.run.parallel).items()}[name]
        return (own,) if self.keeps(name) else values

    def microbatches(self, values: Sequence[int]) -> Sequence[int]:
        """The sequences of a microbatch to try."""
        return (self.run.train.microbatch,) if "train.microbatch" in self.fixed else values

    def layouts(self, pp: int) -> list[tuple[int, str | None]]:
        """vpp and layout to try on so many pipeline ranks: balanced by cost, even, and the run's own."""
        own, model = self.run.parallel, self.run.model
        if self.keeps("layout") and own.layout is not None:
            stages = len(layout_of(model, own).parts)
            return [] if stages % pp else [(stages // pp, own.layout)]
        if self.keeps("layout"):
            return [(own.vpp, None)]
        if pp == 1:
            return [(own.vpp if self.keeps("vpp") else 1, None)]
        items = len(model.layers) + len(model.mtp_layers())
        # More chunks that leave the largest one as large make no shorter bubble.
        largest = {-(-items // (pp * vpp)): vpp for vpp in range(MOST["vpp"], 0, -1) if pp * vpp <= items + 1}
        sizes = self.of("vpp", sorted(largest.values()))
        found = [(vpp, balanced_layout(model, self.run.train.sequence_tokens, pp, vpp)) for vpp in sizes]
        if own.layout is not None and own.pp == pp and not self.keeps("vpp"):
            found.append((own.vpp, own.layout))
        return list(dict.fromkeys(found))


def tensor_degrees(model: ModelConfig, ranks: int, profile: Profile) -> list[int]:
    """tp that cuts between heads and stays inside a node, or inside the NVLink domain where that is larger."""
    heads = [layer.attention.heads for layer in model.layers]
    key_heads = [a.kv_heads for layer in model.layers if isinstance(a := layer.attention, GQA)]
    within = max(profile.fabric.gpus_per_node, min(profile.fabric.domain, 8)) if profile.fabric else MOST["tp"]
    return [
        tp
        for tp in divisors(ranks, min(within, MOST["tp"]))
        if all(number % tp == 0 for number in heads) and all(k % tp == 0 or tp % k == 0 for k in key_heads)
    ]


def expert_degrees(model: ModelConfig, ranks: int) -> list[int]:
    """ep that divides the experts of every layer; 1 in a model without any."""
    experts = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoE)]
    return [ep for ep in divisors(ranks, max(experts, default=1)) if all(number % ep == 0 for number in experts)]


def divisors(number: int, most: int) -> list[int]:
    """Ascending, up to `most`."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


# ------------------------------------------------------------------------------------------------------------- layouts


@lru_cache(maxsize=512)
def balanced_layout(model: ModelConfig, sequence_tokens: int, pp: int, vpp: int) -> str | None:
    """The layout whose dearest stages are cheapest, counting prediction modules and both ends; None where it is the even one.

    Costs are FLOP: a layer's own, a prediction module's with its projection and its use of the head, the head's with the loss.
    """
    costs = _item_costs(model, sequence_tokens)
    num_layers, num_ahead = len(model.layers), len(model.mtp_layers())
    even = even_layout(num_layers=num_layers, num_ahead=num_ahead, pp=pp, vpp=vpp)
    if pp * vpp > min(LONGEST, 4 * len(costs)):
        return None
    letters = "E" + "t" * num_layers + "m" * num_ahead + "L"
    cuts = _cut(costs, pp * vpp)
    text = "|".join(letters[begin:end] for begin, end in pairwise(cuts))
    found = parse_layout(text, num_layers=num_layers, num_ahead=num_ahead, pp=pp)
    return None if found == even or _worse(found, even, costs) else layout_text(found)


def _item_costs(model: ModelConfig, sequence_tokens: int) -> tuple[float, ...]:
    """FLOP of a token in the embedding, every layer, every prediction module and the head, in the order of the layout."""
    head = 6.0 * model.vocab * model.hidden
    alone = replace(model, predict_ahead=None)
    kinds = {
        layer: flops_per_token(replace(alone, layers=(layer,)), sequence_tokens) - head for layer in set(model.layers)
    }
    ahead = [kinds[layer] + head + 12.0 * model.hidden**2 for layer in model.mtp_layers()]
    return (0.0, *(kinds[layer] for layer in model.layers), *ahead, head)


def _cut(costs: Sequence[float], stages: int) -> list[int]:
    """Where stages begin and end, so that the sum of the squares of their costs is least: shortest paths over the items."""
    total = np.concatenate([[0.0], np.cumsum(costs)])
    count = len(costs)
    square = np.where(np.arange(count + 1)[:, None] >= np.arange(count + 1), (total[:, None] - total) ** 2, np.inf)
    best, chosen = square[:, 0], []
    for _ in range(stages - 1):
        options = square + best
        # The latest cut of those that are equally good fills the first stages, which end with the embedding, last.
        where = count - np.argmin(options[:, ::-1], axis=1)
        chosen.append(where)
        best = options[np.arange(count + 1), where]
    cuts = [count]
    for where in reversed(chosen):
        cuts.append(int(where[cuts[-1]]))
    return [0, *reversed(cuts)]


def _worse(found: Layout, even: Layout, costs: Sequence[float]) -> bool:
    """Whether the dearest rank of `found` is no cheaper than that of the even layout."""
    return _dearest(found, costs) >= _dearest(even, costs) * (1 - 1e-9)


def _dearest(layout: Layout, costs: Sequence[float]) -> float:
    num_layers = sum(len(part.layers) for part in layout.parts)
    return max(
        sum(
            sum(costs[1 + i] for i in part.layers)
            + sum(costs[1 + num_layers + d] for d in part.ahead)
            + (costs[-1] if part.loss else 0.0)
            for part in layout.parts_of(rank)
        )
        for rank in range(layout.pp)
    )
