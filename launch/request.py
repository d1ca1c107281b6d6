"""Model + size + hardware + settings → the run, with the origin of every value; or all faults at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from core.check import check, check_model
from core.config.architecture import ModelConfig
from core.config.family import Family, Preset
from core.config.mapping import ParallelConfig
from core.config.override import Assignment, override, parse_assignment, settings
from core.config.run import DataConfig, RunConfig
from core.errors import ConfigError, Fault
from launch.choice import choose_continued, choose_preset, preset_origin
from launch.folder import Init, anywhere
from launch.hardware_rules import check_hardware
from launch.profiles import find_profile

DEFAULT_HARDWARE = "cpu"
INIT = "--init"
BATCH = "train.global_batch"
SCALED = "scaled from preset by --gpus"
# What decides the tokens of every step and what is computed from them: a resumed run must keep it.
# And where its checkpoints are: elsewhere it would find none and begin again.
KEPT_ON_RESUME = (
    *("model.", "data.", "train.seed", "train.sequence_tokens", "train.global_batch"),
    *("train.forced_routing", "checkpoint.address"),
)
# What it takes from another preset, beside the number of ranks: where and how it runs.
FROM_PRESET = ("parallel.", "precision.", "memory.", "execution.", "train.microbatch")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A launch as the user typed it; None where a flag was not given. `settings` are the texts of --set.

    preset: the name of a set-up among those of the size and hardware. gpus: the number of ranks too, and the global batch of a new
    run follows its data-parallel ranks unless it is given.
    """

    size: str | None = None
    hardware: str | None = None
    preset: str | None = None
    ranks: int | None = None
    gpus: int | None = None
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
    """A run that keeps every rule, and where each of its settings comes from: `preset NAME`, `run`, `--set` or a flag.

    init: the weights that it begins with, None for random ones. preset: the set-up that was taken, None where a run is resumed as
    it was.
    """

    run: RunConfig
    origins: Mapping[str, str]
    init: Init | None = None
    preset: Preset | None = None


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
    base = replace(_from_preset(preset, family, initial), ranks=_world(request, preset.ranks))
    run, wrong = override(base, items)
    origin = preset_origin(preset)
    origins = _origins(run, items, origin) | _world_origin(request, origin)
    if initial is not None:
        faults += [*_unlike(request, family, initial), *_misfits(base, items, initial)]
        named = {item.key for item in items}
        origins |= {key: INIT for key in origins if key.startswith("model.") and key not in named}
    if origins["train.schedule_steps"] == origin:
        length = max(preset.train.schedule_steps or preset.train.steps, run.train.steps)
        run = replace(run, train=replace(run.train, schedule_steps=length))
    if request.gpus is not None and origins[BATCH] == origin:
        run, before = _scaled(run, preset), run
        origins |= {} if run == before else {BATCH: SCALED}
    run = _settled(run)
    _raise_faults([*faults, *wrong, *_found(run, request)])
    return Planned(run=run, origins=origins, init=None if initial is None else initial.init, preset=preset)


def resumed_run(request: Request, family: Family, begun: RunConfig) -> Planned:
    """The run that continues `begun`: other steps, ranks, mapping or intervals, and the same model, data and seed.

    With --preset, where and how it runs comes from that set-up. The global batch stays whatever the world is: what a step learns from
    belongs to the run. Raises ConfigError with every fault, among them each setting that would break the continuity.
    """
    items, faults = _assignments(request)
    for flag, asked, held in (("MODEL", family.name, begun.family), ("--size", request.size or begun.size, begun.size)):
        if asked != held:
            faults.append(_changed(flag, asked, held))
    base, preset = begun, None
    if request.hardware is not None:
        base = replace(base, hardware=find_profile(request.hardware).name)
    if request.preset is not None and not faults:
        preset = choose_preset(family, hardware=base.hardware, size=begun.size, name=request.preset)
        base = _moved(base, preset)
    base = replace(base, ranks=_world(request, base.ranks))
    run, wrong = override(base, items)
    run = _settled(run)
    before, after = settings(begun), settings(run)
    for key in sorted(before.keys() | after.keys()):
        if key.startswith(KEPT_ON_RESUME) and before.get(key) != after.get(key):
            faults.append(_changed(key, after.get(key), before.get(key)))
    _raise_faults([*faults, *wrong, *_found(run, request)])
    origins = _origins(run, items, "run") | _world_origin(request, "run")
    if preset is not None:
        taken = (key for key, origin in origins.items() if origin == "run" and key.startswith((*FROM_PRESET, "ranks")))
        origins |= dict.fromkeys(taken, preset_origin(preset))
    return Planned(run=run, origins=origins, preset=preset)


def _found(run: RunConfig, request: Request) -> Iterator[Fault]:
    """Every fault of the run, and of how many ranks it was asked to have."""
    if None not in (request.ranks, request.gpus) and request.ranks != request.gpus:
        rule = f"is another number than --ranks={request.ranks}, and every GPU has one rank"
        works = f"--gpus={request.gpus} alone, which scales the global batch, or --ranks alone, which does not"
        yield Fault(code="request.one-world", setting="--gpus", value=request.gpus, rule=rule, works=works)
    flag = "--ranks" if request.gpus is None else "--gpus"
    for fault in (*check(run), *check_hardware(run, find_profile(run.hardware))):
        yield replace(fault, setting=flag) if fault.setting == "--ranks" else fault


def _world(request: Request, otherwise: int) -> int:
    """How many ranks there will be."""
    asked = request.ranks if request.gpus is None else request.gpus
    return otherwise if asked is None else asked


def _scaled(run: RunConfig, preset: Preset) -> RunConfig:
    """The run in another world, with as many sequences a step for each data-parallel rank as the preset has in its own.

    Data-parallel ranks are what tp, cp and pp leave of the world, so changing these too changes the batch. Where a world cannot be
    folded, the run is left for its check to refuse.
    """
    before, after = _replicas(preset.parallel, preset.ranks), _replicas(run.parallel, run.ranks)
    sequences = preset.train.global_batch * after
    if run.ranks == preset.ranks or 0 in (before, after) or sequences % before:
        return run
    return replace(run, train=replace(run.train, global_batch=sequences // before))


def _replicas(parallel: ParallelConfig, ranks: int) -> int:
    """Data-parallel ranks; none where the mapping does not fold the world."""
    degrees = parallel.tp * parallel.cp * parallel.pp
    folds = min(parallel.tp, parallel.cp, parallel.pp, ranks) > 0 and ranks % degrees == 0
    return ranks // degrees if folds else 0


def _moved(run: RunConfig, preset: Preset) -> RunConfig:
    """The run, where and how the preset runs."""
    return replace(
        run,
        ranks=preset.ranks,
        parallel=preset.parallel,
        precision=preset.precision,
        memory=preset.memory,
        execution=preset.execution,
        train=replace(run.train, microbatch=preset.train.microbatch),
    )


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
    """The family's preset that is asked for; for weights that are there, its preset for going on from them."""
    hardware = find_profile(request.hardware or DEFAULT_HARDWARE).name
    if initial is not None:
        return choose_continued(family, hardware=hardware, name=request.preset)
    size = None if request.size is None else family.size(request.size).name
    return choose_preset(family, hardware=hardware, size=size, name=request.preset)


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


def _world_origin(request: Request, otherwise: str) -> dict[str, str]:
    given = "--gpus" if request.gpus is not None else otherwise if request.ranks is None else "--ranks"
    return {"ranks": given}


def _changed(setting: str, value: object, held: object) -> Fault:
    rule = f"is {held} in the run that is resumed and cannot change within it"
    return Fault(setting=setting, value=value, rule=rule, works=f"{held}, or a new run in another --out")


def _raise_faults(faults: Sequence[Fault]) -> None:
    if faults:
        raise ConfigError(faults)
