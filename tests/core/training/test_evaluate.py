"""Validation loss against a sum written out, and sampling: the same text everywhere, the likeliest at temperature zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import log_softmax

from core.config.architecture import ModelConfig
from core.config.mapping import DispatcherName, ParallelConfig
from core.config.run import IGNORE
from core.parallel.groups import groups_for, one_rank
from core.state.inventory import initialise
from core.training.evaluate import generate, validation_loss
from core.transformer.stage import Stage, build_model
from tests.core.tiny import batch_of, deepseek, microbatches, mixtral, qwen3
from tests.ranks import Ranks

PROMPT = [3, 1, 4, 1, 5]
KINDS = {"mixtral": mixtral(), "qwen3": qwen3(), "deepseek": deepseek()}


def built(config: ModelConfig, parallel: ParallelConfig | None = None) -> Stage:
    parallel = parallel or ParallelConfig()
    model = build_model(config, groups=groups_for(parallel), parallel=parallel, dtype=torch.float64)
    initialise(model, 3)
    return model


def naive_loss(model: Stage, step: int) -> float:
    """-log of the softmax of the model's logits at each label, averaged over the labels there are."""
    (batch,) = microbatches(step)
    ends = torch.tensor([0, *batch.packing.lengths]).cumsum(0)
    with torch.no_grad():
        scores = log_softmax(model(batch.tokens, ends).double(), -1)
    picked = [-float(scores[t, label]) for t, label in enumerate(batch.labels.tolist()) if label != IGNORE]
    return sum(picked) / len(picked)


@pytest.mark.parametrize("name", KINDS)
def test_validation_loss_is_the_mean_over_predicted_tokens_however_they_are_batched(name: str) -> None:
    model = built(KINDS[name])
    expected = naive_loss(model, 0)
    for microbatch in (8, 2, 1):
        found = validation_loss(model, microbatches(0, microbatch=microbatch), one_rank())
        assert found == pytest.approx(expected, rel=1e-6)


def test_windows_without_labels_and_no_labels_at_all_count_nothing() -> None:
    model = built(KINDS["qwen3"])
    silent = batch_of([1, 2, 3], [IGNORE] * 3, [3])
    batches = microbatches(0, microbatch=2)
    assert validation_loss(model, [*batches, silent], one_rank()) == validation_loss(model, batches, one_rank())
    assert validation_loss(model, [silent], one_rank()) == 0.0
    assert validation_loss(model, [], one_rank()) == 0.0


def test_one_token_at_a_time_is_the_likeliest_at_temperature_zero() -> None:
    model = built(KINDS["mixtral"])
    text = list(PROMPT)
    with torch.no_grad():
        for _ in range(6):
            text.append(int(model(torch.tensor(text))[-1].argmax()))
    assert generate(model, PROMPT, tokens=6, end_of_text=-1, temperature=0.0) == text
    assert generate(model, PROMPT, tokens=6, end_of_text=-1, temperature=0.0, seed=9) == text


def test_draws_depend_on_the_seed_and_a_low_temperature_gives_the_likeliest() -> None:
    model = built(KINDS["deepseek"])
    texts = [generate(model, PROMPT, tokens=8, end_of_text=-1, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(text) == 13 and text[:5] == PROMPT and max(text) < 31 for text in texts)
    coldest, cold = (generate(model, PROMPT, tokens=8, end_of_text=-1, temperature=t) for t in (0.0, 1e-4))
    assert coldest == cold


def test_draws_follow_the_softmax_of_the_logits_over_the_temperature() -> None:
    """400 first tokens: each token as often as its probability says, up to five standard deviations."""
    model = built(KINDS["mixtral"])
    with torch.no_grad():
        wanted = torch.softmax(model(torch.tensor(PROMPT))[-1].double() / 1.3, -1)
    seeds = range(400)
    drawn = [generate(model, PROMPT, tokens=1, end_of_text=-1, temperature=1.3, seed=s)[-1] for s in seeds]
    counts = torch.bincount(torch.tensor(drawn), minlength=31).double()
    spread = (400 * wanted * (1 - wanted)).sqrt()
    assert bool(((counts - 400 * wanted).abs() <= 5 * spread + 1).all())
    assert int((counts > 0).sum()) > 5


def test_text_ends_with_end_of_text_and_an_empty_prompt_begins_with_it() -> None:
    model = built(KINDS["mixtral"])
    likeliest = generate(model, PROMPT, tokens=4, end_of_text=-1, temperature=0.0)
    stop = likeliest[6]
    found = generate(model, PROMPT, tokens=4, end_of_text=stop, temperature=0.0)
    assert found == likeliest[: likeliest.index(stop, 5) + 1]
    assert generate(model, [], tokens=0, end_of_text=7) == [7]
    assert generate(model, PROMPT, tokens=0, end_of_text=7) == PROMPT


def test_only_the_last_max_tokens_are_looked_at() -> None:
    model = built(replace(KINDS["mixtral"], max_tokens=4))
    long, short = ([9, 9, 9, *PROMPT], PROMPT)
    found = [generate(model, prompt, tokens=3, end_of_text=-1, temperature=0.0) for prompt in (long, short)]
    assert found[0][8:] == found[1][5:]


def over_ranks(rank: int, world: int, name: str, ep: int, dispatcher: DispatcherName) -> tuple[float, list[list[int]]]:
    """Validation loss over this rank's share, and text at two temperatures."""
    model = built(KINDS[name], ParallelConfig(ep=ep, dispatcher=dispatcher))
    groups = model.place.groups
    loss = validation_loss(model, microbatches(0, groups.dp.position, groups.dp.size, 2), groups)
    texts = [generate(model, PROMPT, tokens=5, end_of_text=-1, temperature=t) for t in (0.0, 1.0)]
    return loss, texts


@pytest.mark.parametrize(("name", "dispatcher"), [("qwen3", "allgather"), ("deepseek", "alltoall")])
def test_loss_and_text_are_the_same_with_experts_over_two_ranks(
    ranks: Ranks, name: str, dispatcher: DispatcherName
) -> None:
    loss, texts = over_ranks(0, 1, name, 1, dispatcher)
    for found in ranks.run(over_ranks, 2, name, 2, dispatcher):
        assert found[0] == pytest.approx(loss, rel=1e-12)
        assert found[1] == texts


def other_opinions(rank: int, world: int) -> list[int]:
    """Ranks whose logits differ, as they may in the last bit: here the second always wants to stop."""
    model = built(KINDS["mixtral"], ParallelConfig(ep=2))
    if rank == 1:
        with torch.no_grad():
            assert model.head is not None
            model.head.weight.zero_()  # token 0 is then the likeliest
    return generate(model, PROMPT, tokens=6, end_of_text=0, temperature=0.0)


def test_ranks_that_came_to_different_tokens_go_on_together(ranks: Ranks) -> None:
    first, second = ranks.run(other_opinions, 2, timeout_seconds=10.0)
    assert first == second and len(first) > 6
