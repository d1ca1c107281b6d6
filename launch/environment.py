"""Environment variables that follow from the settings of a run, with the reason of each: worked out after every override, so that none
is left behind by one.

Only what is read: by the CUDA driver, NCCL, torch 2.10 and later, and the packages that a run's settings ask for. So
TORCH_NCCL_AVOID_RECORD_STREAMS, on which sources disagree (0 in ModelZoo's scripts of DeepSeek-V3 and under a full graph, 1 elsewhere),
is not set: torch does without recording since 2.8, and reads it no more. PYTORCH_ALLOC_CONF is what PYTORCH_CUDA_ALLOC_CONF is called
since 2.9. NVTE_ALLOW_NONDETERMINISTIC_ALGO (1 in ModelZoo, 0 in Bridge's DeepSeek) is of an attention that is not used here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from core.config.run import RunConfig
from launch.profiles import Profile, find_profile

# Compute capability from which kernels of two streams share a GPU whatever their order of launch.
BLACKWELL = (10, 0)
# Processors that Transformer Engine's norms leave free for communication, where the dispatcher names no number.
NORM_MARGIN = 20
# Tokens that HybridEP combines at a time: every published set-up of it has this.
COMBINE_CHUNK = 128
OLD_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}


@dataclass(frozen=True, kw_only=True)
class EnvironmentVariable:
    """One variable of every rank, and why it has its value. by_user: it stood in the environment already, and is left as it is."""

    name: str
    value: str
    why: str
    by_user: bool = False


def environment(
    run: RunConfig, preset_environment: Iterable[tuple[str, str]] = (), user: Mapping[str, str] | None = None
) -> tuple[EnvironmentVariable, ...]:
    """The variables of every rank of `run`, each name once, by name.

    preset_environment: what the set-up has beside those that follow from settings; it wins over these. user: the environment that the
    launch was started in (None: this process's own); what it has wins over both, and is shown as such.
    """
    there = os.environ if user is None else user
    made = {name: (value, why) for name, value, why in _derived(run, find_profile(run.hardware))}
    made |= {name: (value, "the set-up's own") for name, value in preset_environment}
    return tuple(_settled(name, value, why, there) for name, (value, why) in sorted(made.items()))


def _settled(name: str, value: str, why: str, there: Mapping[str, str]) -> EnvironmentVariable:
    """The variable as it will be: the user's, under either of its names, or the one worked out."""
    given = next((known for known in (name, OLD_NAMES.get(name, name)) if known in there), None)
    if given is None:
        return EnvironmentVariable(name=name, value=value, why=why)
    instead = "the same" if there[given] == value else value
    why = f"set in the environment; the settings would make it {instead} ({why})"
    return EnvironmentVariable(name=given, value=there[given], why=why, by_user=True)


Row = tuple[str, str, str]


def _derived(run: RunConfig, profile: Profile) -> Iterator[Row]:
    """Name, value and reason of what follows from the settings; nothing on CPUs."""
    if profile.device != "cuda":
        return
    yield from _driver(run, profile)
    yield from _allocator(run)
    if run.ranks > 1:
        yield from _nccl(run)
    if run.parallel.dispatcher == "hybridep":
        yield from _hybridep(run, profile)
    if run.precision.recipe is not None:
        yield from _transformer_engine(run)


def _driver(run: RunConfig, profile: Profile) -> Iterator[Row]:
    """How many hardware queues a process has; with one, kernels start in the order in which the host launched them.

    Before Blackwell one queue makes communication start before the product that hides it, which tp and cp want; a combined schedule
    needs several, or its halves wait for each other.
    """
    name, parallel = "CUDA_DEVICE_MAX_CONNECTIONS", run.parallel
    if parallel.schedule == "combined":
        yield name, "32", "parallel.schedule=combined runs communication beside computation, in queues of its own"
    elif profile.capability is None:
        return
    elif profile.capability >= BLACKWELL:
        yield name, "32", f"--hw {profile.name}: Blackwell keeps no order among queues"
    elif parallel.tp > 1 or parallel.cp > 1:
        degrees = " and ".join(
            f"parallel.{axis}={n}" for axis, n in (("tp", parallel.tp), ("cp", parallel.cp)) if n > 1
        )
        yield name, "1", f"{degrees} before Blackwell: communication starts in order, before what hides it"
    elif parallel.dispatcher in ("deepep", "hybridep"):
        yield name, "32", f"parallel.dispatcher={parallel.dispatcher} has streams of its own"
    else:
        yield name, "8", "nothing here needs an order among queues, nor more than the driver's own number of them"


def _allocator(run: RunConfig) -> Iterator[Row]:
    name, segments = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
    if "full_iteration" in run.execution.graphs:
        why = "execution.graphs=full_iteration: memory of one stream is used again by another"
        yield name, f"{segments},graph_capture_record_stream_reuse:True", why
    else:
        yield name, segments, "rows of experts differ in number from step to step, and would leave memory in pieces"


def _nccl(run: RunConfig) -> Iterator[Row]:
    yield "NCCL_NVLS_ENABLE", "0", "buffers of multicast for every group take memory that a run of many groups lacks"
    if run.execution.graphs:
        graphs = ",".join(run.execution.graphs)
        yield "NCCL_GRAPH_REGISTER", "0", f"execution.graphs={graphs}: expandable segments cannot be registered"
    if run.parallel.schedule == "combined":
        why = "parallel.schedule=combined: communication that is to be hidden must not queue behind computation"
        yield "TORCH_NCCL_HIGH_PRIORITY", "1", why
    if run.hardware == "b300":
        yield "NCCL_IGNORE_CPU_AFFINITY", "1", "--hw b300: every published set-up has it"


def _hybridep(run: RunConfig, profile: Profile) -> Iterator[Row]:
    """What ranks of ep share an NVLink domain. Recent versions find out by themselves; a value that is wrong there fails at once."""
    yield "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API", str(COMBINE_CHUNK), "parallel.dispatcher=hybridep, as published"
    if profile.fabric is None:
        return
    domain, node, ep = profile.fabric.domain, profile.fabric.gpus_per_node, run.parallel.ep
    together = max(n for n in range(1, min(ep, domain) + 1) if ep % n == 0)
    why = f"--hw {profile.name} joins {domain} GPUs by NVLink"
    yield "NVLINK_DOMAIN_SIZE", str(domain), why
    yield "USE_MNNVL", str(int(domain > node)), f"{why}, and {node} are a node"
    yield "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", str(together), f"parallel.ep={ep}, and {why}"


def _transformer_engine(run: RunConfig) -> Iterator[Row]:
    """For its kernels, by which products in a low-precision format run."""
    recipe = None if run.precision.recipe is None else run.precision.recipe.name
    if run.parallel.schedule == "combined":
        margin = max(NORM_MARGIN, run.execution.dispatcher_sms or 0)
        why = "parallel.schedule=combined: norms leave processors to the communication beside them"
        if margin > NORM_MARGIN:
            why += f", as many as execution.dispatcher_sms={margin}"
        yield "NVTE_FWD_LAYERNORM_SM_MARGIN", str(margin), why
        yield "NVTE_BWD_LAYERNORM_SM_MARGIN", str(margin), why
    if "full_iteration" in run.execution.graphs and recipe == "mxfp8":
        why = "execution.graphs=full_iteration with precision.recipe=mxfp8: experts in one kernel, whose counts stay on the GPU"
        yield "NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1", why
        yield "CUDNNFE_CLUSTER_OVERLAP_MARGIN", "8", why
    if run.memory.offload:
        yield "NVTE_CPU_OFFLOAD_V1", "1", f"memory.offload={','.join(run.memory.offload)}"
    if recipe == "nvfp4":
        yield "NVTE_USE_FAST_MATH", "1", "precision.recipe=nvfp4"
