"""A request becomes a run whose every value has an origin, or one list of all that is wrong with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.config.mapping import PACKAGES, ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import PrecisionConfig
from core.config.run import RunConfig
from core.errors import ConfigError
from launch.choice import choose_continued
from launch.describe import describe, list_rows
from launch.plan.make import make_plan
from launch.request import Planned, Request, new_run, resumed_run
from tests.launch.families import FAMILY


def plan(**asked: object) -> Planned:
    return new_run(Request(**asked), FAMILY)  # type: ignore[arg-type]


def words(planned: Planned) -> str:
    return describe(planned, make_plan(planned.run), Path("runs/x"))


def faults(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(error.value)


def test_nothing_asked_is_the_preset_for_the_cpu() -> None:
    run = plan().run
    assert (run.size, run.hardware, run.ranks, run.parallel.ep) == ("tiny", "cpu", 2, 2)
    assert run.train == replace(FAMILY.presets[0].train, schedule_steps=50)


def test_flags_and_settings_win_over_the_preset_and_say_so() -> None:
    planned = plan(steps=60, seed=7, dtype="bfloat16", ranks=4, settings=("model.moe.top_k=3", "train.steps=60"))
    assert planned.run.train.steps == 60
    assert planned.run.model.layers[1].mlp.top_k == 3  # type: ignore[union-attr]
    origins = planned.origins
    assert (origins["train.seed"], origins["precision.compute"], origins["ranks"]) == ("--seed", "--dtype", "--ranks")
    assert (origins["model.moe.top_k"], origins["train.global_batch"]) == ("--set", "preset")


@pytest.mark.parametrize(
    ("steps", "settings", "schedule"),
    [
        (5, (), 50),  # shorter than the warm-up of the preset: it only stops early
        (50, (), 50),
        (80, (), 80),
        (30, ("train.schedule_steps=25",), 25),
        (30, ("train.schedule_steps=none",), 30),
    ],
)
def test_stopping_early_leaves_the_schedule_and_a_longer_run_stretches_it(
    steps: int, settings: tuple[str, ...], schedule: int
) -> None:
    train = plan(steps=steps, settings=settings).run.train
    assert (train.steps, train.schedule_steps) == (steps, schedule)


def test_paths_hold_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = plan(data="texts", settings=("data.tokenizer=t.json",)).run
    assert run.data.path == str(tmp_path / "texts")
    assert run.data.tokenizer == str(tmp_path / "t.json")


def test_everything_wrong_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as error:
        plan(ranks=3, steps=0, settings=("train.stepz=3", "nonsense", "train.seed=x"))
    text = faults(error)
    assert text.startswith("5 settings cannot run:")
    for part in ("did you mean train.steps", "key=value", "train.seed=x", "--ranks=3", "train.steps=0"):
        assert part in text


def test_one_setting_by_flag_and_by_set_with_two_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.steps=6: was also given as 5 by --steps"):
        plan(steps=5, settings=("train.steps=6",))


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({"size": "tinny"}, ("--size=tinny: is not a size of odd. Works: tiny, huge.",)),
        ({"hardware": "tpu"}, ("--hw=tpu: is not a known kind of hardware. Works: cpu, gpu, gb300,",)),
        ({"hardware": "gpu"}, ("--hw=gpu: has no set-up of odd. Works: --size tiny --hw cpu.",)),
        ({"size": "huge"}, ("--hw=cpu: has no set-up of odd huge. Works: --size tiny --hw cpu.",)),
        ({"size": "tinny", "settings": ("x",)}, ("--size=tinny", "--set=x: is not of the form key=value")),
    ],
)
def test_an_unknown_size_or_hardware_names_those_there_are(asked: dict[str, object], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        plan(**asked)
    assert all(part in faults(error) for part in parts)


CLUSTER = replace(
    FAMILY.presets[0],
    name="bf16",
    hardware="h100",
    ranks=16,
    parallel=ParallelConfig(pp=2, ep=2),
    train=replace(FAMILY.presets[0].train, global_batch=48),
    precision=PrecisionConfig(compute="bfloat16"),
)
CAREFUL = replace(
    CLUSTER,
    name="bf16-careful",
    ranks=8,
    parallel=ParallelConfig(ep=2),
    train=replace(CLUSTER.train, microbatch=1),
    memory=MemoryConfig(recompute=("full",)),
)
MANY = replace(FAMILY, presets=(*FAMILY.presets, CLUSTER, CAREFUL, replace(CLUSTER, size="huge", hardware="gb200")))


def of_many(**asked: object) -> Planned:
    """Planned from a family with two set-ups for one kind of hardware; the first has 8 data-parallel ranks and 6 sequences for each."""
    return new_run(Request(**asked), MANY)  # type: ignore[arg-type]


def test_a_set_up_is_found_by_hardware_size_and_name_and_the_first_is_taken_without() -> None:
    assert of_many(hardware="h100").preset == CLUSTER
    assert of_many(hardware="h100", preset="bf16-careful", size="tiny").preset == CAREFUL
    assert of_many(hardware="gb200").run.size == "huge"
    assert of_many().run.hardware == "cpu"
    planned = of_many(hardware="h100", preset="bf16-careful", steps=60)
    origins = planned.origins
    assert (origins["parallel.ep"], origins["ranks"]) == ("preset bf16-careful", "preset bf16-careful")
    assert origins["train.steps"] == "--steps"
    assert planned.run.memory.recompute == ("full",)


def test_the_list_has_the_hardware_and_its_set_ups_by_name_the_first_taken_first() -> None:
    twin = replace(MANY, presets=(*MANY.presets, replace(CLUSTER, size="huge", hardware="b200")))
    cells = {size: hardware for _, size, hardware, *_ in list_rows((twin,))}
    assert cells == {"tiny": "cpu\nh100: bf16, bf16-careful", "huge": "gb200, b200: bf16"}
    assert [row[2] for row in list_rows((replace(MANY, presets=()),))] == ["-", "-"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"hardware": "h100", "preset": "bf16-carefull"},
            "--preset=bf16-carefull: is no set-up of odd for --hw h100 (did you mean bf16-careful?). Works: bf16, bf16-careful.",
        ),
        (
            {"preset": "bf16"},
            "--preset=bf16: is no set-up of odd for --hw cpu. Works: default; bf16 with --size tiny --hw h100; --size huge --hw gb200.",
        ),
        (
            {"size": "huge", "hardware": "gb200", "preset": "zzz"},
            "--preset=zzz: is no set-up of odd huge for --hw gb200. Works: bf16.",
        ),
        (
            {"hardware": "a100"},
            "--hw=a100: has no set-up of odd. Works: --size tiny --hw cpu or h100; --size huge --hw gb200.",
        ),
        ({"size": "huge"}, "--hw=cpu: has no set-up of odd huge. Works: --size huge --hw gb200."),
    ],
)
def test_a_name_that_is_no_set_up_names_those_there_are(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        of_many(**asked)
    assert message in faults(error)


def test_going_on_from_weights_has_one_set_up_for_each_hardware_and_none_by_name() -> None:
    continued = replace(FAMILY, continued=(replace(CLUSTER, size=None),))
    assert choose_continued(continued, hardware="h100", name=None).hardware == "h100"
    with pytest.raises(ConfigError, match="--preset=bf16: cannot be chosen with --init"):
        choose_continued(continued, hardware="h100", name="bf16")
    with pytest.raises(ConfigError, match="--hw=cpu: has no set-up for going on from weights of odd"):
        choose_continued(continued, hardware="cpu", name=None)


@pytest.mark.parametrize(
    ("gpus", "settings", "batch"),
    [
        (16, (), 48),
        (32, (), 96),
        (8, (), 24),
        (64, (), 192),
        (6, ("parallel.ep=3",), 18),
        # what tp, cp and pp take of the world is no data-parallel rank
        (64, ("parallel.pp=1",), 384),
        (64, ("parallel.cp=2",), 96),
        (96, ("parallel.tp=3",), 96),
    ],
)
def test_f2_the_batch_follows_the_data_parallel_ranks_of_the_world(
    gpus: int, settings: tuple[str, ...], batch: int
) -> None:
    planned = of_many(hardware="h100", gpus=gpus, settings=settings)
    assert (planned.run.ranks, planned.run.train.global_batch) == (gpus, batch)
    scaled = "preset bf16" if batch == 48 else "scaled from preset by --gpus"
    assert (planned.origins["ranks"], planned.origins["train.global_batch"]) == ("--gpus", scaled)


def test_f2_a_batch_that_is_given_is_kept_and_ranks_leave_it() -> None:
    given = of_many(hardware="h100", gpus=32, settings=("train.global_batch=64",))
    assert (given.run.train.global_batch, given.origins["train.global_batch"]) == (64, "--set")
    same = of_many(hardware="h100", gpus=32, settings=("train.global_batch=48", "train.microbatch=1"))
    assert (same.run.train.global_batch, same.origins["train.global_batch"]) == (48, "--set")
    ranks = of_many(hardware="h100", ranks=8)
    assert (ranks.run.train.global_batch, ranks.origins["train.global_batch"]) == (48, "preset bf16")
    with pytest.raises(ConfigError, match=r"train\.global_batch=50: must be a multiple of .*Works: 32 or 64"):
        of_many(hardware="h100", gpus=32, settings=("train.global_batch=50",))


@pytest.mark.parametrize(("gpus", "works"), [(18, "16 or 20"), (3, "4"), (0, "1 or more"), (-4, "1 or more")])
def test_f2_a_world_with_a_fraction_of_a_data_parallel_rank_is_refused_by_the_flag_that_was_given(
    gpus: int, works: str
) -> None:
    with pytest.raises(ConfigError) as error:
        of_many(hardware="h100", gpus=gpus)
    text = faults(error)
    assert f"--gpus={gpus}: must be" in text and works in text and "--ranks=" not in text


def test_two_sizes_of_one_world_are_refused_and_one_said_twice_is_not() -> None:
    assert of_many(hardware="h100", gpus=32, ranks=32).run.train.global_batch == 96
    with pytest.raises(ConfigError, match="--gpus=32: is another number than --ranks=16"):
        of_many(hardware="h100", gpus=32, ranks=16)


def test_a_run_goes_on_with_another_set_up_and_keeps_what_it_learns_from() -> None:
    begun = of_many(hardware="h100", settings=("optimizer.learning_rate=0.25",)).run
    planned = resumed_run(Request(preset="bf16-careful", settings=("parallel.ep=1",)), MANY, begun)
    run, origins = planned.run, planned.origins
    assert (run.ranks, run.parallel.pp, run.memory.recompute) == (8, 1, ("full",))
    assert (run.train.global_batch, run.train.microbatch, run.optimizer.learning_rate) == (48, 1, 0.25)
    assert (origins["parallel.pp"], origins["parallel.ep"], origins["ranks"]) == (
        "preset bf16-careful",
        "--set",
        "preset bf16-careful",
    )
    assert (origins["train.global_batch"], origins["train.microbatch"]) == ("run", "preset bf16-careful")
    assert planned.preset == CAREFUL


def test_a_run_goes_on_over_more_gpus_with_its_own_batch() -> None:
    begun = of_many(hardware="h100").run
    planned = resumed_run(Request(gpus=48), MANY, begun)
    assert (planned.run.ranks, planned.run.train.global_batch, planned.origins["ranks"]) == (48, 48, "--gpus")
    with pytest.raises(ConfigError, match=r"train\.global_batch=48: must be a multiple of"):
        resumed_run(Request(gpus=20), MANY, begun)
    with pytest.raises(ConfigError, match="--preset=zzz: is no set-up of odd tiny for --hw h100"):
        resumed_run(Request(preset="zzz"), MANY, begun)
    moved = resumed_run(Request(hardware="cpu", preset="default"), MANY, begun).run
    assert (moved.hardware, moved.ranks, moved.precision.compute, moved.train.global_batch) == ("cpu", 2, "float32", 48)


def resumed(begun: RunConfig, **asked: object) -> Planned:
    return resumed_run(Request(**asked), FAMILY, begun)  # type: ignore[arg-type]


def test_a_resumed_run_is_the_one_begun_with_more_steps_and_another_mapping() -> None:
    begun = plan(steps=10, settings=("model.moe.top_k=3", "optimizer.learning_rate=0.5")).run
    planned = resumed(begun, steps=70, ranks=1, settings=("parallel.ep=1", "checkpoint.interval=3"))
    train = replace(begun.train, steps=70)
    assert planned.run == replace(
        begun,
        ranks=1,
        train=train,
        parallel=replace(begun.parallel, ep=1),
        checkpoint=replace(begun.checkpoint, interval=3),
    )
    assert train.schedule_steps == 50
    assert (planned.origins["optimizer.learning_rate"], planned.origins["parallel.ep"]) == ("run", "--set")


def test_resuming_with_nothing_asked_changes_nothing() -> None:
    begun = plan(data="texts", steps=5).run
    assert resumed(begun).run == begun


def test_checkpoints_lie_where_the_run_began_to_put_them_from_any_folder() -> None:
    begun = plan(settings=("checkpoint.address=elsewhere",)).run
    assert begun.checkpoint.address == str(Path("elsewhere").absolute())
    assert resumed(begun, settings=("checkpoint.asynchronous=false",)).run.checkpoint.asynchronous is False
    with pytest.raises(ConfigError, match=r"checkpoint\.address=.*cannot change"):
        resumed(begun, settings=("checkpoint.address=s3://bucket/run",))
    remote = plan(settings=("checkpoint.address=s3://bucket/run",)).run
    assert remote.checkpoint.address == "s3://bucket/run"
    assert plan().run.checkpoint.address is None and plan().run.checkpoint.asynchronous


def test_what_would_break_the_continuity_is_refused_by_name() -> None:
    begun = plan(size="tiny").run
    with pytest.raises(ConfigError) as error:
        resumed(begun, size="huge", seed=3, data="other", settings=("model.hidden=24", "train.global_batch=16"))
    text = faults(error)
    assert text.startswith("5 settings cannot run:")
    for key in (
        "--size=huge: is tiny",
        "train.seed=3: is 0",
        "data.path=",
        "model.hidden=24: is 12",
        "train.global_batch",
    ):
        assert key in text
    with pytest.raises(ConfigError, match="MODEL=odd: is mixtral in the run"):
        resumed(replace(begun, family="mixtral"))


def test_a_plan_in_words_has_both_foldings_the_batch_and_every_origin() -> None:
    planned = plan(steps=10, settings=("model.moe.top_k=3",))
    text = words(planned)
    assert "attention    tp 1 × cp 1 × dp 2 × pp 1" in text
    assert "experts      etp 1 × ep 2 × edp 1 × pp 1" in text
    assert "ep groups of ranks {0, 1}" in text
    assert "8 sequences × 32 tokens = 256 tokens a step: 2 data-parallel × 2 microbatches × 2 sequences" in text
    assert "10 steps, of a schedule of 50, 2,560 tokens" in text
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert lines["model.moe.top_k"] == ["3", "--set"]
    assert lines["model.moe.shared"] == ["none", "preset"]
    assert lines["ranks"] == ["2", "preset"]


def test_a_plan_in_words_says_what_every_pipeline_rank_holds_and_what_is_sharded() -> None:
    settings = ("pp=2", "vpp=2", "layout=E|t|t|L", "schedule=zero_bubble", "dispatcher=allgather")
    text = words(plan(ranks=8, settings=tuple(f"parallel.{s}" for s in settings)))
    assert (
        "attention    tp 1 × cp 1 × dp 4 × pp 2\n               dp groups of ranks {0, 1, 2, 3}, {4, 5, 6, 7}" in text
    )
    assert "experts      etp 1 × ep 2 × edp 2 × pp 2, allgather dispatcher" in text
    assert "pipeline     2 ranks of 2 virtual stages, schedule zero_bubble, layout E|t|t|L" in text
    assert "               rank 0: embedding | layer 1\n               rank 1: layer 0 | loss" in text
    assert "sharding     zero1: optimizer states over 4 ranks, of experts over 2" in text
    settings = ("dispatcher=flex", "ep_per_node=2")
    text = words(plan(ranks=4, settings=tuple(f"parallel.{s}" for s in settings)))
    assert "experts      etp 1 × ep 2 × edp 2 × pp 1, flex dispatcher, nodes of 2 ranks" in text
    settings = ("sharding=fsdp", "fsdp_replicas=2")
    text = words(plan(ranks=4, settings=tuple(f"parallel.{s}" for s in settings)))
    assert "sharding     fsdp: parameters and optimizer states over 2 ranks, of experts over 1; 2 copies" in text
    assert "\n  pipeline  " not in text


def test_a_long_pipeline_is_cut_short_in_words() -> None:
    text = words(plan(ranks=12, settings=("parallel.pp=12", "parallel.ep=1")))
    assert "rank 0: embedding, layer" not in text and "rank 1: layer 0" in text
    assert "rank 7: nothing\n               and 4 more" in text
    deep = plan(
        ranks=2, settings=("model.num_layers=9", "parallel.pp=2", "parallel.ep=1", "parallel.layout=E(t)*7|ttL")
    )
    text = words(deep)
    assert "rank 0: embedding, layers 0–6" in text and "rank 1: layers 7–8, loss" in text


@pytest.mark.parametrize("name", PACKAGES)
def test_a_dispatcher_of_gpu_kernels_is_refused_on_cpus_and_in_float32_and_with_cut_experts(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(settings=(f"parallel.dispatcher={name}", "parallel.etp=2", "parallel.ep=1"))
    assert (
        f"parallel.dispatcher={name}: runs on GPUs alone, and --hw is cpu. Works: flex, alltoall or allgather."
        in faults(error)
    )
    assert (
        f"precision.compute=float32: is not what parallel.dispatcher={name} moves, which is bfloat16 alone."
        in faults(error)
    )
    assert f"parallel.etp=2: cuts experts, which parallel.dispatcher={name} takes whole." in faults(error)
