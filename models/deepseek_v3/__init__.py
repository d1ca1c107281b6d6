"""DeepSeek-V3: latent attention, many small experts and a shared one, balanced by a bias, predicting two tokens ahead."""

from core.config.family import Family
from models.deepseek_v3.architecture import SIZES
from models.deepseek_v3.huggingface import HUGGINGFACE
from models.deepseek_v3.presets import CONTINUED, PRESETS

FAMILY = Family(
    name="deepseek_v3",
    title="DeepSeek-V3",
    model_type="deepseek_v3",
    sizes=SIZES,
    presets=PRESETS,
    huggingface=HUGGINGFACE,
    continued=CONTINUED,
)
