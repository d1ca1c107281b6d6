"""A small dispatch and combine before training starts, so that a rank that does not take part is named within a minute, not after a
collective's timeout and without a cause."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from core.config.architecture import MoE
from core.errors import ParallelError, ZooError
from core.layers.place import Place
from core.moe.dispatch.make import dispatcher_name, make_dispatcher
from core.moe.dispatch.protocol import ExpertRows
from core.moe.router import Routing

TIMEOUT_SECONDS = 60.0
SHOWN_RANKS = 16

Stage = Literal["not begun", "dispatch_preprocess", "dispatch", "combine", "done"]


@dataclass(kw_only=True)
class Answer:
    """How far a rank has come, with so many tokens. wrong: what went wrong there, or nothing; error: where it is the user's."""

    rank: int
    tokens: int
    stage: Stage = "not begun"
    wrong: str = ""
    error: ZooError | None = None

    def __str__(self) -> str:
        told = self.wrong or ("has everything back" if self.stage == "done" else f"waits in {self.stage}")
        return f"rank {self.rank} with {self.tokens} tokens {told}"


def preflight(moe: MoE, width: int, place: Place, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Send a few tokens to their experts and back, on every rank of the world; nothing without ep.

    width: features of a token. Tokens come back multiplied by weights that add up to one: unchanged. Takes milliseconds where all is
    well. Raises what the dispatcher says to the user, as of a package that is not installed, and ParallelError that names the ranks that do not answer or have something else back, with their tokens.
    """
    groups = place.groups
    if groups.ep.size == 1:
        return
    # Uneven, and one rank without any: what a dispatcher has to stand.
    mine = Answer(rank=groups.world.position, tokens=(groups.experts.position + 1) % 4)
    finished = threading.Event()
    thread = threading.Thread(target=_exchange, args=(moe, width, place, mine, finished), daemon=True)
    thread.start()
    finished.wait(timeout_seconds)
    what = f"tokens do not reach their experts (parallel.dispatcher={dispatcher_name(moe, place)}, parallel.ep={groups.ep.size})"
    told = _gather(mine, place, what, timeout_seconds)
    failed = [answer for answer in told if answer.wrong] or [answer for answer in told if answer.stage != "done"]
    if mine.error is not None:
        raise mine.error
    if failed:
        raise ParallelError(
            f"{what}: {_listed(failed)}. Of {len(told)} ranks {len(told) - len(failed)} have no fault of their own."
        )
    thread.join()


def _exchange(moe: MoE, width: int, place: Place, answer: Answer, finished: threading.Event) -> None:
    """All six stages, in a thread, so that a rank that waits can still say so."""
    try:
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
        with torch.no_grad():
            answer.wrong = _six_stages(moe, width, place, answer)
    except ZooError as error:
        answer.wrong, answer.error = str(error), error
    except Exception as error:
        answer.wrong = f"fails in {answer.stage}: {type(error).__name__}: {error}"
    finished.set()


def _six_stages(moe: MoE, width: int, place: Place, answer: Answer) -> str:
    """What is wrong with what comes back; nothing if it is what was sent."""
    dispatcher = make_dispatcher(moe, place)
    sent, routing = _tokens(moe, width, place, answer)
    answer.stage = "dispatch_preprocess"
    rows, plan = dispatcher.dispatch_preprocess(sent, routing)
    answer.stage = "dispatch"
    arrived, plan = dispatcher.dispatch_postprocess(dispatcher.dispatch(rows, plan), plan)
    answer.stage = "combine"
    back = dispatcher.combine_preprocess(_part_of_itself(arrived, place), plan)
    out = dispatcher.combine_postprocess(dispatcher.combine(back, plan), plan)
    matches = out.shape == sent.shape and torch.allclose(out.float(), sent.float(), rtol=0.05)
    answer.stage = "done"
    return "" if matches else "has other numbers back than it sent"


def _tokens(moe: MoE, width: int, place: Place, answer: Answer) -> tuple[Tensor, Routing]:
    """Tokens that tell ranks apart, spread over all experts."""
    count, rank = answer.tokens, place.groups.experts.position
    sent = torch.full((count, width), 1.0 + rank % 64, dtype=place.dtype, device=place.device)
    first = torch.arange(count, device=place.device)[:, None] + rank * count
    experts = (first * moe.top_k + torch.arange(moe.top_k, device=place.device)) % moe.experts
    weights = torch.full((count, moe.top_k), 1.0 / moe.top_k, device=place.device)
    counts = torch.zeros(moe.experts, dtype=torch.int64, device=place.device)
    return sent, Routing(experts_TK=experts, weights_TK=weights, counts_E=counts, balance=None)


def _part_of_itself(rows: ExpertRows, place: Place) -> Tensor:
    """What an expert that changes nothing makes of its rows; the ranks of etp each make a part of it."""
    return (rows.hidden_RH * (rows.weights_R[:, None] / place.groups.etp.size)).to(rows.hidden_RH.dtype)


def _gather(mine: Answer, place: Place, what: str, timeout_seconds: float) -> list[Answer]:
    """Every rank's answer, over a channel that tokens do not use. Raises ParallelError naming those that do not answer there either."""
    group = place.groups.checkpoint
    try:
        limit = timedelta(seconds=timeout_seconds)
        dist.monitored_barrier(group=group.handle, timeout=limit, wait_all_ranks=True)
    except RuntimeError as error:
        raise ParallelError(
            f"{what}: {mine}, and not all ranks answer within {timeout_seconds:g} seconds: {error}"
        ) from error
    told: list[tuple[int, int, Stage, str]] = [(0, 0, "not begun", "")] * group.size
    dist.all_gather_object(told, (mine.rank, mine.tokens, mine.stage, mine.wrong), group=group.handle)
    return [Answer(rank=rank, tokens=tokens, stage=stage, wrong=wrong) for rank, tokens, stage, wrong in told]


def _listed(answers: Sequence[Answer]) -> str:
    more = len(answers) - SHOWN_RANKS
    return "; ".join(map(str, answers[:SHOWN_RANKS])) + (f"; and {more} more" if more > 0 else "")
