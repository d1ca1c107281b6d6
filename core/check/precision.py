"""Rules over number formats: a recipe quantises in blocks, and a matrix must consist of whole ones; what is added up keeps what is added."""

from __future__ import annotations

import math
from collections.abc import Iterator

from core.check.words import nearest_multiples
from core.config.architecture import Dense, MoE
from core.config.precision import RecipeName
from core.config.run import RunConfig
from core.errors import Fault

# The numbers of elements that share a scale along the dimension that is summed over; 16 where all share one, as FP8 products want.
BLOCKS: dict[RecipeName, int] = {
    "fp8_delayed": 16,
    "fp8_current": 16,
    "fp8_blockwise": 128,
    "mxfp8": 32,
    "nvfp4": 16,
}
# Half a unit of bfloat16's last place, of a number just above a power of two: a decay by less is undone by rounding to nearest.
_LEAST_DECAY = 2.0**-8


def check_precision(run: RunConfig) -> Iterator[Fault]:
    """Every fault of a recipe, of what is asked for that only a recipe has, and of what is kept in too few bits."""
    precision = run.precision
    if precision.primary and precision.recipe is None:
        rule = "holds weights in the format of a recipe, and precision.recipe=none"
        works = "false, or precision.recipe=fp8_current"
        yield Fault(
            code="precision.primary-needs-recipe", setting="precision.primary", value="true", rule=rule, works=works
        )
    if precision.recipe is not None:
        yield from _whole_blocks(run, precision.recipe)
    yield from _too_few_bits(run)


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
        if precision.moments == "bfloat16" and 1 - _LEAST_DECAY < beta < 1:
            yield Fault(
                code="precision.moments-decay",
                setting=f"optimizer.{name}",
                value=beta,
                rule="keeps so much of a moment each step that precision.moments=bfloat16, which rounds to 8 bits, would not let it decay",
                works=f"{1 - _LEAST_DECAY:.3f} or less, or precision.moments=float32",
            )


def _whole_blocks(run: RunConfig, recipe: RecipeName) -> Iterator[Fault]:
    """Every rank's piece of a width that a product sums over consists of whole blocks."""
    block = BLOCKS[recipe]
    for setting, size, unit, cut in dict.fromkeys(_widths(run, block)):
        if size > 0 and size % unit:
            rule = f"must be a multiple of {unit}: whole blocks of {block}, in which precision.recipe={recipe} quantises{cut}"
            works = f"{nearest_multiples(size, unit)}, or precision.recipe=none"
            yield Fault(code="precision.recipe-blocks", setting=setting, value=size, rule=rule, works=works)


def _widths(run: RunConfig, block: int) -> Iterator[tuple[str, int, int, str]]:
    """The widths that products sum over: the setting, its value, what must divide it, and what cuts it, in words."""
    tp, etp = max(run.parallel.tp, 1), max(run.parallel.etp, 1)
    over_tp = f", on each rank of parallel.tp={tp}" if tp > 1 else ""
    over_etp = f", on each rank of parallel.etp={etp}" if etp > 1 else ""
    yield "model.hidden", run.model.hidden, block, ""
    for _, layer in run.model.all_layers():
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
