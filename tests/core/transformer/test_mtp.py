"""Prediction ahead against its definition, token by token: which embeddings go in, which labels come out, and how many count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.config.architecture import GQA, Layer, ModelConfig, MoE, MultiToken, Router
from core.config.run import IGNORE
from core.state.inventory import initialise
from core.transformer.context import Totals
from core.transformer.mtp import labels_ahead, shift_labels
from core.transformer.stage import PartOutput, Stage, build_model
from tests.core.tiny import NORM, batch_of, losses_of, mixtral, total_of

HEADS, HEAD_DIM, EXPERTS, TOP_K, EPS = 2, 4, 5, 2, NORM.eps
DOCUMENTS = (5, 1, 7, 2, 3)


def model_of(depth: int, tied: bool = False) -> ModelConfig:
    moe = MoE(experts=EXPERTS, top_k=TOP_K, expert_ffn=8, router=Router(score="softmax_after_top_k", normalise=False))
    layer = Layer(attention=GQA(heads=HEADS, kv_heads=1, head_dim=HEAD_DIM), mlp=moe)
    ahead = MultiToken(depth=depth, loss_weight=0.6)
    return replace(mixtral(), layers=(layer,), predict_ahead=ahead, tied_embeddings=tied)


def built(config: ModelConfig) -> Stage:
    model = build_model(config, dtype=torch.float64)
    initialise(model, 3)
    return model


def text(seed: int = 0) -> tuple[list[int], list[int]]:
    """Tokens and labels of the documents: the next token inside each, and for every second one a known token behind it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 31, (sum(DOCUMENTS),), generator=generator).tolist()
    labels = [*tokens[1:], 30]
    for i, end in enumerate(accumulate(DOCUMENTS)):
        if i % 2 == 0:
            labels[end - 1] = IGNORE
    return tokens, labels


def losses_on_text(model: Stage) -> tuple[PartOutput, Totals]:
    tokens, labels = text()
    batch = batch_of(tokens, labels, DOCUMENTS)
    return losses_of(model, batch), model.totals_of(batch)


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + EPS) * gain


def turned(x: Tensor, position: int) -> Tensor:
    """One head turned by the angles of its position; dimension i is paired with i + D / 2."""
    half = HEAD_DIM // 2
    out = list(x)
    for i in range(half):
        # the angles are float32 in the model, whatever it computes in
        angle = torch.tensor(float(position)) * (1e4 ** (-2 * torch.tensor(float(i)) / HEAD_DIM))
        c, s = angle.cos().double(), angle.sin().double()
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i] * s + x[i + half] * c
    return torch.stack(out)


def naive_layer(w: Mapping[str, Tensor], path: str, xs: list[Tensor]) -> list[Tensor]:
    """One GQA and MoE layer over one document, token by token."""
    normed = [rms(x, w[f"{path}.attention_norm.weight"]) for x in xs]
    keys = [turned(w[f"{path}.attention.key.weight"] @ n, p) for p, n in enumerate(normed)]
    values = [w[f"{path}.attention.value.weight"] @ n for n in normed]
    out = []
    for p, (x, n) in enumerate(zip(xs, normed, strict=True)):
        queries = (w[f"{path}.attention.query.weight"] @ n).view(HEADS, HEAD_DIM)
        heads = []
        for query in queries:
            q = turned(query, p)
            weights = torch.softmax(torch.stack([q @ keys[j] for j in range(p + 1)]) / math.sqrt(HEAD_DIM), 0)
            heads.append(sum(weights[j] * values[j] for j in range(p + 1)))
        mixed = x + w[f"{path}.attention.output.weight"] @ torch.cat(heads)
        out.append(mixed + naive_moe(w, f"{path}.mlp", rms(mixed, w[f"{path}.mlp_norm.weight"])))
    return out


def naive_moe(w: Mapping[str, Tensor], path: str, x: Tensor) -> Tensor:
    logits = w[f"{path}.router.weight"] @ x
    best = sorted(range(EXPERTS), key=lambda e: -float(logits[e].detach()))[:TOP_K]
    weights = torch.softmax(logits[best], 0)
    y = torch.zeros_like(x)
    for weight, e in zip(weights, best, strict=True):
        gate, up = (part @ x for part in w[f"{path}.experts.gate_up"][e])
        y = y + weight * (w[f"{path}.experts.down"][e] @ (gate * torch.sigmoid(gate) * up))
    return y


def naive_losses(model: Stage, depth: int) -> tuple[Tensor, list[Tensor], list[int]]:
    """Summed loss of the main head and of each module, and how many tokens each module predicts: document by document.

    Module d joins, at token i, the hidden state before with the embedding of token i + d + 1, where that is known, and
    predicts token i + d + 2, where that is known.
    """
    w = dict(model.named_parameters())
    head = w.get("head.weight", w["embedding.weight"])
    tokens, labels = text()
    zero = torch.zeros((), dtype=torch.float64)
    main, ahead, counts = zero, [zero] * depth, [0] * depth
    for a, b in pairwise((0, *accumulate(DOCUMENTS))):
        known = tokens[a:b] + ([labels[b - 1]] if labels[b - 1] != IGNORE else [])
        hidden = naive_layer(w, "layers.0", [w["embedding.weight"][t] for t in tokens[a:b]])
        hidden = [rms(h, w["final_norm.weight"]) for h in hidden]
        main = main + sum((nll(head, h, known[i + 1]) for i, h in enumerate(hidden) if i + 1 < len(known)), zero)
        for d in range(depth):
            joined = []
            for i, h in enumerate(hidden):
                if i + d + 1 >= len(known):
                    break
                embedded = rms(w["embedding.weight"][known[i + d + 1]], w[f"mtp.{d}.embedding_norm.weight"])
                both = torch.cat([embedded, rms(h, w[f"mtp.{d}.hidden_norm.weight"])])
                joined.append(w[f"mtp.{d}.projection.weight"] @ both)
            hidden = [rms(h, w[f"mtp.{d}.final_norm.weight"]) for h in naive_layer(w, f"mtp.{d}.layer", joined)]
            for i, h in enumerate(hidden):
                if i + d + 2 < len(known):
                    ahead[d] = ahead[d] + nll(head, h, known[i + d + 2])
                    counts[d] += 1
    return main, ahead, counts


def nll(head: Tensor, hidden: Tensor, label: int) -> Tensor:
    return torch.logsumexp(head @ hidden, 0) - (head @ hidden)[label]


@pytest.mark.parametrize("tied", [False, True])
def test_e4_losses_counts_and_every_gradient_are_those_of_the_definition_token_by_token(tied: bool) -> None:
    model = built(model_of(2, tied))
    found, totals = losses_on_text(model)
    main, ahead, counts = naive_losses(model, 2)
    assert totals.ahead == tuple(counts)
    assert float(found.tokens) == pytest.approx(float(main.detach()), rel=1e-10)
    assert [float(loss) for loss in found.ahead] == pytest.approx([float(loss.detach()) for loss in ahead], rel=1e-10)
    # each module's own count divides it, and the weight is shared between the two
    expected = main / totals.labels + sum(0.3 * loss / n for loss, n in zip(ahead, counts, strict=True))
    names = dict(model.named_parameters())
    gradients = [torch.autograd.grad(loss, list(names.values())) for loss in (found.share, expected)]
    for name, mine, truth in zip(names, *gradients, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-8, atol=1e-11, msg=lambda m, n=name: n + m)


def test_each_module_has_its_own_count_of_predicted_tokens() -> None:
    """Documents of 5, 1, 7, 2, 3 tokens; behind the second and the fourth the next token is known."""
    _, totals = losses_on_text(built(model_of(3)))
    assert totals.tokens == 18
    # label i of a document with n known tokens behind the first: n - depth of them
    assert totals.labels == 4 + 1 + 6 + 2 + 2
    assert totals.ahead == (3 + 0 + 5 + 1 + 1, 2 + 0 + 4 + 0 + 0, 1 + 0 + 3 + 0 + 0)


def test_prediction_ahead_leaves_the_main_loss_and_the_logits_alone() -> None:
    with_ahead, plain = built(model_of(2)), built(replace(model_of(1), predict_ahead=None))
    tokens, labels = text()
    batch = batch_of(tokens, labels, DOCUMENTS)
    assert torch.equal(with_ahead(batch.tokens), plain(batch.tokens))
    assert torch.equal(losses_on_text(with_ahead)[0].tokens, losses_on_text(plain)[0].tokens)
    assert losses_on_text(plain)[1].ahead == ()


def test_no_label_reaches_over_the_end_of_its_document() -> None:
    """Changing one document changes no loss of a label in another: the sum of the others' losses stays."""
    model = built(model_of(2))
    tokens, labels = text()
    changed = [*tokens[:6], *((t + 1) % 31 for t in tokens[6:13]), *tokens[13:]]

    def ahead_without_third(tokens: list[int]) -> list[float]:
        hidden_labels = [IGNORE if 6 <= i < 13 else label for i, label in enumerate(labels)]
        batch = batch_of(tokens, hidden_labels, DOCUMENTS)
        losses = losses_of(model, batch)
        return [float(losses.tokens), *map(float, losses.ahead)]

    assert ahead_without_third(tokens) == pytest.approx(ahead_without_third(changed), rel=1e-12)


@given(st.lists(st.integers(1, 6), max_size=5), st.integers(0, 7))
def test_shifted_labels_are_those_further_on_in_the_same_document(lengths: list[int], steps: int) -> None:
    labels = list(range(100, 100 + sum(lengths)))
    expected = []
    for a, b in pairwise((0, *accumulate(lengths))):
        expected += [labels[i + steps] if i + steps < b else IGNORE for i in range(a, b)]
    assert shift_labels(torch.tensor(labels, dtype=torch.int64), tuple(lengths), steps).tolist() == expected


def test_an_unknown_input_is_unknown_as_label_too() -> None:
    labels = torch.tensor([1, 2, IGNORE, 4, 5, 6])
    assert [t.tolist() for t in labels_ahead(labels, (6,), 0)] == [
        [1, 2, IGNORE, 4, 5, 6],
        [2, IGNORE, IGNORE, 5, 6, IGNORE],
    ]
    assert [t.tolist() for t in labels_ahead(labels, (4, 2), 1)] == [
        [2, IGNORE, 4, IGNORE, 6, IGNORE],
        [IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE],
    ]


def test_documents_too_short_to_predict_ahead_give_no_loss_and_finite_gradients() -> None:
    model = built(model_of(2))
    batch = batch_of([3, 4, 5], [IGNORE] * 3, [1, 1, 1])
    totals = model.totals_of(batch)
    assert totals.ahead == (0, 0) and totals.labels == 0
    share = total_of(model, batch)
    share.backward()
    assert float(share.detach()) == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
