"""Rules over number formats: what a recipe may say, and that matrices consist of its whole blocks; what is added up keeps what is added."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from core.check.words import nearest_multiples
from core.config.architecture import GQA, Dense, MoE
from core.config.products import unmatched
from core.config.recipe import ALONG, BITS, SQUARE, Operand, Recipe
from core.config.recipe_text import operand_text
from core.config.run import RunConfig
from core.errors import Fault

# Half a unit of the last place, of a number just above a power of two: a decay by less is undone by rounding to nearest. float16 keeps the
# root of the second moment, which decays by half as much. float8 is rounded stochastically, and any decay shows.
_LEAST_DECAY = {"bfloat16": {"beta1": 2.0**-8, "beta2": 2.0**-8}, "float16": {"beta1": 2.0**-11, "beta2": 2.0**-10}}
_MOMENT_BITS = {"bfloat16": 8, "float16": 11}


def check_precision(run: RunConfig) -> Iterator[Fault]:
    """Every fault of a recipe, of what is asked for that only a recipe has, and of what is kept in too few bits."""
    precision = run.precision
    if precision.primary and precision.recipe is None:
        rule = "holds weights in the format of a recipe, and precision.recipe=none"
        works = "false, or precision.recipe=fp8_current"
        yield Fault(
            code="precision.primary-needs-recipe", setting="precision.primary", value="true", rule=rule, works=works
        )
    if precision.primary:
        yield from _primary(run)
    if precision.recipe is not None:
        yield from _declaration(precision.recipe)
        yield from _layers(run, precision.recipe)
        yield from _whole_blocks(run, precision.recipe)
        yield from _experts(run, precision.recipe)
    yield from _too_few_bits(run)
    yield from _masters(run)
    yield from _loss_scale(run)


def _primary(run: RunConfig) -> Iterator[Fault]:
    """Weights that are held as they are rounded: once, and by ranks that have flat stretches of their masters."""
    recipe = run.precision.recipe
    if run.parallel.sharding == "fsdp":
        yield Fault(
            code="precision.primary-sharding",
            setting="precision.primary",
            value="true",
            rule="rounds weights from the masters of ZeRO-1, and parallel.sharding=fsdp gathers those that it shards in the run's dtype",
            works="false, or parallel.sharding=zero1",
        )
    if recipe is None:
        return
    forward, backward = recipe.forward.weight, recipe.input_gradient.weight
    once = forward is not None and forward == backward
    if forward is None or not once or forward.hadamard or forward.stochastic:
        said = [
            f"precision.recipe.{k}.weight={operand_text(o)}"
            for k, o in (("forward", forward), ("input_gradient", backward))
        ]
        yield Fault(
            code="precision.primary-operands",
            setting="precision.primary",
            value="true",
            rule=f"holds a weight rounded once, to nearest and not rotated, for both its products, and {', '.join(said)}",
            works="false, or precision.recipe=fp8_current",
        )


def _too_few_bits(run: RunConfig) -> Iterator[Fault]:
    """Gradients that would be cut to half their bits, and moments that could not decay."""
    precision, optimizer = run.precision, run.optimizer
    if precision.main_gradients == "bfloat16" and precision.compute != "bfloat16":
        yield Fault(
            code="precision.main-gradients-compute",
            setting="precision.main_gradients",
            value=precision.main_gradients,
            rule=f"has fewer bits than the gradients themselves, which are computed in precision.compute={precision.compute}",
            works="float32, or precision.compute=bfloat16",
        )
    for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        least = _LEAST_DECAY.get(precision.moments, {}).get(name, 0.0)
        if 1 - least < beta < 1:
            rounded = f"precision.moments={precision.moments}, which rounds to {_MOMENT_BITS[precision.moments]} bits"
            yield Fault(
                code="precision.moments-decay",
                setting=f"optimizer.{name}",
                value=beta,
                rule=f"keeps so much of a moment each step that {rounded}, would not let it decay",
                works=f"{math.floor((1 - least) * 10000) / 10000:g} or less, or precision.moments=float32",
            )


def _masters(run: RunConfig) -> Iterator[Fault]:
    """Masters that have nothing to lie beside, or lie where they are needed."""
    precision = run.precision
    remainder = {
        "precision.remainder-compute": (
            precision.compute != "bfloat16",
            f"keeps what a bfloat16 weight lacks of its float32 master, and precision.compute={precision.compute}",
            "precision.compute=bfloat16",
        ),
        "precision.remainder-sharding": (
            run.parallel.sharding == "fsdp",
            "lies beside bfloat16 weights, and under parallel.sharding=fsdp a rank's shards are the float32 masters themselves",
            "parallel.sharding=zero1",
        ),
        "precision.remainder-primary": (
            precision.primary,
            "lies beside bfloat16 weights, which precision.primary=true does without",
            "precision.primary=false",
        ),
    }
    for code, (wrong, rule, works) in remainder.items():
        if precision.masters == "remainder" and wrong:
            yield Fault(
                code=code,
                setting="precision.masters",
                value=precision.masters,
                rule=rule,
                works=f"float32, or {works}",
            )
    if precision.primary and run.memory.optimizer_offload > 0:
        yield Fault(
            code="precision.primary-offload",
            setting="memory.optimizer_offload",
            value=run.memory.optimizer_offload,
            rule="keeps masters in host memory, and precision.primary=true makes its weights from all of them on the device",
            works="0, or precision.primary=false",
        )


def _loss_scale(run: RunConfig) -> Iterator[Fault]:
    """A factor that nothing would use, or that would round."""
    scale = run.precision.loss_scale
    if scale is None:
        return
    if run.precision.compute != "float16":
        yield Fault(
            code="precision.loss-scale-compute",
            setting="precision.loss_scale",
            value=scale,
            rule=f"is for float16 gradients, and precision.compute={run.precision.compute}",
            works="none, or precision.compute=float16",
        )
    elif not (0 < scale < math.inf and math.frexp(scale)[0] == 0.5):
        yield Fault(
            code="precision.loss-scale-power",
            setting="precision.loss_scale",
            value=scale,
            rule="must be a power of two, which multiplies without rounding",
            works="65536.0, or none",
        )


def _declaration(recipe: Recipe) -> Iterator[Fault]:
    """What no product could be of, in a recipe of anyone's."""
    for product in ("forward", "input_gradient", "weight_gradient"):
        yield from _pair(f"precision.recipe.{product}", vars(vars(recipe)[product]))
    for key, operand in recipe.operands():
        yield from _operand(f"precision.recipe.{key}", operand)
    along = max((ALONG[o.scaling] for key, o in recipe.operands() if key.startswith("weight_gradient")), default=1)
    unit = max(along, 16 if any(operand.hadamard for _, operand in recipe.operands()) else 1)
    if recipe.align < 1 or recipe.align % unit:
        yield Fault(
            code="precision.recipe-align",
            setting="precision.recipe.align",
            value=recipe.align,
            rule=f"must be a multiple of {unit}: weight gradients of experts sum over rows, in whole blocks of an expert's own",
            works=str(unit),
        )


def _pair(setting: str, sides: Mapping[str, Operand | None]) -> Iterator[Fault]:
    """What the two operands of a product must have in common."""
    (first, one), (second, other) = sides.items()
    if (one is None) != (other is None):
        missing, there = (first, second) if one is None else (second, first)
        yield Fault(
            code="precision.operand-both",
            setting=f"{setting}.{missing}",
            value="none",
            rule=f"stays in the run's dtype, and {there} is rounded: no hardware multiplies the two",
            works=f"{operand_text(sides[there])}, or {setting}.{there}=none",
        )
    elif one is not None and other is not None and one.hadamard != other.hadamard:
        plain, turned = (second, first) if one.hadamard else (first, second)
        held, rotated = (other, one) if one.hadamard else (one, other)
        unturned = operand_text(replace(rotated, hadamard=False))
        yield Fault(
            code="precision.operand-hadamard",
            setting=f"{setting}.{plain}",
            value=operand_text(held),
            rule=f"is not rotated, and {turned} is: only of two rotated operands is the product unchanged",
            works=f"{operand_text(replace(held, hadamard=True))}, or {setting}.{turned}={unturned}",
        )


def _operand(setting: str, operand: Operand) -> Iterator[Fault]:
    """Elements and scales that do not go together, and blocks over rows that come and go."""
    four = BITS[operand.element] == 4
    if four != (operand.scaling in ("nv", "nv16x16")) and not (four and operand.scaling == "mx"):
        yield Fault(
            code="precision.operand-element",
            setting=setting,
            value=operand_text(operand),
            rule="pairs an element with scales that are not made for it: nv and nv16x16 are for e2m1, which else has mx",
            works="e2m1/nv or e4m3/tensor",
        )
    if ALONG[operand.scaling] > 1 and operand.scaling in SQUARE and not setting.endswith(".weight"):
        yield Fault(
            code="precision.operand-square",
            setting=setting,
            value=operand_text(operand),
            rule="shares a scale among several rows, which only a weight's may: rows of tokens come and go",
            works="e2m1/nv" if four else "e4m3/1x128",
        )


def _layers(run: RunConfig, recipe: Recipe) -> Iterator[Fault]:
    """Patterns that match nothing, and layers that are not there."""
    for pattern in unmatched(recipe, run.model):
        rule = "matches no product of this model, so that it would keep nothing in the run's dtype"
        yield Fault(
            code="precision.recipe-pattern",
            setting="precision.recipe.high",
            value=pattern,
            rule=rule,
            works="layers.0.*, layers.*.attention.*, layers.*.mlp.experts.down",
        )
    layers = len(run.model.layers)
    for name, number in (("high_first", recipe.high_first), ("high_last", recipe.high_last)):
        if not 0 <= number < layers:
            yield Fault(
                code="precision.recipe-layers",
                setting=f"precision.recipe.{name}",
                value=number,
                rule=f"must leave some of the {layers} layers to the recipe",
                works=f"0 to {layers - 1}",
            )


def _experts(run: RunConfig, recipe: Recipe) -> Iterator[Fault]:
    """What a recipe asks of experts that the ranks which hold them cannot do."""
    etp, dispatcher = run.parallel.etp, run.parallel.dispatcher
    if recipe.delayed and etp > 1:
        yield Fault(
            code="precision.delayed-etp",
            setting="precision.recipe",
            value=recipe.name,
            rule=f"remembers the largest numbers of every expert, of which the ranks of parallel.etp={etp} hold parts",
            works="fp8_current, or parallel.etp=1",
        )
    if not recipe.dispatch:
        return
    operand = recipe.forward.input
    if operand is None or not _travels(operand):
        said = "none" if operand is None else operand_text(operand)
        yield Fault(
            code="precision.dispatch-scaling",
            setting="precision.recipe.dispatch",
            value="true",
            rule=f"sends rows with scales of their own, which are powers of two, and precision.recipe.forward.input={said}",
            works="false, or precision.recipe=mxfp8",
        )
    if dispatcher in ("deepep", "hybridep"):
        yield Fault(
            code="recipe.dispatch-package",
            setting="precision.recipe.dispatch",
            value="true",
            rule=f"packs rows for the dispatchers of torch, and parallel.dispatcher={dispatcher} sends them as they are",
            works="false, or parallel.dispatcher=flex",
        )


def _travels(operand: Operand) -> bool:
    """Whether a row alone says how it is rounded, and once rounded is rounded no more."""
    own = operand.scaling == "mx" or (operand.scaling == "1x128" and operand.power_of_two)
    return own and not operand.stochastic and not operand.hadamard


def _block(recipe: Recipe) -> int:
    """What must divide the widths that forward and input gradient sum over: whole blocks, and the 16 bytes that hardware reads at once."""
    return max([16, *(ALONG[o.scaling] for key, o in recipe.operands() if not key.startswith("weight_gradient"))])


def _whole_blocks(run: RunConfig, recipe: Recipe) -> Iterator[Fault]:
    """Every rank's piece of a width that a product sums over consists of whole blocks."""
    block = _block(recipe)
    for setting, size, unit, cut in dict.fromkeys(_widths(run, block)):
        if size > 0 and size % unit:
            rule = f"must be a multiple of {unit}: whole blocks of {block}, in which precision.recipe={recipe.name} quantises{cut}"
            works = f"{nearest_multiples(size, unit)}, or precision.recipe=none"
            yield Fault(code="precision.recipe-blocks", setting=setting, value=size, rule=rule, works=works)


def _widths(run: RunConfig, block: int) -> Iterator[tuple[str, int, int, str]]:
    """The widths that products sum over: the setting, its value, what must divide it, and what cuts it, in words."""
    tp, etp = max(run.parallel.tp, 1), max(run.parallel.etp, 1)
    over_tp = f", on each rank of parallel.tp={tp}" if tp > 1 else ""
    over_etp = f", on each rank of parallel.etp={etp}" if etp > 1 else ""
    yield "model.hidden", run.model.hidden, block, ""
    for _, layer in run.model.all_layers():
        if isinstance(layer.attention, GQA) and tp > 1:
            # Heads are whole on every rank, and what a rank has of them side by side is what its products sum over.
            for heads in (layer.attention.heads, layer.attention.kv_heads):
                unit = block // math.gcd(block, max(1, heads // tp))
                yield "model.attention.head_dim", layer.attention.head_dim, unit, over_tp
        match layer.mlp:
            case Dense(ffn=ffn):
                yield "model.dense.ffn", ffn, block * tp, over_tp
            case MoE(expert_ffn=ffn, shared=shared, latent=latent):
                unit = block * etp
                if shared and shared.count > 0:
                    # one matrix of count * expert_ffn columns, cut over tp
                    unit = math.lcm(unit, block * tp // math.gcd(block * tp, shared.count))
                yield "model.moe.expert_ffn", ffn, unit, over_etp + (over_tp if shared else "")
                if latent is not None:
                    yield "model.moe.latent", latent, block, ""
