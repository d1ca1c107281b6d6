"""Each step is in the file once, whatever was killed, and TensorBoard reads the same numbers."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import run as run_process

import pytest

from core.training.insight import LayerInsight, PrecisionInsight
from core.training.metrics import MetricsWriter, SaveMetrics, StepMetrics, read_metrics, read_saves, scalars


def step(number: int, **more: object) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=5.0 / number,
        learning_rate=1e-3,
        grad_norm=0.5,
        tokens_per_second=7.0,
        tokens=13 * number,
        **more,  # type: ignore[arg-type]
    )


def test_a_line_holds_what_was_measured_and_nothing_else(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(step(1))
        load = {"layers.1.mlp": (0.25, 0.75)}
        writer.write(step(2, expert_load=load, seconds={"data": 0.5}, validation_loss=4.5, worst_load=1.5))
    plain = {"learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_second": 7.0}
    more = {"expert_load": {"layers.1.mlp": [0.25, 0.75]}, "seconds": {"data": 0.5}}
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 5.0, "tokens": 13, **plain},
        {"step": 2, "loss": 2.5, "tokens": 26, **plain, **more, "validation_loss": 4.5, "worst_load": 1.5},
    ]


def test_a_line_is_readable_before_the_writer_closes(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(step(1))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    writer.close()


@pytest.mark.parametrize("resumed", [0, 1, 3, 9])
def test_resuming_leaves_each_step_once(tmp_path: Path, resumed: int) -> None:
    with MetricsWriter(tmp_path) as writer:
        for number in range(1, 6):
            writer.write(step(number))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with MetricsWriter(tmp_path, resume_from_step=resumed) as writer:
        for number in range(resumed + 1, 12):
            writer.write(step(number))
    kept = range(1, min(resumed, 5) + 1)
    assert [line["step"] for line in read_metrics(tmp_path)] == [*kept, *range(resumed + 1, 12)]


def saved(step: int) -> SaveMetrics:
    return SaveMetrics(step=step, seconds=1.25, stalled_seconds=0.125, bytes=1000 * step)


def test_checkpoints_have_lines_of_their_own_each_once_after_a_resume(tmp_path: Path) -> None:
    assert read_saves(tmp_path) == []
    with MetricsWriter(tmp_path) as writer:
        for number in (2, 4, 6):
            writer.write(step(number))
            writer.write_save(saved(number))
    assert read_saves(tmp_path) == [saved(2), saved(4), saved(6)]
    assert [line["step"] for line in read_metrics(tmp_path)] == [2, 4, 6]
    with MetricsWriter(tmp_path, resume_from_step=4) as writer:
        assert read_saves(tmp_path) == [saved(2), saved(4)]
        writer.write_save(saved(6))
    assert read_saves(tmp_path) == [saved(2), saved(4), saved(6)]
    assert saved(6).sentence == "training stopped 0.12 s for the checkpoint of step 6, which took 1.25 s"


def test_a_new_run_never_writes_over_an_old_one(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).close()
    with pytest.raises(FileExistsError):
        MetricsWriter(tmp_path)


def test_a_loss_that_is_not_finite_is_null_and_still_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(step(1, mtp_loss=float("nan"), expert_load={"a": (float("inf"),)}))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    parsed = json.loads(line, parse_constant=pytest.fail)
    assert parsed["mtp_loss"] is None and parsed["expert_load"] == {"a": [None]}


def test_a_torn_last_line_is_left_out_and_a_torn_middle_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path) as writer:
        for number in (1, 2, 3):
            writer.write(step(number, expert_load={"layers.0.mlp": (0.2, 0.8)}))
    with MetricsWriter(tmp_path, resume_from_step=2) as writer:
        writer.write(step(3, validation_loss=4.25))
        writer.write_save(saved(3))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(1, 5.0), (2, 2.5), (3, pytest.approx(5 / 3))]
    assert [(e.step, e.value) for e in events.Scalars("loss/validation")] == [(3, 4.25)]
    for name, value in (("seconds", 1.25), ("stalled_seconds", 0.125), ("bytes", 3000.0)):
        assert [(e.step, e.value) for e in events.Scalars(f"checkpoint/{name}")] == [(3, value)]
    assert events.Scalars("experts/layers.0.mlp")[0].value == pytest.approx(1.6)


def test_metrics_need_no_torch() -> None:
    code = (
        "import sys, tempfile, pathlib, core.training.metrics as m;"
        "m.MetricsWriter(pathlib.Path(tempfile.mkdtemp())).close();"
        "sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    )
    assert run_process([sys.executable, "-c", code], check=False).returncode == 0


def test_what_layers_tell_of_their_experts_is_in_the_file_and_a_curve_each(tmp_path: Path) -> None:
    calm = LayerInsight(entropy=0.75, dropped=0.0, saved=0.5, rank_load=1.5, logit_max=float("inf"), logit_rms=2.0)
    full = LayerInsight(entropy=0.5, dropped=0.25, saved=0.5, rank_load=2.5, logit_max=8.0, logit_rms=4.0)
    told = step(1, insight={"layers.1": calm, "mtp.0.layer": full})
    assert told.dropped == 0.25 and step(2).dropped == 0.0
    with MetricsWriter(tmp_path) as writer:
        writer.write(told)
    numbers = {"entropy": 0.75, "dropped": 0.0, "saved": 0.5, "rank_load": 1.5, "logit_max": None, "logit_rms": 2.0}
    [line] = read_metrics(tmp_path)
    assert line["insight"]["layers.1"] == numbers
    assert line["insight"]["mtp.0.layer"]["logit_max"] == 8.0
    tags = dict(scalars(told))
    assert tags["experts/entropy/layers.1"] == 0.75 and tags["experts/dropped/mtp.0.layer"] == 0.25
    assert {tag.split("/")[1] for tag in tags if tag.endswith("mtp.0.layer")} == set(numbers)


def test_what_rounding_loses_is_in_the_file_and_a_curve_for_each_number_of_each_operand(tmp_path: Path) -> None:
    lost = PrecisionInsight(
        relative_error=0.25, amax=float("inf"), saturated=0.5, flushed=0.125, scales=(0, 3), smallest_exponent=-40
    )
    told = step(1, precision={"layers.1": {"input": lost, "weight": lost}})
    with MetricsWriter(tmp_path) as writer:
        writer.write(told)
        writer.write(step(2))
    first, second = read_metrics(tmp_path)
    numbers = {"relative_error": 0.25, "amax": None, "saturated": 0.5, "flushed": 0.125}
    assert first["precision"]["layers.1"]["weight"] == {**numbers, "scales": [0, 3], "smallest_exponent": -40}
    assert "precision" not in second
    tags = [tag for tag, _ in scalars(told) if tag.startswith("precision/")]
    assert tags == [f"precision/{name}/layers.1/{operand}" for operand in ("input", "weight") for name in numbers]


def test_the_factor_of_float16_is_in_the_file_and_a_curve_and_nowhere_else(tmp_path: Path) -> None:
    told = replace(step(1), loss_scale=32768.0, skipped=1, grad_norm=float("inf"))
    with MetricsWriter(tmp_path) as writer:
        writer.write(told)
        writer.write(step(2))
    first, second = read_metrics(tmp_path)
    assert (first["loss_scale"], first["skipped"], first["grad_norm"]) == (32768.0, 1, None)
    assert not {"loss_scale", "skipped"} & second.keys()
    assert {"optimizer/loss_scale": 32768.0, "optimizer/skipped": 1}.items() <= dict(scalars(told)).items()
