"""Set-ups for every family's `tiny` size: a few minutes on two CPU cores, enough to see a real model learn real text."""

from __future__ import annotations

from dataclasses import replace

from core.config.family import Preset
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig, TrainConfig

TINY_CPU = Preset(
    size="tiny",
    hardware="cpu",
    ranks=2,
    parallel=ParallelConfig(ep=2),
    train=TrainConfig(steps=240, sequence_tokens=256, global_batch=8, microbatch=4),
    optimizer=OptimizerConfig(learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=20),
)
TINY_GPU = replace(
    TINY_CPU, hardware="gpu", ranks=1, parallel=ParallelConfig(), train=replace(TINY_CPU.train, microbatch=8)
)
