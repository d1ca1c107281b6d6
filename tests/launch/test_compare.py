"""Runs side by side: what they have in common, how far apart they end, and the code that says so."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from core.config.recipe import MXFP8
from core.config.run import RunConfig
from core.errors import RequestError
from launch.cli import cli
from launch.comparison import compare, disagreements, read_measured
from launch.folder import RunFile, write_run
from launch.request import Request, new_run
from tests.launch.families import FAMILY

RUN = new_run(Request(), FAMILY).run


def a_run(
    folder: Path,
    losses: list[float | None],
    *,
    run: RunConfig = RUN,
    validation: dict[int, float | None] | None = None,
    batch: int = 10,
) -> Path:
    """A folder as a launch leaves it, its metrics written by hand: `batch` tokens a step, steps from one."""
    folder.mkdir(parents=True)
    write_run(folder, RunFile(run=run, prepared="/p", identity="i", command=("launch",), versions={}))
    lines = []
    for step, loss in enumerate(losses, start=1):
        line = {"step": step, "loss": loss, "tokens": batch * step, "tokens_per_second": 100.0 * step}
        if validation and step in validation:
            line["validation_loss"] = validation[step]
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def test_a_loss_is_the_mean_of_the_last_tenth_of_the_steps_that_all_have(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", [float(step) for step in range(1, 41)])
    b = a_run(tmp_path / "b", [2.0 * step for step in range(1, 31)])
    told = compare(read_measured([a, b], "step"), "step")
    first, second = told.outcomes
    assert (told.first, told.last, told.common, told.averaged) == (1, 30, 30, 3)
    assert (first.steps, second.steps) == (40, 30)
    assert first.loss == (28 + 29 + 30) / 3 and second.loss == 2 * first.loss
    assert (first.difference, second.difference) == (0.0, 29.0)
    assert first.tokens_per_second == 2050.0


@pytest.mark.parametrize(("steps", "averaged"), [(1, 1), (2, 1), (10, 1), (11, 2), (300, 30)])
def test_a_run_of_any_length_has_a_last_tenth(tmp_path: Path, steps: int, averaged: int) -> None:
    folders = [a_run(tmp_path / name, [3.0] * steps) for name in "ab"]
    told = compare(read_measured(folders, "step"), "step")
    assert told.averaged == averaged
    assert [run.loss for run in told.outcomes] == [3.0, 3.0]


def test_by_tokens_runs_of_different_batches_meet_where_they_were_trained_on_as_much(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", [100.0 - step for step in range(1, 101)], batch=10)
    b = a_run(tmp_path / "b", [50.0 - step for step in range(1, 21)], batch=30)
    told = compare(read_measured([a, b], "tokens"), "tokens")
    # Tokens 30 to 600 in common; after 540 are steps 55 to 60 of a, 19 and 20 of b.
    assert (told.first, told.last, told.common, told.averaged) == (30, 600, 58, 6)
    assert [run.loss for run in told.outcomes] == [100 - 57.5, 50 - 19.5]


def test_validation_losses_are_those_of_the_last_place_where_all_measured_them(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", [3.0] * 9, validation={3: 4.0, 6: 3.5, 9: 3.25})
    b = a_run(tmp_path / "b", [3.0] * 9, validation={3: 4.5, 6: 3.75, 8: 1.0})
    c = a_run(tmp_path / "c", [3.0] * 9)
    told = compare(read_measured([a, b], "step"), "step")
    assert told.validation_at == 6
    assert [(run.validation, run.validation_difference) for run in told.outcomes] == [(3.5, 0.0), (3.75, 0.25)]
    told = compare(read_measured([a, b, c], "step"), "step")
    assert told.validation_at is None and all(run.validation is None for run in told.outcomes)


def test_within_judges_the_loss_and_the_validation_loss_each_and_includes_its_end(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", [3.0] * 5, validation={5: 4.0})
    loss = a_run(tmp_path / "loss", [3.25] * 5, validation={5: 4.0})
    tested = a_run(tmp_path / "tested", [3.0] * 5, validation={5: 3.75})
    assert run_command(a, loss, tested, "--within", 0.25).exit_code == 0
    found = run_command(a, loss, tested, "--within", 0.24)
    assert found.exit_code == 1
    assert "loss: loss 3.2500 is +0.2500 from a's, more than 0.24" in found.stderr
    assert "tested: validation loss 3.7500 is -0.2500 from a's, more than 0.24" in found.stderr
    assert run_command(a, loss, tested).exit_code == 0


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("place", ["loss", "validation"])
def test_a_loss_that_is_not_finite_is_further_away_than_anything(tmp_path: Path, bad: int, place: str) -> None:
    folders = []
    for number in range(2):
        broken = number == bad
        losses = [3.0] * 4 + [None if broken and place == "loss" else 3.0]
        tested = {5: None if broken and place == "validation" else 4.0}
        folders.append(a_run(tmp_path / str(number), losses, validation=tested))
    told = compare(read_measured(folders, "step"), "step")
    assert len(disagreements(told, math.inf)) == 1
    assert run_command(*folders, "--within", 1e9).exit_code == 1
    assert "null" in run_command(*folders, "--json").stdout


def test_the_settings_that_differ_are_said_and_those_of_a_part_that_is_absent_are_one(tmp_path: Path) -> None:
    other = replace(
        RUN, train=replace(RUN.train, seed=7), precision=replace(RUN.precision, compute="bfloat16", recipe=MXFP8)
    )
    a, b = a_run(tmp_path / "a", [3.0]), a_run(tmp_path / "b", [3.0], run=other)
    told = dict(compare(read_measured([a, b], "step"), "step").settings)
    assert told == {
        "train.seed": (str(RUN.train.seed), "7"),
        "precision.compute": ("float32", "bfloat16"),
        "precision.recipe": ("none", "mxfp8"),
    }
    assert "All settings are the same." in run_command(a, a).stdout


def test_json_holds_what_the_table_shows(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", [3.0] * 4, validation={4: 4.0})
    b = a_run(tmp_path / "b", [3.5] * 3 + [2.5], validation={4: 4.5})
    told = json.loads(run_command(a, b, "--json").stdout)
    assert told["runs"][1] == {
        "name": "b",
        "folder": str(b),
        "steps": 4,
        "loss": 2.5,
        "difference": -0.5,
        "validation_loss": 4.5,
        "validation_difference": 0.5,
        "tokens_per_second": 250.0,
    }
    assert (told["by"], told["common"], told["validation_at"], told["settings"]) == ("step", 4, 4, {})
    table = run_command(a, b).stdout
    assert "4 steps in common, step 1 to 4; losses are the last one's. Validation losses are those of step 4." in table
    assert "b\t4\t2.5000\t-0.5000\t4.5000\t+0.5000\t250" in table


def test_folders_that_cannot_be_compared_are_all_named_with_code_2(tmp_path: Path) -> None:
    a, empty, none = a_run(tmp_path / "a", [3.0]), a_run(tmp_path / "empty", []), tmp_path / "none"
    with pytest.raises(RequestError) as error:
        read_measured([a, empty, none], "step")
    assert f"{empty}: has measured no step yet." in str(error.value)
    assert f"{none}: holds no run" in str(error.value) and str(a) not in str(error.value)
    assert error.value.exit_code == 2
    with pytest.raises(RequestError, match="two runs or more"):
        read_measured([a], "step")


def test_a_damaged_metrics_file_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a", [3.0]), a_run(tmp_path / "b", [3.0, 2.0])
    (b / "metrics.jsonl").write_text('{"step": 1, "tokens": 7}\n')
    with pytest.raises(RequestError, match=r"b: a step in its metrics has no 'loss'; the file is damaged"):
        read_measured([a, b], "step")
    (b / "metrics.jsonl").write_text('torn\n{"step": 1, "loss": 2.0, "tokens": 7}\n')
    with pytest.raises(RequestError, match="line 1 is not a JSON object"):
        read_measured([a, b], "step")


@pytest.mark.parametrize("by", ["step", "tokens"])
def test_runs_without_a_common_place_are_refused_with_what_each_has(tmp_path: Path, by: str) -> None:
    a, b = a_run(tmp_path / "a", [3.0] * 3), a_run(tmp_path / "b", [3.0] * 9)
    later = (b / "metrics.jsonl").read_text().splitlines(keepends=True)[5:]
    (b / "metrics.jsonl").write_text("".join(later))
    with pytest.raises(RequestError, match=rf"no {by} in common") as error:
        compare(read_measured([a, b], "step" if by == "step" else "tokens"), "step" if by == "step" else "tokens")
    ends = ("1 to 3", "6 to 9") if by == "step" else ("10 to 30", "60 to 90")
    assert f"  a: {by} {ends[0]}" in str(error.value) and f"  b: {by} {ends[1]}" in str(error.value)


def test_the_page_holds_its_picture_and_escapes_names(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", [3.0] * 5, validation={5: 4.0})
    b = a_run(tmp_path / "<b>", [None, *[2.0] * 6], validation={5: 4.5})
    page = tmp_path / "new" / "compare.html"
    assert run_command(a, b, "--out", page).exit_code == 0
    text = page.read_text()
    assert text.count('src="data:image/png;base64,') == 1
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "http" not in text
    assert "&lt;b&gt;" in text and "<b>2" not in text and "<td><b></td>" not in text
    assert "+0.5000" in text and "5 steps in common" in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("by", ["step", "tokens"])
def test_the_picture_is_written_alone_for_one_step_and_many(tmp_path: Path, suffix: str, by: str) -> None:
    a, b = a_run(tmp_path / "a", [3.0]), a_run(tmp_path / "b", [2.0] * 60)
    out = tmp_path / f"picture{suffix}"
    assert run_command(a, b, b, "--out", out, "--by", by).exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_a_file_that_cannot_be_written_is_refused_its_kind_before_anything_is_read(tmp_path: Path) -> None:
    found = run_command(tmp_path / "none", tmp_path / "none", "--out", tmp_path / "x.txt")
    assert isinstance(found.exception, RequestError)
    folder = run_command(a_run(tmp_path / "a", [3.0]), tmp_path / "a", "--out", tmp_path / "a" / "run.json" / "x.png")
    assert "x.png: cannot be written" in str(folder.exception)
    assert "x.txt: is no kind of page or picture that can be written. Works: .html, .png, .svg, .pdf." in str(
        found.exception
    )


def test_comparing_needs_no_torch_and_a_page_of_it_neither(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a", [3.0]), a_run(tmp_path / "b", [2.0])
    code = (
        "import sys\nfrom launch.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch'} & set(sys.modules)"
    )
    out = tmp_path / "page.html"
    subprocess.run([sys.executable, "-c", code, "compare", str(a), str(b), "--out", str(out)], check=True)
    assert out.exists()
