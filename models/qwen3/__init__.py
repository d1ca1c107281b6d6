"""Qwen3 with Mixture-of-Experts: normalised query and key heads, many small experts chosen by a softmax."""

from core.config.family import DenseKin, Family, TextSplit
from models.qwen3.architecture import SIZES
from models.qwen3.huggingface import HUGGINGFACE
from models.qwen3.presets import CONTINUED, PRESETS

# As in the tokenizer.json of the releases; every digit is a word of its own.
TEXT = TextSplit(
    pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    composed=True,
)
FAMILY = Family(
    name="qwen3",
    title="Qwen3 MoE",
    model_type="qwen3_moe",
    sizes=SIZES,
    presets=PRESETS,
    huggingface=HUGGINGFACE,
    continued=CONTINUED,
    dense=(DenseKin(model_type="qwen3", head_norm=True), DenseKin(model_type="qwen2", attention_bias=True, text=TEXT)),
)
