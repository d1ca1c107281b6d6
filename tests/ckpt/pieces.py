"""Canonical states of random bits, cut for simulated ranks; every truth here is the global tensor itself."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ckpt.blocks
import ckpt.plan
import ckpt.store.zarr
from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.manifest import read_manifest
from ckpt.plan import PIECE_BYTES, plan_save
from ckpt.read import read_into
from ckpt.save import Planned, Saving, commit, describe, write_share
from ckpt.shelf.address import open_shelf
from ckpt.store.find import find_store
from core.state.box import Box
from core.state.sharded import ShardedTensor

Rank = list[ShardedTensor]
ZARR = Saving()


def random_bits(name: str, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every bit pattern of the type may occur, NaN and subnormal numbers too."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    return torch.randint(0, 256, (count * size,), generator=generator).to(torch.uint8).view(dtype).reshape(tuple(shape))


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """All bits set: NaN in every floating type. (A bool, which has no such value, is False.)"""
    if dtype is torch.bool:
        return torch.zeros(tuple(shape), dtype=dtype)
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full((*shape, size), 0xFF, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def cut(name: str, tensor: Tensor, parts: Sequence[int], copies: int = 1) -> list[Rank]:
    """`tensor` in equal parts along each dimension, the first dimension slowest; each part on `copies` following ranks."""
    shape = tuple(tensor.shape)
    size = tuple(s // p for s, p in zip(shape, parts, strict=True))
    ranks = []
    for place in itertools.product(*map(range, parts)):
        box = Box(offset=tuple(p * s for p, s in zip(place, size, strict=True)), shape=size)
        for copy in range(copies):
            ranks.append([piece(name, tensor, box, copy, copies)])
    return ranks


def piece(name: str, tensor: Tensor, box: Box, copy: int = 0, copies: int = 1) -> ShardedTensor:
    data = tensor[box.slices].clone()
    return ShardedTensor(name=name, shape=tuple(tensor.shape), box=box, data=data, copy=copy, copies=copies)


def joined(*states: list[Rank]) -> list[Rank]:
    """Several tensors, each cut for the same ranks, as one state."""
    return [[tensor for rank in ranks for tensor in rank] for ranks in zip(*states, strict=True)]


def target_like(rank: Rank) -> Rank:
    return [
        ShardedTensor(name=t.name, shape=t.shape, box=t.box, data=poisoned(t.box.shape, t.data.dtype)) for t in rank
    ]


def planned_as_ranks(ranks: list[Rank], saving: Saving, piece_bytes: int = PIECE_BYTES) -> Planned:
    """What ranks that hold these tensors agree on."""
    plan = plan_save([describe(rank) for rank in ranks], piece_bytes)
    store = find_store(saving.store)
    return Planned(plan=plan, files=store.lay_out(plan), store=store, codec=saving.codec, assets=saving.assets)


def save_as_ranks(
    run: Address,
    step: int,
    ranks: list[Rank],
    extra: Mapping[str, Any] | None = None,
    saving: Saving = ZARR,
    piece_bytes: int = PIECE_BYTES,
) -> str:
    """What `save` does, with the ranks one after the other in this process."""
    planned, shelf = planned_as_ranks(ranks, saving, piece_bytes), open_shelf(run)
    with shelf.only_saver():
        partial = shelf.begin(step)
        written = [write_share(partial, planned, tuple(tensors), rank) for rank, tensors in enumerate(ranks)]
        return commit(shelf, step, partial, planned, written, extra or {})


def assert_loads(checkpoint: Address, ranks: list[Rank], truth: Mapping[str, Tensor]) -> None:
    """Each rank reads its own pieces into poisoned memory and holds exactly the bits of the global tensors."""
    files = open_files(checkpoint)
    manifest = read_manifest(files)
    for rank in ranks:
        targets = target_like(rank)
        read_into(files, manifest, targets)
        for target in targets:
            assert bits(target.data) == bits(truth[target.name][target.box.slices]), f"{target.name} {target.box}"


def make_small(monkeypatch: pytest.MonkeyPatch, block_bytes: int, own_file_bytes: int, share_bytes: int) -> None:
    """Let tensors of a few hundred bytes be laid out as large ones are: many blocks, files of their own, shared writing."""
    monkeypatch.setattr(ckpt.blocks, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(ckpt.store.zarr, "SMALL_BYTES", own_file_bytes)
    monkeypatch.setattr(ckpt.plan, "LEAST_SHARE_BYTES", share_bytes)
