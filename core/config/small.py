"""Set-ups that every family shares: its `tiny` size for a few minutes on two CPU cores, and going on from weights that are there."""

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

# Trained weights take a small part of the learning rate that random ones do, and forget what they know at more; so do upcycled ones,
# whose halves of an expert come apart as their routers learn.
CONTINUED_CPU = Preset(
    size=None,
    hardware="cpu",
    ranks=2,
    parallel=ParallelConfig(ep=2),
    train=TrainConfig(
        steps=100, sequence_tokens=512, global_batch=4, microbatch=1, eval_interval=25, eval_sequences=16
    ),
    optimizer=OptimizerConfig(learning_rate=3e-5, min_learning_rate=3e-6, warmup_steps=10),
)
CONTINUED_GPU = replace(
    CONTINUED_CPU, hardware="gpu", ranks=1, parallel=ParallelConfig(), train=replace(CONTINUED_CPU.train, microbatch=4)
)
