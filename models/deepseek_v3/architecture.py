"""DeepSeek-V3 as published: arXiv 2412.19437 section 4.2, and the released config.json; Moonlight is a smaller one of the same shape."""

from core.config.architecture import (
    MLA,
    AuxLoss,
    Dense,
    ExpertBias,
    Groups,
    Layer,
    ModelConfig,
    MoE,
    MultiToken,
    RMSNorm,
    Rope,
    Router,
    SharedExperts,
    Yarn,
    repeat,
)
from core.config.family import Size

# The norms of the two latents keep this eps whatever the model's other norms have: so does the released code.
LATENT_NORM = RMSNorm(eps=1e-6)
# Section 4.2: the weight of the prediction loss during the first 10T tokens.
PREDICTION_WEIGHT = 0.3
# Section 4.2: the coefficient of the sequence-wise loss, which the released config.json leaves out.
SEQUENCE_LOSS = 1e-4


def router(
    *, groups: Groups | None, scale: float, normalise: bool = True, coefficient: float = SEQUENCE_LOSS
) -> Router:
    """The auxiliary-loss-free router of section 2.1.2, with the small sequence-wise loss where its coefficient is not zero."""
    loss = (AuxLoss(scope="sequence", coefficient=coefficient),) if coefficient else ()
    balance = (ExpertBias(rate=1e-3), *loss)
    return Router(score="sigmoid", normalise=normalise, groups=groups, scale=scale, balance=balance)


V3_ATTENTION = MLA(
    heads=128, query_rank=1536, latent_rank=512, nope_dim=128, rope_dim=64, value_dim=128, latent_norm=LATENT_NORM
)
V3_EXPERTS = MoE(
    experts=256,
    top_k=8,
    expert_ffn=2048,
    shared=SharedExperts(count=1),
    router=router(groups=Groups(total=8, kept=4), scale=2.5),
)
V3_671B = ModelConfig(
    vocab=129280,
    hidden=7168,
    max_tokens=163840,
    norm=RMSNorm(eps=1e-6),
    rope=Yarn(theta=1e4, factor=40.0, trained_tokens=4096, mscale=1.0, mscale_all_dim=1.0),
    layers=repeat(3, Layer(attention=V3_ATTENTION, mlp=Dense(ffn=18432)))
    + repeat(58, Layer(attention=V3_ATTENTION, mlp=V3_EXPERTS)),
    predict_ahead=MultiToken(depth=1, loss_weight=PREDICTION_WEIGHT),
)

MOONLIGHT_ATTENTION = MLA(
    heads=16, query_rank=None, latent_rank=512, nope_dim=128, rope_dim=64, value_dim=128, latent_norm=LATENT_NORM
)
MOONLIGHT_EXPERTS = MoE(
    experts=64,
    top_k=6,
    expert_ffn=1408,
    shared=SharedExperts(count=2),
    router=router(groups=None, scale=2.446, coefficient=1e-3),
)
MOONLIGHT_16B = ModelConfig(
    vocab=163840,
    hidden=2048,
    max_tokens=8192,
    norm=RMSNorm(eps=1e-5),
    rope=Rope(theta=5e4),
    layers=repeat(1, Layer(attention=MOONLIGHT_ATTENTION, mlp=Dense(ffn=11264)))
    + repeat(26, Layer(attention=MOONLIGHT_ATTENTION, mlp=MOONLIGHT_EXPERTS)),
)

TINY_ATTENTION = MLA(
    heads=8, query_rank=96, latent_rank=64, nope_dim=32, rope_dim=16, value_dim=32, latent_norm=LATENT_NORM
)
TINY_EXPERTS = MoE(
    experts=32,
    top_k=4,
    expert_ffn=96,
    shared=SharedExperts(count=1),
    # A run of a few hundred steps is too short for the bias alone, which moves by a thousandth a step.
    router=router(groups=Groups(total=4, kept=2), scale=2.5, coefficient=2e-2),
)
TINY = ModelConfig(
    vocab=4096,
    hidden=256,
    max_tokens=512,
    embedding_std=1.0,
    norm=RMSNorm(eps=1e-6),
    rope=Yarn(theta=1e4, factor=2.0, trained_tokens=256, mscale=1.0, mscale_all_dim=1.0),
    layers=repeat(1, Layer(attention=TINY_ATTENTION, mlp=Dense(ffn=768)))
    + repeat(3, Layer(attention=TINY_ATTENTION, mlp=TINY_EXPERTS)),
    predict_ahead=MultiToken(depth=1, loss_weight=PREDICTION_WEIGHT),
)

SIZES = (
    Size(name="tiny", model=TINY, source="this zoo: the same architecture for two CPU cores"),
    Size(
        name="16b",
        model=MOONLIGHT_16B,
        source="arXiv 2502.16982, and config.json of the release",
        published="moonshotai/Moonlight-16B-A3B",
    ),
    Size(
        name="671b",
        model=V3_671B,
        source="arXiv 2412.19437 section 4.2, and config.json of the release",
        published="deepseek-ai/DeepSeek-V3",
    ),
)
