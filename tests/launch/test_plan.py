"""`launch plan` and `--dry-run`: what a job would hold, send and take, from a laptop, in words, in JSON, and setting by setting."""

import json

import pytest

from core.config.family import find_family
from core.config.override import settings
from core.config.run import RunConfig, TrainConfig
from launch.cli import main
from launch.explain import explain, meanings
from launch.plan.result import MemoryParts, Plan, RankMemory
from launch.plan.text import plan_lines, table
from launch.request import Request, new_run


def launch(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_a_plan_names_mapping_memory_stages_communication_time_and_what_cannot_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = launch(capsys, "plan", "deepseek_v3", "--hw", "gb200")
    assert code == 0
    for part in (
        "deepseek_v3 671b on gb200, 256 GPUs",
        "tp 1 × cp 1 × dp 64 × pp 4",
        "etp 1 × ep 64 × edp 1 × pp 4",
        "rank 3: layers 12–15 | layers 28–31 | layers 44–47 | layer 60, prediction module 0, loss",
        "fullest: rank 0 with",
        "milliseconds of one microbatch",
        "NVLink domain",
        "predicted step",
        "execution.graphs=attn,moe_router,moe_preprocess: can be planned and priced, and cannot run yet",
        "formats of products",
        "e4m3/mx · e4m3/mx",
        "NVLINK_DOMAIN_SIZE=72",
        "preset mxfp8",
    ):
        assert part in out


def test_the_json_of_a_plan_has_the_run_its_origins_and_sizes_that_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = launch(capsys, "plan", "qwen3", "--hw", "h100", "--preset", "bf16", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["run"]["parallel"]["pp"] == 8 and data["origins"]["parallel.pp"] == "preset bf16"
    assert len(data["plan"]["memory"]) == 8
    fullest = max(data["plan"]["memory"], key=lambda each: sum(each["balanced"].values()))
    assert data["worst_rank"] == fullest["rank"]
    assert data["headroom"] == 80 * 10**9 - sum(fullest["balanced"].values())
    time = data["plan"]["time"]
    assert time["seconds"] == pytest.approx(sum(time["walls"].values()))


def test_the_plan_of_the_machine_at_hand_has_memory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = launch(capsys, "mixtral", "--dry-run")
    assert code == 0
    assert "memory of the fullest rank at each place of the pipeline, MiB" in out
    assert "predicted step" not in out and "cannot start yet" not in out


def test_a_setting_is_explained_with_origin_default_choices_and_meaning() -> None:
    planned = new_run(Request(hardware="gb200", settings=("parallel.schedule=combined",)), find_family("deepseek_v3"))
    lines = explain(planned, "parallel.schedule").splitlines()
    assert lines[0] == "parallel.schedule = combined"
    assert lines[1].split() == ["from", "--set"]
    assert lines[2].split() == ["default", "1f1b"]
    assert lines[3].split(maxsplit=1)[1] == "gpipe, 1f1b, zero_bubble, combined"
    assert "hides the communication of each behind the other's computation" in lines[4]


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3", "mixtral"])
def test_every_setting_can_be_explained(model: str) -> None:
    planned = new_run(Request(), find_family(model))
    for key in ("ranks", *settings(planned.run)):
        assert explain(planned, key).startswith(f"{key} = ")


def test_a_field_means_what_stands_behind_its_name() -> None:
    assert meanings(TrainConfig)["global_batch"] == "sequences of one optimizer step, over all ranks."
    assert "ranks" not in meanings(RunConfig)


def test_a_setting_that_is_none_is_refused_with_the_closest_ones(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = launch(capsys, "plan", "mixtral", "--explain", "paralel.ep")
    assert code == 2
    assert "--explain=paralel.ep: is not a setting of this run. Works: parallel.ep" in err


def test_memory_is_shown_by_the_reports_own_accounting_too(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ("recipe=none", "primary=false", "moments=float32")
    settings = [*(f"--set=precision.{text}" for text in plain), "--set=memory.recompute=none"]
    code, out, _ = launch(capsys, "plan", "deepseek_v3", "--hw", "gb200", "--table3", *settings)
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:]]
    assert rows[0] == ["-", "36.4", "32.1", "131.0", "199.6"], "as printed, but for its 199.5"
    assert [row[0] for row in rows[1:]] == ["0", "64", "128", "192"]
    assert float(rows[1][-1]) == pytest.approx(218.6, abs=0.1), "the fullest rank is the first"
    code, _, err = launch(capsys, "plan", "mixtral", "--table3")
    assert code == 2 and "MODEL=mixtral: shows what Table 3 of the report counts" in err


def of_parts(size: int) -> MemoryParts:
    return MemoryParts(parameters=size, gradients=size, optimizer=0, activations=0, logits=0, working=0)


def test_what_does_not_fit_is_said_with_how_much_is_missing() -> None:
    gib = 1 << 30
    memory = tuple(
        RankMemory(pp_rank=i, rank=8 * i, balanced=of_parts(i * gib), worst=of_parts(2 * i * gib), in_flight=(2, 1))
        for i in range(3)
    )
    plan = Plan(memory=memory, capacity=3 * gib, stages=(), communication=(), time=None)
    run = new_run(Request(), find_family("mixtral")).run
    lines = list(plan_lines(run, plan))
    assert lines[-1] == "  fullest: rank 16 with 4.0 GiB of 3.0: 1.0 too much: it does not fit"
    assert lines[3].split() == ["1", "8", *["1.0"] * 2, *["0.0"] * 4, "2.0", "4.0", "2+1"]
    roomy = Plan(memory=memory, capacity=5 * gib, stages=(), communication=(), time=None)
    assert list(plan_lines(run, roomy))[-2].endswith("4.0 GiB of 5.0: 1.0 free")
    assert "should all tokens go to its experts it needs 8.0 GiB" in list(plan_lines(run, roomy))[-1]


def test_tables_put_numbers_right_and_words_left() -> None:
    assert list(table(("a", "word"), [("1", "x"), ("100", "longer")])) == ["    a  word", "    1  x", "  100  longer"]
