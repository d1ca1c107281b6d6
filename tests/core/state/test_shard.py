"""The box of a shard is what torch leaves of a tensor on a rank, for sizes that do not divide and for none at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from core.config.mapping import ParallelConfig
from core.parallel.groups import groups_for
from core.state.box import Box, part
from core.state.shard import is_sharded, local, shard_box
from tests.ranks import Ranks

# (shape of the whole tensor, the dimension that is cut)
SHAPES = [((7, 2), 0), ((6,), 0), ((2, 3), 0), ((1, 3), 0), ((0, 3), 0), ((3, 1), 0), ((2, 6, 2), 1), ((5, 2, 9), 2)]


def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def shards(rank: int, world: int, shift: int) -> list[tuple[Box, Tensor]]:
    """Box and elements of a shard of every shape, each being the second of two pieces along dimension `shift`'s end."""
    handle = groups_for(ParallelConfig()).replicas.handle
    assert handle is not None
    mesh = DeviceMesh.from_group(handle, "cpu")
    found = []
    for shape, dimension in SHAPES:
        tensor = nn.Parameter(distribute_tensor(whole(shape), mesh, [Shard(dimension)]))
        assert is_sharded(tensor)
        outer = part((shape[0] * 2, *shape[1:]), 0, 1, 2) if shift else part(shape, 0, 0, 1)
        found.append((shard_box(tensor, outer), local(tensor)))
    return found


def test_boxes_are_the_chunks_of_torch_wherever_the_piece_lies(ranks: Ranks) -> None:
    for shift in (0, 1):
        told = ranks.run(shards, 3, shift)
        for i, (shape, dimension) in enumerate(SHAPES):
            start = (shape[0] * shift, *(0 for _ in shape[1:]))
            chunks = torch.chunk(whole(shape), 3, dimension)
            at = 0
            for rank in range(3):
                box, held = told[rank][i]
                expected = chunks[rank] if rank < len(chunks) else whole(shape).narrow(dimension, 0, 0)
                assert torch.equal(held, expected) and box.shape == tuple(expected.shape)
                assert box.offset == tuple(s + at * (d == dimension) for d, s in enumerate(start))
                at += box.shape[dimension]


def test_meshes_of_an_earlier_world_do_not_tell_a_rank_its_place(ranks: Ranks) -> None:
    """Ranks 0 and 1 shared groups of other names before."""
    ranks.run(shards, 3, 0)
    for world in (2, 3):
        told = ranks.run(shards, world, 0)
        sizes = [told[rank][0][0].shape[0] for rank in range(world)]
        assert sizes == [len(chunk) for chunk in torch.chunk(whole((7, 2)), world)]


def test_an_ordinary_tensor_is_no_shard_and_all_of_it_is_here() -> None:
    for tensor in (torch.ones(3), nn.Parameter(torch.ones(3))):
        assert not is_sharded(tensor)
        held = local(tensor)
        assert held.data_ptr() == tensor.data_ptr() and not held.requires_grad
