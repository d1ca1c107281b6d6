"""Set-ups per hardware: short runs that show a real model learning real text."""

from dataclasses import replace

from core.config.family import Preset
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig, TrainConfig

OPTIMIZER = OptimizerConfig(learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=20)
CPU = Preset(
    size="tiny",
    hardware="cpu",
    ranks=2,
    parallel=ParallelConfig(ep=2),
    train=TrainConfig(steps=240, sequence_tokens=256, global_batch=8, microbatch=4),
    optimizer=OPTIMIZER,
)
GPU = replace(CPU, hardware="gpu", ranks=1, parallel=ParallelConfig(), train=replace(CPU.train, microbatch=8))

PRESETS = (CPU, GPU)
