"""Every rank of worlds that are not there: what they hold covers the model, and broken mappings do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_mappings import NINE, PublishedMapping, on_deepseek
from core.config.architecture import Dense, MoE
from core.config.family import find_family
from core.config.mapping import ParallelConfig
from core.errors import ConfigError
from core.moe.router import Router
from core.optim.chained import ChainedOptimizer
from core.parallel.fake import plan_world
from core.parallel.mesh import fold
from core.pipeline.layout import layout_of
from core.state.cover import cover_faults
from core.state.inventory import declared, inventory
from core.state.sharded import ShardedTensor
from core.transformer.fake import FakeStages, canonical_shapes, check_cover
from core.transformer.stage import Stage, build_model
from tests.core import tiny

DEEPSEEK = find_family("deepseek_v3").size("671b").model
H100 = next(mapping for mapping in NINE if mapping.ranks == 1024)
OTHERS = tuple(dict.fromkeys((*NINE, *map(on_deepseek, NINE))))
DIFFERENT = {(m.size, m.ranks, m.parallel): m for m in OTHERS if m is not H100}
LARGE = ParallelConfig(tp=8, cp=4, pp=16, ep=64)
LARGEST_WORLD = 65_536

SMALL = {
    "every axis": (tiny.deepseek(), ParallelConfig(tp=2, cp=2, pp=2, ep=8), 16),
    "experts cut by etp, in three copies": (tiny.mixtral(), ParallelConfig(tp=2, cp=3, pp=2, etp=2, ep=4), 48),
    "key heads that neighbours share, tied embeddings": (tiny.qwen3(), ParallelConfig(tp=2, pp=2, ep=3, etp=2), 12),
    "virtual stages, modules ahead on stages of their own": (
        tiny.deepseek(),
        ParallelConfig(tp=2, pp=3, vpp=2, etp=3, ep=4, layout="E|t||t|m|mL"),
        36,
    ),
    "more experts' ranks than copies": (tiny.deepseek(), ParallelConfig(cp=4, cp_alltoall=2, ep=16), 16),
    "one rank": (tiny.qwen3(), ParallelConfig(), 1),
}


def told(pieces: dict[str, ShardedTensor]) -> list[tuple[object, ...]]:
    """All that pieces say, in order."""
    return [(name, p.name, p.shape, p.box, p.copy, p.copies) for name, p in pieces.items()]


def built(stages: FakeStages, rank: int) -> dict[str, ShardedTensor]:
    """The pieces of a rank's own stage."""
    return inventory(stages.stage(rank), stages.groups(rank))


@pytest.mark.parametrize("case", SMALL)
def test_what_a_rank_holds_is_what_its_own_stage_declares(case: str) -> None:
    model, parallel, ranks = SMALL[case]
    stages = FakeStages(model, parallel, ranks)
    for rank in range(ranks):
        assert told(stages.pieces(rank)) == told(built(stages, rank)), rank


@pytest.mark.parametrize("case", SMALL)
def test_all_ranks_of_small_worlds_cover_the_model(case: str) -> None:
    model, parallel, ranks = SMALL[case]
    assert check_cover(model, parallel, ranks, every_stage=True) == ()


@settings(max_examples=12)
@given(rank=st.integers(0, H100.ranks - 1))
def test_what_a_rank_of_the_h100_mapping_holds_is_what_its_own_stage_declares(rank: int) -> None:
    stages = FakeStages(H100.model, H100.parallel, H100.ranks)
    assert told(stages.pieces(rank)) == told(built(stages, rank))


def test_all_1024_ranks_of_the_h100_mapping_cover_deepseek_v3_and_their_parameters_are_those_published() -> None:
    stages = FakeStages(DEEPSEEK, H100.parallel, H100.ranks)
    held = [(rank, piece) for rank in range(H100.ranks) for piece in stages.pieces(rank).values()]
    assert cover_faults(canonical_shapes(DEEPSEEK), held) == ()
    once, kept = Counter[str](), Counter[int]()
    for _, piece in held:
        kept[piece.copies] += piece.box.elements
        if piece.copy == 0:
            once["ahead" if piece.name.startswith("mtp.") else "main"] += piece.box.elements
    # The report prints 671B; embedding and head of the prediction module are the main model's own.
    assert once == {"main": 671_026_419_200, "ahead": 682_636_487_424 - 671_026_419_200}
    # What a distributed optimizer keeps of every piece is one part for each of its copies.
    assert sum(elements / Fraction(copies) for copies, elements in kept.items()) == 682_636_487_424


@pytest.mark.parametrize("mapping", DIFFERENT.values(), ids=lambda mapping: mapping.name)
def test_all_ranks_of_the_other_published_mappings_cover_their_model(mapping: PublishedMapping) -> None:
    assert check_cover(mapping.model, mapping.parallel, mapping.ranks) == ()


def test_the_nine_mappings_fill_their_worlds_and_two_of_them_are_alike() -> None:
    assert len({mapping.name for mapping in NINE}) == 9 and len(DIFFERENT) == 11
    assert sum(mapping.ranks for mapping in NINE) == 1024 + 7 * 256 + 128


def parameters(rank: int) -> tuple[dict[str, int], dict[str, set[int]]]:
    """What a rank of the H100 mapping holds by kind: elements, and the numbers of copies."""
    elements, copies = Counter[str](), dict[str, set[int]]()
    for name, piece in FakeStages(DEEPSEEK, H100.parallel, H100.ranks).pieces(rank).items():
        kind = next((k for k in ("embedding.weight", "experts", "head", "attention.") if k in name), "other")
        elements[kind] += piece.box.elements
        copies.setdefault(kind, set()).add(piece.copies)
    return dict(elements), copies


def test_a_rank_of_the_h100_mapping_holds_what_its_places_say() -> None:
    # First pipeline rank, stages 0, 8, 16 and 24: three dense layers, then six with experts, of which it has 256 / 64.
    elements, copies = parameters(0)
    assert elements["experts"] == 6 * 4 * 3 * 7168 * 2048
    assert elements["embedding.weight"] == 129_280 // 2 * 7168
    assert "head" not in elements and copies["experts"] == {2}
    # Copies of the embedding lie over dp, 64, and on the pipeline rank of the prediction module.
    assert copies["embedding.weight"] == {2 * 64}
    # Cut by tp: over dp; whole on both of its ranks: twice as many.
    assert copies["attention."] == {64, 128}
    # Pipeline rank 6, stages 6, 14, 22 and 30: six layers with experts, and the prediction module, one more.
    elements, copies = parameters(6 * 128 + 5)
    assert elements["experts"] == 7 * 4 * 3 * 7168 * 2048
    assert elements["embedding.weight"] == 129_280 // 2 * 7168 and "head" not in elements
    # The last, stages 7, 15, 23 and 31, of which that holds the head alone.
    elements, copies = parameters(1023)
    assert elements["experts"] == 6 * 4 * 3 * 7168 * 2048
    assert elements["head"] == 129_280 // 2 * 7168 and copies["head"] == {64}
    assert "embedding.weight" not in elements


@settings(max_examples=10)
@given(rank=st.integers(0, LARGEST_WORLD - 1))
def test_any_rank_of_65536_can_be_built_and_holds_its_share(rank: int) -> None:
    stages = FakeStages(DEEPSEEK, LARGE, LARGEST_WORLD)
    pieces = stages.pieces(rank)
    assert told(pieces) == told(built(stages, rank))
    # Ranks vary fastest in tp and in ep, slowest in pp.
    per_stage = LARGEST_WORLD // 16
    part = layout_of(DEEPSEEK, LARGE).parts[rank // per_stage]
    moe = sum(isinstance(DEEPSEEK.layers[i].mlp, MoE) for i in part.layers) + len(part.ahead)
    experts = [piece for name, piece in pieces.items() if ".experts." in name]
    assert sum(piece.box.elements for piece in experts) == moe * 256 // 64 * 3 * 7168 * 2048
    assert {piece.box.offset[0] for piece in experts} == ({rank % 64 * 4} if moe else set())
    assert {(piece.copies, piece.copy) for piece in experts} == ({(64, rank % per_stage // 64)} if moe else set())
    dense = [pieces[f"layers.{i}.mlp.gate_up"] for i in part.layers if isinstance(DEEPSEEK.layers[i].mlp, Dense)]
    queries = [pieces[f"layers.{i}.attention.query_up.weight"] for i in part.layers]
    assert all(p.box.offset[1] == rank % 8 * 18432 // 8 and p.box.elements == 2 * 7168 * 18432 // 8 for p in dense)
    assert all(p.box.offset == (rank % 8 * 16 * 192, 0) and p.box.shape == (16 * 192, 1536) for p in queries)
    assert all((p.copies, p.copy) == (per_stage // 8, rank % per_stage // 8) for p in (*dense, *queries))


@settings(max_examples=20)
@given(data=st.data())
def test_the_ranks_of_any_mapping_cover_the_model(data: st.DataObject) -> None:
    def degree(*choices: int) -> int:
        return data.draw(st.sampled_from(choices))

    model, experts = data.draw(st.sampled_from([(tiny.mixtral(), 4), (tiny.qwen3(), 12), (tiny.deepseek(), 16)]))
    parallel = ParallelConfig(
        tp=degree(1, 2),
        cp=degree(1, 2, 3),
        pp=degree(1, 2, 3),
        vpp=degree(1, 2),
        ep=degree(1, 2, 4),
        etp=degree(1, 2, 3),
    )
    assert experts % parallel.ep == 0
    # The least number of ranks that both foldings divide, sometimes twice.
    ranks = Fraction(parallel.tp * parallel.cp, parallel.etp * parallel.ep).numerator
    ranks *= parallel.etp * parallel.ep * parallel.pp * degree(1, 2)
    assert check_cover(model, parallel, ranks) == ()


def faults(stages: FakeStages, ranks: int, pieces: Callable[[int], dict[str, ShardedTensor]]) -> tuple[str, ...]:
    """The faults of a world whose ranks hold `pieces`."""
    held = [(rank, piece) for rank in range(ranks) for piece in pieces(rank).values()]
    return cover_faults(canonical_shapes(stages.model), held)


EXPERTS = ParallelConfig(etp=2, ep=2)


def test_experts_that_ignore_etp_are_caught() -> None:
    stages = FakeStages(tiny.mixtral(), EXPERTS, 4)

    def uncut(rank: int) -> dict[str, ShardedTensor]:
        groups = stages.groups(rank)
        deaf = replace(groups, etp=replace(groups.etp, ranks=(rank,), position=0))
        return inventory(build_model(stages.model, groups=deaf, parallel=EXPERTS, device="meta"), groups)

    found = faults(stages, 4, uncut)
    assert len(found) == 4 and all(".experts." in fault for fault in found)
    said = "the piece at (0, 0, 0, 0) of shape (2, 2, 8, 16) lies on ranks 0, 1 as copy 0, 0 of 1"
    assert found[0].startswith(f"layers.0.mlp.experts.gate_up: {said}")


def test_ranks_of_etp_that_are_counted_as_copies_are_caught() -> None:
    # As in a published framework, whose checkpoints then held one part of every expert (known_faults A1).
    stages = FakeStages(tiny.mixtral(), EXPERTS, 4)

    def counted_twice(rank: int) -> dict[str, ShardedTensor]:
        groups = stages.groups(rank)
        wrong = replace(groups, edp=groups.etp)
        return inventory(stages.stage(rank), wrong)

    found = faults(stages, 4, counted_twice)
    said = "the piece at (0, 0, 0, 0) of shape (2, 2, 4, 16) lies on rank 0 as copy 0 of 2"
    assert len(found) == 4 and found[0].startswith(f"layers.0.mlp.experts.gate_up: {said}")


def test_a_tensor_that_is_whole_on_tp_and_says_that_it_is_cut_is_caught() -> None:
    stages = FakeStages(tiny.mixtral(), ParallelConfig(tp=2), 4)

    def narrow(rank: int) -> dict[str, ShardedTensor]:
        stage = stages.stage(rank)
        assert stage.final_norm is not None and stage.final_norm.adjacent == 2
        stage.final_norm.adjacent = 1
        return inventory(stage, stages.groups(rank))

    said = "the piece at (0,) of shape (16,) lies on ranks 0, 1, 2, 3 as copy 0, 0, 1, 1 of 2"
    assert faults(stages, 4, narrow) == (f"final_norm.weight: {said}, where every copy from 0 has to be on one rank",)


def test_an_embedding_whose_groups_forget_a_stage_is_caught() -> None:
    parallel = ParallelConfig(pp=2, tp=2)
    stages = FakeStages(tiny.deepseek(), parallel, 8)
    stages.world = plan_world(fold(parallel, 8), embedding_stages=(0,))
    said = "the piece at (0, 0) of shape (15, 16) lies on ranks 0, 2, 4, 6 as copy 0, 1, 0, 0 of 1 or 2"
    found = faults(stages, 8, stages.pieces)
    assert len(found) == 1 and found[0].startswith(f"embedding.weight: {said}")


def test_one_rank_with_the_layers_of_another_stage_is_caught() -> None:
    stages = FakeStages(tiny.mixtral(), ParallelConfig(pp=2), 2)
    found = faults(stages, 2, lambda rank: stages.pieces(0))
    assert (
        "layers.0.attention_norm.weight: the piece at (0,) of shape (16,) lies on ranks 0, 1 as copy 0, 0 of 1, "
        in " ".join(found)
    )
    assert {"layers.1.mlp.router.weight: lies on no rank", "head.weight: lies on no rank"} <= set(found)


def test_layers_of_one_kind_that_differ_are_our_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = FakeStages(tiny.mixtral(), ParallelConfig(tp=2), 2)
    stage = stages.stage

    def odd(rank: int) -> Stage:
        made = stage(rank)
        router = made.get_submodule("layers.1.mlp.router")
        assert isinstance(router, Router)
        router.adjacent = 1
        return made

    monkeypatch.setattr(stages, "stage", odd)
    with pytest.raises(AssertionError, match=r"layers\.1\.mlp\.router\.weight is unlike others of its kind"):
        stages.pieces(0)


def test_each_element_of_the_optimizers_state_lies_on_one_rank() -> None:
    """ZeRO-1 by its own code: every rank's real optimizer, of a world of which no other rank is there."""
    model, parallel, ranks = tiny.deepseek(), ParallelConfig(tp=2, cp=2, pp=2, ep=4), 16
    stages = FakeStages(model, parallel, ranks)
    trained = {n: e.spec.shape for n, e in declared(build_model(model, device="meta")).items() if e.spec.trained}
    held = []
    for rank in range(ranks):
        groups = stages.groups(rank)
        stage = build_model(model, groups=groups, parallel=parallel)
        for piece in ChainedOptimizer(stage, tiny.PLAIN, groups, bucket_bytes=4096).state():
            held.append((rank, replace(piece, name=piece.name.removeprefix("optimizer."))))
    shapes = {f"{kind}.{name}": shape for name, shape in trained.items() for kind in ("exp_avg", "exp_avg_sq")}
    assert cover_faults(shapes, held) == ()


def test_a_foreign_mapping_or_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="12 ranks do not fold"):
        check_cover(tiny.mixtral(), ParallelConfig(ep=8), 12)
    with pytest.raises(ConfigError, match="layout"):
        check_cover(tiny.mixtral(), ParallelConfig(layout="EtL"), 1)
