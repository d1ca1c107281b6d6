"""What FSDP leaves on one rank of a tensor that the ranks of a group share: its shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.state.box import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether FSDP holds only a shard of this parameter or gradient here."""
    return type(tensor) is not Tensor and type(tensor) is not nn.Parameter


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The elements that are here, data shared: the shard of a sharded tensor, any other as it is. Without gradient."""
    return _dtensor(tensor).to_local().detach() if is_sharded(tensor) else tensor.detach()


def shard_box(tensor: Tensor, box: Box) -> Box:
    """Which part of the piece `box` the shard of `tensor` is: as torch cuts, all but the last are of equal length, some empty."""
    held = _dtensor(tensor)
    (placement,) = held.placements
    dimension: int = placement.dim  # type: ignore[attr-defined]
    # Not the mesh's own idea of my place: torch keeps meshes of equal ranks for good, and one of an earlier world in this
    # process may know its group by a name that is another group's now.
    ranks = held.device_mesh.mesh.tolist()
    size, place = box.shape[dimension], ranks.index(dist.get_rank())
    length = -(-size // len(ranks))
    first = min(place * length, size)
    offset, shape = list(box.offset), list(box.shape)
    offset[dimension] += first
    shape[dimension] = min(length, size - first)
    found = Box(offset=tuple(offset), shape=tuple(shape))
    assert tuple(held.to_local().shape) == found.shape, f"{tuple(held.to_local().shape)} is not {found.shape}"
    return found


def _dtensor(tensor: Tensor) -> DTensor:
    # Takes a second to import, for which only those who shard have to wait.
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor), f"a {type(tensor).__name__} is no kind of tensor that FSDP makes"
    return tensor
