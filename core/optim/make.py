"""The optimizer that a mapping asks for."""

from __future__ import annotations

from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim.chained import ChainedOptimizer
from core.optim.formats import Formats
from core.optim.fsdp import is_sharded_model, shard
from core.optim.protocol import Optimizer
from core.optim.shards import FullyShardedOptimizer
from core.parallel.groups import Groups
from core.precision.quantiser import Quantiser
from core.transformer.quantise import quantisers
from core.transformer.stage import Stage


def make_optimizer(
    model: Stage,
    config: OptimizerConfig,
    groups: Groups,
    parallel: ParallelConfig,
    formats: Formats | None = None,
) -> Optimizer:
    """The optimizer of `parallel.sharding` over a model that has its values; under fsdp the model is sharded, if it is not yet.

    formats: of moments, masters and main gradients, and where they wait; None for those of masters. A model that is sharded already sums gradients over its shards as
    `shard` was told. From now on the model's tensors are where they stay, and are read and written through `core.state.inventory`.
    """
    match parallel.sharding:
        case "zero1":
            return ChainedOptimizer(model, config, groups, formats=formats, primary=_primary(model, formats))
        case "fsdp":
            if not is_sharded_model(model):
                shard(model, groups, None if formats is None else formats.gradients)
            return FullyShardedOptimizer(model, config, groups, formats=formats)


def _primary(model: Stage, formats: Formats | None) -> dict[str, Quantiser]:
    """The weights that are to be held as they are rounded, by name."""
    if formats is None or not formats.primary:
        return {}
    return {q.name: q for q in quantisers(model) if q.recipe.held is not None}
