"""The whole model on one rank: packing, sizes at the edge, and how its losses add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from core.config.architecture import Dense, Layer, ModelConfig
from core.config.mapping import ParallelConfig
from core.config.run import IGNORE
from core.layers.embedding import Vocabulary
from core.layers.place import Place
from core.parallel.groups import one_rank
from core.state.inventory import initialise, inventory
from core.transformer.context import Totals
from core.transformer.stage import Stage, build_model
from tests.core.tiny import (
    ATTENTION,
    GLOBAL_LOSS,
    SEQUENCE_LOSS,
    Z_LOSS,
    batch_of,
    deepseek,
    empty_batch,
    losses_of,
    microbatches,
    mixtral,
    qwen3,
    total_of,
)

LENGTHS = (3, 1, 7, 5, 1)
KINDS = {
    "mixtral": mixtral((SEQUENCE_LOSS, Z_LOSS)),
    "qwen3": qwen3((SEQUENCE_LOSS,)),
    "deepseek": deepseek((SEQUENCE_LOSS, Z_LOSS)),
    "dense": replace(mixtral(), layers=(Layer(attention=ATTENTION, mlp=Dense(ffn=8)),)),
}


def built(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Stage:
    model = build_model(config, dtype=dtype)
    initialise(model, 3)
    return model


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 31, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", KINDS)
def test_packed_sequences_of_odd_lengths_equal_the_same_sequences_one_by_one(name: str) -> None:
    """Logits, every loss and every gradient; all totals are those of the whole."""
    model = built(KINDS[name])
    tokens, labels = text(sum(LENGTHS)), text(sum(LENGTHS), seed=1)
    whole = batch_of(tokens, labels, LENGTHS)
    totals = model.totals_of(whole)
    ends = torch.tensor([0, *accumulate(LENGTHS)])
    starts = ends[:-1].tolist()
    packed = model(whole.tokens, ends)
    alone = torch.cat([model(whole.tokens[a : a + n]) for a, n in zip(starts, LENGTHS, strict=True)])
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)
    parameters = list(model.parameters())
    together = total_of(model, whole, totals)
    gradients = torch.autograd.grad(together, parameters)
    sums: list[Tensor] = [torch.zeros_like(parameter) for parameter in parameters]
    total = 0.0
    for a, n in zip(starts, LENGTHS, strict=True):
        one = total_of(model, batch_of(tokens[a : a + n], labels[a : a + n], (n,)), totals)
        total += float(one.detach())
        sums = [s + g for s, g in zip(sums, torch.autograd.grad(one, parameters), strict=True)]
    assert float(together.detach()) == pytest.approx(total, rel=1e-11)
    for (path, _), found, expected in zip(model.named_parameters(), gradients, sums, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=path: n + m)


@pytest.mark.parametrize("name", KINDS)
def test_no_token_sees_a_later_one_or_another_sequence(name: str) -> None:
    model = built(KINDS[name])
    tokens = torch.tensor(text(sum(LENGTHS)))
    ends = torch.tensor([0, *accumulate(LENGTHS)])
    changed = tokens.clone()
    changed[8] = (changed[8] + 1) % 31  # in the middle of the third sequence, tokens 4 to 10
    same = [torch.equal(a, b) for a, b in zip(model(tokens, ends), model(changed, ends), strict=True)]
    assert same[:8] == [True] * 8 and same[11:] == [True] * 6 and same[8:11] == [False] * 3


@pytest.mark.parametrize("name", KINDS)
def test_no_token_and_one_token_pass_forward_and_backward(name: str) -> None:
    for count in (0, 1):
        model = built(KINDS[name])
        batch = batch_of(text(count), text(count, seed=1), (1,)) if count else empty_batch()
        assert model(batch.tokens).shape == (count, 31)
        total_of(model, batch).backward()
        for path, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape, path
            assert bool(parameter.grad.isfinite().all()) and (count or not parameter.grad.any()), path


def test_e5_the_head_takes_logits_as_a_whole_and_gives_the_known_value() -> None:
    """Logits [0, 1, 2, 3] and label 3: ln(1 + e^-1 + e^-2 + e^-3) = 0.4402, per token and summed."""
    place = Place(groups=one_rank(), parallel=ParallelConfig(), dtype=torch.float32, device=torch.device("cpu"))
    head = Vocabulary(4, 1, init_std=1.0, place=place)
    with torch.no_grad():
        head.weight.copy_(torch.arange(4.0)[:, None])
    one = torch.ones(1, 1)
    assert float(head.loss(one, torch.tensor([3])).detach()) == pytest.approx(0.4401897, rel=1e-6)
    assert float(head.loss(one.expand(3, 1), torch.tensor([3, IGNORE, 3])).detach()) == pytest.approx(
        0.8803794, rel=1e-6
    )


def test_e4_a_shared_embedding_has_the_sum_of_the_gradients_of_its_uses() -> None:
    """Tied and untied models of equal weights: the tied gradient is that of embedding and head together."""
    tied, untied = (built(replace(KINDS["deepseek"], tied_embeddings=flag)) for flag in (True, False))
    with torch.no_grad():
        assert untied.head is not None and tied.head is None
        untied.head.weight.copy_(untied.embedding.weight)
    batch = microbatches(0)[0]
    for model in (tied, untied):
        total_of(model, batch).backward()
    gradients = [m.weight.grad for m in (tied.embedding, untied.embedding, untied.head)]
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)
    torch.testing.assert_close(gradients[0], gradients[1] + gradients[2], rtol=1e-10, atol=1e-13)


def test_the_total_is_the_sum_of_its_named_parts() -> None:
    model = built(deepseek((SEQUENCE_LOSS, GLOBAL_LOSS, Z_LOSS)))
    batch = microbatches(0)[0]
    totals = Totals(tokens=200, labels=150, ahead=(140, 110))
    found = losses_of(model, batch, totals)
    assert found.share is not None and found.tokens is not None
    expected = float(found.tokens) / 150 + 0.15 * float(found.ahead[0]) / 140 + 0.15 * float(found.ahead[1]) / 110
    expected += sum(float(share) for share in found.balance.values())
    assert float(found.share.detach()) == pytest.approx(expected, rel=1e-12)
    layers = {"layers.1", "mtp.0.layer", "mtp.1.layer"}
    assert set(found.routings) == layers
    assert set(found.balance) == {f"{l}/{n}" for l in layers for n in ("aux_sequence", "aux_global_batch", "z")}
    assert not any(t.requires_grad for t in (found.tokens, *found.ahead, *found.balance.values()))


def test_b17_generation_and_evaluation_compute_no_balance_loss() -> None:
    model = built(deepseek())
    out = model.run(0, None, batch_of([5], [IGNORE], [1]), purpose="hidden")
    assert set(out.routings) == {"layers.1"}
    assert all(routing.balance is None for routing in out.routings.values())


def test_masked_tokens_reach_no_expert_and_no_count() -> None:
    model = built(deepseek((SEQUENCE_LOSS, Z_LOSS)))
    batch = batch_of(text(9), [*text(6, seed=1), IGNORE, IGNORE, IGNORE], (9,))
    valid = torch.tensor([True] * 6 + [False] * 3)
    batch = replace(batch, valid=valid)
    totals = model.totals_of(batch)
    assert totals.tokens == 6
    masked = losses_of(model, batch, totals)
    short = batch_of(batch.tokens[:6].tolist(), batch.labels[:6].tolist(), (6,))
    assert int(masked.routings["layers.1"].counts_E.sum()) == 6 * 4
    assert masked.share is not None
    assert float(masked.share.detach()) == pytest.approx(float(total_of(model, short, totals).detach()), rel=1e-11)


@pytest.mark.parametrize("name", KINDS)
def test_every_tensor_has_its_canonical_name_and_global_shape(name: str) -> None:
    pieces = inventory(built(KINDS[name]), one_rank())
    hidden, vocab = (16,), (31, 16)
    expected = {"embedding.weight": vocab, "final_norm.weight": hidden, "layers.0.mlp_norm.weight": hidden}
    expected |= {
        "mixtral": {
            "head.weight": vocab,
            "layers.1.attention.key.weight": (8, 16),
            "layers.1.mlp.experts.gate_up": (4, 2, 8, 16),
            "layers.1.mlp.experts.down": (4, 16, 8),
            "layers.1.mlp.router.weight": (4, 16),
        },
        "qwen3": {"layers.0.attention.query_norm.weight": (8,), "layers.0.attention.output.weight": (16, 16)},
        "deepseek": {
            "layers.0.mlp.gate_up": (2, 24, 16),
            "layers.1.attention.latent_down.weight": (12, 16),
            "layers.1.attention.query_up.weight": (16, 6),
            "layers.1.mlp.shared.gate_up": (2, 16, 16),
            "layers.1.mlp.shared.down": (16, 16),
            "mtp.1.projection.weight": (16, 32),
            "mtp.1.layer.mlp.experts.down": (16, 16, 8),
            "mtp.1.final_norm.weight": hidden,
        },
        "dense": {"layers.0.mlp.down": (16, 8)},
    }[name]
    assert {n: pieces[n].shape for n in expected} == expected
    assert ("head.weight" in pieces) == (name != "qwen3")
    assert not any(n.startswith(("mtp.0.embedding.", "mtp.0.head.")) for n in pieces)
