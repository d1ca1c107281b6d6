"""A module tree as canonical state: name -> declaration and piece. Whoever needs parameters by name asks here (contract 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from core.parallel.groups import Group, Groups
from core.state.box import Box
from core.state.hollow import is_hollow
from core.state.seed import normal
from core.state.shard import is_sharded, local, shard_box
from core.state.sharded import ShardedTensor
from core.state.spec import Normal, TensorSpec


@runtime_checkable
class Declares(Protocol):
    """A module that owns tensors and says what they are."""

    def specs(self) -> dict[str, TensorSpec]:
        """The declaration of every parameter and buffer of this module itself, by attribute name."""
        ...


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a model: its declaration and this rank's piece, of which FSDP may leave the part `shard` alone."""

    spec: TensorSpec
    tensor: Tensor
    shard: Box | None = None

    @property
    def box(self) -> Box:
        """What `tensor` is of the canonical tensor."""
        return self.spec.box if self.shard is None else self.shard


def declared(model: nn.Module) -> dict[str, Entry]:
    """Every tensor of `model` by canonical name, in module order. A tensor without a declaration, or of another shape than
    declared, is our own mistake: AssertionError."""
    found: dict[str, Entry] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        specs = module.specs() if isinstance(module, Declares) else {}
        assert set(own) == set(specs), f"{path}: owns {sorted(own)} but declares {sorted(specs)}"
        for name, tensor in own.items():
            spec = specs[name]
            assert tuple(tensor.shape) == spec.box.shape, (
                f"{path}.{name}: {tuple(tensor.shape)} is not {spec.box.shape}"
            )
            found[f"{path}.{name}" if path else name] = _entry(spec, tensor)
    return found


def _entry(spec: TensorSpec, tensor: Tensor) -> Entry:
    if not is_sharded(tensor):
        return Entry(spec=spec, tensor=tensor)
    return Entry(spec=spec, tensor=local(tensor), shard=shard_box(tensor, spec.box))


def replicas(spec: TensorSpec, groups: Groups) -> Group:
    """The ranks that hold equal copies of a tensor's piece."""
    match spec.replicas:
        case "expert":
            return groups.edp
        case "embedding":
            return groups.embedding
        case "dense":
            return groups.adjacent[spec.adjacent]


def copies(entry: Entry, groups: Groups) -> Group:
    """The ranks that hold the same of a tensor as this one: its piece, or under FSDP its shard."""
    if entry.shard is None:
        return replicas(entry.spec, groups)
    assert groups.shards is not None, "a model that FSDP shards has groups for its shards"
    match entry.spec.replicas:
        case "expert":
            return groups.shards.expert_copies
        case "embedding":
            return groups.shards.embedding_copies
        case "dense":
            return groups.shards.copies[entry.spec.adjacent]


def piece_of(name: str, entry: Entry, data: Tensor, groups: Groups) -> ShardedTensor:
    """`data`, which lies as the tensor of `entry` does (that tensor, or a moment of it), as this rank's piece of `name`."""
    group = copies(entry, groups)
    return ShardedTensor(
        name=name, shape=entry.spec.shape, box=entry.box, data=data, copy=group.position, copies=group.size
    )


def inventory(model: nn.Module, groups: Groups) -> dict[str, ShardedTensor]:
    """Every tensor of `model` as a piece of the canonical state, data shared with the model.

    Left out are empty shards, and hollow parameters, whose values the optimizer has: its `state` gives them.
    """
    return {
        name: piece_of(name, entry, entry.tensor.detach(), groups)
        for name, entry in declared(model).items()
        if (entry.shard is None or entry.shard.elements) and not is_hollow(entry.tensor)
    }


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every tensor of `model` as declared: the same values under every mapping."""
    for name, entry in declared(model).items():
        if isinstance(entry.spec.init, Normal):
            entry.tensor.copy_(normal(seed, name, entry.box, std=entry.spec.init.std))
        else:
            entry.tensor.fill_(entry.spec.init.value)
