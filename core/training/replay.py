"""Recording of what the routers choose, and microbatches that are told what they shall choose (report section 10.3).

recording = Recording()
train_step(model, optimizer, batches, …, recording=recording)      # or run_microbatches, validation_loss
write_replay(path, recording.whole(batches, model), model.config)

replay = read_replay(path, model.config, first=…, tokens=…)        # or RouterReplay(experts=…) from an inference engine
train_step(model, optimizer, [replayed(batch, replay, model)], …)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from core.moe.replay import RouterReplay, check_replay, moe_layers
from core.moe.router import Routing
from core.parallel.collectives import all_gather_rows, all_reduce_max, all_reduce_sum
from core.transformer.context import TokenBatch
from core.transformer.stage import Stage


def replayed(batch: TokenBatch, replay: RouterReplay, model: Stage) -> TokenBatch:
    """The microbatch with the experts that `replay` says, in training and evaluation, on a rank that holds some of its layers.

    Nothing is communicated; the host reads the ids. Raises DataError that names layer and token where a layer that this rank holds is
    missing, tokens or choices are not as many as they are, an id is out of range or twice there, or a token that is no padding has none.
    """
    known = moe_layers(model.config)
    held = {name: moe for name, moe in known.items() if name in _held(model)}
    valid = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.valid is None else batch.valid
    check_replay(replay, held, known, valid)
    return replace(batch, prescribed=replay.on(model.place.device, held))


@dataclass(kw_only=True)
class Recording:
    """What my tokens chose in every microbatch and every MoE layer of this stage, before capacity dropped any.

    Handed to `train_step` or `run_microbatches`, which fill it. chosen: int32 [my tokens, K] by (microbatch, layer), -1 for padding.
    """

    chosen: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def add(self, microbatch: int, routings: Mapping[str, Routing]) -> None:
        """Note the routings of one part."""
        for layer, routing in routings.items():
            ids = routing.experts_TK if routing.chosen_TK is None else routing.chosen_TK
            self.chosen[microbatch, layer] = ids.detach().to(torch.int32)

    def replays(self, batches: Sequence[TokenBatch], model: Stage) -> list[RouterReplay]:
        """The routing of each of these microbatches, whole, in the layers of this stage.

        One all-gather a layer and microbatch over the ranks that share the microbatch, all of which call this.
        """
        found: list[dict[str, Tensor]] = [{} for _ in batches]
        for (number, layer), mine in sorted(self.chosen.items()):
            packing = batches[number].packing
            rows, order = (
                all_gather_rows(x.contiguous(), packing.shares, model.place.groups.sequence)
                for x in (mine, packing.mine_T)
            )
            found[number][layer] = torch.empty_like(rows).index_copy_(0, order, rows)
        return [RouterReplay(experts=experts) for experts in found]

    def whole(self, batches: Sequence[TokenBatch], model: Stage) -> dict[str, Tensor]:
        """The routing of the whole global batch in all layers that ran, for `write_replay`: int32 [tokens, K or E] by layer, on the CPU.

        Batches must know their position. All ranks call this and get the same. Two small all-reduces over the world, and one of 4 * K
        bytes a token for each layer, which is the memory that it takes too.
        """
        layers, device, world = moe_layers(model.config), model.place.device, model.place.groups.world
        firsts = [_first(batch) for batch in batches]
        ends = [first + batch.tokens.shape[0] for first, batch in zip(firsts, batches, strict=True)]
        tokens = int(all_reduce_max(torch.tensor([max(ends, default=0)], device=device), world))
        mine = {layer: ids.shape[1] for (_, layer), ids in self.chosen.items()}
        widths = all_reduce_max(torch.tensor([mine.get(layer, 0) for layer in layers], device=device), world).tolist()
        found = {}
        for layer, width in zip(layers, widths, strict=True):
            if not width:
                continue
            # Each choice lies on one rank of the world: a sum puts them together, one more than the id so that -1 is nothing.
            ids = torch.zeros(tokens, width, dtype=torch.int32, device=device)
            for number, (first, batch) in enumerate(zip(firsts, batches, strict=True)):
                if (number, layer) in self.chosen:
                    ids[batch.packing.mine_T + first] = self.chosen[number, layer] + 1
            found[layer] = all_reduce_sum(ids, world).cpu() - 1
        return found


def _held(model: Stage) -> set[str]:
    """The names of the layers that this rank holds."""
    parts = model.parts
    return {f"layers.{i}" for part in parts for i in part.layers} | {
        f"mtp.{d}.layer" for part in parts for d in part.ahead
    }


def _first(batch: TokenBatch) -> int:
    assert batch.position is not None, (
        "only microbatches that know their position can be put together to a global batch"
    )
    return batch.position.first
