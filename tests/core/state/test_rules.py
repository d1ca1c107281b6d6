"""Rules: which published tensors, and which boxes of them, fill ours."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config.family import Family, Size, all_families
from core.parallel.groups import one_rank
from core.state.box import Box, part, whole
from core.state.inventory import inventory
from core.state.published import experts, frequencies
from core.state.rules import Derived, Part, Rule, choose, expand, match, numbers_in, pieces, plain
from core.transformer.stage import build_model

EXPERTS = experts("layers.{layer}.experts", "m.{layer}.e", fused="m.{layer}.fused", names=("gate", "up", "down"))
GATE_UP, DOWN = EXPERTS


def test_numbers_are_read_where_the_pattern_has_braces_and_nowhere_else() -> None:
    assert numbers_in("a.{layer}.b.{expert}.c", "a.12.b.0.c") == {"layer": 12, "expert": 0}
    for wrong in ("a.12.b.0.cc", "a.x.b.0.c", "a.01.b.0.c", "a.1.b.0xc", "a.-1.b.0.c"):
        assert numbers_in("a.{layer}.b.{expert}.c", wrong) is None
    assert numbers_in("a.b", "a.b") == {}
    assert numbers_in("a.b", "axb") is None


def test_a_tensor_with_no_rule_or_with_two_is_our_own_mistake() -> None:
    with pytest.raises(LookupError, match="0 rules fit the tensor y"):
        match((plain("x", "p"),), "y")
    with pytest.raises(LookupError, match="2 rules fit the tensor x"):
        match((plain("x", "p"), plain("x", "q")), "x")


def test_expert_ten_comes_after_expert_nine() -> None:
    names = [piece.name for piece in expand(EXPERTS, "layers.3.experts.down", (12, 5, 7))]
    assert names == [f"m.3.e.{i}.down.weight" for i in range(12)]


def test_a_rank_needs_only_the_published_tensors_of_its_own_experts() -> None:
    box = part((12, 2, 3, 5), 0, 1, 4)
    found = expand(EXPERTS, "layers.0.experts.gate_up", (12, 2, 3, 5), box)
    assert {piece.name for piece in found} == {f"m.0.e.{i}.{p}.weight" for i in (3, 4, 5) for p in ("gate", "up")}
    assert all(piece.shape == (3, 5) and piece.box == whole((3, 5)) for piece in found)


def test_the_rows_of_a_piece_are_the_rows_of_the_published_tensor() -> None:
    box = Box(offset=(1, 1, 2, 0), shape=(1, 1, 3, 5))
    (piece,) = expand(EXPERTS, "layers.0.experts.gate_up", (2, 2, 7, 5), box)
    assert (piece.name, piece.box) == ("m.0.e.1.up.weight", Box(offset=(2, 0), shape=(3, 5)))
    # In the fused form the seven rows of gate come before those of up.
    (fused,) = pieces(GATE_UP.forms[1], {"layer": 0}, (2, 2, 7, 5), box)
    assert (fused.shape, fused.box) == ((2, 14, 5), Box(offset=(1, 9, 0), shape=(1, 3, 5)))


FORMS = st.sampled_from([(rule, form) for rule in EXPERTS for form in (0, 1)])


@settings(max_examples=150)
@given(st.data())
def test_pieces_fill_every_element_of_a_box_once_with_the_number_that_stands_there(data: st.DataObject) -> None:
    rule, form = data.draw(FORMS)
    sizes = st.integers(1, 11), st.just(2), st.integers(1, 5), st.integers(1, 4)
    shape = tuple(data.draw(s) for s in (sizes if rule is GATE_UP else (sizes[0], *sizes[2:])))
    low = tuple(data.draw(st.integers(0, s - 1)) for s in shape)
    box = Box(offset=low, shape=tuple(data.draw(st.integers(1, s - o)) for s, o in zip(shape, low, strict=True)))
    ours = np.arange(np.prod(shape)).reshape(shape)
    published = by_hand(ours, fused=form == 1)
    got = np.full(shape, -1)
    for piece in pieces(rule.forms[form], {"layer": 0}, shape, box):
        assert published[piece.name].shape == piece.shape
        assert (got[piece.target.slices] == -1).all()
        got[piece.target.slices] = published[piece.name][piece.box.slices].reshape(piece.target.shape)
    inside = np.zeros(shape, dtype=bool)
    inside[box.slices] = True
    assert (got == np.where(inside, ours, -1)).all()


def by_hand(ours: np.ndarray, *, fused: bool) -> dict[str, np.ndarray]:
    """The published tensors, made with numpy from ours: gate_up where it has four dimensions, else down."""
    if ours.ndim == 3:
        return {"m.0.fused.down_proj": ours} if fused else {f"m.0.e.{i}.down.weight": e for i, e in enumerate(ours)}
    if fused:
        return {"m.0.fused.gate_up_proj": np.concatenate([ours[:, 0], ours[:, 1]], axis=1)}
    return {f"m.0.e.{i}.{name}.weight": e[half] for i, e in enumerate(ours) for half, name in enumerate(("gate", "up"))}


@pytest.mark.parametrize(
    ("family", "size"), [pytest.param(f, s, id=f"{f.name}-{s.name}") for f in all_families() for s in f.sizes]
)
def test_every_tensor_of_every_size_has_one_rule_and_no_published_tensor_is_used_twice(
    family: Family, size: Size
) -> None:
    rules = family.huggingface.rules(size.model)
    tensors = inventory(build_model(size.model, groups=one_rank(), device="meta"), one_rank())
    elements, names = 0, Counter[str]()
    for name, tensor in tensors.items():
        found = expand(rules, name, tensor.shape)
        names.update(piece.name for piece in found)
        assert sum(piece.box.elements for piece in found) == tensor.box.elements
        elements += sum(np.prod(piece.shape, dtype=int) for piece in found)
    assert max(names.values()) == 1
    assert elements == sum(tensor.box.elements for tensor in tensors.values())


RULES = (plain("a", "A", copies=("A.copy",)), *EXPERTS, Derived(name="freq.{layer}"), *frequencies())
WANTED = {"a": (3,), "layers.0.experts.gate_up": (2, 2, 3, 5), "layers.0.experts.down": (2, 5, 3)}
PER_EXPERT = {f"m.0.e.{i}.{p}.weight": (3, 5) for i in (0, 1) for p in ("gate", "up")}
PER_EXPERT |= {f"m.0.e.{i}.down.weight": (5, 3) for i in (0, 1)}
FUSED = {"m.0.fused.gate_up_proj": (2, 6, 5), "m.0.fused.down_proj": (2, 5, 3)}


@pytest.mark.parametrize(("found", "form"), [(PER_EXPERT, 0), (FUSED, 1)])
def test_the_form_that_is_there_is_chosen(found: dict[str, tuple[int, ...]], form: int) -> None:
    choice = choose(RULES, WANTED, {"A": (3,)} | found)
    assert not choice.faults
    assert choice.forms["layers.0.experts.gate_up"] is GATE_UP.forms[form]
    assert choice.forms["layers.0.experts.down"] is DOWN.forms[form]


def test_missing_unexpected_and_misshapen_tensors_are_listed_together() -> None:
    found = {"A": (4,), "B": (1,)} | PER_EXPERT
    del found["m.0.e.1.up.weight"]
    faults = choose(RULES, WANTED, found).faults
    assert faults.missing == ("m.0.e.1.up.weight",)
    assert faults.unexpected == ("B",)
    assert faults.misshapen == ("A [4] instead of [3]",)
    assert len(faults.lines()) == 3


def test_both_forms_at_once_are_a_fault_and_not_a_choice() -> None:
    assert set(choose(RULES, WANTED, {"A": (3,)} | PER_EXPERT | FUSED).faults.unexpected) == set(FUSED)


def test_nothing_found_is_reported_as_the_published_form_missing() -> None:
    assert set(choose(RULES, WANTED, {}).faults.missing) == {"A", *PER_EXPERT}


def test_a_long_list_of_names_is_cut_and_counted() -> None:
    (line,) = choose(RULES, {"layers.0.experts.down": (40, 1, 1)}, {}).faults.lines(most=2)
    assert line == "40 missing: m.0.e.0.down.weight, m.0.e.1.down.weight and 38 more"


def test_copies_and_derived_tensors_may_be_there_or_not() -> None:
    found = {"A": (3,), "freq.0": (9,), "model.layers.11.self_attn.rotary_emb.inv_freq": (2,)} | PER_EXPERT
    assert choose(RULES, WANTED, found).copies["a"] == ()
    choice = choose(RULES, WANTED, found | {"A.copy": (3,)})
    assert not choice.faults
    assert choice.copies["a"] == ("A.copy",)
    assert choose(RULES, WANTED, found | {"A.copy": (4,)}).faults.misshapen == ("A.copy [4] instead of [3]",)


def test_a_scalar_is_a_piece_of_one_element() -> None:
    rule = Rule(name="s", forms=((Part(name="S"),),))
    (piece,) = expand((rule,), "s", ())
    assert (piece.shape, piece.box.elements) == ((), 1)
