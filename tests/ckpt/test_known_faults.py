"""Group (a) of the known faults, as far as it is about the canonical state and mappings: one test each, here or where COVERED says."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import Manifest, read_manifest
from ckpt.plan import Held, plan_save
from ckpt.save import Saving, save
from core.config.architecture import Dense, Layer, ModelConfig, MoE, Router
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.errors import CheckpointError
from core.optim.chained import ChainedOptimizer
from core.optim.make import make_optimizer
from core.parallel.groups import Groups, groups_for, one_rank
from core.state.box import Box, tiling_fault, whole
from core.state.inventory import declared, initialise, inventory
from core.state.sharded import ShardedTensor
from core.state.spec import Constant, TensorSpec
from core.transformer.stage import build_model
from tests.ckpt.pieces import bits
from tests.core.optim.trees import Owner, backward, gradient, trained
from tests.core.tiny import ATTENTION, mixtral
from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
# Fault -> the tests of it that stand elsewhere. Those of Hugging Face folders (A2, A8, A10, A15 to A19, A25, A30), of asynchronous saves
# (A20 to A23) and of stores (A26, A27) stand with what they are about.
COVERED = {
    "A3": (
        "tests/ckpt/test_load.py::test_a_rank_under_tensor_parallelism_gets_its_rows_of_gate_and_of_up",
        "tests/core/layers/test_mlp.py::test_c9_ranks_of_tp_with_any_numbers_of_tokens_make_what_one_rank_makes",
        "tests/ckpt/test_any_mapping.py::test_a_run_goes_on_under_any_mapping_from_what_any_other_has_saved",
    ),
    "A7": ("tests/ckpt/test_load.py::test_an_expert_is_the_same_expert_under_every_other_mapping",),
    "A12": (
        "tests/ckpt/test_any_mapping.py::test_a_run_goes_on_under_any_mapping_from_what_any_other_has_saved",
        "tests/ckpt/test_optimizer_state.py::test_state_is_the_same_in_every_world_and_goes_on_bit_by_bit",
        "tests/core/optim/test_fsdp_state.py::test_masters_of_a_model_in_bfloat16_survive_the_change_of_sharding",
    ),
    "A14": (
        "tests/ckpt/test_load.py::test_everything_that_does_not_fit_is_listed_before_anything_is_read",
        "tests/ckpt/test_load.py::test_parts_can_be_left_out_only_by_name",
        "tests/ckpt/test_ranks.py::test_what_no_rank_wants_is_unexpected_and_what_one_of_them_wants_is_not",
    ),
    "A15": ("tests/ckpt/test_load.py::test_a_router_bias_in_float32_keeps_every_bit",),
    "A21": (
        "tests/ckpt/test_kill.py::test_a_kill_before_any_rename_or_removal_loses_no_complete_checkpoint",
        "tests/ckpt/test_manifest.py::test_a_folder_that_is_no_checkpoint_is_told_for_what_it_is",
    ),
    "A22": ("tests/ckpt/test_ranks.py::test_one_rank_that_cannot_write_fails_all_and_leaves_the_older_checkpoint",),
    "A26": (
        "tests/ckpt/test_plan.py::test_each_element_is_written_once_by_a_rank_that_holds_it_and_each_file_by_one_rank",
        "tests/ckpt/test_faults.py::test_every_missing_file_is_named_at_once",
    ),
    "A27": ("tests/ckpt/test_save.py::test_the_number_of_files_does_not_grow_with_that_of_small_tensors",),
    "A29": ("tests/ckpt/test_plan.py::test_experts_of_every_expert_rank_are_saved_each_by_one_of_its_replicas",),
    "pattern 1": (
        "tests/ckpt/test_load.py::test_a_load_of_everything_reads_every_block_once_and_writes_every_element_once",
        "tests/ckpt/test_load.py::test_any_pieces_are_read_from_any_other_pieces_bit_for_bit_and_from_just_the_blocks_that_they_meet",
    ),
}
CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, eps=1e-3, clip_norm=None)


@pytest.mark.parametrize("place", sorted({place for places in COVERED.values() for place in places}))
def test_what_covers_a_known_fault_is_there(place: str) -> None:
    path, _, name = place.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def experts_model() -> ModelConfig:
    """One MoE layer: 4 experts, hidden 16, width 6, which etp of 4 does not divide."""
    moe = MoE(experts=4, top_k=2, expert_ffn=6, router=Router(score="softmax", normalise=True, balance=()))
    return replace(mixtral(), layers=(Layer(attention=ATTENTION, mlp=moe),))


def dense_model() -> ModelConfig:
    """One dense layer of width 8."""
    return replace(mixtral(), layers=(Layer(attention=ATTENTION, mlp=Dense(ffn=8)),))


MODELS = {"experts": experts_model(), "dense": dense_model()}


@cache
def truth(name: str) -> dict[str, Tensor]:
    """The seed means the same model under every mapping: that of one rank."""
    model = build_model(MODELS[name], groups=one_rank())
    initialise(model, 7)
    return {n: p.data.clone() for n, p in inventory(model, one_rank()).items()}


def built(name: str, parallel: ParallelConfig) -> tuple[list[ShardedTensor], Groups]:
    """This rank's pieces of the initialised model, as its optimizer leaves them."""
    groups = groups_for(parallel)
    model = build_model(MODELS[name], groups=groups, parallel=parallel)
    initialise(model, 7)
    make_optimizer(model, CONFIG, groups, parallel)
    return list(inventory(model, groups).values()), groups


def saved(rank: int, world: int, name: str, parallel: ParallelConfig, run: Path) -> str:
    pieces, groups = built(name, parallel)
    return save(run, 1, pieces, {}, groups.world, Saving())


def loaded(rank: int, world: int, name: str, parallel: ParallelConfig, checkpoints: Sequence[str]) -> int:
    """Load each into NaN; how many were what they should be."""
    pieces, groups = built(name, parallel)
    for checkpoint in checkpoints:
        for piece in pieces:
            piece.data.fill_(torch.nan)
        load(checkpoint, pieces, groups.world)
        for piece in pieces:
            assert bits(piece.data) == bits(truth(name)[piece.name][piece.box.slices]), f"{piece.name} {checkpoint}"
    return len(checkpoints)


def manifest_of(checkpoint: str) -> Manifest:
    return read_manifest(LocalFiles(Path(checkpoint)))


EXPERT_MAPPINGS = [
    (1, ParallelConfig()),
    (2, ParallelConfig(tp=2)),
    (2, ParallelConfig(tp=2, ep=2)),
    (2, ParallelConfig(tp=2, etp=2)),
    (2, ParallelConfig(etp=2)),
    (4, ParallelConfig(tp=2, ep=2)),
    (4, ParallelConfig(tp=2, ep=2, etp=2)),
    (4, ParallelConfig(ep=2, etp=2)),
    (4, ParallelConfig(etp=4)),
]


def test_experts_cut_by_etp_are_saved_whole_and_etp_is_never_taken_for_tp(ranks: Ranks, tmp_path: Path) -> None:
    """A1, A11."""
    checkpoints = [
        ranks.run(saved, world, "experts", parallel, tmp_path / str(i))[0]
        for i, (world, parallel) in enumerate(EXPERT_MAPPINGS)
    ]
    for checkpoint in checkpoints:
        entries = {entry.name: entry for entry in manifest_of(checkpoint).entries}
        assert entries.keys() == truth("experts").keys()
        for name, tensor in truth("experts").items():
            assert entries[name].shape == tuple(tensor.shape)
            assert tiling_fault(whole(tuple(tensor.shape)), [p.box for p in entries[name].pieces]) is None, name
    for world, parallel in EXPERT_MAPPINGS:
        assert ranks.run(loaded, world, "experts", parallel, checkpoints) == [len(checkpoints)] * world


DENSE_MAPPINGS = [
    (tp * dp, ParallelConfig(tp=tp, sharding="fsdp"))
    for tp, dp in ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (4, 2))
]


def test_gate_and_up_are_the_same_tensor_under_every_tp_and_every_number_of_shards(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A4."""
    checkpoints = [
        ranks.run(saved, world, "dense", parallel, tmp_path / str(i))[0]
        for i, (world, parallel) in enumerate(DENSE_MAPPINGS)
    ]
    for world, parallel in DENSE_MAPPINGS:
        assert ranks.run(loaded, world, "dense", parallel, checkpoints) == [len(checkpoints)] * world


# One parameter that fills buckets alone, and twenty that together do not fill one.
UNEVEN = {"big": (37, 11)} | {f"tiny{i:02d}": (i % 3 + 1,) for i in range(20)}


def uneven(groups: Groups) -> tuple[nn.Module, ChainedOptimizer]:
    specs = {
        name: TensorSpec(shape=shape, box=whole(shape), replicas="dense", init=Constant(value=1.0))
        for name, shape in UNEVEN.items()
    }
    model = nn.ModuleDict({"layer": Owner("layer", specs, {"": torch.float32})})
    return model, ChainedOptimizer(model, CONFIG, groups, bucket_bytes=400)


def step(model: nn.Module, optimizer: ChainedOptimizer, number: int) -> None:
    """One step whose gradient the first copy has alone, so that no sum over copies rounds."""
    entries = trained(model)
    first = {slot.name: bucket.group.position == 0 for bucket in optimizer.buckets for slot in bucket.slots}
    optimizer.begin(1)
    backward({n: gradient(number, 0, n, e.spec) * float(first[n]) for n, e in entries.items()}, entries)
    optimizer.reduce()
    optimizer.step(0.05, 1.0)


def state_of(model: nn.Module, optimizer: ChainedOptimizer, groups: Groups) -> list[ShardedTensor]:
    return [*inventory(model, groups).values(), *optimizer.state()]


def uneven_saved(rank: int, world: int, run: Path) -> tuple[str, list[tuple[str, Box, Tensor]]]:
    """Three steps, a checkpoint, and one step more: where it is, and what this rank holds then."""
    groups = groups_for(ParallelConfig())
    model, optimizer = uneven(groups)
    for number in range(3):
        step(model, optimizer, number)
    checkpoint = save(run, 3, state_of(model, optimizer, groups), {}, groups.world, Saving())
    step(model, optimizer, 3)
    return checkpoint, [(t.name, t.box, t.data.clone()) for t in state_of(model, optimizer, groups)]


def uneven_resumed(rank: int, world: int, checkpoint: str) -> list[tuple[str, Box, Tensor]]:
    groups = groups_for(ParallelConfig())
    model, optimizer = uneven(groups)
    state = state_of(model, optimizer, groups)
    for tensor in state:
        tensor.data.fill_(torch.nan)
    load(checkpoint, state, groups.world)
    optimizer.set_steps(3)
    step(model, optimizer, 3)
    return [(t.name, t.box, t.data.clone()) for t in state_of(model, optimizer, groups)]


def assembled(held: Sequence[list[tuple[str, Box, Tensor]]]) -> dict[str, Tensor]:
    shapes = {f"layer.{name}": shape for name, shape in UNEVEN.items()}
    found: dict[str, Tensor] = {}
    for name, box, data in (piece for rank in held for piece in rank):
        shape = shapes[name.removeprefix("optimizer.exp_avg_sq.").removeprefix("optimizer.exp_avg.")]
        found.setdefault(name, torch.full(shape, torch.nan))[box.slices] = data
    return found


def test_one_big_and_twenty_tiny_parameters_resume_on_three_of_four_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """A13."""
    first = ranks.run(uneven_saved, 4, tmp_path)
    expected = assembled([held for _, held in first])
    for world in (3, 1, 8):
        found = assembled(ranks.run(uneven_resumed, world, first[0][0]))
        assert found.keys() == expected.keys() and len(found) == 3 * len(UNEVEN)
        assert all(bits(tensor) == bits(expected[name]) for name, tensor in found.items())
        assert not any(tensor.isnan().any() for tensor in found.values())


def test_a_piece_has_as_many_axes_as_its_tensor() -> None:
    """A13: an expert axis that is set in front of sizes, but not of offsets."""
    with pytest.raises(ValueError, match="one offset per dimension"):
        Box(offset=(0, 2, 0), shape=(4, 4))
    held = Held(name="w", shape=(4, 4), dtype="float32", box=whole((1, 4, 4)), copy=0, copies=1)
    with pytest.raises(CheckpointError, match=r"w: .* reaches outside"):
        plan_save([[held]])


def test_a_checkpoint_is_as_large_after_many_steps_as_after_one_and_holds_nothing_but_declared_tensors(
    tmp_path: Path,
) -> None:
    """A28: no state beside the tensors that every mapping and precision has; nothing empty, nothing that grows."""
    groups = one_rank()
    model, optimizer = uneven(groups)
    forms = []
    for number in range(60):
        step(model, optimizer, number)
        if number in (0, 59):
            address = save(tmp_path, number, state_of(model, optimizer, groups), {}, groups.world, Saving())
            manifest = manifest_of(address)
            forms.append({entry.name: (entry.shape, entry.dtype) for entry in manifest.entries})
            sizes = [file.size for path, file in manifest.files.items() if not path.endswith(".json")]
            assert sum(sizes) == 3 * sum(4 * entry.spec.box.elements for entry in declared(model).values())
    assert forms[0] == forms[1]
    kinds = ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    assert forms[0].keys() == {f"{kind}{name}" for kind in kinds for name in declared(model)}
