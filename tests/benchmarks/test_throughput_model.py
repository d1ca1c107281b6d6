"""What docs/throughput.md says of the throughput model, held against the model; and that no judged set-up was fitted."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.published_rows import Row, model_of, read_rows, run_of, split
from benchmarks.throughput_model import (
    COLUMNS,
    TABLE_7,
    baseline,
    errors,
    exchanged,
    pairs,
    predicted,
    profile_of,
    shipped,
)
from core.config.flops import flops_per_token
from core.pipeline.layout import layout_of
from launch.profiles import PROFILES, find_profile

DOCS = (Path(__file__).parents[2] / "docs" / "throughput.md").read_text(encoding="utf-8")
ROWS = read_rows()
FITTED, JUDGED = split(ROWS)


def stated(name: str) -> tuple[float, ...]:
    """The numbers of a line of the docs' table, in per cent."""
    line = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", DOCS, re.MULTILINE)
    assert line is not None, name
    return tuple(float(number) for number in re.findall(r"[\d.]+", line[1]))


def told(found: list[float]) -> tuple[float, float]:
    sizes = [100 * abs(error) for error in found]
    return mean(sizes), max(sizes)


@pytest.fixture(scope="module")
def speeds() -> dict[Row, float]:
    return {row: predicted(row, shipped(), exact=False) for row in ROWS}


@pytest.mark.parametrize(("name", "rows"), [("fitted", FITTED), ("not fitted", JUDGED)])
def test_errors_are_no_larger_than_the_docs_say(name: str, rows: tuple[Row, ...], speeds: dict[Row, float]) -> None:
    average, worst = told([speeds[row] / row.tokens_per_second - 1 for row in rows])
    number, stated_mean, _, stated_worst = stated(name)
    assert len(rows) == number
    assert average <= stated_mean + 0.05 and worst <= stated_worst + 0.05


def test_the_model_is_at_least_a_third_below_one_utilisation_for_each_hardware_and_precision(
    speeds: dict[Row, float],
) -> None:
    ours, _ = told([speeds[row] / row.tokens_per_second - 1 for row in JUDGED])
    theirs, worst = told(baseline(FITTED, JUDGED))
    assert ours <= 2 / 3 * theirs
    assert (theirs, worst) == pytest.approx(
        (stated("not fitted, baseline")[1], stated("not fitted, baseline")[3]), abs=0.05
    )


def test_mappings_are_ranked_as_often_as_the_docs_say(speeds: dict[Row, float]) -> None:
    compared = list(pairs(ROWS))
    right = sum((speeds[a] > speeds[b]) == (a.tokens_per_second > b.tokens_per_second) for a, b in compared)
    line = re.search(r"(\d+) of (\d+) pairs", DOCS)
    assert line is not None
    assert len(compared) == int(line[2]) and right >= int(line[1])


def test_a_set_up_is_on_one_side_only() -> None:
    assert len(ROWS) == len(FITTED) + len(JUDGED) == 80
    assert not {(*row.kind, *row.mapping) for row in FITTED} & {(*row.kind, *row.mapping) for row in JUDGED}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_every_published_row_is_a_run_that_can_be_laid_out(row: Row) -> None:
    run = run_of(row)
    assert layout_of(run.model, run.parallel).virtual == row.vpp
    assert row.gpus % (row.tp * row.cp * row.pp) == 0 and row.gpus % (row.ep * row.pp) == 0
    profile = find_profile(row.hardware)
    assert profile.chip is not None and (row.precision == "bf16" or row.precision in profile.chip.recipes)
    # The published FLOP tell whether the module counted, which the file says.
    assert row.tflops / row.tokens_per_second * 1e12 == pytest.approx(
        flops_per_token(model_of(row), row.sequence), rel=0.015
    )


def test_constants_that_are_shared_are_the_same_in_every_profile() -> None:
    known = {profile.name: profile.speeds for profile in PROFILES if profile.speeds is not None}
    shared = {(s.overlapped, s.launch_seconds, s.combined_launches) for s in known.values()}
    assert len(shared) == 1
    for row in (
        next(row for row in ROWS if row.hardware == hardware) for hardware in ("gb300", "b300", "gb200", "b200", "h100")
    ):
        used = profile_of(replace(row, fused=False, fp8_attention=False), shipped()).speeds
        assert used is not None
        assert used.products == pytest.approx(known[row.hardware].products, rel=1e-3)
        assert used.low_products == pytest.approx(known[row.hardware].low_products, rel=1e-3)
        assert used.streamed == pytest.approx(known[row.hardware].streamed, rel=1e-3)
        assert used.attention == pytest.approx(known[row.hardware].attention, rel=1e-3)


def test_the_times_of_table_7_are_met_as_the_docs_say() -> None:
    found = [
        exchanged(hardware, dispatcher, ep) / printed[i] - 1
        for lines in TABLE_7.values()
        for ep, printed in lines.items()
        for i, (hardware, dispatcher) in enumerate(COLUMNS)
    ]
    average, worst = told(found)
    number, stated_mean, _, stated_worst = stated("Table 7")
    assert (len(found), average, worst) == pytest.approx((number, stated_mean, stated_worst), abs=0.05)


def test_an_error_is_of_the_published_figure() -> None:
    row = JUDGED[0]
    ours = predicted(row, shipped(), exact=False)
    assert errors((row,), shipped(), exact=False) == [ours / row.tokens_per_second - 1]
