"""The report's figures of parameters, FLOP and memory (arXiv 2603.07685) beside ours: prints docs/memory.md.

Printed figures with their sources and tolerances stand in benchmarks/data/report_figures.json.

    python -m benchmarks.report_figures > docs/memory.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from core.config.architecture import Dense, Layer, ModelConfig
from core.config.counts import count_parameters
from core.config.family import find_family
from core.config.flops import flops_per_token
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig, RecomputeName
from core.config.precision import FloatName, PrecisionConfig
from core.config.recipe import RECIPES
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from launch.plan.load import load_of
from launch.plan.memory import MemoryPlanner
from launch.plan.result import RankMemory
from launch.plan.table3 import Table3, as_printed, by_rank, in_flight, saved_tensors

DATA = Path(__file__).parent / "data" / "report_figures.json"
GIB, GB = 2**30, 1e9
_LLAMA = 405e9
_MOMENTS: tuple[tuple[str, FloatName], ...] = (("fp32", "float32"), ("bf16", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A figure as the report prints it. tolerance: fair, as a share of the value or in its unit; fixed before our code was compared."""

    id: str
    value: float
    unit: str
    source: str
    tolerance: float
    tolerance_kind: Literal["relative", "absolute"]

    def met(self, ours: float) -> bool:
        """Whether ours is within the tolerance."""
        allowed = self.tolerance * (abs(self.value) if self.tolerance_kind == "relative" else 1.0)
        return abs(ours - self.value) <= allowed * (1 + 1e-9)


# Figures that our numbers do not meet, and why.
WHY = {
    "memory.table4.swiglu": "Routed activations [rows, 2048] in bfloat16 give 7.5; kept in one byte they would give what is printed. The "
    "report does not say so, and we do not tune to it.",
    "memory.table4.layernorm": "Two norm outputs a layer give 6.56; what is printed wants two and a half. Rank 0 of the real schedule, "
    "with 76 layers in flight, gives 8.3.",
}
# What our own modules do where they differ from what the report counts.
REMARKS = {
    "params.dsv3.total_with_mtp": "as published, with embedding and head stored twice; this zoo shares them: 682.6e9",
    "memory.table3.activations": "by the table's list of 2236 MiB a layer; our modules keep less of the experts and more of attention",
    "memory.table3.total": "the table is one of the lighter ranks: see the ranks below",
    "memory.permutation_saving": "always saved: router weights are applied before the second product",
    "memory.table4.swiglu": "always saved: experts keep the first product and make the activation again",
    "memory.table4.mla_up_proj": "values are widened to the size of keys for the attention kernel: 576 MiB a layer",
    "memory.fp8_saving.three_inputs": "Only the inputs of the experts' first product, of the down projections and of the shared experts: a "
    "subset that was searched for after the fact, so no evidence.",
    "memory.fp8_saving": "our modules traced under fp8_current: both down projections of attention share one copy (with one of its own for "
    "each it is 16.2), and what shared experts read is kept beside what the router reads",
    "memory.bytes_per_param.fp32_moments.d64": "buckets of a real dense model on 64 ranks",
    "memory.bytes_per_param.bf16_moments.d64": "the same with moments in bfloat16",
    "memory.offload.dsv3_baseline_pp8": "fullest rank in GiB, 256 GPUs assumed; the unit is not printed; our modules with logits and working memory",
    "llama405b.total": "the table adds GB and GiB; so do we, to meet it",
}


def printed() -> tuple[Printed, ...]:
    """Every figure."""
    return tuple(Printed(**figure) for figure in json.loads(DATA.read_text()))


def table3_run(memory: MemoryConfig | None = None, precision: PrecisionConfig | None = None) -> RunConfig:
    """DeepSeek-V3 as Table 3 has it: 256 GPUs, TP 1, PP 4, VPP 4, EP 64, bfloat16, nothing made again."""
    return RunConfig(
        family="deepseek_v3",
        size="671b",
        hardware="gb200",
        ranks=256,
        model=_model("deepseek_v3", "671b"),
        parallel=ParallelConfig(pp=4, vpp=4, ep=64, layout="Et*4|(tttt|)*14tmL"),
        train=TrainConfig(steps=1, sequence_tokens=4096, global_batch=8192, microbatch=1),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        data=DataConfig(),
        precision=precision or PrecisionConfig(compute="bfloat16"),
        checkpoint=CheckpointConfig(),
        memory=memory or MemoryConfig(),
    )


class Figures:
    """Our values. by_convention: by the report's own way of counting. by_modules: what our modules do, where that is another thing."""

    def __init__(self) -> None:
        self.planner = MemoryPlanner()
        self.run = table3_run()
        self.layers = in_flight(self.run)
        self.saved = saved_tensors(self.run.model.layers[-1], self.run.model.hidden, 4096)
        self.table = as_printed(self.run)

    def by_convention(self) -> dict[str, float]:
        """All figures by id."""
        return dict((*_parameters(), *_flops(), *self._memory(), *_arithmetic()))

    def by_modules(self) -> dict[str, float]:
        """Table 3 and 4 of our own modules, in GiB of as many layers in flight; and the fullest rank's total."""
        none = self._layer_bytes()
        found = {
            "memory.table3.activations": self.layers * none / GIB,
            "memory.permutation_saving": 0.0,
            "memory.table4.swiglu": 0.0,
            "memory.table4.total": self.layers
            * (none - self._layer_bytes("mla_up_proj", "moe_act", "layernorm"))
            / GIB,
        }
        names: tuple[RecomputeName, ...] = ("mla_up_proj", "layernorm")
        for name in names:
            found[f"memory.table4.{name}"] = self.layers * (none - self._layer_bytes(name)) / GIB
        fp8 = PrecisionConfig(compute="bfloat16", recipe=RECIPES["fp8_current"])
        found["memory.fp8_saving"] = self.layers * (none - self._layer_bytes(precision=fp8)) / GIB
        resident = self.planner.resident(self.run, 128)
        found["memory.table3.weights_and_gradients"] = (resident.parameters + resident.gradients) / GIB
        found["memory.table3.master_and_optimizer"] = resident.optimizer / GIB
        found["memory.table3.total"] = self.plan()[2].balanced.total / GIB
        for format_name, moments in _MOMENTS:
            precision = PrecisionConfig(compute="bfloat16", moments=moments)
            found[f"memory.bytes_per_param.{format_name}_moments.d64"] = self._bytes_per_parameter(precision)
        offload = self.planner.of(self._offload_run())
        found["memory.offload.dsv3_baseline_pp8"] = max(each.balanced.total for each in offload) / GIB
        return found

    def plan(self) -> tuple[RankMemory, ...]:
        """Our plan of Table 3's set-up."""
        return self.planner.of(self.run)

    def ranks(self) -> tuple[Table3, ...]:
        """Table 3's tensors under the real schedule."""
        return by_rank(self.run, self.planner)

    def _layer_bytes(self, *recompute: RecomputeName, precision: PrecisionConfig | None = None) -> int:
        """What one layer of experts keeps of 4096 tokens, its input included."""
        run = table3_run(MemoryConfig(recompute=recompute), precision)
        pieces = self.planner.traces.of(run, 0)
        last = pieces.kinds.of[-1]
        load = load_of(pieces.experts.layer(last, final=False), run.memory)
        return load.kept + load.stream

    def _memory(self) -> Iterator[tuple[str, float]]:
        table, saved, layers = self.table, self.saved, self.layers
        yield "memory.table3.weights_and_gradients", table.weights_and_gradients / GIB
        yield "memory.table3.master_and_optimizer", table.optimizer / GIB
        yield "memory.table3.activations", table.activations / GIB
        yield "memory.table3.total", table.total / GIB
        yield "memory.permutation_saving", layers * saved["experts' output"] / GIB
        parts = {
            "mla_up_proj": saved["queries"] + saved["keys"] + saved["values"],
            "swiglu": saved["experts' product"],
            "layernorm": saved["input norm"] + saved["mlp norm"],
        }
        for name, each in parts.items():
            yield f"memory.table4.{name}", layers * each / GIB
        yield "memory.table4.total", layers * sum(parts.values()) / GIB
        few = saved["permuted rows"] + saved["input norm"] + saved["mlp norm"]
        # The inputs of all products but the experts' second one, whose activation is made again; and of the shared experts' SwiGLU.
        more = sum(saved[name] for name in ("query norm", "latent norm", "shared product", "shared gate and up"))
        yield "memory.fp8_saving.three_inputs", layers * few / 2 / GIB
        yield "memory.fp8_saving", layers * (few + more) / 2 / GIB
        yield "memory.bf16_moments_saving", table.optimizer / 3 / GIB
        yield "memory.optimizer_share", table.optimizer / table.total
        yield "memory.bytes_per_param.fp32_moments.d64", 6 + 12 / 64
        yield "memory.bytes_per_param.bf16_moments.d64", 6 + 8 / 64
        baseline = by_rank(self._offload_run(), self.planner, _under_fp8)
        yield "memory.offload.dsv3_baseline_pp8", max(rank.total for rank in baseline) / GIB

    def _bytes_per_parameter(self, precision: PrecisionConfig) -> float:
        """Of a large dense model on 64 ranks of dp, as its buckets lie."""
        wide = replace(self.run.model.layers[0], mlp=Dense(ffn=18432))
        model = replace(self.run.model, layers=(wide,) * 8, predict_ahead=None)
        run = replace(self.run, model=model, ranks=64, parallel=ParallelConfig(), precision=precision)
        resident = self.planner.resident(run, 0)
        return (resident.parameters + resident.gradients + resident.optimizer) / (resident.parameters / 2)

    def _offload_run(self) -> RunConfig:
        """Table 5's set-up: TP 1, PP 8, VPP 4, EP 32, MXFP8, on 256 GPUs, which are assumed."""
        parallel = ParallelConfig(pp=8, vpp=4, ep=32, layout="Et|(tt|)*30mL", dispatcher="flex")
        precision = PrecisionConfig(compute="bfloat16", recipe=RECIPES["mxfp8"])
        return replace(self.run, parallel=parallel, precision=precision)


def _under_fp8(layer: Layer, hidden: int, tokens: int) -> dict[str, int]:
    """The table's list where inputs of products are kept in eight bits, and no output of experts."""
    found = saved_tensors(layer, hidden, tokens)
    halved = (
        "permuted rows",
        "input norm",
        "mlp norm",
        "query norm",
        "latent norm",
        "shared product",
        "shared gate and up",
    )
    return {name: count // 2 if name in halved else count for name, count in found.items() if name != "experts' output"}


def _model(family: str, size: str) -> ModelConfig:
    return find_family(family).size(size).model


def _parameters() -> Iterator[tuple[str, float]]:
    deepseek, qwen, mixtral = _model("deepseek_v3", "671b"), _model("qwen3", "235b_a22b"), _model("mixtral", "8x7b")
    counts = count_parameters(deepseek)
    yield "params.dsv3.total_no_mtp", counts.main
    yield "params.dsv3.total_with_mtp", counts.total + 2 * deepseek.vocab * deepseek.hidden
    yield "params.dsv3.active", counts.active
    # Of the numbers as they are printed: 685 over 37.
    yield "params.dsv3.total_over_active", 685 / 37
    for name, model in (("qwen3_235b", qwen), ("mixtral", mixtral)):
        yield f"params.{name}.total", count_parameters(model).main
        yield f"params.{name}.active", count_parameters(model).active


def _flops() -> Iterator[tuple[str, float]]:
    deepseek, qwen = _model("deepseek_v3", "671b"), _model("qwen3", "235b_a22b")
    for row in ("gb300-mxfp8", "gb200-mxfp8", "gb200-bf16", "h100-fp8blk"):
        yield f"flops_per_token.dsv3-{row}", flops_per_token(deepseek, 4096) / 1e9
    for row in ("gb300-mxfp8", "gb200-mxfp8", "gb200-bf16", "h100-bf16"):
        yield f"flops_per_token.qwen3-{row}", flops_per_token(qwen, 4096) / 1e9
    yield "flops_per_token.qwen3-gb300-128k-mxfp8", flops_per_token(qwen, 131072) / 1e9
    whole, products = _layer_flops(deepseek, 4096), _layer_flops(deepseek, 0)
    experts = products - _layer_flops(deepseek, 0, experts=False)
    yield "flops_share.fig34.moe.4096", 100 * experts / whole
    long = _layer_flops(deepseek, 65536)
    yield "flops_share.fig34.sdpa.65536", 100 * (long - products) / long
    yield "flops_share.crossover_tokens", 4096 * experts / (whole - products)


def _layer_flops(model: ModelConfig, tokens: int, *, experts: bool = True) -> float:
    """Of one token in one layer of experts of a sequence of so many tokens; without the experts where not asked for."""
    layer = model.layers[-1] if experts else replace(model.layers[-1], mlp=Dense(ffn=0))
    one, two = (replace(model, layers=(layer,) * n, predict_ahead=None) for n in (1, 2))
    return flops_per_token(two, tokens) - flops_per_token(one, tokens)


def _arithmetic() -> Iterator[tuple[str, float]]:
    """Figures that follow from others that the report prints."""
    yield "memory.offload.dsv3_delta", 100 * (151 / 169 - 1)
    yield "memory.offload.dsv3_throughput_delta", 100 * (930 / 945 - 1)
    yield "memory.offload.qwen3_delta", 100 * (175 / 172 - 1)
    yield "memory.offload.qwen3_throughput_delta", 100 * (920 / 800 - 1)
    held = {"parameters": 2 * _LLAMA / GB, "optimizer": 12 * _LLAMA / GB, "gradients": 4 * _LLAMA / GB}
    layers, hidden, heads, tokens = 126, 16384, 128, 8192
    held["activations"] = layers * tokens * hidden * (34 + 5 * heads * tokens / hidden) / GIB
    for name, value in held.items():
        yield f"llama405b.{name}", value
    yield "llama405b.total", sum(held.values())


def figure_table(figures: Figures) -> str:
    """Every figure as a row of Markdown."""
    ours, modules = figures.by_convention(), figures.by_modules()
    head = "| figure | source | unit | printed | ours, counted so | difference | our modules | |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for figure in printed():
        value = ours[figure.id]
        difference = f"{100 * (value / figure.value - 1):+.2f} %"
        if not figure.met(value):
            difference = f"**{difference}**"
        own = f"{modules[figure.id]:.5g}" if figure.id in modules else ""
        remark = WHY.get(figure.id) or REMARKS.get(figure.id, "")
        cells = (figure.id, figure.source, figure.unit, _number(figure.value), _number(value), difference, own, remark)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def rank_table(figures: Figures) -> str:
    """Every place of the pipeline of Table 3's set-up: by the table's tensors, and by our plan, in GiB."""
    rows = [
        "| place | forwards waiting | weights, gradients | optimizer | activations by the table's list | total | our activations "
        "| logits | working memory | our total | our worst case |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for table, plan in zip(figures.ranks(), figures.plan(), strict=True):
        balanced = plan.balanced
        numbers = (
            table.weights_and_gradients,
            table.optimizer,
            table.activations,
            table.total,
            balanced.activations,
            balanced.logits,
            balanced.working,
            balanced.total,
            plan.worst.total,
        )
        waiting = " + ".join(map(str, plan.in_flight))
        rows.append(f"| {plan.pp_rank} | {waiting} | " + " | ".join(f"{n / GIB:.1f}" for n in numbers) + " |")
    return "\n".join(rows)


def layer_table(figures: Figures) -> str:
    """What one layer of experts keeps of 4096 tokens: by the table's list, and what our modules keep, in MiB."""
    theirs = [f"| {name} | {count / 2**20:.1f} |" for name, count in figures.saved.items()]
    trace = figures.planner.traces.of(figures.run, 0)
    kept = trace.experts.layer(trace.kinds.of[-1], final=False)
    ours = [
        f"| {_place(piece.module)} | {'x'.join(map(str, piece.shape))} | {str(piece.dtype).removeprefix('torch.')} | "
        f"{piece.num_bytes / 2**20:.2f} |"
        for piece in kept.kept
    ]
    ours.insert(0, f"| (its input) | | bfloat16 | {kept.stream_bytes / 2**20:.2f} |")
    total = (kept.kept_bytes + kept.stream_bytes) / 2**20
    ours.append(f"| all | | | {total:.1f} |")
    theirs.append(f"| all | {sum(figures.saved.values()) / 2**20:.1f} |")
    return "\n".join(
        [
            "By the table's list:",
            "",
            "| what | MiB |",
            "|---|---|",
            *theirs,
            "",
            "By our modules:",
            "",
            "| module that made it | shape | dtype | MiB |",
            "|---|---|---|---|",
            *ours,
        ]
    )


def _place(module: str) -> str:
    """A module inside its layer."""
    return ".".join(module.split(".")[2:]) or "(layer)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.6g}"


@lru_cache(maxsize=1)
def page() -> str:
    """docs/memory.md."""
    figures = Figures()
    met = sum(figure.met(value) for figure, value in ((f, figures.by_convention()[f.id]) for f in printed()))
    return TEXT.format(
        ranks=rank_table(figures),
        figures=figure_table(figures),
        layer=layer_table(figures),
        met=met,
        count=len(printed()),
        why=len(WHY),
    )


TEXT = """# Memory: how it is planned, and the report's figures beside ours

This page is printed by `python -m benchmarks.report_figures`; `tests/benchmarks/test_report_figures.py` holds it and every figure.

## How a plan comes about

- **From step to step** a rank holds parameters, summed gradients and the optimizer's masters and moments, in buckets. The real modules
  are built on the meta device for the rank's place, and the optimizer's own arithmetic lays their pieces out: dense ones over the
  copies that tp, cp and dp make, experts over the ranks of edp, never divided by tp.
- **Activations**: one layer of each kind, the embedding, the head with its losses and a prediction module run forward and backward on
  the meta device, as one rank of a world whose peers are imagined. Hidden states have no data; routing has, dealt out evenly, so all that a
  host reads is a number. Memory that still lives after the forward, when its outputs are dropped, is what waits for the backward. What is most
  at one moment is the working memory. Bytes sent are counted by the meters of the groups, as in training.
- **The moment**: each pipeline rank's real schedule is executed; forwards add, backwards free, the fullest moment is the plan.
- **The worst case** lets every token of the ep group that can go to this rank's experts, in every layer, for as long as its
  microbatch waits. Capacity and budgets are honoured. It is an upper bound, and what `parallel.expert_budget` protects from.
- **Recipes** are traced too: modules keep operands in fewer bits, rows of experts filled up to whole blocks. Working memory is that of fused
  kernels, which write nothing but operands and results; the emulation on a CPU needs more for a moment.
- Offloading of activations is planned by a rule (`launch/plan/load.py`) until it is built.
  Memory of CUDA itself, of NCCL, and gaps between allocations are not planned.

On real ranks plans hold within 2 % for every rank of twelve drawn set-ups, bytes of parameters, gradients and optimizer exactly
(`tests/launch/plan/test_memory_reality.py`), and of set-ups under every recipe (`tests/launch/plan/test_recipe_reality.py`).

## Table 3's set-up, rank by rank

DeepSeek-V3 on 256 GPUs, TP 1, PP 4, VPP 4, EP 64, bfloat16, layout `Et*4|(tttt|)*14tmL`, nothing made again. GiB; "GB" in the report's
table is GiB too. The table prints 199.5, which is its own idealised rank, near place 2. **The fullest rank is at place 0.** Our modules
differ in what they keep: see below.

{ranks}

## What one layer of experts keeps of a sequence of 4096 tokens

{layer}

Ours is less by the experts' output (448) and their activation (128), which are not kept, and by the row map; more by the values and the
attention's result, which the attention kernel wants as wide as keys (64 each), and by that result once more without the widening (128).

## The figures

"Ours, counted so" follows the report's own way of counting: its list of saved tensors, its 60 layers in flight, decimal or binary
units as its numbers imply. {met} of {count} are within the tolerance that was set before; the other {why} are named in bold. Most are no
test of anything: they restate each other, or their convention was chosen by looking at them. "Our modules" is what this zoo's code does
in the same set-up with as many layers in flight, where that is another thing.

{figures}
"""


if __name__ == "__main__":
    print(page(), end="")
