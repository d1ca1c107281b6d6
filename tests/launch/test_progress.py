"""The progress of a run, on a terminal and in a file."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from core.training.insight import LayerInsight
from core.training.metrics import SaveMetrics, StepMetrics
from launch.progress import ProgressLine, duration


def step(number: int, **more: float) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=5.4321,
        learning_rate=1e-3,
        grad_norm=0.5,
        tokens_per_second=12345.6,
        tokens=8 * number,
        **more,  # type: ignore[arg-type]
    )


def shown(terminal: bool, total: int, *steps: StepMetrics, done: int = 0) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, color_system=None)
    with ProgressLine(steps=total, start_step=done, console=console) as progress:
        for metrics in steps:
            progress.show(metrics)
    return stream.getvalue().splitlines()


def test_a_short_run_in_a_file_has_a_line_a_step_under_a_header() -> None:
    lines = shown(False, 3, step(1), step(2, mfu=0.123, worst_load=1.5), step(3, validation_loss=4.5))
    assert len(lines) == 4
    assert lines[0].split() == [
        "step",
        "loss",
        "learning",
        "rate",
        "grad",
        "norm",
        "tokens/s",
        "MFU",
        "worst",
        "load",
        "left",
    ]
    assert lines[1].split()[:7] == ["1", "5.4321", "1.000e-03", "0.500", "12,346", "-", "-"]
    assert lines[2].split()[5:7] == ["12.3%", "1.50×"]
    assert lines[3].endswith("0s   validation 4.5000")


def test_a_long_run_in_a_file_has_about_a_hundred_lines_and_every_validation() -> None:
    steps = [step(n, **({"validation_loss": 4.0} if n == 777 else {})) for n in range(1, 1001)]
    lines = shown(False, 1000, *steps)
    assert 100 <= len(lines) <= 104
    assert sum("validation" in line for line in lines) == 1
    assert lines[-1].split()[0] == "1000"


def test_a_checkpoint_is_told_of_on_the_next_line_that_is_shown_and_the_last_one_on_its_own() -> None:
    stream = io.StringIO()
    save = [SaveMetrics(step=n, seconds=1.3, stalled_seconds=0.12, bytes=8) for n in (2, 3, 1000)]
    with ProgressLine(steps=1000, console=Console(file=stream, force_terminal=False, width=80)) as progress:
        for n in range(1, 1001):
            progress.show(step(n), save[n - 3 : n - 2] if n in (3, 4) else ())
        progress.show_last(save[2:])
        progress.show_last([])
    lines = stream.getvalue().splitlines()
    told = [line for line in lines if "training stopped" in line]
    assert len(told) == 1 and told[0].split()[0] == "10"
    assert told[0].endswith("   training stopped 0.12 s for the checkpoint of step 3, which took 1.30 s")
    assert lines[-1] == "checkpoint of step 1000 written in 1.30 s"


def test_a_terminal_shows_every_step_and_a_bar() -> None:
    text = "\n".join(shown(True, 300, *[step(n) for n in range(1, 301)]))
    assert all(f"{n:>6}   5.4321" in text for n in range(1, 301))
    assert "300/300" in text


def test_a_loss_that_is_not_finite_is_shown_as_such() -> None:
    (_, line) = shown(
        False,
        2,
        StepMetrics(
            step=1, loss=float("nan"), learning_rate=0.0, grad_norm=float("inf"), tokens_per_second=0.0, tokens=0
        ),
    )
    assert "nan" in line and "inf" in line


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (3599.7, "1h00m"), (7500, "2h05m")]
)
def test_times_are_read_in_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_drops_are_told_where_there_are_some_of_the_layer_with_most() -> None:
    def layer(dropped: float) -> LayerInsight:
        return LayerInsight(entropy=1.0, dropped=dropped, saved=0.5, rank_load=1.0, logit_max=1.0, logit_rms=1.0)

    full = replace(step(1), insight={"layers.0": layer(0.125), "layers.1": layer(0.0312)})
    lines = shown(False, 2, full, replace(step(2), insight={"layers.0": layer(0.0)}))
    assert lines[1].endswith("   up to 12.5% dropped")
    assert "dropped" not in lines[2]
