"""What a model has learned: its loss on held-out text, and text that it continues."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.attention.packing import packing_of
from core.config.run import IGNORE
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Groups
from core.state.box import Box
from core.state.seed import uniform
from core.training.batch import TokenBatch
from core.transformer.stage import Stage


@torch.no_grad()
def validation_loss(model: Stage, batches: Sequence[TokenBatch], groups: Groups) -> float:
    """Mean cross-entropy per predicted token over all ranks' batches, nats. Every rank must bring equally many batches."""
    summed = torch.zeros(2, dtype=torch.float64, device=model.place.device)
    for batch in batches:
        hidden = model.hidden(batch.tokens, batch.packing).hidden
        summed[0] += model.output_head.loss(hidden, batch.labels)
        summed[1] += (batch.labels != IGNORE).sum()
    loss, tokens = all_reduce_sum(summed, groups.tokens).tolist()
    return loss / max(1.0, tokens)


@torch.no_grad()
def generate(
    model: Stage, prompt: Sequence[int], *, tokens: int, end_of_text: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """The prompt and up to `tokens` more, each drawn from softmax(logits / temperature) (the likeliest at temperature 0).

    Stops after end_of_text. Only the last max_tokens tokens are looked at. Every rank of the expert group calls it with the
    same arguments and gets the same text: draws depend on (seed, position) only, and the group's first rank decides.
    """
    device, longest, group = model.place.device, model.config.max_tokens, model.place.groups.ep
    text = list(prompt) or [end_of_text]
    for position in range(tokens):
        seen = torch.tensor(text[-longest:], dtype=torch.int64, device=device)
        packing = packing_of(None, seen.shape[0], device)
        last = model.hidden(seen, packing).hidden[-1:]
        logits = model.output_head.logits(last)[0].double().cpu()
        # Ranks that came to other tokens, by the last bit of a logit, would go different ways and wait for each other.
        drawn = _draw(logits, temperature, seed, position) if group.position == 0 else 0
        text.append(int(all_reduce_sum(torch.tensor([drawn], device=device), group)))
        if text[-1] == end_of_text:
            break
    return text


def _draw(logits_V: torch.Tensor, temperature: float, seed: int, position: int) -> int:
    """One token: the inverse of the cumulative distribution at a number that (seed, position) gives."""
    if temperature <= 0.0:
        return int(logits_V.argmax())
    cumulative = torch.softmax(logits_V / temperature, dim=-1).cumsum(0)
    point = uniform(seed, "sample", Box(offset=(position,), shape=(1,)))
    return min(int(torch.searchsorted(cumulative, point)), logits_V.numel() - 1)
