"""What hardware asks of a run: rules, without which it cannot run there, and advice, without which it runs badly."""

from __future__ import annotations

from collections.abc import Iterator

from core.check.words import nearest_multiples
from core.config.architecture import MoE
from core.config.mapping import PACKAGES
from core.config.run import RunConfig
from core.errors import Advice, Fault
from launch.profiles import Fabric, Profile


def check_hardware(run: RunConfig, profile: Profile) -> tuple[Fault, ...]:
    """Every fault of `run` on the hardware of `profile`; rules that hold everywhere are core.check's."""
    return (*_gpu_alone(run, profile), *_recipe(run, profile), *_whole_nodes(run, profile))


def advice(run: RunConfig, profile: Profile) -> tuple[Advice, ...]:
    """What would run and could be better, for a run without faults."""
    found = list(_schedule(run))
    if profile.fabric is not None:
        found += _across_domains(run, profile.fabric)
    return tuple(found)


def _gpu_alone(run: RunConfig, profile: Profile) -> Iterator[Fault]:
    """What only a GPU has: packages of kernels, and graphs."""
    if profile.device == "cuda":
        return
    dispatcher, graphs = run.parallel.dispatcher, run.execution.graphs
    rule = f"runs on GPUs alone, and --hw is {run.hardware}"
    if dispatcher in PACKAGES:
        works = "flex, alltoall or allgather"
        yield Fault(
            code="hardware.package-gpu", setting="parallel.dispatcher", value=dispatcher, rule=rule, works=works
        )
    if graphs:
        yield Fault(
            code="hardware.graphs-gpu", setting="execution.graphs", value=",".join(graphs), rule=rule, works="none"
        )


def _recipe(run: RunConfig, profile: Profile) -> Iterator[Fault]:
    """Matrix units take some formats and not others. Of the machine at hand nothing is known beforehand."""
    recipe = run.precision.recipe
    if recipe is not None and profile.chip is not None and not profile.chip.has(recipe):
        rule = f"is no format of the matrix units of --hw {profile.name} ({profile.title})"
        works = " or ".join((*profile.chip.recipes, "none"))
        yield Fault(code="hardware.recipe", setting="precision.recipe", value=recipe.name, rule=rule, works=works)


def _whole_nodes(run: RunConfig, profile: Profile) -> Iterator[Fault]:
    """A scheduler gives whole nodes, and every one runs as many ranks as it has GPUs."""
    if profile.fabric is None:
        return
    each = profile.fabric.gpus_per_node
    if run.ranks > each and run.ranks % each:
        rule = f"must fill nodes of {each} GPUs where --hw {profile.name} needs more than one"
        works = nearest_multiples(run.ranks, each)
        yield Fault(code="hardware.whole-nodes", setting="--ranks", value=run.ranks, rule=rule, works=works)


def _schedule(run: RunConfig) -> Iterator[Advice]:
    """What a combined schedule has to hide, and with what."""
    parallel = run.parallel
    if parallel.schedule != "combined":
        return
    if parallel.ep == 1:
        rule = "hides the communication of experts, and parallel.ep=1 has none"
        yield Advice(
            code="advice.combined-ep",
            setting="parallel.schedule",
            value="combined",
            rule=rule,
            works="1f1b, which keeps fewer activations",
        )
    elif parallel.dispatcher == "allgather":
        rule = "gathers every token on every rank, more than parallel.schedule=combined has work to hide it behind"
        yield Advice(
            code="advice.combined-allgather",
            setting="parallel.dispatcher",
            value="allgather",
            rule=rule,
            works="alltoall",
        )
    if parallel.pp > 1 and parallel.vpp == 1 and parallel.layout is None:
        rule = "leaves the longer warm-up of parallel.schedule=combined whole; virtual stages cut it up"
        yield Advice(code="advice.combined-vpp", setting="parallel.vpp", value=1, rule=rule, works="2 or more")


def _across_domains(run: RunConfig, fabric: Fabric) -> Iterator[Advice]:
    """Axes that talk in every layer belong inside an NVLink domain."""
    parallel, domain = run.parallel, fabric.domain
    for axis, degree in (("tp", parallel.tp), ("etp", parallel.etp)):
        if degree > 1 and (degree > domain or domain % degree):
            rule = f"talks twice in every layer, and its groups do not lie inside NVLink domains of {domain} GPUs"
            works = ", ".join(str(n) for n in range(1, min(degree, domain) + 1) if domain % n == 0)
            yield Advice(code="advice.inside-domain", setting=f"parallel.{axis}", value=degree, rule=rule, works=works)
    wide = parallel.etp * parallel.ep
    plain = parallel.dispatcher in ("allgather", "alltoall")
    top_k = max((layer.mlp.top_k for layer in run.model.layers if isinstance(layer.mlp, MoE)), default=1)
    if wide > domain and plain and top_k > 1:
        rule = (
            f"sends a token over the network once for each of its {top_k} experts, and parallel.etp*ep={wide} reaches beyond "
            f"an NVLink domain of {domain}"
        )
        works = "deepep or hybridep, which send it to each node once"
        yield Advice(
            code="advice.once-a-node",
            setting="parallel.dispatcher",
            value=parallel.dispatcher,
            rule=rule,
            works=works,
        )
