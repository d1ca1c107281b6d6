"""Qwen3 with Mixture-of-Experts as published: arXiv 2505.09388 table 2, and the released config.json of each size."""

from dataclasses import replace

from core.config.architecture import GQA, AuxLoss, Layer, ModelConfig, MoE, RMSNorm, Rope, Router, Yarn, repeat
from core.config.family import Size

NORM = RMSNorm(eps=1e-6)


def router(coefficient: float, *, normalise: bool = True) -> Router:
    """Qwen3's router: the report balances over the global batch (section 2); no loss where the coefficient is zero."""
    balance = (AuxLoss(scope="global_batch", coefficient=coefficient),) if coefficient else ()
    return Router(score="softmax", normalise=normalise, balance=balance)


# In both sizes heads * head_dim is twice the hidden size.
QWEN3_30B_A3B = ModelConfig(
    vocab=151936,
    hidden=2048,
    max_tokens=40960,
    norm=NORM,
    rope=Rope(theta=1e6),
    layers=repeat(
        48,
        Layer(
            attention=GQA(heads=32, kv_heads=4, head_dim=128, head_norm=NORM),
            mlp=MoE(experts=128, top_k=8, expert_ffn=768, router=router(1e-3)),
        ),
    ),
)
QWEN3_235B_A22B = ModelConfig(
    vocab=151936,
    hidden=4096,
    max_tokens=40960,
    norm=NORM,
    rope=Rope(theta=1e6),
    layers=repeat(
        94,
        Layer(
            attention=GQA(heads=64, kv_heads=4, head_dim=128, head_norm=NORM),
            mlp=MoE(experts=128, top_k=8, expert_ffn=1536, router=router(1e-3)),
        ),
    ),
)
# The model card stretches the rotation so for 131,072 tokens; the weights are those of the release.
QWEN3_235B_A22B_128K = replace(
    QWEN3_235B_A22B, max_tokens=131072, rope=Yarn(theta=1e6, factor=4.0, trained_tokens=32768)
)
TINY = ModelConfig(
    vocab=4096,
    hidden=256,
    max_tokens=512,
    embedding_std=1.0,
    norm=NORM,
    rope=Rope(theta=1e4),
    layers=repeat(
        4,
        Layer(
            attention=GQA(heads=8, kv_heads=2, head_dim=64, head_norm=NORM),
            mlp=MoE(experts=32, top_k=4, expert_ffn=96, router=router(2e-2)),
        ),
    ),
)

SIZES = (
    Size(name="tiny", model=TINY, source="this zoo: the same architecture for two CPU cores"),
    Size(
        name="30b_a3b",
        model=QWEN3_30B_A3B,
        source="arXiv 2505.09388 table 2, and config.json of the release",
        published="Qwen/Qwen3-30B-A3B",
    ),
    Size(
        name="235b_a22b",
        model=QWEN3_235B_A22B,
        source="arXiv 2505.09388 table 2, and config.json of the release",
        published="Qwen/Qwen3-235B-A22B",
    ),
    Size(
        name="235b_a22b_128k",
        model=QWEN3_235B_A22B_128K,
        source="as 235b_a22b, with the YaRN of the model card of Qwen/Qwen3-235B-A22B for 131,072 tokens",
    ),
)
