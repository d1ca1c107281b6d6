"""Qwen3 with Mixture-of-Experts: normalised query and key heads, many small experts chosen by a softmax."""

from core.config.family import Family
from models.qwen3.architecture import SIZES
from models.qwen3.huggingface import HUGGINGFACE
from models.qwen3.presets import PRESETS

FAMILY = Family(
    name="qwen3",
    title="Qwen3 MoE",
    model_type="qwen3_moe",
    sizes=SIZES,
    presets=PRESETS,
    huggingface=HUGGINGFACE,
)
