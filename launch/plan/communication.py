"""What ranks send each other in a step and how long it takes, in closed form: bytes from the declarations, rates from the hardware.

Bytes are what one rank sends, the mean over its group, as core/parallel/traffic.py counts them; here also for dispatchers that send a
token once to each rank or node, by the number of distinct ones that its experts lie on when all experts are chosen alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb

from core.config.architecture import GQA, Attention, Dense, Layer, MoE, TopK
from core.config.memory import RecomputeName
from core.config.recipe import Recipe
from core.config.run import RunConfig
from core.parallel.mesh import fold
from launch.plan.work import Share
from launch.profiles import Fabric

_WIDE = 4  # bytes of a float32


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where the members of an axis lie: `size` of them, `stride` ranks apart, `near` of which share an NVLink domain."""

    size: int
    stride: int
    near: int

    @property
    def inside(self) -> bool:
        """Whether all of them do."""
        return self.near == self.size


@dataclass(frozen=True, kw_only=True)
class Links:
    """The axes of a run on a fabric. Ranks fill a domain as far as whole groups fit: ep=64 leaves 8 of 72 GPUs to others."""

    fabric: Fabric
    axes: dict[str, Axis]

    @staticmethod
    def of(run: RunConfig, fabric: Fabric) -> Links:
        """Raises ValueError where the mapping does not fold."""
        mesh = fold(run.parallel, run.ranks)
        axes = {}
        for folding in (mesh.dense, mesh.expert):
            stride = 1
            for axis, size in zip(folding.axes, folding.sizes, strict=True):
                axes[axis] = Axis(size=size, stride=stride, near=_near(size, stride, fabric.domain))
                stride *= size
        parallel = run.parallel
        inner = parallel.cp_alltoall
        axes["heads"] = Axis(size=inner, stride=parallel.tp, near=_near(inner, parallel.tp, fabric.domain))
        copies = mesh.dense.size("cp") * mesh.dense.size("dp")
        axes["replicas"] = Axis(size=copies, stride=parallel.tp, near=_near(copies, parallel.tp, fabric.domain))
        return Links(fabric=fabric, axes=axes)

    def rate(self, name: str) -> float:
        """Bytes a second of a rank in a collective over an axis: outside a domain, its members there share their network ports."""
        axis, fabric = self.axes[name], self.fabric
        if axis.inside:
            return fabric.all_to_all_nvlink
        return min(fabric.all_to_all_nvlink, axis.near * fabric.all_to_all_network)


def _near(size: int, stride: int, domain: int) -> int:
    """The largest divisor of `size` so many members of which, `stride` apart, fit a domain."""
    return max((d for d in range(1, min(size, domain) + 1) if size % d == 0 and d * stride <= domain), default=1)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a rank sends over an axis for one layer and microbatch, each way.

    forward, backward: (bytes, seconds). hidden_by: what it runs beside: the attention of its ring, the shared experts that a dispatch
    leaves to compute. recomputed: the names under which it is done again.
    """

    axis: str
    purpose: str
    forward: tuple[float, float]
    backward: tuple[float, float]
    hidden_by: str | None = None
    recomputed: tuple[RecomputeName, ...] = ()


def layer_exchanges(
    layer: Layer, run: RunConfig, share: Share, links: Links, high: Sequence[str] = ()
) -> Iterator[Exchange]:
    """Everything that a layer exchanges for one microbatch. high: the names inside it of weights that a recipe leaves alone."""
    yield from _attention(layer.attention, run, share, links)
    if isinstance(layer.mlp, Dense):
        yield from over_tp("mlp", 2 * share.hidden, share, links, "mlp")
        return
    if layer.mlp.shared is not None:
        yield from over_tp("shared experts", 2 * share.hidden, share, links, "moe", "shared_experts")
    recipe = run.precision.recipe
    there = recipe if recipe is not None and "mlp.experts.gate_up" not in high else None
    yield from _experts(layer.mlp, run, share, links, _narrowed(there, share))


def over_tp(purpose: str, width: float, share: Share, links: Links, *by: RecomputeName) -> Iterator[Exchange]:
    """Gathers and reduce-scatters of `width` numbers a token, and the reverse backward."""
    if share.tp > 1:
        sent = (share.tp - 1) * share.moved(width)
        each = (sent, sent / links.rate("tp"))
        yield Exchange(axis="tp", purpose=purpose, forward=each, backward=each, recomputed=("full", *by))


def _attention(a: Attention, run: RunConfig, share: Share, links: Links) -> Iterator[Exchange]:
    """tp around the attention; heads traded for tokens and back; keys and values that pass the ring, behind the attention."""
    parallel, hidden = run.parallel, share.hidden
    if isinstance(a, GQA):
        entered, key, value, common, kv_heads = hidden, a.head_dim, a.head_dim, 0, a.kv_heads
    else:
        entered = (a.query_rank or hidden) + a.latent_rank + a.rope_dim
        key, value, common, kv_heads = a.nope_dim, a.value_dim, a.rope_dim, a.heads
    yield from over_tp("attention", entered + hidden, share, links)
    traders = parallel.cp_alltoall
    places = parallel.cp // traders
    mine = a.heads / parallel.tp / traders
    keys = max(1.0, kv_heads / parallel.tp / traders) * (key + value) + common
    tokens = share.tokens * parallel.tp  # of the heads that a rank of tp has
    if traders > 1:
        sent = (traders - 1) * tokens * share.element * (mine * (key + common + value) + keys)
        each = (sent, sent / links.rate("heads"))
        yield Exchange(axis="cp", purpose="heads", forward=each, backward=each, recomputed=("full", "core_attn"))
    if places > 1:
        # Of the chunks of a sequence three quarters are read by each further place: a later token sees them.
        passed = 0.75 * (places - 1) * tokens * keys * traders
        rate = links.rate("cp")
        ahead, back = passed * share.element, passed * (share.element + _WIDE)
        yield Exchange(
            axis="cp",
            purpose="ring",
            forward=(ahead, ahead / rate),
            backward=(back, back / rate),
            hidden_by="attention",
            recomputed=("full", "core_attn"),
        )


def _narrowed(recipe: Recipe | None, share: Share) -> float:
    """What is left of the bytes of rows on their way to experts, where they travel as the forward's input is rounded."""
    if recipe is None or not recipe.dispatch or recipe.forward.input is None:
        return 1.0
    return recipe.forward.input.num_bytes / share.element


def _experts(moe: MoE, run: RunConfig, share: Share, links: Links, narrowed: float) -> Iterator[Exchange]:
    """Dispatch and combine; the gradient of one is the other. narrowed: of the dispatch forward, whose gradient comes back as it is."""
    parallel, width = run.parallel, moe.routed_width(share.hidden)
    by: tuple[RecomputeName, ...] = ("full", "moe")
    if parallel.etp > 1 and parallel.dispatcher != "allgather" and parallel.ep > 1:
        rows = (parallel.etp - 1) * share.moved(moe.top_k * width)
        each = (rows, rows / links.rate("etp"))
        there = (narrowed * each[0], narrowed * each[1])
        for purpose, ahead in (("dispatch", there), ("combine", each)):
            yield Exchange(axis="etp", purpose=purpose, forward=ahead, backward=each, recomputed=by)
    if parallel.ep * parallel.etp == 1:
        return
    axis = "ep" if parallel.ep > 1 else "etp"
    each = dispatched(moe, run, share, links)
    there = (narrowed * each[0], narrowed * each[1])
    begun = "shared" if parallel.dispatcher == "alltoall" and moe.shared is not None else None
    yield Exchange(axis=axis, purpose="dispatch", forward=there, backward=each, hidden_by=begun, recomputed=by)
    yield Exchange(axis=axis, purpose="combine", forward=each, backward=each, recomputed=by)


def dispatched(moe: MoE, run: RunConfig, share: Share, links: Links) -> tuple[float, float]:
    """Bytes that a rank sends and seconds that it takes until all rows have come to their experts, or back."""
    parallel, fabric = run.parallel, links.fabric
    token = share.moved(moe.routed_width(share.hidden))
    if parallel.dispatcher == "allgather" or parallel.ep == 1:
        sent = (parallel.etp * parallel.ep - 1) * token
        return sent, sent / min(links.rate("ep"), links.rate("etp"))
    ep = links.axes["ep"]
    if parallel.dispatcher == "alltoall":
        row = token * moe.top_k / ep.size
        near, far = (ep.near - 1) * row, (ep.size - ep.near) * row
        return near + far, max(near / fabric.all_to_all_nvlink, far / fabric.all_to_all_network)
    packaged = parallel.dispatcher != "flex"
    node = ep.near if packaged else parallel.ep_per_node
    nodes = ep.size // node
    between = (nodes - 1) * met(moe, nodes) * token
    within = nodes * (node - 1) * met(moe, ep.size) * token
    if packaged:  # both at once
        return between + within, max(between / fabric.token_once_network, within / fabric.token_once_nvlink)
    fast, slow = fabric.all_to_all_nvlink, fabric.all_to_all_network
    spread = fast if node * ep.stride <= fabric.domain else slow
    return between + within, between / (fast if ep.inside else slow) + within / spread


def met(moe: MoE, units: int) -> float:
    """The chance that one of `units` equal parts of the experts has any of a token's experts, when all are chosen alike.

    With groups, of which a token may use some, its experts are spread over the kept ones alone. units: a divisor of experts.
    """
    experts, k, groups = moe.experts, moe.top_k, moe.router.groups
    unit = experts // units
    group = experts if groups is None else experts // groups.total
    crossing = bool(
        group % unit and unit % group
    )  # parts that begin inside one group and end inside another: as without groups
    if groups is None or crossing or not isinstance(moe.router.selection, TopK):
        return 1 - comb(experts - unit, k) / comb(experts, k)
    pool = groups.kept * group
    if unit <= group:
        return groups.kept / groups.total * (1 - comb(pool - unit, k) / comb(pool, k))
    held = unit // group  # whole groups in a part: some of which are kept
    ways = comb(groups.total, groups.kept)
    missed = 0.0
    for kept in range(max(0, held + groups.kept - groups.total), min(held, groups.kept) + 1):
        chance = comb(held, kept) * comb(groups.total - held, groups.kept - kept) / ways
        missed += chance * comb(pool - kept * group, k) / comb(pool, k)
    return 1 - missed


def handed_on(run: RunConfig, share: Share, links: Links) -> tuple[float, float]:
    """Bytes and seconds of one microbatch's activations from a stage to the next."""
    sent = share.moved(share.hidden)
    whole = links.axes["pp"].stride * links.axes["pp"].size <= links.fabric.domain
    return sent, sent / (links.fabric.all_to_all_nvlink if whole else links.fabric.all_to_all_network)


def copied(numbers: float, name: str, links: Links, number_bytes: float) -> tuple[float, float]:
    """Bytes and seconds of a reduce-scatter or a gather of so many numbers over an axis."""
    size = links.axes[name].size
    sent = numbers * number_bytes * (size - 1) / size
    return sent, sent / links.rate(name)
