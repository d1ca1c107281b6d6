"""The learning rate of each step, as a pure function."""

from __future__ import annotations

import math

from core.config.run import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, schedule_steps: int) -> float:
    """The rate for step `step` (0 is the first) of a schedule of `schedule_steps` steps; beyond its end the last value holds.

    Linear warm-up over warmup_steps reaches the full rate at step warmup_steps - 1. Then `cosine` starts at the full rate and
    reaches min_learning_rate in the schedule's last step (where warm-up leaves it a single step, that one has the full
    rate); `wsd` (warm-up, stable, decay) stays and falls linearly over the last decay_steps.
    """
    step = min(step, schedule_steps - 1)
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    high, low = config.learning_rate, config.min_learning_rate
    if config.schedule == "wsd":
        left = schedule_steps - 1 - step
        share = min(1.0, left / config.decay_steps) if config.decay_steps else 1.0
        return low + (high - low) * share
    span = max(1, schedule_steps - 1 - config.warmup_steps)
    done = (step - config.warmup_steps) / span
    return low + (high - low) * 0.5 * (1.0 + math.cos(math.pi * done))
