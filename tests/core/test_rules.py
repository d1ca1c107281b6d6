"""Every rule of the validator is broken by one request and just kept by another, however they are written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core.check import check
from core.check.built import not_built
from core.config.family import Family, Preset, Size, find_family
from core.config.mapping import ParallelConfig
from core.config.override import override, parse_assignment, settings
from core.config.run import RunConfig
from core.config.serial import run_to_json
from core.errors import ConfigError, Fault
from launch.folder import RunFile, read_run, write_run
from launch.hardware_rules import advice, check_hardware
from launch.profiles import find_profile
from launch.request import Request, new_run, resumed_run
from tests.core.rules import DENSE, PAIRS, RUN, VALUES, WRITTEN, Pair, in_json, in_python, value_of
from tests.core.test_check_mapping import alternatives, changed
from tests.launch.families import NoHuggingFace

ROOT = Path(__file__).resolve().parents[2]
# Where rules stand: everything that a request has to pass, besides what needs this machine (paths, weights, devices).
SOURCES = ("core/check/*.py", "core/config/override.py", "core/pipeline/layout.py", "launch/hardware_rules.py")
AREAS = (
    *("advice", "balance", "budget", "built", "capacity", "data", "dispatcher", "graphs", "hardware", "layout"),
    *("mapping", "memory", "model", "optimizer", "precision", "recompute", "selection", "setting", "train", "value"),
)

Verdict = set[tuple[str, str]]


def family_of(pair: Pair) -> Family:
    """A family whose one set-up is the run that a pair changes."""
    base = pair.base
    preset = Preset(
        size="tiny",
        hardware=pair.hardware,
        ranks=base.ranks,
        parallel=base.parallel,
        train=base.train,
        optimizer=base.optimizer,
    )
    sizes = (Size(name="tiny", model=base.model, source="here"),)
    return Family(
        name="odd", title="Odd", model_type="odd", sizes=sizes, presets=(preset,), huggingface=NoHuggingFace()
    )


def verdict(faults: tuple[Fault, ...]) -> Verdict:
    return {(fault.code, fault.setting) for fault in faults}


def by_text(pair: Pair, texts: str, ranks: int) -> Verdict:
    """As on the command line."""
    request = Request(hardware=pair.hardware, ranks=ranks, settings=tuple(texts.split()))
    try:
        new_run(request, family_of(pair))
    except ConfigError as error:
        return verdict(error.faults)
    return set()


def by_json(pair: Pair, texts: str, ranks: int, folder: Path) -> Verdict:
    """As a run.json that somebody edited, taken up again."""
    data = run_to_json(replace(pair.base, ranks=ranks, hardware=pair.hardware))
    for word in texts.split():
        key, _, text = word.partition("=")
        data = in_json(data, key.split("."), value_of(key, text))
    write_run(folder, RunFile(run=pair.base, prepared="", identity="", command=(), versions={}))
    whole = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**whole, "run": data}))
    try:
        resumed_run(Request(), family_of(pair), read_run(folder).run)
    except ConfigError as error:
        return verdict(error.faults)
    return set()


def by_value(pair: Pair, texts: str, ranks: int) -> Verdict:
    """As Python values."""
    run = replace(pair.base, ranks=ranks, hardware=pair.hardware)
    for word in texts.split():
        key, _, text = word.partition("=")
        run = in_python(run, key.split("."), value_of(key, text))
    return verdict(faults_of(run))


@pytest.mark.parametrize("pair", [*PAIRS, *WRITTEN], ids=lambda pair: f"{pair.code} {pair.breaks}")
def test_every_rule_refuses_what_breaks_it_and_passes_what_just_does_not(pair: Pair) -> None:
    assert pair.code in {code for code, _ in by_text(pair, pair.breaks, pair.ranks)}
    assert by_text(pair, pair.keeps, pair.keeps_ranks or pair.ranks) == set()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.code} {pair.breaks}")
def test_f4_command_line_file_and_python_get_the_same_verdict(pair: Pair, tmp_path: Path) -> None:
    broken = by_text(pair, pair.breaks, pair.ranks)
    assert by_json(pair, pair.breaks, pair.ranks, tmp_path) == by_value(pair, pair.breaks, pair.ranks) == broken
    ranks = pair.keeps_ranks or pair.ranks
    assert by_json(pair, pair.keeps, ranks, tmp_path) == by_value(pair, pair.keeps, ranks) == set()


@pytest.mark.parametrize(("code", "broken", "kept"), VALUES, ids=[code for code, _, _ in VALUES])
def test_what_no_setting_can_say_is_refused_as_a_value(code: str, broken: RunConfig, kept: RunConfig) -> None:
    assert code in {fault.code for fault in check(broken)}
    assert check(kept) == ()


def test_every_rule_in_the_sources_has_a_code_and_a_pair_here() -> None:
    texts = {path: path.read_text() for pattern in SOURCES for path in ROOT.glob(pattern)}
    for path, text in texts.items():
        without = re.findall(r"\b(?:Fault|Advice|Rule)\((?!\s*code=)[^)]{0,40}", text)
        assert not without, f"{path}: says {without} without a code"
    word = rf"""["'](({"|".join(AREAS)})\.[a-z0-9]+(?:-[a-z0-9]+)*)["']"""
    literals = {found[0] for text in texts.values() for found in re.findall(word, text)}
    literals |= {code for text in texts.values() for code in re.findall(r'code="([^"]*)"', text)}
    named = {".".join(key.split(".")[:n]) for base in (RUN, DENSE) for key in settings(base) for n in (1, 2, 3)}
    tested = {pair.code for pair in (*PAIRS, *WRITTEN)} | {code for code, *_ in (*VALUES, *ADVICE)} | {"built.not-yet"}
    assert literals - named - tested == set(), "rules without a pair"
    assert tested - literals == set(), "a pair for a rule that is no more"
    assert not tested & named, "a code that is a setting too"


FIXED = (
    "budget",
    "dispatcher",
    "graphs",
    "hardware.graphs",
    "hardware.recipe",
    "hardware.whole",
    "layout",
    "mapping",
    "precision",
    "recompute",
)


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if pair.code.startswith(FIXED)], ids=lambda pair: f"{pair.code} {pair.breaks}"
)
def test_every_way_out_that_a_mapping_or_set_up_is_told_leads_out(pair: Pair) -> None:
    run, wrong = override(
        replace(pair.base, ranks=pair.ranks, hardware=pair.hardware), list(map(parse_assignment, pair.breaks.split()))
    )
    assert not wrong
    for fault in faults_of(run):
        for way in alternatives(fault):
            left = {(other.code, other.setting) for other in faults_of(changed(run, way))}
            assert (fault.code, fault.setting) not in left, f"{fault} with {way}"


def faults_of(run: RunConfig) -> tuple[Fault, ...]:
    return (*check(run), *check_hardware(run, find_profile(run.hardware)))


# --------------------------------------------------------------------------------------------------- the usual eight

LAYOUT_ERRORS = (
    ("parallel.tp=7", "must divide model.attention.heads=12", "4 or 12"),
    ("parallel.tp=7", "must divide model.attention.kv_heads=4 or be a multiple of it", "4 or 12"),
    ("parallel.cp_alltoall=3", "must divide parallel.cp=8", "2 or 4"),
    ("parallel.ep=5", "must divide model.moe.experts=12", "4 or 6"),
    ("--ranks=30", "must be a multiple of parallel.tp*cp*pp=392", "1960"),
    ("--ranks=30", "must be a multiple of parallel.etp*ep*pp=35", "1960"),
    ("parallel.layout=Ett|ttt|mL", "has 5 t, and model.num_layers=4", "Et|t|t|tmL for parallel.pp=4"),
    ("parallel.pp=7", "the layout 'Ett|ttt|mL' has 3 stages, which 7 pipeline ranks cannot share evenly", "3, or 1"),
)


def test_f6_the_eight_usual_errors_of_a_layout_each_name_field_rule_and_fix_all_at_once() -> None:
    texts = ("tp=7", "ep=5", "cp=8", "cp_alltoall=3", "pp=7", "layout=Ett|ttt|mL")
    request = Request(hardware="gpu", ranks=30, settings=tuple(f"parallel.{text}" for text in texts))
    with pytest.raises(ConfigError) as caught:
        new_run(request, family_of(PAIRS[0]))
    head, *said = str(caught.value).splitlines()
    assert head == "8 settings cannot run:"
    for line, (field, rule, fix) in zip(said, LAYOUT_ERRORS, strict=True):
        assert line.strip().startswith(f"{field}: {rule}") and fix in line.split("Works: ")[1]


# ------------------------------------------------------------------------------------------- what was shipped elsewhere


def test_f1_a_grid_of_256_expert_ranks_on_64_gpus_is_refused_with_the_numbers_and_choices_that_work() -> None:
    model = find_family("qwen3").size("235b_a22b").model
    parallel = ParallelConfig(pp=8, ep=32, vpp=4)
    train = replace(RUN.train, sequence_tokens=4096, global_batch=1024)
    run = replace(RUN, hardware="gb200", ranks=64, model=model, parallel=parallel, train=train)
    (fault,) = faults_of(run)
    assert str(fault) == (
        "--ranks=64: must be a multiple of parallel.etp*ep*pp=256. Works: 256, or parallel.ep=8, or parallel.pp=2. "
        "[mapping.world-experts]"
    )
    for way in alternatives(fault):
        assert faults_of(changed(run, way)) == (), way


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "qwen3"])
def test_f1_every_set_up_on_other_numbers_of_gpus_is_refused_for_just_the_grids_that_do_not_divide(name: str) -> None:
    family = find_family(name)
    for preset in family.presets:
        assert preset.size is not None
        model, p, train = family.size(preset.size).model, preset.parallel, preset.train
        for ranks in {preset.ranks // 2, preset.ranks, preset.ranks * 2, preset.ranks + 8} - {0}:
            run = replace(RUN, hardware=preset.hardware, ranks=ranks, model=model, parallel=p, train=train)
            run = replace(run, precision=preset.precision, memory=preset.memory, execution=preset.execution)
            run = replace(run, optimizer=preset.optimizer)
            dense, experts = p.tp * p.cp * p.pp, p.etp * p.ep * p.pp
            fabric = find_profile(preset.hardware).fabric
            expected = {
                "mapping.world-attention": ranks % dense != 0,
                "mapping.world-experts": ranks % experts != 0,
                "train.batch-divides": ranks % dense == 0 and train.global_batch % (train.microbatch * (ranks // dense)) != 0,
                "hardware.whole-nodes": fabric is not None and ranks > fabric.gpus_per_node and ranks % fabric.gpus_per_node != 0,
            }  # fmt: skip
            found = {fault.code for fault in faults_of(run)}
            assert found == {code for code, broken in expected.items() if broken}, (preset.name, preset.hardware, ranks)


# --------------------------------------------------------------------------------------------- what is not built yet

UNBUILT = (
    ("memory.offload", "core_attn,moe_act", "none"),
    ("execution.graphs", "attn,moe_router", "none"),
)


def test_what_can_be_planned_and_not_run_is_one_fault_each_with_the_value_that_runs() -> None:
    assert not_built(RUN) == ()
    texts = [f"{key}={value}" for key, value, _ in UNBUILT]
    run, wrong = override(RUN, [parse_assignment(text) for text in texts])
    assert not wrong
    faults = not_built(run)
    assert [(fault.setting, fault.value, fault.works) for fault in faults] == list(UNBUILT)
    back, _ = override(run, [parse_assignment(f"{fault.setting}={fault.works}") for fault in faults])
    assert not_built(back) == ()


# --------------------------------------------------------------------------------------------------------- advice

ADVICE = (
    ("advice.combined-ep", "h100", 8, "parallel.schedule=combined parallel.vpp=2 parallel.pp=2", "parallel.schedule=combined parallel.vpp=2 parallel.pp=2 parallel.ep=2"),
    ("advice.combined-vpp", "h100", 8, "parallel.schedule=combined parallel.ep=2 parallel.pp=2", "parallel.schedule=combined parallel.ep=2 parallel.pp=2 parallel.vpp=2"),
    ("advice.combined-allgather", "h100", 8, "parallel.schedule=combined parallel.ep=2 parallel.dispatcher=allgather", "parallel.schedule=combined parallel.ep=2"),
    ("advice.inside-domain", "h100", 24, "parallel.tp=12", "parallel.tp=4"),
    ("advice.once-a-node", "h100", 12, "parallel.ep=12", "parallel.ep=12 parallel.dispatcher=deepep"),
)  # fmt: skip


@pytest.mark.parametrize(("code", "hardware", "ranks", "unwise", "wise"), ADVICE, ids=[row[0] for row in ADVICE])
def test_what_runs_and_is_unwise_is_advised_against(
    code: str, hardware: str, ranks: int, unwise: str, wise: str
) -> None:
    for texts, expected in ((unwise, {code}), (wise, set())):
        run, wrong = override(replace(RUN, ranks=ranks), [parse_assignment(text) for text in texts.split()])
        assert not wrong and not [fault for fault in check(run) if fault.setting.startswith("parallel.")]
        assert {item.code for item in advice(run, find_profile(hardware))} == expected
    assert advice(run, find_profile("gpu")) == (), "of this machine nothing is known"


# ------------------------------------------------------------------------------------------- without torch, at once


def test_a_verdict_takes_less_than_a_second_and_no_torch() -> None:
    code = (
        "import sys, time\n"
        "from launch.cli import main\n"
        "try: main(['mixtral', '--ranks', '3', '--set', 'parallel.ep=5', '--set', 'parallel.tp=3', '--dry-run'])\n"
        "except SystemExit as end: assert end.code == 2, end.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "assert time.process_time() < 1, time.process_time()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "[mapping.ep-divides-experts]" in ended.stderr and "[mapping.world-experts]" in ended.stderr
