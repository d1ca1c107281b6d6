"""Model + size + hardware + settings → the run, with the origin of every value; or all faults at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from core.check import check, check_model
from core.config.architecture import ModelConfig
from core.config.family import Family, Preset
from core.config.override import Assignment, override, parse_assignment, settings
from core.config.run import DataConfig, RunConfig
from core.errors import ConfigError, Fault
from launch.folder import Init, anywhere
from launch.hardware_rules import check_hardware
from launch.profiles import find_profile

DEFAULT_HARDWARE = "cpu"
INIT = "--init"
# What decides the tokens of every step and what is computed from them: a resumed run must keep it.
# And where its checkpoints are: elsewhere it would find none and begin again.
KEPT_ON_RESUME = (
    *("model.", "data.", "train.seed", "train.sequence_tokens", "train.global_batch"),
    *("train.forced_routing", "checkpoint.address"),
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A launch as the user typed it; None where a flag was not given. `settings` are the texts of --set."""

    size: str | None = None
    hardware: str | None = None
    ranks: int | None = None
    steps: int | None = None
    seed: int | None = None
    data: str | None = None
    dtype: str | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Initial:
    """Weights that a new run begins with (`--init`), and what is known of them.

    family: a name of the zoo, None where nobody said. assets: files that came with them, by name. misfit: the first tensor that another
    model has in another shape, in words; None where the weights fit.
    """

    init: Init
    family: str | None
    size: str
    model: ModelConfig
    assets: Mapping[str, bytes] = field(repr=False)
    misfit: Callable[[ModelConfig], str | None] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run that keeps every rule, and where each of its settings comes from: `preset`, `run`, `--set` or a flag.

    init: the weights that it begins with, None for random ones.
    """

    run: RunConfig
    origins: Mapping[str, str]
    init: Init | None = None


def new_run(request: Request, family: Family, initial: Initial | None = None) -> Planned:
    """The run that is asked for, from random weights or from `initial`, whose model it then has. Raises ConfigError with every fault.

    Where `--steps` stops before the preset's end, the learning-rate schedule keeps the preset's length, so that the run can
    be resumed to the full length with the losses of an uninterrupted one; a longer run gets a longer schedule.
    """
    items, faults = _assignments(request)
    try:
        preset = _find_preset(request, family, initial)
    except ConfigError as error:
        raise ConfigError([*error.faults, *faults]) from None
    base = _from_preset(preset, family, initial)
    if request.ranks is not None:
        base = replace(base, ranks=request.ranks)
    run, wrong = override(base, items)
    origins = _origins(run, items, "preset")
    if initial is not None:
        faults += [*_unlike(request, family, initial), *_misfits(base, items, initial)]
        named = {item.key for item in items}
        origins |= {key: INIT for key in origins if key.startswith("model.") and key not in named}
    if origins["train.schedule_steps"] == "preset":
        length = max(preset.train.schedule_steps or preset.train.steps, run.train.steps)
        run = replace(run, train=replace(run.train, schedule_steps=length))
    run = _settled(run)
    _raise_faults([*faults, *wrong, *check(run), *check_hardware(run, find_profile(run.hardware))])
    init = None if initial is None else initial.init
    return Planned(run=run, origins=origins | _ranks_origin(request, "preset"), init=init)


def resumed_run(request: Request, family: Family, begun: RunConfig) -> Planned:
    """The run that continues `begun`: other steps, ranks, mapping or intervals, and the same model, data and seed.

    Raises ConfigError with every fault, among them each setting that would break the continuity.
    """
    items, faults = _assignments(request)
    for flag, asked, held in (("MODEL", family.name, begun.family), ("--size", request.size or begun.size, begun.size)):
        if asked != held:
            faults.append(_changed(flag, asked, held))
    base = replace(begun, ranks=request.ranks or begun.ranks)
    if request.hardware is not None:
        base = replace(base, hardware=find_profile(request.hardware).name)
    run, wrong = override(base, items)
    run = _settled(run)
    before, after = settings(begun), settings(run)
    for key in sorted(before.keys() | after.keys()):
        if key.startswith(KEPT_ON_RESUME) and before.get(key) != after.get(key):
            faults.append(_changed(key, after.get(key), before.get(key)))
    _raise_faults([*faults, *wrong, *check(run), *check_hardware(run, find_profile(run.hardware))])
    return Planned(run=run, origins=_origins(run, items, "run") | _ranks_origin(request, "run"))


def _assignments(request: Request) -> tuple[list[Assignment], list[Fault]]:
    """The flags and the --set texts as assignments, and a fault for each text that is none."""
    flags = (
        ("train.steps", request.steps, "--steps"),
        ("train.seed", request.seed, "--seed"),
        ("data.path", request.data, "--data"),
        ("precision.compute", request.dtype, "--dtype"),
    )
    items = [Assignment(key=key, text=str(value), origin=flag) for key, value, flag in flags if value is not None]
    faults: list[Fault] = []
    for text in request.settings:
        try:
            items.append(parse_assignment(text))
        except ConfigError as error:
            faults.extend(error.faults)
    return items, faults


def _find_preset(request: Request, family: Family, initial: Initial | None) -> Preset:
    """The family's preset for the size and the hardware; without a size, the first one for the hardware. For weights that are there,
    its preset for going on from them."""
    hardware = find_profile(request.hardware or DEFAULT_HARDWARE).name
    if initial is not None:
        return _find_continued(family, hardware)
    size = None if request.size is None else family.size(request.size).name
    for preset in family.presets:
        if preset.hardware == hardware and size in (None, preset.size):
            return preset
    there = [preset for preset in family.presets if size in (None, preset.size)]
    works = ", ".join(f"--size {preset.size} --hw {preset.hardware}" for preset in there or family.presets)
    rule = f"has no set-up of {family.name}{f' {size}' if size else ''}"
    raise ConfigError([Fault(setting="--hw", value=hardware, rule=rule, works=works)])


def _find_continued(family: Family, hardware: str) -> Preset:
    """The family's preset for going on from weights on the hardware. Raises ConfigError where there is none."""
    for preset in family.continued:
        if preset.hardware == hardware:
            return preset
    works = ", ".join(f"--hw {preset.hardware}" for preset in family.continued) or f"no {INIT}"
    rule = f"has no set-up for going on from weights of {family.name}"
    raise ConfigError([Fault(setting="--hw", value=hardware, rule=rule, works=works)])


def _unlike(request: Request, family: Family, initial: Initial) -> Iterator[Fault]:
    """Faults of a model that is not that of the weights."""
    if initial.family not in (None, family.name):
        rule = f"is not the family of the weights at {INIT}={initial.init.address}"
        yield Fault(setting="MODEL", value=family.name, rule=rule, works=str(initial.family))
    if request.size is not None:
        rule = f"cannot be chosen with {INIT}: the weights have their size"
        yield Fault(setting="--size", value=request.size, rule=rule, works="no --size")


def _misfits(base: RunConfig, items: Sequence[Assignment], initial: Initial) -> Iterator[Fault]:
    """A fault for every setting under which the weights would have another shape. What is impossible in itself is said elsewhere."""
    held = settings(base)
    for item in items:
        if item.key not in held or not item.key.startswith("model."):
            continue
        changed, wrong = override(base, [item])
        misfit = None if wrong or check_model(changed.model) else initial.misfit(changed.model)
        if misfit is not None:
            rule = f"does not fit the weights at {INIT}={initial.init.address}: {misfit}"
            yield Fault(setting=item.key, value=item.text, rule=rule, works=f"{held[item.key]}, as they have it")


def _from_preset(preset: Preset, family: Family, initial: Initial | None) -> RunConfig:
    if initial is not None:
        size, model = initial.size, initial.model
    else:
        assert preset.size is not None, "only what goes on from weights has a set-up without a size"
        size, model = preset.size, family.size(preset.size).model
    return RunConfig(
        family=family.name,
        size=size,
        hardware=preset.hardware,
        ranks=preset.ranks,
        model=model,
        parallel=preset.parallel,
        train=preset.train,
        optimizer=preset.optimizer,
        data=DataConfig(),
        precision=preset.precision,
        memory=preset.memory,
        execution=preset.execution,
        checkpoint=preset.checkpoint,
    )


def _settled(run: RunConfig) -> RunConfig:
    """The run with what depends on this moment written out: paths that hold from any folder, the schedule's length."""
    data = replace(run.data, path=_absolute(run.data.path), tokenizer=_absolute(run.data.tokenizer))
    train = replace(run.train, schedule_steps=run.train.schedule_steps or run.train.steps)
    checkpoint = replace(
        run.checkpoint, address=None if run.checkpoint.address is None else anywhere(run.checkpoint.address)
    )
    return replace(run, data=data, train=train, checkpoint=checkpoint)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _origins(run: RunConfig, items: Sequence[Assignment], otherwise: str) -> dict[str, str]:
    given = {item.key: item.origin for item in items}
    return {key: given.get(key, otherwise) for key in settings(run)}


def _ranks_origin(request: Request, otherwise: str) -> dict[str, str]:
    return {"ranks": otherwise if request.ranks is None else "--ranks"}


def _changed(setting: str, value: object, held: object) -> Fault:
    rule = f"is {held} in the run that is resumed and cannot change within it"
    return Fault(setting=setting, value=value, rule=rule, works=f"{held}, or a new run in another --out")


def _raise_faults(faults: Sequence[Fault]) -> None:
    if faults:
        raise ConfigError(faults)
