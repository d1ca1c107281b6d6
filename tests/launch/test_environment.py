"""Environment variables follow from the settings of a run, also from those that were changed (fault F3)."""

from __future__ import annotations

import pytest

from core.config.family import find_family
from launch.environment import EnvironmentVariable, environment
from launch.request import Request, new_run

EP_RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MARGINS = ("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN")


def of(model: str, hardware: str, preset: str | None = None, *settings: str, **asked: int) -> dict[str, str]:
    """The variables of a request, by name."""
    return {variable.name: variable.value for variable in whole(model, hardware, preset, *settings, **asked)}


def whole(
    model: str, hardware: str, preset: str | None = None, *settings: str, **asked: int
) -> tuple[EnvironmentVariable, ...]:
    request = Request(hardware=hardware, preset=preset, settings=settings, **asked)  # type: ignore[arg-type]
    planned = new_run(request, find_family(model))
    assert planned.preset is not None
    return environment(planned.run, planned.preset.environment, {})


@pytest.mark.parametrize(
    ("hardware", "preset", "settings", "ranks", "domain", "between_nodes"),
    [
        ("gb200", "mxfp8", (), "64", "72", "1"),
        ("gb200", "mxfp8", ("parallel.ep=16",), "16", "72", "1"),
        ("gb200", "mxfp8", ("parallel.ep=256", "parallel.pp=1", "parallel.layout=none", "parallel.vpp=1"), "64", "72", "1"),
        ("b300", "mxfp8", (), "8", "8", "0"),
        ("b300", "mxfp8", ("parallel.ep=4",), "4", "8", "0"),
        ("h100", "bf16", (), "8", "8", "0"),
        ("h100", "bf16", ("parallel.ep=2",), "2", "8", "0"),
    ],
)  # fmt: skip
def test_f3_another_ep_reaches_the_variables_of_the_dispatcher(
    hardware: str, preset: str, settings: tuple[str, ...], ranks: str, domain: str, between_nodes: str
) -> None:
    made = of("deepseek_v3", hardware, preset, *settings)
    assert (made[EP_RANKS], made["NVLINK_DOMAIN_SIZE"], made["USE_MNNVL"]) == (ranks, domain, between_nodes)
    assert made["NUM_OF_TOKENS_PER_CHUNK_COMBINE_API"] == "128"


def test_f3_without_the_dispatcher_its_variables_are_gone() -> None:
    made = of("deepseek_v3", "gb200", "mxfp8", "parallel.dispatcher=alltoall", "execution.dispatcher_sms=none")
    assert not {EP_RANKS, "NVLINK_DOMAIN_SIZE", "USE_MNNVL", "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API"} & set(made)


@pytest.mark.parametrize(
    ("model", "hardware", "preset", "settings", "queues"),
    [
        ("deepseek_v3", "gb200", "mxfp8", (), "32"),
        ("deepseek_v3", "gb200", "mxfp8", ("parallel.tp=2",), "32"),
        ("deepseek_v3", "h100", "bf16", (), "1"),
        ("deepseek_v3", "h100", "bf16", ("parallel.tp=1",), "32"),
        ("deepseek_v3", "h100", "bf16", ("parallel.tp=1", "parallel.cp=2"), "1"),
        ("deepseek_v3", "h100", "bf16", ("parallel.schedule=combined",), "32"),
        ("deepseek_v3", "h100", "fp8-blockwise", (), "32"),
        ("mixtral", "h100", "bf16", (), "8"),
        ("mixtral", "a100", "bf16", ("parallel.tp=2",), "1"),
    ],
)
def test_queues_follow_the_hardware_the_mapping_and_the_overlap(
    model: str, hardware: str, preset: str, settings: tuple[str, ...], queues: str
) -> None:
    assert of(model, hardware, preset, *settings)[QUEUES] == queues


def test_norms_leave_as_many_processors_as_the_dispatcher_takes_and_none_without_overlap() -> None:
    for preset, settings, margin in (
        ("fp8-blockwise", (), "20"),
        ("fp8-blockwise", ("execution.dispatcher_sms=24",), "24"),
        ("fp8-blockwise", ("execution.dispatcher_sms=none",), "20"),
        ("fp8-blockwise", ("execution.dispatcher_sms=8",), "20"),
    ):
        made = of("deepseek_v3", "h100", preset, *settings)
        assert [made[name] for name in MARGINS] == [margin, margin]
    assert not set(MARGINS) & set(of("deepseek_v3", "h100", "fp8-blockwise", "parallel.schedule=1f1b"))
    assert not set(MARGINS) & set(of("qwen3", "h100", "bf16"))  # no package with such norms is used in bfloat16


def test_a_full_graph_a_recipe_and_offloading_have_theirs() -> None:
    plain, graphs, full = (of("deepseek_v3", "gb300", preset) for preset in ("bf16", "mxfp8-paper", "mxfp8"))
    assert plain["PYTORCH_ALLOC_CONF"] == graphs["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert full["PYTORCH_ALLOC_CONF"] == "expandable_segments:True,graph_capture_record_stream_reuse:True"
    assert (full["NVTE_CUTEDSL_FUSED_GROUPED_MLP"], full["CUDNNFE_CLUSTER_OVERLAP_MARGIN"]) == ("1", "8")
    assert "NVTE_CUTEDSL_FUSED_GROUPED_MLP" not in graphs
    assert (graphs["NCCL_GRAPH_REGISTER"], full["TORCH_NCCL_HIGH_PRIORITY"]) == ("0", "1")
    assert "NCCL_GRAPH_REGISTER" not in of("deepseek_v3", "h100") and "TORCH_NCCL_HIGH_PRIORITY" not in plain
    assert of("qwen3", "gb200", "mxfp8")["NVTE_CPU_OFFLOAD_V1"] == "1"
    four = of("deepseek_v3", "gb300", "mxfp8", "precision.recipe=nvfp4")
    assert four["NVTE_USE_FAST_MATH"] == "1" and "NVTE_CUTEDSL_FUSED_GROUPED_MLP" not in four
    assert of("deepseek_v3", "b300")["NCCL_IGNORE_CPU_AFFINITY"] == "1" and "NCCL_IGNORE_CPU_AFFINITY" not in full


def test_nothing_is_set_that_torch_has_ceased_to_read() -> None:
    for hardware in ("gb300", "h100"):
        assert not {"TORCH_NCCL_AVOID_RECORD_STREAMS", "PYTORCH_CUDA_ALLOC_CONF"} & set(of("deepseek_v3", hardware))


def test_every_variable_stands_once_with_a_reason_that_names_what_it_follows_from() -> None:
    made = whole("deepseek_v3", "gb300", "mxfp8")
    names = [variable.name for variable in made]
    assert names == sorted(set(names))
    assert all(variable.why and not variable.by_user for variable in made)
    reasons = {variable.name: variable.why for variable in made}
    assert reasons[EP_RANKS] == "parallel.ep=32, and --hw gb300 joins 72 GPUs by NVLink"
    assert "parallel.schedule=combined" in reasons[QUEUES]


def test_f3_what_the_user_has_set_wins_and_is_shown() -> None:
    run = new_run(Request(hardware="gb200"), find_family("deepseek_v3")).run
    user = {EP_RANKS: "4", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", QUEUES: "32", "PATH": "/bin"}
    made = {variable.name: variable for variable in environment(run, (("NCCL_IB_SL", "1"), (QUEUES, "9")), user)}
    assert (made[EP_RANKS].value, made[EP_RANKS].by_user) == ("4", True)
    assert "set in the environment" in made[EP_RANKS].why and "make it 64" in made[EP_RANKS].why
    assert made["PYTORCH_CUDA_ALLOC_CONF"].value == "max_split_size_mb:512" and "PYTORCH_ALLOC_CONF" not in made
    assert made[QUEUES].value == "32" and "make it 9" in made[QUEUES].why
    assert made["NCCL_IB_SL"] == EnvironmentVariable(name="NCCL_IB_SL", value="1", why="the set-up's own")
    assert "PATH" not in made


def test_without_another_environment_it_is_the_one_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(Request(hardware="gb200"), find_family("deepseek_v3")).run
    monkeypatch.setenv(QUEUES, "16")
    assert {v.name: v.value for v in environment(run)}[QUEUES] == "16"


def test_cpus_need_none_and_one_gpu_no_communication() -> None:
    assert of("mixtral", "cpu") == {}
    assert set(of("mixtral", "gpu")) == {"PYTORCH_ALLOC_CONF"}
