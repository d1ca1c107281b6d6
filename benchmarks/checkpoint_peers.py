"""What benchmarks/checkpoint.py compares: five ways of writing the same pieces to a folder and reading them back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt.huggingface import save_pretrained
from ckpt.load import load
from ckpt.save import Saving, save
from core.config.architecture import GQA, Layer, ModelConfig, MoE, RMSNorm, Rope, Router
from core.parallel.groups import Group
from core.state.sharded import ShardedTensor
from core.transformer.stage import build_model


class Method(Protocol):
    """A way to keep a state; save and load are collective."""

    folder: Path

    def save(self) -> None: ...

    def load(self) -> None: ...


class Ours:
    """A checkpoint of the zoo."""

    def __init__(self, folder: Path, tensors: Sequence[ShardedTensor], world: Group, store: str) -> None:
        self.folder, self.tensors, self.world, self.store = folder, tensors, world, store
        self.made = ""

    def save(self) -> None:
        self.made = save(self.folder, 1, self.tensors, {}, self.world, Saving(store=self.store, keep=1))

    def load(self) -> None:
        load(self.made, self.tensors, self.world)


class Plain:
    """One file per rank, in which the bytes of its tensors lie one behind the other; nothing says which."""

    def __init__(self, folder: Path, tensors: Sequence[ShardedTensor], world: Group) -> None:
        self.folder, self.world = folder, world
        self.views = [t.data.reshape(-1).view(torch.uint8).numpy() for t in tensors]

    def save(self) -> None:
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / str(self.world.position), "wb", buffering=0) as file:
            for view in self.views:
                done = 0
                while done < len(view):
                    done += file.write(view[done:])
            os.fsync(file.fileno())

    def load(self) -> None:
        with open(self.folder / str(self.world.position), "rb", buffering=0) as file:
            for view in self.views:
                done = 0
                while done < len(view):
                    done += file.readinto(view[done:].data)


class Torch:
    """torch.distributed.checkpoint as it comes, of DTensors that share the tensors' memory."""

    def __init__(self, folder: Path, tensors: Sequence[ShardedTensor], world: Group) -> None:
        self.folder = folder
        mesh = init_device_mesh("cpu", (world.size,))
        self.state = {t.name: _dtensor(t, mesh) if t.copies == 1 else t.data for t in tensors}

    def save(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.state, checkpoint_id=self.folder)

    def load(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(self.state, checkpoint_id=self.folder)


def _dtensor(tensor: ShardedTensor, mesh: object) -> Tensor:
    return DTensor.from_local(
        tensor.data, mesh, [Shard(0)], run_check=False, shape=torch.Size(tensor.shape), stride=_stride(tensor.shape)
    )


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class Safetensors:
    """One safetensors file per rank; loading copies into the tensors that are there."""

    def __init__(self, folder: Path, tensors: Sequence[ShardedTensor], world: Group) -> None:
        self.folder, self.file = folder, folder / f"{world.position}.safetensors"
        self.tensors = {t.name: t.data for t in tensors}

    def save(self) -> None:
        self.folder.mkdir(exist_ok=True)
        save_file(self.tensors, self.file)
        with open(self.file, "rb") as file:
            os.fsync(file.fileno())

    def load(self) -> None:
        for name, data in load_file(self.file).items():
            self.tensors[name].copy_(data)


def _ours(store: str) -> Callable[[Path, Sequence[ShardedTensor], Group], Method]:
    return lambda folder, tensors, world: Ours(folder, tensors, world, store)


METHODS: dict[str, Callable[[Path, Sequence[ShardedTensor], Group], Method]] = {
    "plain": Plain,
    "ours, zarr": _ours("zarr"),
    "ours, torch_dist": _ours("torch_dist"),
    "torch": Torch,
    "safetensors": Safetensors,
}


def published_folder(folder: Path, size: int) -> Path:
    """A Mixtral of about `size` bytes in bfloat16, as a published folder of files of 1 GB, of random weights."""
    moe = MoE(
        experts=8, top_k=2, expert_ffn=3584, router=Router(score="softmax_after_top_k", normalise=False, balance=())
    )
    layer = Layer(attention=GQA(heads=16, kv_heads=4, head_dim=128), mlp=moe)
    count = max(1, round(size / 2 / (8 * 3 * 3584 * 2048 + 2.5 * 2048 * 2048)))
    config = ModelConfig(
        vocab=32000,
        hidden=2048,
        max_tokens=2048,
        norm=RMSNorm(eps=1e-5),
        rope=Rope(theta=1e6),
        layers=(layer,) * count,
        init_std=0.02,
    )
    model = build_model(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    save_pretrained(model, folder, family="mixtral", shard_bytes=10**9)
    return folder
