"""A state that can be read by boxes: what converting, resharding, exporting and upcycling read from, whatever it is stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from core.config.architecture import ModelConfig
from core.state.box import Box

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True, kw_only=True)
class Form:
    """Global shape and element type (a name of ckpt/dtype.py) of a canonical tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Described:
    """What is known of a model beside its tensors.

    family: a name of the zoo, None where nobody said. model: its architecture. published: the config.json that it came with, None for a
    model that never was a published folder. assets: other files of that folder (tokenizer, generation settings) by name.
    """

    family: str | None
    model: ModelConfig
    published: Mapping[str, Any] | None
    assets: Mapping[str, bytes]


class Source(Protocol):
    """Canonical tensors, named as in a checkpoint (`model.layers.0.…`, `optimizer.exp_avg.…`), that are read piece by piece."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """Every tensor."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """The piece `box` of a tensor, contiguous, on the CPU, in its own element type. Raises CheckpointError where it is damaged."""
        ...

    def describe(self) -> Described | None:
        """The model that the tensors are of; None where nothing says so."""
        ...
