"""A small model of declared tensors under any mapping, its gradients, and AdamW as torch and the paper have it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from core.config.run import OptimizerConfig
from core.parallel.groups import Group, Groups, one_rank
from core.state.box import Box, cut, whole
from core.state.inventory import Entry, declared, inventory
from core.state.spec import Constant, Normal, Replicas, TensorSpec
from tests.core.numbers import draw

# Odd sizes: neither whole vectors nor parts for two, three or four ranks. Some are smaller than a vector, one is a scalar.
EMBEDDING, MATRIX, WHOLE, GAIN, EXPERTS = (11, 5), (13, 7), (3, 2, 17), (7,), (12, 3, 5)
SMALL_BUCKET = 4 * 150  # bytes: several buckets, and one parameter that is larger

Piece = tuple[str, tuple[int, ...], Box, Tensor]


class Owner(nn.Module):
    """Declared parameters (and buffers, where not trained), with starting values that depend on the name alone."""

    def __init__(self, path: str, specs: Mapping[str, TensorSpec], dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.declared = dict(specs)
        for name, spec in specs.items():
            start = value(f"{path}.{name}", spec.shape)[spec.box.slices].to(dtypes.get(name, dtypes[""]))
            if spec.trained:
                self.register_parameter(name, nn.Parameter(start))
            else:
                self.register_buffer(name, start)

    def specs(self) -> dict[str, TensorSpec]:
        return dict(self.declared)


class Tree(nn.Module):
    """What a rank of a pipeline stage holds: `layers.<stage>.…`, and the embedding if the stage is one of `embedding_stages`.

    Rows of `embedding` and `matrix` are cut over tp, unevenly; `experts` over ep and etp; the rest is whole on every rank.
    dtypes: by attribute name, "" for all others.
    """

    def __init__(
        self,
        groups: Groups | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        embedding_stages: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__()
        groups, dtypes = groups or one_rank(), dtypes or {"": torch.float32}
        stage = groups.pp.position
        if stage in embedding_stages:
            self.embedding = Owner("embedding", {"weight": _cut(EMBEDDING, groups.tp, "embedding")}, dtypes)
        layer = Owner(f"layers.{stage}", _layer(groups), dtypes)
        self.layers = nn.ModuleDict({str(stage): layer})


def _layer(groups: Groups) -> dict[str, TensorSpec]:
    tp = groups.tp.size
    experts = cut(cut(whole(EXPERTS), 0, groups.ep.position, groups.ep.size), 2, groups.etp.position, groups.etp.size)
    return {
        "norm": _spec(GAIN, whole(GAIN), "dense", tp, decay=False),
        "matrix": _cut(MATRIX, groups.tp, "dense"),
        "scale": _spec((), whole(()), "dense", tp, decay=False),
        "whole": _spec(WHOLE, whole(WHOLE), "dense", tp),
        "bias": _spec((4,), whole((4,)), "dense", tp, decay=False, trained=False),
        "experts": _spec(EXPERTS, experts, "expert"),
    }


def _cut(shape: tuple[int, ...], tp: Group, replicas: Replicas) -> TensorSpec:
    return _spec(shape, cut(whole(shape), 0, tp.position, tp.size), replicas)


def _spec(
    shape: tuple[int, ...], box: Box, replicas: Replicas, adjacent: int = 1, *, decay: bool = True, trained: bool = True
) -> TensorSpec:
    init = Normal(std=1.0) if decay else Constant(value=1.0)
    return TensorSpec(
        shape=shape, box=box, replicas=replicas, init=init, adjacent=adjacent, decay=decay, trained=trained
    )


def trained(model: nn.Module) -> dict[str, Entry]:
    """The parameters of a model by canonical name."""
    return {name: entry for name, entry in declared(model).items() if entry.spec.trained}


def value(name: str, shape: tuple[int, ...], of: str = "start") -> Tensor:
    """The whole tensor of random numbers that belongs to a name, float64."""
    return draw(zlib.crc32(f"{of} {name}".encode()), *shape)


def gradient(step: int, microbatch: int, name: str, spec: TensorSpec) -> Tensor:
    """The whole model's gradient of a microbatch, float64."""
    return value(name, spec.shape, f"gradient {step} {microbatch}") * (3.0 if "experts" in name else 1.0)


def copies_of(name: str, spec: TensorSpec, groups: Groups) -> Group:
    """Who holds the same piece: by the name alone, and by tp * cp * dp where a piece is not cut."""
    if "experts" in name:
        return groups.edp
    if "embedding" in name:
        return groups.embedding
    return groups.tokens if spec.adjacent > 1 else groups.replicas


def share(step: int, microbatch: int, name: str, spec: TensorSpec, groups: Groups) -> Tensor:
    """This rank's part of the gradient of its piece: an eighth to every copy, the rest to the first; float64."""
    copies = copies_of(name, spec, groups)
    weight = 1.0 - (copies.size - 1) / 8 if copies.position == 0 else 1 / 8
    return gradient(step, microbatch, name, spec)[spec.box.slices] * weight


def backward(gradients: Mapping[str, Tensor], entries: Mapping[str, Entry], order: Sequence[str] | None = None) -> None:
    """A real backward that gives each named parameter its gradient; autograd comes to those first that stand last in `order`."""
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for name in order or list(gradients):
        tensor = entries[name].tensor
        total = total + (tensor * gradients[name].to(tensor.dtype)).sum()
    if total.requires_grad:
        total.backward()


def pieces_of(model: nn.Module, groups: Groups) -> list[Piece]:
    """What a rank holds of the model, as a test's answer."""
    return [(p.name, p.shape, p.box, p.data.clone()) for p in inventory(model, groups).values()]


def assembled(ranks: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks; equal pieces must be equal bit by bit, and leave no hole."""
    found: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, shape, box, data in (piece for rank in ranks for piece in rank):
        full, known = (
            found.setdefault(name, torch.zeros(shape, dtype=data.dtype)),
            seen.setdefault(name, torch.zeros(shape)),
        )
        before = known[box.slices].bool()
        assert torch.equal(full[box.slices][before], data[before]), f"copies of {name} at {box} differ"
        full[box.slices] = data
        known[box.slices] = 1.0
    holes = [name for name, known in seen.items() if not bool(known.all())]
    assert not holes, f"nobody holds all of {holes}"
    return found


class Reference:
    """torch.optim.AdamW on whole tensors of one process, with the global norm by numpy."""

    def __init__(self, start: Mapping[str, Tensor], no_decay: Sequence[str], config: OptimizerConfig) -> None:
        self.tensors = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in start.items()}
        self.config = config
        self.norms: list[float] = []
        groups = [
            {"params": [t for n, t in self.tensors.items() if n not in no_decay], "weight_decay": config.weight_decay},
            {"params": [t for n, t in self.tensors.items() if n in no_decay], "weight_decay": 0.0},
        ]
        self.update = torch.optim.AdamW(
            groups, betas=(config.beta1, config.beta2), eps=config.eps, foreach=False, fused=False
        )

    def step(self, rate: float, gradients: Mapping[str, Tensor]) -> None:
        flat = np.concatenate([gradients[name].double().numpy().ravel() for name in self.tensors])
        self.norms.append(float(np.linalg.norm(flat)))
        limit = self.config.clip_norm
        factor = 1.0 if limit is None else min(1.0, limit / self.norms[-1])
        for name, tensor in self.tensors.items():
            tensor.grad = gradients[name].to(tensor.dtype) * factor
        for group in self.update.param_groups:
            group["lr"] = rate
        self.update.step()


def plain_adamw(start: Tensor, gradients: list[Tensor], rates: list[float], c: OptimizerConfig, decay: float) -> Tensor:
    """The updates of arXiv 1711.05101 algorithm 2, written out."""
    w, m, v = start.double().clone(), torch.zeros_like(start.double()), torch.zeros_like(start.double())
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m, v = c.beta1 * m + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g * g
        mean, square = m / (1 - c.beta1**t), v / (1 - c.beta2**t)
        w = w - rate * (mean / (square.sqrt() + c.eps) + decay * w)
    return w
