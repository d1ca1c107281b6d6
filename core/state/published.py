"""Rules for the parts that many published families name alike; `models/<name>/huggingface.py` puts them together."""

from __future__ import annotations

from collections.abc import Mapping

from core.config.architecture import ModelConfig
from core.state.rules import Derived, Part, Rule, Share, plain


def ends(
    model: ModelConfig, *, embedding_copies: tuple[str, ...] = (), head_copies: tuple[str, ...] = ()
) -> tuple[Rule, ...]:
    """Embedding, final norm and head; a tied head is a copy of the embedding, and so are its copies."""
    norm = plain("final_norm.weight", "model.norm.weight")
    if model.tied_embeddings:
        copies = (*embedding_copies, "lm_head.weight", *head_copies)
        return plain("embedding.weight", "model.embed_tokens.weight", copies=copies), norm
    return (
        plain("embedding.weight", "model.embed_tokens.weight", copies=embedding_copies),
        norm,
        plain("head.weight", "lm_head.weight", copies=head_copies),
    )


def norms(ours: str, theirs: str) -> tuple[Rule, ...]:
    """The two norms of a layer."""
    return (
        plain(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight"),
        plain(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
    )


def grouped_query(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Grouped-query attention, with the norms per head that some families have."""
    names = {
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "output": "o_proj",
        "query_norm": "q_norm",
        "key_norm": "k_norm",
    }
    return _attention(ours, theirs, names)


def latent(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Multi-head latent attention, with a compressed query or without."""
    names = {
        "query": "q_proj",
        "query_down": "q_a_proj",
        "query_norm": "q_a_layernorm",
        "query_up": "q_b_proj",
        "latent_down": "kv_a_proj_with_mqa",
        "latent_norm": "kv_a_layernorm",
        "latent_up": "kv_b_proj",
        "output": "o_proj",
    }
    return _attention(ours, theirs, names)


def _attention(ours: str, theirs: str, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Every matrix of an attention under its own name; its norms are none."""
    return tuple(
        plain(f"{ours}.attention.{a}.weight", f"{theirs}.self_attn.{b}.weight", float8=not a.endswith("norm"))
        for a, b in names.items()
    )


def swiglu(ours: str, theirs: str) -> tuple[Rule, ...]:
    """One SwiGLU MLP: gate and up are the two halves of our pair."""
    pair = (Part(name=f"{theirs}.gate_proj.weight", at=(0,)), Part(name=f"{theirs}.up_proj.weight", at=(1,)))
    return (
        Rule(name=f"{ours}.gate_up", forms=(pair,), float8=True),
        plain(f"{ours}.down", f"{theirs}.down_proj.weight", float8=True),
    )


def experts(ours: str, theirs: str, *, fused: str, names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Routed experts: one tensor per expert under `theirs` (gate, up and down called `names`), or, as transformers 5 has them
    in memory, all experts in one tensor under `fused` with the rows of gate before those of up."""
    gate, up, down = (f"{theirs}.{{expert}}.{name}.weight" for name in names)
    pair = (Part(name=gate, at=("expert", 0)), Part(name=up, at=("expert", 1)))
    halves = tuple(
        Part(name=f"{fused}.gate_up_proj", at=(None, half), share=Share(dimension=1, index=half, count=2))
        for half in (0, 1)
    )
    alone, together = (Part(name=down, at=("expert",)),), (Part(name=f"{fused}.down_proj"),)
    return (
        Rule(name=f"{ours}.gate_up", forms=(pair, halves), float8=True),
        Rule(name=f"{ours}.down", forms=(alone, together), float8=True),
    )


def frequencies() -> tuple[Derived, ...]:
    """The rotary frequencies that old files carry."""
    layer = Derived(name="model.layers.{layer}.self_attn.rotary_emb.inv_freq")
    return layer, Derived(name="model.rotary_emb.inv_freq")
