"""`launch schedule`: what it prints is what the layout and the closed forms say; the picture is drawn; mistakes are told."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core.config.architecture import Dense, Layer, MultiToken
from core.config.mapping import ParallelConfig
from core.config.run import RunConfig
from core.errors import ConfigError, RequestError
from core.pipeline.layout import layout_of
from core.pipeline.schedule import forward_only, make_schedule
from core.pipeline.simulate import Costs, simulate
from launch.cli import main
from launch.request import Request, new_run
from launch.schedule import headline, parse_costs, part_work, rows, time_schedule
from launch.schedule_picture import draw_schedule
from tests.launch.families import FAMILY, MODEL

PNG = b"\x89PNG\r\n\x1a\n"
EQUAL = parse_costs("equal")


def a_run(**parallel: object) -> RunConfig:
    run = new_run(Request(), FAMILY).run
    pp = parallel.get("pp", 1)
    assert isinstance(pp, int)
    return replace(run, ranks=2 * pp, parallel=ParallelConfig(ep=2, **parallel))  # type: ignore[arg-type]


def launch(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(("schedule", *arguments))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_command_prints_every_rank_and_the_proof_and_draws_the_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "a picture.png"
    settings = ("--set", "parallel.pp=2", "--set", "parallel.ep=1", "--set", "parallel.layout=E|t*4|t*4|L")
    settings += ("--set", "model.num_layers=8", "--costs", "equal,transfer=0")
    code, out, _ = launch(capsys, "mixtral", "--ranks", "2", *settings, "--microbatches", "6", "--out", str(picture))
    assert code == 0
    assert out.splitlines() == [
        "rank\tparts\tpeak live microbatches\tcomputes\tbubble",
        "0\tE | t*4\t5\t36.00\t8.3%",
        "1\tt*4 | L\t3\t36.00\t8.3%",
        "mixtral tiny: 1f1b, 2 pipeline ranks, 2 chunks each, 6 microbatches: bubble 8.3%",
        "total 39.00 forward passes of an average part",
        "proved: complete, in order, free of deadlock",
        f"picture: {picture}",
    ]
    assert picture.read_bytes().startswith(PNG)


def test_without_a_picture_nothing_slow_is_imported() -> None:
    code = (
        "import sys\nfrom launch.cli import main\n"
        "for arguments in (['schedule', '--help'], ['schedule', 'mixtral']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "slow = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("mixtrl",), "mixtrl"),
        (("mixtral", "--microbatches", "0"), "0 is not in the range x>=1"),
        (("mixtral", "--set", "parallel.layout=Ex"), "parallel.layout=Ex: 'x' is not one of E (embedding)"),
        (
            ("mixtral", "--costs", "sleep=1"),
            "--costs=sleep=1: is not a cost. Works: equal, or a number for any of forward,",
        ),
        (("mixtral", "--costs", "forward=-1"), "--costs=forward=-1: needs a number that is not negative"),
        (("mixtral", "--costs", "forward=inf"), "--costs=forward=inf: needs a number"),
        (("mixtral", "--costs", "overlap=1.5"), "overlap=0.1, or another number from 0 to 1"),
        (
            ("mixtral", "--out", "x.txt"),
            "--out x.txt: is no kind of picture. Works: a name that ends in .png, .svg, .pdf",
        ),
        (("mixtral", "--out", "no/where/x.png"), "--out no/where/x.png: cannot be written: No such file"),
    ],
)
def test_a_mistake_ends_with_code_two_and_one_message(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = launch(capsys, *arguments)
    assert (code, part in err, "Traceback" in err) == (2, True, False), err
    assert not list(tmp_path.iterdir())


def test_microbatches_are_those_of_the_run_unless_they_are_given() -> None:
    # 8 sequences a step, 2 at a time: 4 microbatches for one replica, 2 for each of two
    assert (
        time_schedule(replace(a_run(pp=2), ranks=2, parallel=ParallelConfig(pp=2)), None, EQUAL).schedule.microbatches
        == 4
    )
    assert time_schedule(a_run(pp=2), None, EQUAL).schedule.microbatches == 2
    assert time_schedule(a_run(pp=2), 7, EQUAL).schedule.microbatches == 7


@pytest.mark.parametrize(
    ("name", "bubble"), [("gpipe", 1 / 4), ("1f1b", 1 / 4), ("combined", 1 / 4), ("zero_bubble", 1 / 12)]
)
def test_equal_parts_have_the_bubble_of_the_closed_form(name: str, bubble: float) -> None:
    assert time_schedule(a_run(pp=2, schedule=name), 4, EQUAL).bubble == pytest.approx(bubble)


def test_parts_weigh_by_their_operations() -> None:
    wide = Layer(attention=MODEL.layers[0].attention, mlp=Dense(ffn=1000))
    model = replace(MODEL, layers=(MODEL.layers[0], wide), predict_ahead=MultiToken(depth=2, loss_weight=0.1))
    layout = layout_of(model, ParallelConfig(pp=5, layout="Et|t|m|m|L"))
    first, second, ahead, also, head = part_work(model, layout, 32)
    assert first + second + ahead + also + head == pytest.approx(5)
    # per token: attention 12 * 4 * (2*3 + 2*1) + 3*8*32/2, experts 2 * 3*12*8, dense 3*12*1000, head 300*12, projection 2*12*12
    attention = 384 + 384
    assert second / first == pytest.approx((attention + 36000) / (attention + 576))
    assert head / first == pytest.approx(3600 / (attention + 576))
    assert ahead / first == pytest.approx((attention + 36000 + 288 + 3600) / (attention + 576))
    assert also == pytest.approx(ahead)


def test_a_rank_with_nothing_to_do_is_said_so() -> None:
    run = a_run(pp=3, layout="E||ttL")
    timeline = time_schedule(run, 2, parse_costs(""))
    table = list(rows(timeline, layout_of(run.model, run.parallel)))
    assert [row[1] for row in table] == ["E", "nothing", "ttL"]
    assert [row[4] for row in table] == ["∞", "∞", "0.0%"]
    assert headline(run, timeline) == "odd tiny: 1f1b, 3 pipeline ranks, 2 microbatches: bubble 200.0%"


def test_costs_are_read_with_all_faults_at_once() -> None:
    weights = parse_costs("equal,backward=3,transfer=0.5,overlap=0.25")
    assert weights.equal and weights.costs == Costs(backward=3.0, transfer=0.5, overlap=0.25)
    assert not parse_costs("").equal and parse_costs("").costs == Costs()
    with pytest.raises(ConfigError) as caught:
        parse_costs("forwards=1,backward=x,overlap=2")
    assert len(caught.value.faults) == 3


def test_schedules_of_every_kind_and_size_can_be_drawn(tmp_path: Path) -> None:
    schedules = [make_schedule(name, stages=3, virtual=2, microbatches=4) for name in ("zero_bubble", "combined")]
    schedules.append(forward_only(stages=1, virtual=1, microbatches=1))
    schedules.append(make_schedule("1f1b", stages=1, virtual=9, microbatches=11))
    for schedule, suffix in zip(schedules, (".png", ".svg", ".pdf", ".PNG"), strict=True):
        path = tmp_path / f"{schedule.name}{suffix}"
        draw_schedule(simulate(schedule, Costs(transfer=0.1)), path, "a title")
        assert path.stat().st_size > 2_000


def test_a_picture_of_what_takes_no_time_is_still_drawn(tmp_path: Path) -> None:
    nothing = Costs(forward=0.0, backward=0.0)
    draw_schedule(simulate(make_schedule("1f1b", stages=2, virtual=1, microbatches=2), nothing), tmp_path / "x.png", "")
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


def test_the_same_schedule_gives_the_same_picture(tmp_path: Path) -> None:
    timeline = simulate(make_schedule("1f1b", stages=2, virtual=1, microbatches=3), Costs())
    for name in ("a.png", "b.png"):
        draw_schedule(timeline, tmp_path / name, "the same")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with pytest.raises(RequestError, match="is no kind of picture"):
        draw_schedule(timeline, tmp_path / "c.gif", "another")
