"""Published throughputs (benchmarks/data/published.json) as runs of this zoo, and which of them constants may be fitted to."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from core.config.architecture import ModelConfig
from core.config.execution import ExecutionConfig, GraphName
from core.config.family import find_family
from core.config.mapping import DispatcherName, ParallelConfig
from core.config.memory import MemoryConfig, RecomputeName
from core.config.precision import FloatName, PrecisionConfig
from core.config.recipe import RECIPES, RecipeName
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig

DATA = Path(__file__).parent / "data" / "published.json"
SIZES = {
    "deepseek_v3": ("deepseek_v3", "671b"),
    "qwen3_235b_a22b": ("qwen3", "235b_a22b"),
    "qwen3_30b_a3b": ("qwen3", "30b_a3b"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure: what ran where, and tokens a second of one GPU. The file says where each field stands."""

    release: str
    model: str
    hardware: str
    gpus: int
    precision: RecipeName | Literal["bf16"]
    tp: int
    pp: int
    cp: int
    vpp: int
    ep: int
    global_batch: int
    microbatch: int
    sequence: int
    layout: str | None
    mtp: bool
    dispatcher: DispatcherName
    overlap: bool
    recompute: tuple[RecomputeName, ...]
    graphs: tuple[GraphName, ...]
    fused: bool
    fp8_attention: bool
    tokens_per_second: float
    tflops: float
    source: str
    setup: str

    @property
    def kind(self) -> tuple[str, str, str, int, int]:
        """What is the same in rows that may differ in mapping alone."""
        return self.model, self.hardware, self.precision, self.gpus, self.sequence

    @property
    def mapping(self) -> tuple[int, ...]:
        """Degrees and microbatch."""
        return self.tp, self.cp, self.pp, self.vpp, self.ep, self.microbatch

    @property
    def label(self) -> str:
        """The row in a table."""
        mapping = f"tp{self.tp} cp{self.cp} pp{self.pp}x{self.vpp} ep{self.ep} mbs{self.microbatch}"
        return f"{self.release:8} {self.model:15} {self.hardware:5} {self.precision:13} {self.gpus:4} {mapping:30}"


def read_rows() -> tuple[Row, ...]:
    """All of them, in the order of the file."""
    stored = json.loads(DATA.read_text(encoding="utf-8"))["rows"]
    return tuple(Row(**{**row, "recompute": tuple(row["recompute"]), "graphs": tuple(row["graphs"])}) for row in stored)


def split(rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Rows that constants are fitted to, and rows that judge them.

    By set-up, not by row: the same set-up under another release must not be on both sides. Set-ups (model, hardware, precision, GPUs,
    sequence, mapping, microbatch) in ascending order are dealt in turn.
    """
    order = sorted({(*row.kind, *row.mapping) for row in rows})
    fitted = {setup for i, setup in enumerate(order) if i % 2 == 0}
    sides = [(*row.kind, *row.mapping) in fitted for row in rows]
    return (
        tuple(row for row, inside in zip(rows, sides, strict=True) if inside),
        tuple(row for row, inside in zip(rows, sides, strict=True) if not inside),
    )


def model_of(row: Row) -> ModelConfig:
    """The model that ran."""
    family, size = SIZES[row.model]
    model = find_family(family).size(size).model
    return model if row.mtp or model.predict_ahead is None else replace(model, predict_ahead=None)


def run_of(row: Row) -> RunConfig:
    """The run as this zoo declares it. Gradients and moments of DeepSeek-V3's recipes are bfloat16, the others' float32."""
    family, size = SIZES[row.model]
    recipe = None if row.precision == "bf16" else RECIPES[row.precision]
    states: FloatName = "bfloat16" if row.model == "deepseek_v3" else "float32"
    return RunConfig(
        family=family,
        size=size,
        hardware=row.hardware,
        ranks=row.gpus,
        model=model_of(row),
        parallel=ParallelConfig(
            tp=row.tp,
            cp=row.cp,
            pp=row.pp,
            ep=row.ep,
            vpp=row.vpp,
            layout=row.layout,
            schedule="combined" if row.overlap else "1f1b",
            dispatcher=row.dispatcher,
        ),
        train=TrainConfig(
            steps=1, sequence_tokens=row.sequence, global_batch=row.global_batch, microbatch=row.microbatch
        ),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        data=DataConfig(),
        precision=PrecisionConfig(
            compute="bfloat16",
            recipe=recipe,
            primary=recipe is not None,
            main_gradients=states,
            moments=states,
        ),
        checkpoint=CheckpointConfig(),
        memory=MemoryConfig(recompute=row.recompute),
        execution=ExecutionConfig(graphs=row.graphs),
    )
