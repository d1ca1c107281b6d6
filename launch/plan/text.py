"""A plan for a terminal: stages, memory, communication and time, in tables of fixed width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from core.config.run import RunConfig
from launch.plan.result import AxisTraffic, MemoryParts, Plan, RankMemory, StagePlan, StepTime

GIB = 1 << 30
MIB = 1 << 20
# Of a pipeline of many ranks the first, the last and the fullest are shown.
SHOWN_RANKS = 16
Row = TypeVar("Row", RankMemory, StagePlan)


def plan_lines(run: RunConfig, plan: Plan) -> Iterator[str]:
    """The plan in some forty lines."""
    yield from _memory(plan)
    if plan.stages:
        yield from ("", *_stages(plan.stages))
    if plan.communication:
        yield from ("", *_communication(plan.communication))
    if plan.time is not None:
        yield from ("", *_time(run, plan.time))


def _memory(plan: Plan) -> Iterator[str]:
    """A row for the fullest rank of every place in the pipeline, and the verdict."""
    unit, name = (GIB, "GiB") if plan.worst_rank.balanced.total >= GIB else (MIB, "MiB")
    columns = ("pp", "rank", "parameters", "gradients", "optimizer", "activations", "logits", "working", "total")
    host = any(each.on_host for each in plan.memory)
    yield f"memory of the fullest rank at each place of the pipeline, {name}, every expert getting equally many rows"
    yield from table(
        [*columns, "all tokens here", "in flight", *(["on host"] if host else [])],
        [_memory_row(each, unit, host) for each in shown(plan.memory, plan.worst_rank)],
    )
    worst = plan.worst_rank
    fullest = f"  fullest: rank {worst.rank} with {_size(worst.balanced.total, unit)} {name}"
    if plan.capacity is None or plan.headroom is None:
        yield fullest
        return
    verdict = "free" if plan.headroom >= 0 else "too much: it does not fit"
    capacity = f"of {_size(plan.capacity, unit)}: {_size(abs(plan.headroom), unit)} {verdict}"
    yield f"{fullest} {capacity}"
    if plan.headroom >= 0 and worst.worst.total > plan.capacity:
        yield (
            f"  should all tokens go to its experts it needs {_size(worst.worst.total, unit)} {name}: "
            "parallel.expert_budget or model.moe.capacity bounds that"
        )


def _memory_row(each: RankMemory, unit: int, host: bool) -> tuple[str, ...]:
    numbers = (_size(part, unit) for part in parts(each.balanced).values())
    flight = "+".join(map(str, each.in_flight))
    row = (str(each.pp_rank), str(each.rank), *numbers, _size(each.balanced.total, unit))
    return (*row, _size(each.worst.total, unit), flight, *((_size(each.on_host, unit),) if host else ()))


def parts(memory: MemoryParts) -> dict[str, int]:
    """The parts by name, in the order in which they are shown."""
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "working": memory.working,
    }


def _stages(stages: Sequence[StagePlan]) -> Iterator[str]:
    yield "pipeline ranks, milliseconds of one microbatch"
    rows = [
        (
            *(str(each.pp_rank), " | ".join(each.parts)),
            *(f"{each.forward_seconds * 1e3:.2f}", f"{each.backward_seconds * 1e3:.2f}", f"{each.bubble:.1%}"),
        )
        for each in shown(stages, None)
    ]
    yield from table(("pp", "parts", "forward", "backward", "bubble"), rows)


def _communication(communication: Sequence[AxisTraffic]) -> Iterator[str]:
    yield "communication of the rank that sends most, a step"
    rows = [
        (
            *(each.axis, f"{each.sent_bytes / GIB:.2f}", "inside" if each.inside else "outside"),
            *(f"{each.seconds * 1e3:.1f}", f"{each.exposed_seconds * 1e3:.1f}", _hidden(each)),
        )
        for each in communication
    ]
    yield from table(("axis", "GiB", "NVLink domain", "ms", "exposed ms", "hidden"), rows)


def _hidden(each: AxisTraffic) -> str:
    return f"{abs(1 - each.exposed_seconds / each.seconds):.0%}" if each.seconds else "-"


def _time(run: RunConfig, time: StepTime) -> Iterator[str]:
    tokens = run.train.global_batch * run.train.sequence_tokens
    yield (
        f"predicted step {time.seconds:.3g} s for {tokens:,} tokens: {time.tokens_per_second:,.0f} tokens/s and "
        f"{time.tflops:,.0f} TFLOPS a GPU; all ranks together wait for {time.bubble:.1%} of the time that they compute"
    )
    walls = sorted(time.walls.items(), key=lambda item: -item[1])
    shares = (f"{name} {seconds / time.seconds:.1%}" for name, seconds in walls if seconds > 0.0005 * time.seconds)
    yield "  of the slowest rank it goes to: " + ", ".join(shares)
    yield "  predictions rank mappings; docs/throughput.md says how far they are from published runs"


def shown(rows: Sequence[Row], always: Row | None) -> Sequence[Row]:
    """All rows, or of very many the first and the last ones and `always`."""
    if len(rows) <= SHOWN_RANKS:
        return rows
    half = SHOWN_RANKS // 2
    return [row for i, row in enumerate(rows) if i < half or i >= len(rows) - half or row is always]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines under a head, columns as wide as they need be, numbers to the right."""
    everything = [tuple(columns), *map(tuple, rows)]
    widths = [max(len(row[i]) for row in everything) for i in range(len(columns))]
    left = [any(not _is_number(row[i]) for row in rows) for i in range(len(columns))]
    for row in everything:
        cells = (
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        )
        yield ("  " + "  ".join(cells)).rstrip()


def _is_number(cell: str) -> bool:
    return cell.replace(".", "").replace(",", "").replace("%", "").replace("-", "").replace("+", "").isdigit()


def _size(count: int, unit: int) -> str:
    return f"{count / unit:,.1f}"
