"""Set-ups per hardware."""

from core.config.small import TINY_CPU, TINY_GPU

PRESETS = (TINY_CPU, TINY_GPU)
