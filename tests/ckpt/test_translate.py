"""Tensors through rules: into our pieces on any number of ranks, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckpt.translate import import_state, part_of, published_plan, read_published
from core.errors import CheckpointError
from core.state.box import Box, part, whole
from core.state.published import experts
from core.state.rules import Part, Rule, choose, plain
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


def held_by(ranks: int) -> dict[str, list[ShardedTensor]]:
    """Every piece of a model that so many ranks have loaded, each once."""
    found: dict[str, list[ShardedTensor]] = {name: [] for name in SHAPES}
    for rank in range(ranks):
        state = pieces_of(rank, ranks)
        load(published(fused=False), state)
        for name, piece in state.items():
            if piece.copy == 0:
                found[name].append(piece)
    return found


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_what_the_ranks_hold_together_is_what_they_read(ranks: int) -> None:
    held, truth = held_by(ranks), published(fused=False)
    plan = published_plan(RULES, SHAPES, {name: [piece.box for piece in pieces] for name, pieces in held.items()})
    assert {p.name: p.shape for p in plan} == {name: tuple(tensor.shape) for name, tensor in truth.items()}
    assert [p.name for p in plan if ".up." in p.name] == [f"m.0.e.{i}.up.weight" for i in range(EXPERTS)]
    for p in plan:
        out = torch.full(p.shape, float("nan"))
        for source in p.sources:
            (piece,) = [piece for piece in held[source.name] if piece.box == source.box]
            out[source.piece.box.slices] = part_of(source, piece.data)
        assert torch.equal(out, truth[p.name])


def test_a_published_tensor_that_the_pieces_do_not_fill_is_an_error_that_names_it() -> None:
    boxes = {name: [whole(shape)] for name, shape in SHAPES.items()}
    boxes["layers.0.experts.down"] = [Box(offset=(0, 0, 0), shape=(EXPERTS, HIDDEN - 1, FFN))]
    with pytest.raises(CheckpointError, match=r"m\.0\.e\.0\.down\.weight has 15 elements, of which 12 are held"):
        published_plan(RULES, SHAPES, boxes)


def test_values_are_rounded_to_the_dtype_of_the_target_and_back() -> None:
    state = pieces_of(0, 1)
    state = {
        name: ShardedTensor(name=name, shape=p.shape, box=p.box, data=p.data.bfloat16()) for name, p in state.items()
    }
    found = published(fused=False)
    load(found, state)
    plan = {p.name: p for p in published_plan(RULES, SHAPES)}
    up = plan["m.0.e.3.up.weight"]
    for dtype in (torch.bfloat16, torch.float32):
        got = read_published(up, whole(up.shape), lambda name, box: state[name].data[box.slices], dtype)
        assert got.dtype == dtype and torch.equal(got, found["m.0.e.3.up.weight"].bfloat16().to(dtype))


TURNED = (
    Rule(
        name="q",
        forms=((Part(name="Q", halves=6),),),
    ),
    Rule(name="t.{layer}", forms=((Part(name="T.{expert}", at=("expert",), transposed=True),),)),
)
TURNED_SHAPES = {"q": (12, 5), "t.3": (2, 7, 4)}


def turned() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Ours and the published tensors: heads of six rows with their halves in turn, and matrices the other way round."""
    ours = {name: torch.randn(shape) for name, shape in TURNED_SHAPES.items()}
    rows = ours["q"].view(2, 2, 3, 5).swapaxes(1, 2).reshape(12, 5)
    return ours, {"Q": rows, "T.0": ours["t.3"][0].T.contiguous(), "T.1": ours["t.3"][1].T.contiguous()}


def test_transposed_tensors_and_halves_of_heads_run_in_both_directions_whatever_the_piece() -> None:
    @settings(max_examples=60, database=None)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        ours, theirs = turned()
        choice = choose(TURNED, TURNED_SHAPES, {name: tuple(tensor.shape) for name, tensor in theirs.items()})
        assert not choice.faults
        for name, shape in TURNED_SHAPES.items():
            box = data.draw(boxes_in(shape))
            piece = ShardedTensor(name=name, shape=shape, box=box, data=torch.zeros(box.shape))
            import_state(TURNED, choice, {name: piece}, lambda name, box: theirs[name][box.slices])
            assert torch.equal(piece.data, ours[name][box.slices])
        for published in published_plan(TURNED, TURNED_SHAPES):
            box = data.draw(boxes_in(published.shape))
            got = read_published(published, box, lambda name, box: ours[name][box.slices], torch.float32)
            assert torch.equal(got, theirs[published.name][box.slices])

    compare()


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    low = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(offset=low, shape=tuple(draw(st.integers(1, s - o)) for s, o in zip(shape, low, strict=True)))


def test_rows_that_are_no_heads_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="Q: 8 rows are no heads of two halves of 6 rows together"):
        published_plan(TURNED[:1], {"q": (8, 5)})


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


def test_the_names_of_copies_stand_beside_what_they_repeat() -> None:
    assert {p.name: p.copies for p in published_plan(RULES, SHAPES) if p.copies} == {"A": ("A.copy",)}
