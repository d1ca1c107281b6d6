"""Mixtral as published: arXiv 2401.04088, and the released config.json of each size."""

from core.config.architecture import GQA, AuxLoss, Layer, ModelConfig, MoE, RMSNorm, Rope, Router, ZLoss, repeat
from core.config.family import Size

# The softmax over the chosen two logits is the published rule. The released configs carry the coefficient of the balancing
# loss; the z-loss is ours (ST-MoE, arXiv 2202.08906, gives 1e-3).
Z_LOSS = ZLoss(coefficient=1e-3)


def router(coefficient: float) -> Router:
    """Mixtral's router with a balancing loss of the given coefficient, none where it is zero."""
    balance = (AuxLoss(scope="microbatch", coefficient=coefficient),) if coefficient else ()
    return Router(score="softmax_after_top_k", normalise=False, balance=(*balance, Z_LOSS))


MIXTRAL_8X7B = ModelConfig(
    vocab=32000,
    hidden=4096,
    max_tokens=32768,
    norm=RMSNorm(eps=1e-5),
    rope=Rope(theta=1e6),
    layers=repeat(
        32,
        Layer(
            attention=GQA(heads=32, kv_heads=8, head_dim=128),
            mlp=MoE(experts=8, top_k=2, expert_ffn=14336, router=router(0.02)),
        ),
    ),
)
MIXTRAL_8X22B = ModelConfig(
    vocab=32000,
    hidden=6144,
    max_tokens=65536,
    norm=RMSNorm(eps=1e-5),
    rope=Rope(theta=1e6),
    layers=repeat(
        56,
        Layer(
            attention=GQA(heads=48, kv_heads=8, head_dim=128),
            mlp=MoE(experts=8, top_k=2, expert_ffn=16384, router=router(0.001)),
        ),
    ),
)
TINY = ModelConfig(
    vocab=4096,
    hidden=256,
    max_tokens=512,
    embedding_std=1.0,
    norm=RMSNorm(eps=1e-5),
    rope=Rope(theta=1e4),
    layers=repeat(
        4,
        Layer(
            attention=GQA(heads=8, kv_heads=2, head_dim=32),
            mlp=MoE(experts=8, top_k=2, expert_ffn=384, router=router(0.02)),
        ),
    ),
)

SIZES = (
    Size(name="tiny", model=TINY, source="this zoo: the same architecture for two CPU cores"),
    Size(
        name="8x7b",
        model=MIXTRAL_8X7B,
        source="arXiv 2401.04088 table 1, and config.json of the release",
        published="mistralai/Mixtral-8x7B-v0.1",
    ),
    Size(
        name="8x22b",
        model=MIXTRAL_8X22B,
        source="config.json of the release",
        published="mistralai/Mixtral-8x22B-v0.1",
    ),
)
