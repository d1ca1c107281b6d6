"""FSDP2 with experts: which module shares its parameters with which ranks (arXiv 2304.11277; report section 4.1.7).

Two device meshes: what lies outside the experts is cut over cp * dp, experts over edp, whose ranks hold the same experts. Hybrid
sharding cuts over the inner part of either alone; see `ShardGroups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from core.moe.layer import MoELayer
from core.optim.buckets import main_dtype
from core.parallel.collectives import gather_into
from core.parallel.groups import Group, Groups
from core.parallel.pending import start_reduce_scatter
from core.transformer.block import Block
from core.transformer.mtp import MultiTokenModule
from core.transformer.stage import Stage

# The first dimension may be cut unevenly, but every shard is padded to the largest one. Where that costs more than this, another
# dimension that divides evenly is cut, which costs copies instead.
MOST_PADDING = 1.1


def shard(model: Stage, groups: Groups, gradients: torch.dtype | None = None) -> None:
    """Leave this rank its shards of the parameters of `model`; each module gathers what it needs whenever it runs.

    Values are kept, so a model may be initialised before or after; a large one is built on meta, and only its shards are made
    (`Module.to_empty`) and initialised. Shards are float32 (float64 for such), the masters that the optimizer updates; modules
    compute with, and gather, the model's own dtype. What no other rank holds stays as it is. gradients: in which dtype they are
    sent to be summed; None: that of the masters.

    Units are the experts of every block, the rest of every block and of every multi-token prediction module, the embedding, the
    final norm and the head. A unit is gathered for each forward, and again for its backward, behind which its gradients are
    reduce-scattered, as a plain sum (contract 4), and added up sharded. So each microbatch sends three times
    (n - 1) / n of most units, and few of them are whole at a time; gradients kept whole until a step's last backward would
    spare a third of that, and take four bytes for every parameter of the model.
    """
    schedule = model.place.parallel.schedule
    assert groups.shards is not None, "these groups are not for sharding=fsdp"
    assert schedule in ("gpipe", "1f1b"), f"{schedule} goes past the hooks of FSDP, as core/check tells users"
    known: set[int] = set()
    alone: set[nn.Parameter] = set()
    plan: list[tuple[nn.Module, Group]] = []
    for unit, group in _units(model, groups):
        own = [parameter for parameter in unit.parameters() if id(parameter) not in known]
        known.update(map(id, own))
        if group.size == 1:
            alone.update(own)
            continue
        plan.append((unit, group))
        for parameter in own:
            parameter.data = parameter.data.to(main_dtype(parameter.dtype))
    if not plan:
        return
    meshes = {group.ranks: _mesh(group, model) for _, group in plan}
    policy = _policy(model.place.dtype, gradients)
    for unit, group in plan:
        _wrap(unit, group, meshes[group.ranks], policy, alone)
    # The root has no parameters of its own; it lets the units share streams and fetch each other's parameters in advance.
    fully_shard(model, mesh=next(iter(meshes.values())), mp_policy=policy, ignored_params=alone)
    _register_methods(model)


def is_sharded_model(model: nn.Module) -> bool:
    """Whether `shard` has been here."""
    return isinstance(model, FSDPModule)


def _units(model: Stage, groups: Groups) -> Iterator[tuple[nn.Module, Group]]:
    """Modules that are gathered at once, inner ones first, each with the ranks that share its parameters."""
    assert groups.shards is not None
    dense, expert = groups.shards.dense, groups.shards.expert
    modules = [module for module in model.mtp.values() if isinstance(module, MultiTokenModule)]
    for block in (*model.layers.values(), *(module.layer for module in modules)):
        assert isinstance(block, Block)
        if isinstance(block.mlp, MoELayer):
            yield block.mlp.experts, expert
        yield block, dense
    for module in (*modules, model.embedding, model.final_norm, model.head):
        if module is not None:
            yield module, dense


def _wrap(
    unit: nn.Module, group: Group, mesh: DeviceMesh, policy: MixedPrecisionPolicy, alone: set[nn.Parameter]
) -> None:
    """Make a module a unit of FSDP whose collectives are the zoo's."""
    wrapped = fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=True,
        shard_placement_fn=partial(_placement, count=group.size),
        mp_policy=policy,
        ignored_params=alone,
    )
    wrapped.set_custom_all_gather(cast(Any, _Gathering(group=group)))
    wrapped.set_custom_reduce_scatter(cast(Any, _Summing(group=group)))
    # Plain sums: a factor of one, and no kind of sum that multiplies by it, which gloo does not have.
    wrapped.set_gradient_divide_factor(1.0)
    wrapped.set_force_sum_reduction_for_comms(True)


def _register_methods(model: Stage) -> None:
    """Name the methods besides `forward` that use parameters."""
    register_fsdp_forward_method(model, "run")
    for vocabulary in (model.embedding, model.head):
        if isinstance(vocabulary, FSDPModule):
            for name in ("embed", "loss", "logits"):
                register_fsdp_forward_method(vocabulary, name)
    if isinstance(model.embedding, FSDPModule) and model.head is not None:
        # Without logits, backward looks at tokens alone.
        model.embedding.set_unshard_in_backward(False)


def _policy(dtype: torch.dtype, gradients: torch.dtype | None) -> MixedPrecisionPolicy:
    """Compute in `dtype` with shards in the dtype of masters. Modules cast their inputs themselves."""
    summed = gradients or main_dtype(dtype)
    if summed == dtype == main_dtype(dtype):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=summed, cast_forward_inputs=False)


def _mesh(group: Group, model: Stage) -> DeviceMesh:
    device = model.place.device.type
    assert group.handle is not None, "groups of several ranks have a process group"
    return DeviceMesh.from_group(group.handle, "cpu" if device == "meta" else device)


def _placement(parameter: nn.Parameter, count: int) -> Shard:
    """Which dimension `count` ranks cut."""
    size = parameter.shape[0]
    if -(-size // count) * count <= MOST_PADDING * size:
        return Shard(0)
    return Shard(next((d for d, n in enumerate(parameter.shape) if n % count == 0), 0))


@dataclass(frozen=True, kw_only=True)
class _Gathering:
    """FSDP's all-gather over a group that counts its bytes."""

    group: Group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of its own for every call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Every rank's input, one after the other."""
        self.group.count("all_gather", (self.group.size - 1) * input_tensor.nbytes)
        return gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


@dataclass(frozen=True, kw_only=True)
class _Summing:
    """FSDP's reduce-scatter over a group, summed in the order of the ranks; see `start_reduce_scatter`."""

    group: Group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of its own for every call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """My part of the sum of all ranks' inputs; the input is spent."""
        output_tensor.copy_(start_reduce_scatter(input_tensor, self.group).wait())
