"""The report: self-contained, honest about what was not measured, and safe whatever the text in it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.errors import RequestError
from core.training.insight import LayerInsight, PrecisionInsight
from core.training.metrics import MetricsWriter, SaveMetrics, StepMetrics
from launch.describe import describe
from launch.folder import RunFile, write_json, write_run
from launch.plan.make import make_plan
from launch.report import write_report
from launch.report_figures import smoothed
from launch.request import Request, new_run
from tests.launch.families import FAMILY

PNG = b"\x89PNG\r\n\x1a\n"


def a_run(out: Path, steps: int, samples: dict[str, str] | None = None, **summary: object) -> Path:
    run = new_run(Request(), FAMILY).run
    write_run(out, RunFile(run=run, prepared="/p", identity="i", command=("launch", "<odd>"), versions={"python": "3"}))
    with MetricsWriter(out) as writer:
        for number in range(1, steps + 1):
            writer.write(a_step(number))
    if samples is not None:
        write_json(out / "samples.json", samples)
    if summary:
        write_json(out / "summary.json", summary)
    return out


def a_step(number: int) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=float("nan") if number == 3 else 5.0 / number,
        learning_rate=1e-3,
        grad_norm=float("inf") if number == 3 else 1.0,
        tokens_per_second=100.0,
        tokens=7 * number,
        expert_load={"layers.0": (0.5, 0.5, 0.0), "layers.1": (1.0, 0.0, 0.0)},
        insight={"layers.0": told(0.9, number), "layers.1": told(0.1, number)},
        seconds={"data": 0.0, "forward_backward": 0.5},
        validation_loss=4.25 if number % 5 == 0 else None,
    )


def told(entropy: float, number: int) -> LayerInsight:
    largest = float("nan") if number == 3 else 7.0
    return LayerInsight(entropy=entropy, dropped=0.25, saved=0.5, rank_load=1.5, logit_max=largest, logit_rms=2.0)


@pytest.mark.parametrize("steps", [1, 301])
def test_a_run_of_any_length_has_a_page_with_its_pictures_inside(tmp_path: Path, steps: int) -> None:
    page = write_report(a_run(tmp_path, steps, unigram_entropy=6.5, ended="stopped"))
    text = page.read_text()
    assert page == tmp_path / "report.html"
    assert text.count('src="data:image/png;base64,') == 6
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "http" not in text
    pictures = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert pictures == [
        "expert_load.png",
        "layer_load.png",
        "learning_rate.png",
        "loss.png",
        "routing.png",
        "time.png",
    ]
    assert all((tmp_path / "report" / name).read_bytes().startswith(PNG) for name in pictures)
    assert f"{steps} of 50 steps on cpu, 2 ranks; stopped by a signal" in text
    assert "6.5000" in text


def test_the_report_says_for_how_long_training_stopped_for_checkpoints_the_dearest_first(tmp_path: Path) -> None:
    a_run(tmp_path, 8)
    with MetricsWriter(tmp_path, resume_from_step=8) as writer:
        for step, stalled in ((2, 0.12), (4, 0.5), (6, 0.01), (8, 0.3)):
            writer.write_save(SaveMetrics(step=step, seconds=1.3, stalled_seconds=stalled, bytes=3 << 20))
    text = write_report(tmp_path).read_text()
    cell = text.split("<td>checkpoints</td><td>")[1].split("</td>")[0].splitlines()
    assert cell == [
        "4 of 3.0 MiB",
        "training stopped 0.50 s for the checkpoint of step 4, which took 1.30 s",
        "training stopped 0.30 s for the checkpoint of step 8, which took 1.30 s",
        "training stopped 0.12 s for the checkpoint of step 2, which took 1.30 s",
    ]


def test_the_validation_loss_stands_beside_the_unigram_entropy(tmp_path: Path) -> None:
    text = write_report(a_run(tmp_path, 6, unigram_entropy=6.5, ended="finished")).read_text()
    assert "<b>4.2500</b><span>validation loss, last</span>" in text
    assert "<b>6.5000</b><span>unigram entropy of the validation text</span>" in text


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    text = write_report(a_run(tmp_path, 0)).read_text()
    assert "No step was finished" in text and "<td>checkpoints</td>" not in text
    assert "Generated text" not in text
    assert not (tmp_path / "report").exists()


def test_generated_text_is_shown_as_text(tmp_path: Path) -> None:
    samples = {"prompt": "<b>x", "before": "{y} <script>alert(1)</script>", "after": "&amp;"}
    text = write_report(a_run(tmp_path, 0, samples)).read_text()
    assert "<script" not in text
    assert "{y} &lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&amp;amp;" in text and "launch &lt;odd&gt;" in text


def test_a_run_stopped_before_its_last_sample_shows_the_first(tmp_path: Path) -> None:
    text = write_report(a_run(tmp_path, 0, {"prompt": "x", "before": "y"})).read_text()
    assert "Before training" in text and "After training" not in text


def test_a_folder_without_a_run_or_with_damaged_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no run"):
        write_report(tmp_path)
    a_run(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_text("[]\nx\n{}\n")
    with pytest.raises(RequestError, match="line 2"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RequestError, match=r"run\.json: is not JSON"):
        write_report(tmp_path)


def test_smoothing_keeps_a_straight_line_and_passes_over_what_is_not_finite() -> None:
    line = np.arange(200, dtype=float)
    assert np.allclose(smoothed(line), line)
    assert np.isnan(smoothed(np.array([np.nan]))).all()
    holed = np.where(line == 100, np.nan, 3.0)
    assert np.allclose(smoothed(holed), 3.0)


def test_a_run_without_experts_has_no_picture_of_them(tmp_path: Path) -> None:
    a_run(tmp_path, 0)
    with MetricsWriter(tmp_path, resume_from_step=0) as writer:
        writer.write(replace(a_step(1), expert_load={}, insight={}))
    write_report(tmp_path)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "learning_rate.png",
        "loss.png",
        "time.png",
    ]


def test_layers_of_different_numbers_of_experts_and_many_layers_are_drawn(tmp_path: Path) -> None:
    a_run(tmp_path, 0)
    load = {f"layers.{i}": (1 / (2 + i % 2),) * (2 + i % 2) for i in range(43)}
    with MetricsWriter(tmp_path, resume_from_step=0) as writer:
        for number in range(1, 4):
            insight = {name: told(0.5, number) for name in load}
            writer.write(replace(a_step(number), expert_load=load, insight=insight))
    assert "Expert load by layer" in write_report(tmp_path).read_text()


def test_a_run_of_forced_routing_says_that_its_losses_mean_nothing(tmp_path: Path) -> None:
    planned = new_run(Request(settings=("train.forced_routing=hot_expert",)), FAMILY)
    words = "forced (hot_expert): the run measures speed and memory, its losses mean nothing"
    said = describe(planned, make_plan(planned.run))
    assert words in said and "train.forced_routing" in said
    file = RunFile(run=planned.run, prepared="/p", identity="i", command=("launch",), versions={})
    write_run(tmp_path, file)
    text = write_report(tmp_path).read_text()
    assert f"Routing was {words}." in text and f"<td>routing</td><td>{words}</td>" in text
    free = new_run(Request(), FAMILY)
    assert "losses mean nothing" not in describe(free, make_plan(free.run))


def test_what_rounding_loses_is_drawn_and_its_last_numbers_are_a_table(tmp_path: Path) -> None:
    def lost(error: float, place: int) -> PrecisionInsight:
        scales = tuple(int(i == place) * 40 for i in range(81))
        return PrecisionInsight(
            relative_error=error, amax=12.5, saturated=0.0, flushed=0.00125, scales=scales, smallest_exponent=-40
        )

    a_run(tmp_path, 0)
    with MetricsWriter(tmp_path, resume_from_step=0) as writer:
        for number in range(1, 6):
            both = {"input": lost(0.02 / number, 35), "gradient": lost(float("nan"), 0)}
            told = {"layers.0": both, "mtp.0": {"weight": lost(0.03, 40)}} if number in (2, 4) else {}
            writer.write(replace(a_step(number), precision=told))
    text = write_report(tmp_path).read_text()
    assert (tmp_path / "report" / "precision.png").read_bytes().startswith(PNG)
    assert "<h2>Precision, step 4</h2>" in text
    some, none = "<td>12.5</td><td>0.000%</td><td>0.125%</td>", "<td>-</td>" * 4
    assert f"<tr><td>layers.0</td><td>0.50%</td>{some}{none}<td>-</td>{some}</tr>" in text
    assert f"<tr><td>mtp.0</td>{none}<td>3.00%</td>{some}{none}</tr>" in text


def test_a_run_without_a_recipe_says_nothing_of_rounding(tmp_path: Path) -> None:
    assert "<h2>Precision" not in write_report(a_run(tmp_path, 3)).read_text()
    assert not (tmp_path / "report" / "precision.png").exists()
