"""The stage language: the published layouts, every fault named, and no layer lost or twice (faults E1 and E3)."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from core.config.architecture import GQA, Dense, Layer, ModelConfig, MultiToken, RMSNorm, Rope, repeat
from core.config.mapping import ParallelConfig
from core.errors import ConfigError
from core.pipeline.layout import Layout, even_layout, layout_of, layout_text, parse_layout

# Text, ranks, layers of each stage, stage of the prediction module: as the report and the published set-ups have them.
PUBLISHED = (
    ("Et*3|(tt|)*29m|L", 8, [3] + [2] * 29 + [0, 0], 30),
    ("Et*4|(t*4|)*14tmL", 4, [4] * 15 + [1], 15),
    ("Et*4|(tttt|)*14tmL", 4, [4] * 15 + [1], 15),
    ("Et*8|(t*8|)*6t*5mL", 8, [8] * 7 + [5], 7),
    ("Et|(tt|)*30mL", 16, [1] + [2] * 30 + [0], 31),
    ("Et*2|(tt|)*22t|(tt|)*7mL", 16, [2] * 23 + [1] + [2] * 7 + [0], 31),
)
LAYER = Layer(attention=GQA(heads=1, kv_heads=1, head_dim=2), mlp=Dense(ffn=3))
MODEL = ModelConfig(
    vocab=300, hidden=2, max_tokens=8, norm=RMSNorm(eps=1e-6), rope=Rope(theta=1e4), layers=repeat(5, LAYER)
)


def message(text: str, *, num_layers: int = 3, num_ahead: int = 1, pp: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text, num_layers=num_layers, num_ahead=num_ahead, pp=pp)
    return str(caught.value)


def expanded(text: str) -> str:
    """The language by its definition: commas out, groups in one pass, then single repeats."""
    text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), text.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text)


def spelled(layout: Layout) -> str:
    """Every letter of a layout, by its parts alone."""
    return "|".join(
        "E" * part.embedding + "t" * len(part.layers) + "m" * len(part.ahead) + "L" * part.loss for part in layout.parts
    )


@pytest.mark.parametrize(("text", "pp", "layers", "ahead"), PUBLISHED)
def test_published_layouts_hold_every_layer_where_the_report_says(
    text: str, pp: int, layers: list[int], ahead: int
) -> None:
    layout = parse_layout(text, num_layers=61, num_ahead=1, pp=pp)
    assert [len(part.layers) for part in layout.parts] == layers
    assert [i for part in layout.parts for i in part.layers] == list(range(61))
    assert [s for s, part in enumerate(layout.parts) if part.ahead] == [ahead]
    assert layout.virtual == len(layers) // pp
    assert layout.parts[0].embedding and layout.parts[-1].loss
    assert layout.embedding_stages(tied=False) == tuple(sorted({0, ahead % pp}))
    assert layout.embedding_stages(tied=True) == tuple(sorted({0, ahead % pp, pp - 1}))


@pytest.mark.parametrize("text", [text for text, *_ in PUBLISHED if "tttt" not in text and "t*2" not in text])
def test_published_layouts_are_printed_as_they_were_published(text: str) -> None:
    assert layout_text(parse_layout(text, num_layers=61, num_ahead=1, pp=1)) == text


def test_a_stage_lies_on_rank_s_mod_pp_as_chunk_s_div_pp() -> None:
    layout = parse_layout("Et|tt|ttt|L", num_layers=6, num_ahead=0, pp=2)
    assert layout.virtual == 2
    assert [part.layers for part in layout.parts_of(0)] == [(0,), (3, 4, 5)]
    assert layout.part(1, 0).layers == (1, 2)
    assert layout.part(1, 1).loss and not layout.part(1, 1).layers


def test_modules_may_lie_on_several_stages_before_the_loss() -> None:
    layout = parse_layout("Ett|tm||mm|m|L", num_layers=3, num_ahead=4, pp=3)
    assert [part.ahead for part in layout.parts] == [(), (0,), (), (1, 2), (3,), ()]
    assert layout.embedding_stages(tied=False) == (0, 1)
    assert layout.embedding_stages(tied=True) == (0, 1, 2)


@seed(11)
@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.one_of(
            st.sampled_from(["t", "|", ",", "t*3", "|*2", "t*1,2"]),
            st.tuples(st.text("t|,", min_size=1, max_size=4), st.integers(1, 4)).map(lambda g: f"({g[0]})*{g[1]}"),
            st.integers(1, 5).map(lambda n: f"(t*{n}|)*{n}"),
        ),
        max_size=7,
    ),
    modules=st.sampled_from(["", "m", "|m", "m|m*2", "m*4|,|"]),
)
def test_any_text_means_what_its_expansion_spells_and_survives_printing(pieces: list[str], modules: str) -> None:
    text = "E" + "".join(pieces) + modules + "L"
    plain = expanded(text)
    num_layers, num_ahead = plain.count("t"), plain.count("m")
    for pp in {1, plain.count("|") + 1}:
        layout = parse_layout(text, num_layers=num_layers, num_ahead=num_ahead, pp=pp)
        assert spelled(layout) == plain
        printed = layout_text(layout)
        assert parse_layout(printed, num_layers=num_layers, num_ahead=num_ahead, pp=pp) == layout
        assert len(printed) <= len(plain)


def test_every_even_layout_holds_every_layer_once_and_in_order() -> None:
    for pp in range(1, 9):
        for vpp in range(1, 5):
            for num_layers in range(65):
                num_ahead = num_layers % 3
                layout = even_layout(num_layers=num_layers, num_ahead=num_ahead, pp=pp, vpp=vpp)
                sizes = [len(part.layers) for part in layout.parts]
                assert (len(sizes), layout.virtual) == (pp * vpp, vpp)
                assert [i for part in layout.parts for i in part.layers] == list(range(num_layers))
                assert max(sizes) - min(sizes) <= 1
                assert sizes[-1] == min(sizes)
                assert sizes[0] == min(sizes) or sum(size > min(sizes) for size in sizes) >= max(pp * vpp - 1, 1)
                assert [part.embedding for part in layout.parts] == [True] + [False] * (pp * vpp - 1)
                assert [part.loss for part in layout.parts] == [False] * (pp * vpp - 1) + [True]
                assert layout.parts[-1].ahead == tuple(range(num_ahead))


def test_every_even_layout_survives_printing_and_parsing() -> None:
    for pp, vpp, num_layers in (
        (1, 1, 0),
        (1, 1, 64),
        (2, 1, 1),
        (3, 4, 5),
        (7, 3, 61),
        (8, 4, 64),
        (8, 1, 3),
        (5, 2, 11),
    ):
        layout = even_layout(num_layers=num_layers, num_ahead=2, pp=pp, vpp=vpp)
        assert parse_layout(layout_text(layout), num_layers=num_layers, num_ahead=2, pp=pp) == layout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "Et*3x|mL",
            "'x' is not one of E (embedding), t (layer), m (multi-token prediction), L (loss), |, ( and ) (char",
        ),
        ("E,t*3,x|mL", "(character 7 of 10)"),
        ("Et t|tmL", "spaces are not allowed (character 3 of 8)"),
        ("Et((t|)*2)*1mL", "a group cannot hold a group (character 4 of 14)"),
        ("E(t|)*2(tmL", "the group opened here is not closed (character 8 of 11)"),
        ("Et*3)mL", ") closes no group (character 5 of 7)"),
        ("E(t|)tmL", "a group needs a count, as in (tt|)*3 (character 5 of 8)"),
        ("Et*|mL", "* needs a whole number of 1 or more after it (character 3 of 6)"),
        ("Et*0mL", "* needs a whole number of 1 or more"),
        ("E*-1", "* needs a whole number of 1 or more"),
        ("Et*", "* needs a whole number of 1 or more after it (character 3 of 3)"),
        ("Et*3*2mL", "* must follow one of E, t, m, L, | or a group, and only once (character 5 of 8)"),
        ("E(*3t)*1mL", "* must follow one of"),
        ("Et*999999999999999999999mL", "spells out more than 100,000 letters from here (character 2 of 26)"),
        ("E(t*99999|)*9mL", "spells out more than 100,000 letters from here (character 2 of 15)"),
        ("Et*" + "9" * 5000, "spells out more than 100,000 letters"),
        ("t*3|mL", "has no E, and the model has one embedding"),
        ("Et*3|Em|L", "has 2 E, and the model has one embedding"),
        ("Et*3|m", "has no L, and the model has one loss"),
        ("Et*3L|mL", "has 2 L, and the model has one loss"),
        ("t|Ett|mL", "must begin with E"),
        ("|Et*3|mL", "must begin with E"),
        ("Et*3L|m", "must end with L"),
        ("Et*3|Lm", "must end with L"),
        ("Et*3|mL|", "must end with L"),
        ("Et*4|mL", "has 4 t, and model.num_layers=3"),
        ("Et*3|L", "has 0 m, and model.predict_ahead.depth=1"),
        ("Et*3|mmL", "has 2 m, and model.predict_ahead.depth=1"),
        ("Ett|m|tL", "has m before the last t"),
        ("Emt*3|L", "has m before the last t"),
    ],
)
def test_a_text_that_cannot_be_a_layout_is_refused_with_the_place_and_one_that_works(text: str, sentence: str) -> None:
    found = message(text)
    assert f"parallel.layout={text}: " in found
    assert sentence in found
    assert "Works: Et*3mL for parallel.pp=1, or none, which spreads evenly." in found


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = message("t|t|E", pp=2)
    assert found.startswith("2 settings cannot run:")
    for part in (
        "must begin with E",
        "has no L",
        "has 2 t",
        "has 0 m",
        "parallel.pp=2: the layout 't|t|E' has 3 stages",
    ):
        assert part in found


def test_stages_that_do_not_spread_over_the_ranks_name_the_ranks_that_would() -> None:
    assert (
        "parallel.pp=7: the layout 'Et|t*60|mL' has 3 stages, which 7 pipeline ranks cannot share evenly. Works: 3, or 1."
    ) in message("Et|t*60|mL", num_layers=61, pp=7)
    assert "Works: 6, or 3." in message("Et||||t|tmL", pp=5)
    assert "parallel.pp=0: must be positive" in message("Et*3|mL", pp=0)


def test_the_layout_of_a_run_is_its_text_or_the_even_one() -> None:
    whole = layout_of(MODEL, ParallelConfig())
    assert layout_text(whole) == "Et*5L"
    assert layout_text(layout_of(MODEL, ParallelConfig(pp=2, vpp=2))) == "Et|tt|t|tL"
    assert layout_text(layout_of(MODEL, ParallelConfig(pp=2, layout="Et*5|L"))) == "Et*5|L"
    implied = layout_of(MODEL, ParallelConfig(pp=2, layout="E|t*5||L"))
    assert implied == layout_of(MODEL, ParallelConfig(pp=2, vpp=2, layout="E|t*5||L"))
    assert implied.virtual == 2
    ahead = replace(MODEL, predict_ahead=MultiToken(depth=2, loss_weight=0.1))
    assert layout_text(layout_of(ahead, ParallelConfig(pp=3))) == "Ett|tt|tmmL"


def test_degrees_that_contradict_the_layout_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        layout_of(MODEL, ParallelConfig(pp=2, vpp=3, layout="E|t*5||L"))
    assert str(caught.value).splitlines()[1:] == [
        "  parallel.vpp=3: the layout 'E|t*5||L' has 4 stages, 2 on each of parallel.pp=2 pipeline ranks. "
        "Works: 2, or 1, which takes it from the layout. [layout.vpp]"
    ]
    for wrong, name in (
        (ParallelConfig(pp=-1), "pp=-1"),
        (ParallelConfig(vpp=0), "vpp=0"),
        (ParallelConfig(pp=9, vpp=10**9), "vpp="),
    ):
        with pytest.raises(ConfigError, match=f"parallel.{name}"):
            layout_of(MODEL, wrong)
