"""What a model has learned: its loss on held-out text, and text that it continues."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.config.run import IGNORE
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Groups
from core.state.box import Box
from core.state.seed import uniform
from core.training.replay import Recording
from core.training.work import run_microbatches
from core.transformer.context import TokenBatch
from core.transformer.stage import Stage


def validation_loss(
    model: Stage, batches: Sequence[TokenBatch], groups: Groups, recording: Recording | None = None
) -> float:
    """Mean cross-entropy per predicted token over all ranks' batches, nats. Every rank must bring equally many batches.

    recording: is told what the routers choose.
    """
    loss = run_microbatches(model, batches, "loss", recording=recording).losses[0]
    # The ranks of tp, cp and pp have the same batches: one of them counts their labels.
    counts = groups.sequence.position == 0 and groups.pp.position == 0
    labels = sum(int((batch.labels != IGNORE).sum()) for batch in batches) if counts else 0
    mine = torch.stack([loss, loss.new_tensor(float(labels))])
    summed, tokens = all_reduce_sum(mine, groups.world).tolist()
    return summed / max(1.0, tokens)


@torch.no_grad()
def generate(
    model: Stage, prompt: Sequence[int], *, tokens: int, end_of_text: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """The prompt and up to `tokens` more, each drawn from softmax(logits / temperature) (the likeliest at temperature 0).

    Stops after end_of_text. Only the last max_tokens tokens are looked at. Every rank of the world calls it with the same
    arguments and gets the same text: draws depend on (seed, position) only, and one rank of the last pipeline stage decides.
    """
    device, longest, groups = model.place.device, model.config.max_tokens, model.place.groups
    text = list(prompt) or [end_of_text]
    decides = model.parts[-1].loss and groups.tokens.position == 0
    for position in range(tokens):
        seen = torch.tensor(text[-longest:], dtype=torch.int64, device=device)
        logits = _last_logits(model, seen)
        # Ranks that came to other tokens, by the last bit of a logit, would go different ways and wait for each other.
        drawn = _draw(logits, temperature, seed, position) if decides and logits is not None else 0
        text.append(int(all_reduce_sum(torch.tensor([drawn], device=device), groups.world)))
        if text[-1] == end_of_text:
            break
    return text


def _last_logits(model: Stage, tokens_T: Tensor) -> Tensor | None:
    """Logits [vocab] float64 on the CPU of the token behind the given ones; None on ranks that hold no head."""
    batch = model.batch(tokens_T, torch.full_like(tokens_T, IGNORE))
    hidden = run_microbatches(model, [batch], "hidden").hidden
    if not model.parts[-1].loss:
        return None
    assert hidden is not None
    groups, mine = model.place.groups, hidden[0]
    # The last token lies on one rank of tp * cp: the others add nothing to its row.
    at = batch.packing.mine_T == tokens_T.shape[0] - 1
    last = all_reduce_sum(mine[at].sum(0), groups.sequence)
    rows = (1,) + (0,) * (groups.tp.size - 1)
    return model.output_head.logits(last[None][: rows[groups.tp.position]], rows)[0].double().cpu()


def _draw(logits_V: Tensor, temperature: float, seed: int, position: int) -> int:
    """One token: the inverse of the cumulative distribution at a number that (seed, position) gives."""
    if temperature <= 0.0:
        return int(logits_V.argmax())
    cumulative = torch.softmax(logits_V / temperature, dim=-1).cumsum(0)
    point = uniform(seed, "sample", Box(offset=(position,), shape=(1,)))
    return min(int(torch.searchsorted(cumulative, point)), logits_V.numel() - 1)
