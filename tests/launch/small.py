"""What the tests that really train share: a model of a few thousand parameters, and some text."""

from __future__ import annotations

import random
from pathlib import Path

from launch.backends.protocol import Job, State

# A DeepSeek-V3 of a few thousand parameters: latent attention, groups, expert bias, a shared expert, prediction ahead.
SMALL = (
    "model.hidden=16",
    "model.vocab=300",
    "model.num_layers=2",
    "model.attention.heads=2",
    "model.attention.query_rank=8",
    "model.attention.latent_rank=8",
    "model.attention.nope_dim=8",
    "model.attention.rope_dim=4",
    "model.attention.value_dim=8",
    "model.dense.ffn=16",
    "model.moe.experts=8",
    "model.moe.top_k=2",
    "model.moe.expert_ffn=8",
    "model.moe.router.groups=none",
    "train.sequence_tokens=32",
    "train.global_batch=4",
    "train.microbatch=1",
    "train.sample_tokens=4",
    "train.eval_sequences=4",
    "checkpoint.interval=15",
)


class RunsHere:
    """What the tests' own back ends share: nothing is submitted, nothing refused."""

    def refuse(self, job: Job) -> None: ...

    def script(self, job: Job) -> None: ...

    def state(self, job: str) -> State:
        raise AssertionError("nobody asks")

    def stop(self, job: str) -> None: ...


def write_corpus(folder: Path) -> Path:
    """Some hundred kilobytes of words."""
    draw = random.Random(0)
    folder.mkdir()
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 7))) for _ in range(200)]
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(words, k=500)), encoding="utf-8")
    return folder
