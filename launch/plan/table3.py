"""The accounting of the report's Table 3 (arXiv 2603.07685), beside our own plan: other tensors are kept, and one of two rules of
what is in flight.

What a layer keeps follows the report's section 4.1.2 and a public estimator (Megatron-MoE-ModelZoo, misc/tools, commit e865065): more
than our modules keep of some things, less of others; docs/memory.md compares them. The table itself counts 16 equal layers of
experts on the rank and `layers * (p - 1) + layers / v * (p - 1)` layers with a microbatch in flight, which is one of the lighter
ranks; the real schedule makes rank 0 the fullest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.config.architecture import MLA, Dense, Layer, ModelConfig, MoE
from core.config.run import RunConfig
from core.pipeline.layout import Part
from launch.plan.load import Moment, PartLoad
from launch.plan.memory import MemoryPlanner, Place
from launch.plan.moments import fullest_of, states

_BF16, _FLOAT32, _INT64 = 2, 4, 8
# Bytes of a parameter and its gradient, and of what the optimizer keeps of it: master and two moments.
_HELD, _OPTIMIZER = 2 + 4, 12


# Bytes that a layer of a model of some width keeps of so many tokens, by what they are.
SavedTensors = Callable[[Layer, int, int], dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class Table3:
    """Bytes by the table's rows. rank: of the world; None for the table's own, idealised one."""

    rank: int | None
    weights_and_gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All rows."""
        return self.weights_and_gradients + self.optimizer + self.activations


def saved_tensors(layer: Layer, hidden: int, tokens: int) -> dict[str, int]:
    """Bytes that one layer keeps of so many tokens, by what they are: MLA in bfloat16 on one rank of tp, nothing made again.

    Raises ValueError for other attention and for a query without a latent, of which the table says nothing.
    """
    a = layer.attention
    if not isinstance(a, MLA) or a.query_rank is None:
        raise ValueError("Table 3 is of multi-head latent attention with compressed queries")
    head = a.nope_dim + a.rope_dim
    numbers = {
        "layer input": hidden,
        "input norm": hidden,
        "query down": a.query_rank,
        "query norm": a.query_rank,
        "latent down": a.latent_rank,
        "latent norm": a.latent_rank,
        "queries": a.heads * head,
        "keys": a.heads * head,
        "values": a.heads * a.value_dim,
        "attention": a.heads * a.value_dim,
        "residual": hidden,
        "mlp norm": hidden,
    }
    found = {name: tokens * count * _BF16 for name, count in numbers.items()}
    found["log of sums"] = tokens * a.heads * _FLOAT32
    if isinstance(layer.mlp, Dense):
        return found | {"gate and up": tokens * 2 * layer.mlp.ffn * _BF16, "product": tokens * layer.mlp.ffn * _BF16}
    return found | _saved_of_experts(layer.mlp, hidden, tokens)


def _saved_of_experts(moe: MoE, hidden: int, tokens: int) -> dict[str, int]:
    shared = 0 if moe.shared is None else moe.shared.count * moe.expert_ffn
    rows = tokens * moe.top_k
    return {
        "router": tokens * moe.experts * _BF16,
        "row map": tokens * moe.experts * _INT64,
        "shared gate and up": tokens * 2 * shared * _BF16,
        "shared product": tokens * shared * _BF16,
        "permuted rows": rows * hidden * _BF16,
        "experts' gate and up": rows * 2 * moe.expert_ffn * _BF16,
        "experts' product": rows * moe.expert_ffn * _BF16,
        "experts' output": rows * hidden * _BF16,
    }


def in_flight(run: RunConfig) -> float:
    """Layers with a microbatch in flight, by the table's rule: 60 for 16 layers, p = 4, v = 4."""
    p, place = run.parallel.pp, Place(run=run)
    layers = _layers_of_rank(run)
    return layers * (p - 1) + layers / place.layout.virtual * (p - 1)


def as_printed(run: RunConfig) -> Table3:
    """The table's own column: a rank of equal layers of experts, matrices alone. Raises ValueError as `saved_tensors` does."""
    layer, model = run.model.layers[-1], run.model
    assert isinstance(layer.mlp, MoE), "the table is of layers of experts"
    # Said before anything else: of which attention the table is.
    kept = sum(saved_tensors(layer, model.hidden, run.train.microbatch * run.train.sequence_tokens).values())
    p = run.parallel
    experts = layer.mlp.experts // p.ep * layer.mlp.expert_parameters(model.hidden)
    dense = _matrices(layer, model)
    replicas, copies = run.ranks // (p.tp * p.pp), run.ranks // (p.etp * p.ep * p.pp)
    layers = _layers_of_rank(run)
    return Table3(
        rank=None,
        weights_and_gradients=layers * (dense + experts) * _HELD,
        optimizer=layers * (dense / replicas + experts / copies) * _OPTIMIZER,
        activations=in_flight(run) * kept,
    )


def by_rank(
    run: RunConfig, planner: MemoryPlanner | None = None, saved: SavedTensors = saved_tensors
) -> tuple[Table3, ...]:
    """The table's tensors under the real schedule and layout: one rank for each place of the pipeline.

    Parameters and optimizer are those of our plan, everything on the rank counted. Embedding, head, loss and what stands around a
    prediction module's layer keep nothing in the table's list. saved: another list.
    """
    planner, place, found = planner or MemoryPlanner(), Place(run=run), []
    for rank in place.fullest_ranks():
        resident = planner.resident(run, rank)
        loads = [_load(part, run, saved) for part in place.parts(rank)]
        found.append(
            Table3(
                rank=rank,
                weights_and_gradients=resident.parameters + resident.gradients,
                optimizer=resident.optimizer,
                activations=fullest_of(states(place.actions(rank), place.layout.virtual), loads).activations,
            )
        )
    return tuple(found)


def _load(part: Part, run: RunConfig, saved: SavedTensors) -> PartLoad:
    """A part by the table's list, without anything that is needed only while it runs."""
    tokens = run.train.microbatch * run.train.sequence_tokens
    layers = [run.model.layers[i] for i in part.layers] + [run.model.layers[-1]] * len(part.ahead)
    kept = sum(sum(saved(layer, run.model.hidden, tokens).values()) for layer in layers)
    moment = Moment(activations=kept, logits=0, total=kept)
    return PartLoad(activations=kept, logits=0, late=0, on_host=0, forward=moment, backward=moment)


def _layers_of_rank(run: RunConfig) -> int:
    """Decoder layers and prediction modules of a rank, as if they were spread evenly: 16 of 62."""
    return -(-(len(run.model.layers) + len(run.model.mtp_layers())) // run.parallel.pp)


def _matrices(layer: Layer, model: ModelConfig) -> int:
    """Numbers in the matrices of attention and shared experts."""
    a, moe = layer.attention, layer.mlp
    assert isinstance(a, MLA) and a.query_rank is not None and isinstance(moe, MoE)
    queries = a.query_rank * (model.hidden + a.heads * (a.nope_dim + a.rope_dim))
    latents = model.hidden * (a.latent_rank + a.rope_dim) + a.latent_rank * a.heads * (a.nope_dim + a.value_dim)
    shared = 0 if moe.shared is None else moe.shared.count * moe.expert_ffn
    return queries + latents + a.heads * a.value_dim * model.hidden + 3 * shared * model.hidden
