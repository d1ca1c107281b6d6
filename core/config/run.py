"""Everything one training run is made of, as one frozen value that can be written to JSON and read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.config.architecture import ModelConfig
from core.config.execution import ExecutionConfig
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import PrecisionConfig

# The label of a token that predicts nothing: it is in no loss and in no count.
IGNORE = -100

ScheduleName = Literal["cosine", "wsd"]
# Loads that routing can be forced to: all experts alike; one expert that every token goes to; that, and another one each step; the
# experts of one rank before all others; half of the experts (those of the higher ranks) idle.
WorkloadName = Literal["balanced", "hot_expert", "rotating", "hot_rank", "zero_load"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and batch of a run.

    sequence_tokens: length of every sequence. global_batch: sequences of one optimizer step, over all ranks. microbatch: sequences that
    a rank takes through the model at once. seed: of weights, data order and all other random numbers.
    steps: where this run stops. schedule_steps: how long the learning-rate schedule is (None: as long as `steps`).
    eval_interval: steps between measurements of the validation loss, each over `eval_sequences` sequences.
    sample_tokens: length of the generated sample before and after training. forced_routing: experts are dealt to the tokens in training
    instead of chosen by the routers, to measure speed and memory under a known load; losses then mean nothing.
    """

    steps: int
    schedule_steps: int | None = None
    sequence_tokens: int
    global_batch: int
    microbatch: int
    seed: int = 0
    eval_interval: int = 50
    eval_sequences: int = 32
    sample_tokens: int = 64
    forced_routing: WorkloadName | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay on matrices only, and a learning rate that warms up linearly.

    schedule: `cosine` falls to min_learning_rate at the end; `wsd` stays flat and falls linearly over the last decay_steps.
    clip_norm: largest global gradient norm (None: no clipping).
    """

    learning_rate: float
    min_learning_rate: float = 0.0
    warmup_steps: int = 0
    schedule: ScheduleName = "cosine"
    decay_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read: `path` of a file or folder (None: the Python standard library's own sources).

    tokenizer: a tokenizer.json to use (None: a byte-level BPE of the model's vocabulary, trained on the data once).
    validation_fraction: share of the documents, split by document, kept for the validation loss.
    """

    path: str | None = None
    tokenizer: str | None = None
    validation_fraction: float = 0.05


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint every `interval` steps (and at the end); the newest `keep` are kept.

    asynchronous: training goes on while a checkpoint is written, from copies in host memory; otherwise it stops until all is on the
    disk. address: where checkpoints lie, a folder or the URL of an object store such as s3://bucket/run (None: the run's folder).
    store: what its files are besides the zoo's own: Zarr arrays, or a folder of torch.distributed.checkpoint. codec: `zstd` makes
    them smaller and slower to write, in Zarr only.
    """

    interval: int = 100
    keep: int = 2
    asynchronous: bool = True
    address: str | None = None
    store: Literal["zarr", "torch_dist"] = "zarr"
    codec: Literal["raw", "zstd"] = "raw"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: what is computed, where, on what, how."""

    family: str
    size: str
    hardware: str
    ranks: int
    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    data: DataConfig
    precision: PrecisionConfig
    checkpoint: CheckpointConfig
    memory: MemoryConfig = MemoryConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @property
    def replicas(self) -> int:
        """Data-parallel ranks: what tp, cp and pp leave of the world."""
        return self.ranks // (self.parallel.tp * self.parallel.cp * self.parallel.pp)

    @property
    def microbatches(self) -> int:
        """Of one replica in a step; at least one. (core/check has the rule that the batch divides.)"""
        return max(1, self.train.global_batch // (self.train.microbatch * self.replicas))
