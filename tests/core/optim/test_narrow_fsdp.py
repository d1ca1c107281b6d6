"""Shards of FSDP whose moments lie under scales or in host memory: stopped and gone on, and wherever they lie, the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.config.run import OptimizerConfig
from core.optim.formats import Formats
from core.state.inventory import inventory
from tests.core.optim.sharded import FSDP, built, steps_of
from tests.core.tiny import Case, mixtral
from tests.ranks import Ranks

CASE = Case(
    model=mixtral(()), parallel=FSDP, microbatch=2, optimizer=OptimizerConfig(learning_rate=0.01, eps=1e-6), steps=4
)
FORMATS = [
    Formats(moments=torch.float8_e4m3fn, seed=5),
    Formats(moments=torch.float16, on_host=0.7),
    Formats(on_host=1.0),
]


def _states(formats: Formats, stop: bool) -> dict[str, Tensor]:
    """What a rank holds after four steps, with a stop after two where that is asked for."""
    model, optimizer, groups = built(CASE, dtype=torch.bfloat16, formats=formats)
    steps_of(CASE, model, optimizer, groups, range(2))
    if stop:
        saved = {p.name: p.data.clone() for p in (*inventory(model, groups).values(), *optimizer.state())}
        model, optimizer, groups = built(CASE, dtype=torch.bfloat16, formats=formats)
        steps_of(CASE, model, optimizer, groups, range(7, 8))
        pieces = optimizer.state()
        for piece in (*inventory(model, groups).values(), *pieces):
            piece.data.copy_(saved[piece.name])
        optimizer.restore(pieces)
        optimizer.set_steps(2)
    steps_of(CASE, model, optimizer, groups, range(2, 4))
    return {p.name: p.data.clone() for p in (*inventory(model, groups).values(), *optimizer.state())}


def _both(rank: int, world: int, formats: Formats) -> list[dict[str, Tensor]]:
    return [_states(formats, False), _states(formats, True), _states(replace(formats, on_host=0.0), False)]


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f.moments}, {f.on_host}")
def test_shards_go_on_from_what_they_saved_and_wherever_their_states_wait(ranks: Ranks, formats: Formats) -> None:
    for whole_run, stopped, on_device in ranks.run(_both, 2, formats):
        assert whole_run.keys() == stopped.keys() == on_device.keys()
        for name, tensor in whole_run.items():
            assert torch.equal(tensor, stopped[name]) and torch.equal(tensor, on_device[name]), name
