"""Routing that was recorded, or comes from an inference engine, as what a microbatch is told to do again (report section 10.3).

Router and engine round differently, so that about a tenth of the choices differ: a trainer that replays the engine's differentiates
the model that wrote the text. Only the choice is replayed; weights come from the router's scores of now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.config.architecture import ExpertChoice, ModelConfig, MoE
from core.errors import DataError


@dataclass(frozen=True, kw_only=True)
class RouterReplay:
    """The experts of every token of a microbatch, in every MoE layer that runs.

    experts: by the layer's canonical name (`layers.3`, `mtp.0.layer`), [tokens of the microbatch, K] of any integer dtype, tokens in the order of
    the batch, -1 for padding. Where experts chose, E columns, -1 where an expert did not take the token. Layers of other pipeline stages
    may be there or not. own: layers that shall choose themselves.
    """

    experts: Mapping[str, Tensor]
    own: tuple[str, ...] = ()

    def of(self, layer: str, mine_T: Tensor) -> Tensor | None:
        """[T, K] int64, the experts of some tokens of the microbatch (int64 places) in one layer; None where it chooses itself."""
        return None if layer in self.own else self.experts[layer][mine_T].to(torch.int64)

    def on(self, device: torch.device, layers: Mapping[str, MoE]) -> RouterReplay:
        """The part that belongs to `layers`, on a device."""
        return replace(self, experts={name: ids.to(device) for name, ids in self.experts.items() if name in layers})


def check_replay(replay: RouterReplay, held: Mapping[str, MoE], known: Mapping[str, MoE], valid_T: Tensor) -> None:
    """Raises DataError with the first fault of every layer: those in `held` must be there, names must be in `known`.

    valid_T: bool, False for padding, for every token of the microbatch; on any device, as the experts.
    """
    faults = [
        f"{name}: is no MoE layer of this model. Its MoE layers are {', '.join(known) or 'none'}."
        for name in (*replay.experts, *replay.own)
        if name not in known
    ]
    for name, moe in held.items():
        if name in replay.own:
            continue
        wanted = f"the experts of {valid_T.numel()} tokens, {moe.top_k} each"
        if name not in replay.experts:
            faults.append(f"{name}: is missing. Give {wanted}, or name it in own=, to let it choose itself.")
        elif (fault := _fault(replay.experts[name], moe, valid_T)) is not None:
            faults.append(f"{name}: {fault} Give {wanted}, all different and from 0 to {moe.experts - 1}.")
    if faults:
        raise DataError("\n".join(["the routing to replay does not fit:", *(f"  {fault}" for fault in faults)]))


def moe_layers(model: ModelConfig) -> dict[str, MoE]:
    """The MoE layers of a model by canonical name, those that predict ahead last."""
    return {path: layer.mlp for path, layer in model.all_layers() if isinstance(layer.mlp, MoE)}


def ids_dtype(experts: int) -> torch.dtype:
    """The smallest dtype that holds the ids of so many experts, and -1."""
    return torch.int16 if experts <= 1 << 15 else torch.int32


def _fault(ids_TK: Tensor, moe: MoE, valid_T: Tensor) -> str | None:
    """What is wrong with the ids of one layer, in words."""
    if ids_TK.dtype.is_floating_point or ids_TK.dtype == torch.bool:
        return f"its ids are {ids_TK.dtype}, not integers."
    # Experts that choose leave tokens with any number of experts.
    by_experts = isinstance(moe.router.selection, ExpertChoice) and ids_TK.shape[-1:] == (moe.experts,)
    if tuple(ids_TK.shape) != (valid_T.numel(), moe.experts if by_experts else moe.top_k):
        return f"its shape is {list(ids_TK.shape)}, not {[valid_T.numel(), moe.top_k]}."
    valid = valid_T.to(ids_TK.device)
    if (found := _first((ids_TK >= moe.experts) | (ids_TK < -1))) is not None:
        return f"token {found[0]} goes to expert {int(ids_TK[found])}, which there is not."
    if not by_experts and (found := _first((ids_TK < 0) & valid[:, None])) is not None:
        return f"token {found[0]} has no expert as choice {found[1]} (-1), and is no padding."
    ordered = ids_TK.sort(dim=1).values
    if (found := _first((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0) & valid[:, None])) is not None:
        return f"token {found[0]} goes twice to expert {int(ordered[found])}."
    return None


def _first(wrong_TK: Tensor) -> tuple[int, int] | None:
    """The first token and choice where something is wrong."""
    at = wrong_TK.nonzero()
    return None if at.shape[0] == 0 else (int(at[0, 0]), int(at[0, 1]))
