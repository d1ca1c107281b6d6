"""A model family: its sizes, its tuned set-ups per hardware, and how its published checkpoints are named."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from core.config.architecture import ModelConfig
from core.config.execution import ExecutionConfig
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, OptimizerConfig, TrainConfig
from core.errors import ConfigError, Fault


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of a family. `source` says where the numbers stand; `published` is the checkpoint that has them, if any."""

    name: str
    model: ModelConfig
    source: str
    published: str | None = None


# published: a source states the set-up as it is here. derived: made from one for other hardware, or corrected. tested: it ran here.
Status = Literal["published", "derived", "tested"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a source measured with a set-up, of one GPU: tokens a second, and model TFLOPS (paper.md section 2)."""

    tokens_per_second: float | None = None
    tflops: float | None = None
    source: str


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A tuned set-up of one size on one kind of hardware. size: None for whatever weights a run begins with.

    name: by which `--preset` finds it among those of its size and hardware; the first of them is what is taken without. source:
    where it stands. figure: what its source measured. notes: where sources disagree, what was corrected, what to know; a sentence each.
    environment: variables that its source sets beside those that follow from the settings (launch/environment.py).
    """

    name: str = "default"
    size: str | None
    hardware: str
    ranks: int
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    execution: ExecutionConfig = ExecutionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    environment: tuple[tuple[str, str], ...] = ()
    status: Status = "tested"
    source: str = "this zoo"
    figure: Published | None = None
    notes: tuple[str, ...] = ()


class HuggingFace(Protocol):
    """How a family's published folders map to our model: `models/<name>/huggingface.py` provides one as HUGGINGFACE."""

    def read_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """The model that a config.json declares. Raises RequestError naming each field that this family cannot express."""
        ...

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """The config.json that declares `model`."""
        ...

    def rules(self, model: ModelConfig) -> tuple[Any, ...]:
        """The rules (core/state/rules.py) between our canonical names and the published ones."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextSplit:
    """How a byte-level tokenizer cuts text into words: by a regular expression, after Unicode composition (NFC) or without."""

    pattern: str
    composed: bool = False


@dataclass(frozen=True, kw_only=True)
class DenseKin:
    """Dense models made of the parts that a family is made of, so that they can become one of it (ckpt/upcycle.py).

    Their folders carry `model_type`, and so do GGUF files as their architecture. head_norm: queries and keys have a norm per head.
    attention_bias: queries, keys and values have biases. text: of tokenizers that GGUF files call by that `model_type`.
    """

    model_type: str
    head_norm: bool = False
    attention_bias: bool = False
    text: TextSplit | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model package's declarations.

    continued: set-ups for going on from weights that are there, one for each kind of hardware. dense: the dense models that its own
    grew out of.
    """

    name: str
    title: str
    model_type: str
    sizes: tuple[Size, ...]
    presets: tuple[Preset, ...]
    huggingface: HuggingFace
    continued: tuple[Preset, ...] = ()
    dense: tuple[DenseKin, ...] = ()

    def size(self, name: str) -> Size:
        """The size called `name`. Raises ConfigError naming those there are."""
        for size in self.sizes:
            if size.name == name:
                return size
        works = ", ".join(size.name for size in self.sizes)
        raise ConfigError([Fault(setting="--size", value=name, rule=f"is not a size of {self.name}", works=works)])


def all_families() -> tuple[Family, ...]:
    """Every family in `models/`, by name."""
    package = importlib.import_module("models")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    return tuple(importlib.import_module(f"models.{name}").FAMILY for name in names)


def find_family(name: str) -> Family:
    """The family called `name`, or the one whose published checkpoints carry it as `model_type`. Raises ConfigError."""
    families = all_families()
    for family in families:
        if name in (family.name, family.model_type):
            return family
    works = ", ".join(family.name for family in families)
    raise ConfigError([Fault(setting="MODEL", value=name, rule="is not a model of the zoo", works=works)])
