"""What the ranks of a mapping hold of a checkpoint's tensors, from the real model, without any of them running."""

from __future__ import annotations

import math

from ckpt.plan import Held
from ckpt.source import MODEL_PREFIX, OPTIMIZER_PREFIX, Source
from core.config.architecture import ModelConfig
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError
from core.transformer.fake import FakeStages


def smallest_world(parallel: ParallelConfig) -> int:
    """The fewest ranks that both foldings of a mapping divide."""
    attention = parallel.tp * parallel.cp * parallel.pp
    experts = parallel.etp * parallel.ep * parallel.pp
    return math.lcm(attention, experts)


def held_under(source: Source, model: ModelConfig, parallel: ParallelConfig) -> list[list[Held]]:
    """What each rank of the smallest world of `parallel` holds of the tensors of `source`; moments lie as their parameters do.

    Raises CheckpointError with every tensor of the source that is not one of the model, and every one that it lacks.
    """
    stages = FakeStages(model, parallel, smallest_world(parallel))
    of: dict[str, list[str]] = {}
    for name in source.forms:
        of.setdefault(canonical(name), []).append(name)
    held = []
    met: set[str] = set()
    for rank in range(smallest_world(parallel)):
        pieces = stages.pieces(rank)
        met |= pieces.keys()
        held.append(
            [
                Held(name=n, shape=p.shape, dtype=source.forms[n].dtype, box=p.box, copy=p.copy, copies=p.copies)
                for name, p in pieces.items()
                for n in of.get(name, [])
            ]
        )
    faults = [f"{name}: is no tensor of the model" for name in sorted(of.keys() - met)]
    faults += [f"{name}: is a tensor of the model that is not there" for name in sorted(met - of.keys())]
    if faults:
        raise CheckpointError(
            "\n".join(["the tensors are not those of the model:", *(f"  {fault}" for fault in faults)])
        )
    return held


def canonical(name: str) -> str:
    """The model's name for what a checkpoint's tensor is, or is a moment of."""
    if name.startswith(OPTIMIZER_PREFIX):
        return name.removeprefix(OPTIMIZER_PREFIX).partition(".")[2]
    return name.removeprefix(MODEL_PREFIX)
