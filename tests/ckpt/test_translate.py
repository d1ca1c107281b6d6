"""Tensors through rules: into our pieces on any number of ranks, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ckpt.translate import copy_names, export_state, import_state
from core.errors import CheckpointError
from core.state.box import Box, part, whole
from core.state.published import experts
from core.state.rules import choose, plain
from core.state.sharded import ShardedTensor

EXPERTS, FFN, HIDDEN = 12, 3, 5
NAMES = ("gate", "up", "down")
RULES = (
    *experts("layers.{layer}.experts", "m.{layer}.e", fused="m.{layer}.fused", names=NAMES),
    plain("a.weight", "A", copies=("A.copy",)),
)
SHAPES = {
    "layers.0.experts.gate_up": (EXPERTS, 2, FFN, HIDDEN),
    "layers.0.experts.down": (EXPERTS, HIDDEN, FFN),
    "a.weight": (7, HIDDEN),
}


def published(*, fused: bool) -> dict[str, Tensor]:
    """Expert i is filled with i, gate with a half and up with a quarter more; rows count up in hundreds."""
    rows = 100.0 * torch.arange(FFN)[:, None].expand(FFN, HIDDEN)
    found = {"A": torch.arange(35.0).view(7, HIDDEN)}
    gate = torch.stack([rows + i + 0.5 for i in range(EXPERTS)])
    up = torch.stack([rows + i + 0.25 for i in range(EXPERTS)])
    down = torch.stack([rows.T + i for i in range(EXPERTS)])
    if fused:
        return found | {"m.0.fused.gate_up_proj": torch.cat([gate, up], dim=1), "m.0.fused.down_proj": down}
    for name, tensor in zip(NAMES, (gate, up, down), strict=True):
        found |= {f"m.0.e.{i}.{name}.weight": tensor[i].clone() for i in range(EXPERTS)}
    return found


def pieces_of(rank: int, ranks: int) -> dict[str, ShardedTensor]:
    """What a rank holds: its share of the experts, and a copy of everything else."""
    state = {}
    for name, shape in SHAPES.items():
        box = part(shape, 0, rank, ranks) if "experts" in name else whole(shape)
        copies = 1 if "experts" in name else ranks
        data = torch.zeros(box.shape)
        copy = 0 if copies == 1 else rank
        state[name] = ShardedTensor(name=name, shape=shape, box=box, data=data, copy=copy, copies=copies)
    return state


def load(found: dict[str, Tensor], state: dict[str, ShardedTensor]) -> set[str]:
    """Import, and say which published tensors were read."""
    read: list[tuple[str, Box]] = []

    def piece(name: str, box: Box) -> Tensor:
        read.append((name, box))
        return found[name][box.slices]

    choice = choose(RULES, SHAPES, {name: tuple(tensor.shape) for name, tensor in found.items()})
    assert not choice.faults
    import_state(RULES, choice, state, piece)
    assert len(read) == len(set(read)), "a piece was read twice"
    return {name for name, _ in read}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("fused", [False, True])
def test_expert_i_holds_i_on_every_number_of_ranks(ranks: int, fused: bool) -> None:
    for rank in range(ranks):
        state = pieces_of(rank, ranks)
        read = load(published(fused=fused), state)
        local = EXPERTS // ranks
        for i in range(local):
            gate_up = state["layers.0.experts.gate_up"].data[i]
            expected = 100.0 * torch.arange(FFN)[:, None].expand(FFN, HIDDEN) + rank * local + i
            assert torch.equal(gate_up[0], expected + 0.5)
            assert torch.equal(gate_up[1], expected + 0.25)
            assert torch.equal(state["layers.0.experts.down"].data[i], expected.T)
        if not fused:
            wanted = {f"m.0.e.{i}.{n}.weight" for i in range(rank * local, (rank + 1) * local) for n in NAMES}
            assert read == wanted | {"A"}


def test_what_the_ranks_export_together_is_what_they_read() -> None:
    found, exported = published(fused=False), {}
    for rank in range(4):
        state = pieces_of(rank, 4)
        load(found, state)
        exports = export_state(RULES, {name: piece for name, piece in state.items() if piece.copy == 0})
        assert all(export.whole() for export in exports.values())
        assert not set(exports) & set(exported)
        exported |= {name: export.assemble() for name, export in exports.items()}
    assert set(exported) == set(found)
    assert all(torch.equal(exported[name], tensor) for name, tensor in found.items())


def test_a_published_tensor_that_is_spread_over_ranks_is_known_to_be_incomplete() -> None:
    shape = SHAPES["layers.0.experts.down"]
    box = part((EXPERTS, FFN, HIDDEN), 2, 0, 5)
    box = Box(offset=box.offset, shape=(EXPERTS, 1, FFN))
    piece = ShardedTensor(name="layers.0.experts.down", shape=shape, box=box, data=torch.zeros(box.shape))
    assert not any(export.whole() for export in export_state(RULES, {piece.name: piece}).values())


def test_values_are_rounded_to_the_dtype_of_the_target_and_back() -> None:
    state = pieces_of(0, 1)
    state = {
        name: ShardedTensor(name=name, shape=p.shape, box=p.box, data=p.data.bfloat16()) for name, p in state.items()
    }
    found = published(fused=False)
    load(found, state)
    exports = export_state(RULES, state)
    assert torch.equal(exports["m.0.e.3.up.weight"].assemble(), found["m.0.e.3.up.weight"].bfloat16())
    wide = exports["m.0.e.3.up.weight"].assemble(torch.float32)
    assert torch.equal(wide, found["m.0.e.3.up.weight"].bfloat16().float())


def test_a_copy_that_differs_is_an_error_that_names_both() -> None:
    found = published(fused=False)
    state = pieces_of(0, 1)
    load(found | {"A.copy": found["A"].clone()}, state)
    wrong = found["A"].clone()
    wrong[6, 4] += 1
    with pytest.raises(CheckpointError, match=r"A\.copy should be a copy of what a\.weight is read from"):
        load(found | {"A.copy": wrong}, state)


def test_numbers_that_are_none_are_an_error_that_names_the_tensor() -> None:
    found = published(fused=False)
    found["m.0.e.11.up.weight"][2, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.0\.experts\.gate_up has values that are not numbers"):
        load(found, pieces_of(0, 1))
    load(found, pieces_of(0, 2))


def test_the_names_of_copies_lead_to_what_they_repeat() -> None:
    assert copy_names(RULES, pieces_of(0, 1)) == {"A.copy": "A"}
