"""What a model computes with, whole tensors of whatever form they are held in: for whoever publishes it."""

from __future__ import annotations

from core.parallel.groups import Groups
from core.state.hollow import is_hollow
from core.state.inventory import declared, inventory, piece_of
from core.state.sharded import ShardedTensor
from core.transformer.quantise import quantisers
from core.transformer.stage import Stage


def weights(model: Stage, groups: Groups) -> dict[str, ShardedTensor]:
    """As `inventory`, and of primary weights copies in the run's dtype: the numbers that their codes mean, not the masters."""
    primary = {quantiser.name: quantiser.primary for quantiser in quantisers(model)}
    found, known = {}, inventory(model, groups)
    for name, entry in declared(model).items():
        held = primary.get(name)
        if is_hollow(entry.tensor):
            assert held is not None, f"{name}: nothing has its values"
            data = held.rows.dequantise(entry.tensor.dtype).view(entry.tensor.shape)
            found[name] = piece_of(name, entry, data, groups)
        elif name in known:
            found[name] = known[name]
    return found
