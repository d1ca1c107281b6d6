"""Mixtral: grouped-query attention, and in every layer a few large experts of which a token uses two."""

from core.config.family import DenseKin, Family
from models.mixtral.architecture import SIZES
from models.mixtral.huggingface import HUGGINGFACE
from models.mixtral.presets import CONTINUED, PRESETS

FAMILY = Family(
    name="mixtral",
    title="Mixtral",
    model_type="mixtral",
    sizes=SIZES,
    presets=PRESETS,
    huggingface=HUGGINGFACE,
    continued=CONTINUED,
    dense=(DenseKin(model_type="llama"), DenseKin(model_type="mistral")),
)
