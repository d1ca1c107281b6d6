"""Routing on the disk: one safetensors file for a global batch, one tensor [tokens, K] of int16 or int32 for each MoE layer.

Tokens stand in the order of the global batch, -1 for padding. The header says for how many tokens and for which layers it was made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.config.architecture import ModelConfig, MoE
from core.errors import DataError
from core.moe.replay import RouterReplay, ids_dtype, moe_layers

FORMAT = "router-replay/1"


def write_replay(path: Path, experts: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Write the experts [tokens of the global batch, K] of some of the model's MoE layers, whole or not at all.

    Raises DataError where the layers' token counts differ or a name is no MoE layer of the model.
    """
    known = moe_layers(model)
    counts = {ids.shape[0] for ids in experts.values()}
    strange = [name for name in experts if name not in known]
    if len(counts) > 1 or strange:
        raise DataError(f"{path}: layers with {sorted(counts)} tokens and unknown layers {strange} are no global batch")
    sizes = {name: (known[name].experts, known[name].top_k) for name in experts}
    header = {"format": FORMAT, "tokens": str(max(counts, default=0)), "layers": json.dumps(sizes)}
    tensors = {name: ids.to("cpu", ids_dtype(known[name].experts)).contiguous() for name, ids in experts.items()}
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, partial, metadata=header)
    partial.replace(path)


def read_replay(path: Path, model: ModelConfig, *, first: int, tokens: int, own: tuple[str, ...] = ()) -> RouterReplay:
    """The routing of a microbatch: of `tokens` tokens from place `first` of the global batch. Nothing else is read.

    own: layers that shall choose themselves. Raises DataError where the file is damaged, is of another model or has no such tokens.
    """
    try:
        with safe_open(path, framework="pt") as file:
            _check(path, file.metadata() or {}, model, first + tokens)
            names = [name for name in json.loads(file.metadata()["layers"]) if name not in own]
            experts = {name: file.get_slice(name)[first : first + tokens] for name in names}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as recorded routing: {error}") from error
    wrong = [name for name, ids in experts.items() if ids.dtype not in (torch.int16, torch.int32)]
    if wrong:
        raise DataError(f"{path}: {wrong[0]} is not of int16 or int32. Record it again.")
    return RouterReplay(experts=experts, own=own)


def _check(path: Path, header: Mapping[str, str], model: ModelConfig, needed: int) -> None:
    """Raises DataError unless the file is recorded routing of a model like this one, of enough tokens."""
    if header.get("format") != FORMAT:
        raise DataError(f"{path}: its header does not say format={FORMAT}, so it is no recorded routing of this form.")
    known = moe_layers(model)
    for name, size in json.loads(header["layers"]).items():
        moe: MoE | None = known.get(name)
        if moe is None or [moe.experts, moe.top_k] != size:
            there = "is no MoE layer here" if moe is None else f"has {moe.experts} experts and top-{moe.top_k} here"
            raise DataError(f"{path}: {name} was recorded with {size[0]} experts and top-{size[1]}, but {there}.")
    if int(header["tokens"]) < needed:
        raise DataError(
            f"{path}: holds a global batch of {header['tokens']} tokens, but tokens up to {needed} are asked for."
        )
